//! Writes what each rank had, received and got back.

use std::fmt::Display;
use std::fs;
use std::path::Path;

use ep_conformance::arrival::split;
use ep_conformance::verify::{Observed, bytes_of};
use ep_conformance::workload::Batch;
use ep_core::quant::groups;
use ep_core::reference::Fp8Rows;
use ep_core::{Element, Shape};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensorError};

use crate::failure::Failure;

/// Creates the directory of `--dump`, before a run whose results would be lost.
pub(crate) fn create(dir: &Path) -> Result<(), Failure> {
    fs::create_dir_all(dir)
        .map_err(|error| Failure::bad_input(format_args!("cannot create {}: {error}", dir.display())))
}

/// Writes `rank{r}.safetensors`.
pub(crate) fn write(dir: &Path, rank: usize, shape: &Shape, batch: &Batch, seen: &Observed) -> Result<(), Failure> {
    let path = dir.join(format!("rank{rank}.safetensors"));
    let fail = |error: &dyn Display| Failure::failed(format_args!("cannot write {}: {error}", path.display()));
    let tensors = tensors(shape, batch, seen);
    let views: Result<Vec<_>, _> = tensors.iter().map(|tensor| Ok((tensor.name, tensor.view()?))).collect();
    let views = views.map_err(|error: SafeTensorError| fail(&error))?;
    safetensors::serialize_to_file(views, None, &path).map_err(|error| fail(&error))
}

struct Tensor {
    name: &'static str,
    dtype: Dtype,
    shape: Vec<usize>,
    data: Vec<u8>,
}

impl Tensor {
    fn view(&self) -> Result<TensorView<'_>, SafeTensorError> {
        TensorView::new(self.dtype, self.shape.clone(), &self.data)
    }
}

fn tensors(shape: &Shape, batch: &Batch, seen: &Observed) -> Vec<Tensor> {
    let tokens = batch.tokens as usize;
    let rows = seen.source_token.len();
    let (hidden, topk) = (shape.hidden() as usize, shape.topk() as usize);
    let tensor = |name, dtype, shape: &[usize], data| Tensor { name, dtype, shape: shape.to_vec(), data };
    let counts: Vec<i32> = seen.expert_counts.iter().map(|&count| count as i32).collect();
    let mut tensors = vec![
        tensor("x", Dtype::BF16, &[tokens, hidden], bytes_of(&batch.x)),
        tensor("topk_idx", Dtype::I64, &[tokens, topk], le(&batch.topk_idx, i64::to_le_bytes)),
        tensor("topk_weights", Dtype::F32, &[tokens, topk], le(&batch.topk_weights, f32::to_le_bytes)),
        tensor("recv_src_rank", Dtype::I32, &[rows], le(&seen.source_rank, i32::to_le_bytes)),
        tensor("recv_src_token", Dtype::I32, &[rows], le(&seen.source_token, i32::to_le_bytes)),
        tensor("recv_topk_idx", Dtype::I64, &[rows, topk], le(&seen.topk_idx, i64::to_le_bytes)),
        tensor("recv_topk_weights", Dtype::F32, &[rows, topk], le(&seen.topk_weights, f32::to_le_bytes)),
        tensor("recv_counts", Dtype::I32, &[counts.len()], le(&counts, i32::to_le_bytes)),
        tensor("combined_x", Dtype::BF16, &[tokens, hidden], seen.combined_x.clone()),
        tensor("combined_topk_weights", Dtype::F32, &[tokens, topk], le(&seen.combined_topk_weights, f32::to_le_bytes)),
    ];
    match shape.element() {
        Element::Fp8(scaling) => {
            let Fp8Rows { codes, scales } = split(shape, &seen.recv_x);
            let scales: Vec<f32> = scales.chunks_exact(scaling.scale_bytes()).map(scale_of).collect();
            tensors.push(tensor("recv_x", Dtype::U8, &[rows, hidden], codes));
            tensors.push(tensor(
                "recv_scales",
                Dtype::F32,
                &[rows, groups(shape.hidden()) as usize],
                le(&scales, f32::to_le_bytes),
            ));
        }
        _ => tensors.push(tensor("recv_x", Dtype::BF16, &[rows, hidden], seen.recv_x.clone())),
    }
    tensors
}

/// A scale as it is stored, f32 or the exponent byte of one, as f32.
fn scale_of(bytes: &[u8]) -> f32 {
    match *bytes {
        [exponent] => f32::from_bits(u32::from(exponent) << 23),
        [a, b, c, d] => f32::from_le_bytes([a, b, c, d]),
        _ => f32::NAN,
    }
}

fn le<T: Copy, const N: usize>(values: &[T], bytes: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|&value| bytes(value)).collect()
}
