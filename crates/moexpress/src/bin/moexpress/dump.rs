//! Writes what each rank had, received and got back.

use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use ep_conformance::arrival::split;
use ep_conformance::low_latency::Seen;
use ep_conformance::verify::{Observed, bytes_of};
use ep_conformance::workload::Batch;
use ep_core::quant::int8;
use ep_core::reference::CodedRows;
use ep_core::{Element, Rank, Shape, Topology};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensorError};

use crate::failure::Failure;
use crate::rank::Saw;
use crate::whole::Whole;

/// Creates the directory of `--dump`, and sees to it that the files of all ranks can be written, before a run whose results would be lost.
pub(crate) fn create(dir: &Path, ranks: usize) -> Result<Vec<Whole>, Failure> {
    let shown = dir.display();
    if dir.exists() && !dir.is_dir() {
        return Err(Failure::bad_input(format_args!("--dump is {shown}, a file, allowed: a directory")));
    }
    fs::create_dir_all(dir).map_err(|error| Failure::bad_input(format_args!("cannot create {shown}: {error}")))?;
    (0..ranks).map(|rank| Whole::create(&file_of(dir, Rank(rank as u32)))).collect()
}

/// The file of one rank.
pub(crate) fn file_of(dir: &Path, rank: Rank) -> PathBuf {
    dir.join(format!("rank{rank}.safetensors"))
}

/// Writes `rank{r}.safetensors`.
pub(crate) fn write(file: Whole, shape: &Shape, topology: &Topology, batch: &Batch, saw: &Saw) -> Result<(), Failure> {
    let mut tensors = inputs(shape, batch);
    match saw {
        Saw::Throughput(seen) => tensors.extend(throughput(shape, batch, seen)),
        Saw::LowLatency(seen) => tensors.extend(low_latency(shape, topology, batch, seen)),
    }
    file.write_with(|file| {
        let views: Result<Vec<_>, _> = tensors.iter().map(|tensor| Ok((tensor.name, tensor.view()?))).collect();
        let bytes = views.and_then(|views| safetensors::serialize(views, None));
        file.write_all(&bytes.map_err(io::Error::other)?)
    })
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

fn tensor(name: &'static str, dtype: Dtype, shape: &[usize], data: Vec<u8>) -> Tensor {
    Tensor { name, dtype, shape: shape.to_vec(), data }
}

/// What the rank had.
fn inputs(shape: &Shape, batch: &Batch) -> Vec<Tensor> {
    let (tokens, hidden, topk) = (batch.tokens as usize, shape.hidden() as usize, shape.topk() as usize);
    vec![
        tensor("x", Dtype::BF16, &[tokens, hidden], bytes_of(&batch.x)),
        tensor("topk_idx", Dtype::I64, &[tokens, topk], le(&batch.topk_idx, i64::to_le_bytes)),
        tensor("topk_weights", Dtype::F32, &[tokens, topk], le(&batch.topk_weights, f32::to_le_bytes)),
    ]
}

/// Received rows, `[leading dimensions, hidden]`, given as they travelled; and their scales.
fn received(shape: &Shape, leading: &[usize], bytes: &[u8]) -> Vec<Tensor> {
    let columns = |last: usize| [leading, &[last]].concat();
    let hidden = shape.hidden() as usize;
    let (dtype, scale_bytes) = match shape.element() {
        Element::Fp8(scaling) => (Dtype::U8, scaling.scale_bytes()),
        Element::Int8 => (Dtype::I8, int8::SCALE_BYTES),
        _ => return vec![tensor("recv_x", Dtype::BF16, &columns(hidden), bytes.to_vec())],
    };
    let CodedRows { codes, scales } = split(shape, bytes);
    let scales: Vec<f32> = scales.chunks_exact(scale_bytes).map(scale_of).collect();
    let of_row = columns(shape.element().scales(shape.hidden()) as usize);
    vec![
        tensor("recv_x", dtype, &columns(hidden), codes),
        tensor("recv_scales", Dtype::F32, &of_row, le(&scales, f32::to_le_bytes)),
    ]
}

fn throughput(shape: &Shape, batch: &Batch, seen: &Observed) -> Vec<Tensor> {
    let tokens = batch.tokens as usize;
    let rows = seen.source_token.len();
    let (hidden, topk) = (shape.hidden() as usize, shape.topk() as usize);
    let counts: Vec<i32> = seen.expert_counts.iter().map(|&count| count as i32).collect();
    let mut tensors = vec![
        tensor("recv_src_rank", Dtype::I32, &[rows], le(&seen.source_rank, i32::to_le_bytes)),
        tensor("recv_src_token", Dtype::I32, &[rows], le(&seen.source_token, i32::to_le_bytes)),
        tensor("recv_topk_idx", Dtype::I64, &[rows, topk], le(&seen.topk_idx, i64::to_le_bytes)),
        tensor("recv_topk_weights", Dtype::F32, &[rows, topk], le(&seen.topk_weights, f32::to_le_bytes)),
        tensor("recv_counts", Dtype::I32, &[counts.len()], le(&counts, i32::to_le_bytes)),
        tensor("combined_x", Dtype::BF16, &[tokens, hidden], seen.combined_x.clone()),
        tensor("combined_topk_weights", Dtype::F32, &[tokens, topk], le(&seen.combined_topk_weights, f32::to_le_bytes)),
    ];
    tensors.extend(received(shape, &[rows], &seen.recv_x));
    tensors
}

/// Each expert's rows lie packed at the start of its part; the rest is 0, and -1 where a rank or token would be.
fn low_latency(shape: &Shape, topology: &Topology, batch: &Batch, seen: &Seen) -> Vec<Tensor> {
    let (experts, row_bytes) = (seen.experts.len(), shape.row_bytes() as usize);
    let stride = topology.ranks() as usize * shape.max_tokens() as usize;
    let mut x = vec![0; experts * stride * row_bytes];
    let (mut source_rank, mut source_token) = (vec![-1i32; experts * stride], vec![-1i32; experts * stride]);
    let mut counts = Vec::new();
    for (at, expert) in seen.experts.iter().enumerate() {
        let rows = expert.source_token.len();
        x[at * stride * row_bytes..][..expert.x.len()].copy_from_slice(&expert.x);
        source_rank[at * stride..][..rows].copy_from_slice(&expert.source_rank);
        source_token[at * stride..][..rows].copy_from_slice(&expert.source_token);
        counts.push(rows as i32);
    }
    let (tokens, hidden) = (batch.tokens as usize, shape.hidden() as usize);
    let places = [experts, stride];
    let mut tensors = vec![
        tensor("recv_src_rank", Dtype::I32, &places, le(&source_rank, i32::to_le_bytes)),
        tensor("recv_src_token", Dtype::I32, &places, le(&source_token, i32::to_le_bytes)),
        tensor("recv_counts", Dtype::I32, &[experts], le(&counts, i32::to_le_bytes)),
        tensor("combined_x", Dtype::BF16, &[tokens, hidden], seen.combined_x.clone()),
    ];
    tensors.extend(received(shape, &places, &x));
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
