//! Reads a batch from a safetensors file.

use std::fmt::Display;
use std::fs;
use std::io;
use std::path::Path;

use ep_conformance::workload::Batch;
use ep_core::Error;
use ep_core::memory::Estimate;
use ep_core::shape::{MAX_HIDDEN, MAX_TOKENS, MAX_TOPK};
use half::{bf16, f16};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

/// What the file holds, dealt to the ranks.
#[derive(Debug)]
pub(crate) struct Input {
    pub(crate) hidden: u32,
    pub(crate) topk: u32,
    /// `[ranks]`
    pub(crate) batches: Vec<Batch>,
}

/// Reads `path` for `ranks` ranks and `experts` experts in all.
///
/// Tensors: `x [tokens, hidden]` bf16, f16 or f32 (rounded to bf16); `topk_idx [tokens, topk]` i64; optional
/// `topk_weights [tokens, topk]` f32 (1 where absent) and `rank [tokens]` i32 (absent: equal contiguous blocks).
///
/// # Errors
/// [`Error::Invalid`] naming tensor, what is wrong with it and what is allowed.
pub(crate) fn read(path: &Path, ranks: u32, experts: u32) -> Result<Input, Error> {
    if experts == 0 {
        return Err(Error::invalid("--experts", 0, "at least 1"));
    }
    let file = path.display();
    let refuse = |error: io::Error| Error::invalid("input", format_args!("{file} ({error})"), "a readable file");
    let data = fs::metadata(path).map_err(refuse)?;
    if !data.is_file() {
        return Err(Error::invalid("input", format_args!("{file}, no regular file"), "a regular file"));
    }
    let size = Estimate::default().with("its tensors, read and dealt", data.len().saturating_mul(2));
    ep_memory::admit(&size, format_args!("input {file}"), "a smaller file")?;
    let bytes = fs::read(path).map_err(refuse)?;
    let tensors = SafeTensors::deserialize(&bytes)
        .map_err(|error| Error::invalid("input", format_args!("{file} ({error})"), "a safetensors file"))?;
    Tensors { tensors, names_file: file.to_string() }.deal(ranks, experts)
}

struct Tensors<'a> {
    tensors: SafeTensors<'a>,
    names_file: String,
}

impl Tensors<'_> {
    fn deal(&self, ranks: u32, experts: u32) -> Result<Input, Error> {
        let x = self.required("x")?;
        let [tokens, hidden] = self.matrix("x", &x, ["tokens", "hidden"])?;
        self.within("tokens of tensor x", tokens, 0, MAX_TOKENS)?;
        let hidden = self.within("hidden of tensor x", hidden, 1, MAX_HIDDEN)?;
        let rows = self.rows(&x)?;

        let topk_idx = self.required("topk_idx")?;
        let [idx_tokens, topk] = self.matrix("topk_idx", &topk_idx, ["tokens", "topk"])?;
        self.expect("rows of tensor topk_idx", idx_tokens, format_args!("{tokens} as tensor x"), idx_tokens == tokens)?;
        let topk = self.within("topk of tensor topk_idx", topk, 1, MAX_TOPK)?;
        self.expect_dtype("topk_idx", &topk_idx, &[Dtype::I64])?;
        let choices = numbers(topk_idx.data(), i64::from_le_bytes);
        self.check_choices(&choices, topk as usize, experts)?;

        let weights = self.weights(&[tokens, topk as usize])?;
        let homes = self.homes(tokens, ranks)?;

        let mut batches = vec![Batch::default(); ranks as usize];
        let topk_at = topk as usize;
        for (token, home) in homes.into_iter().enumerate() {
            let batch = &mut batches[home];
            let part = token * topk_at..(token + 1) * topk_at;
            batch.tokens += 1;
            batch.x.extend_from_slice(&rows[token * hidden as usize..(token + 1) * hidden as usize]);
            batch.topk_idx.extend_from_slice(&choices[part.clone()]);
            batch.topk_weights.extend_from_slice(&weights[part]);
        }
        Ok(Input { hidden, topk, batches })
    }

    fn rows(&self, x: &TensorView<'_>) -> Result<Vec<u16>, Error> {
        self.expect_dtype("x", x, &[Dtype::BF16, Dtype::F16, Dtype::F32])?;
        Ok(match x.dtype() {
            Dtype::F32 => numbers(x.data(), |bytes| bf16::from_f32(f32::from_le_bytes(bytes)).to_bits()),
            Dtype::F16 => numbers(x.data(), |bytes| bf16::from_f32(f16::from_le_bytes(bytes).to_f32()).to_bits()),
            _ => numbers(x.data(), u16::from_le_bytes),
        })
    }

    fn weights(&self, shape: &[usize; 2]) -> Result<Vec<f32>, Error> {
        let Ok(weights) = self.tensors.tensor("topk_weights") else {
            return Ok(vec![1.0; shape[0] * shape[1]]);
        };
        self.expect_dtype("topk_weights", &weights, &[Dtype::F32])?;
        let same = weights.shape() == shape;
        self.expect(
            "shape of tensor topk_weights",
            show(weights.shape()),
            format_args!("{} as topk_idx", show(shape)),
            same,
        )?;
        Ok(numbers(weights.data(), f32::from_le_bytes))
    }

    /// `[tokens]`: the rank of each token.
    fn homes(&self, tokens: usize, ranks: u32) -> Result<Vec<usize>, Error> {
        let ranks = ranks as usize;
        let Ok(rank) = self.tensors.tensor("rank") else {
            let start = |rank: usize| tokens * rank / ranks;
            return Ok((0..ranks).flat_map(|rank| std::iter::repeat_n(rank, start(rank + 1) - start(rank))).collect());
        };
        self.expect_dtype("rank", &rank, &[Dtype::I32])?;
        let same = rank.shape() == [tokens];
        self.expect("shape of tensor rank", show(rank.shape()), format_args!("[{tokens}]"), same)?;
        let homes = numbers(rank.data(), i32::from_le_bytes);
        let home = |(token, home): (usize, i32)| {
            usize::try_from(home).ok().filter(|&home| home < ranks).ok_or_else(|| {
                self.refuse(format_args!("tensor rank at token {token}"), home, format_args!("0 to {}", ranks - 1))
            })
        };
        homes.into_iter().enumerate().map(home).collect()
    }

    fn check_choices(&self, choices: &[i64], topk: usize, experts: u32) -> Result<(), Error> {
        for (token, choices) in choices.chunks_exact(topk).enumerate() {
            for (at, &expert) in choices.iter().enumerate() {
                let what = || format!("tensor topk_idx at token {token}, choice {at}");
                if !(-1..i64::from(experts)).contains(&expert) {
                    let limit = format_args!("-1 or 0 to {} (--experts {experts})", experts - 1);
                    return Err(self.refuse(what(), expert, limit));
                }
                if expert >= 0 && choices[..at].contains(&expert) {
                    return Err(self.refuse(what(), format_args!("{expert} again"), "every expert once per token"));
                }
            }
        }
        Ok(())
    }

    fn required(&self, name: &str) -> Result<TensorView<'_>, Error> {
        self.tensors.tensor(name).map_err(|_| self.refuse(format_args!("tensor {name}"), "absent", "present"))
    }

    fn matrix(&self, name: &str, tensor: &TensorView<'_>, axes: [&str; 2]) -> Result<[usize; 2], Error> {
        let shape = tensor.shape();
        shape.try_into().map_err(|_| {
            self.refuse(format_args!("shape of tensor {name}"), show(shape), format_args!("[{}, {}]", axes[0], axes[1]))
        })
    }

    fn expect_dtype(&self, name: &str, tensor: &TensorView<'_>, allowed: &[Dtype]) -> Result<(), Error> {
        let names: Vec<_> = allowed.iter().map(|dtype| format!("{dtype:?}")).collect();
        let fits = allowed.contains(&tensor.dtype());
        self.expect(
            format_args!("dtype of tensor {name}"),
            format_args!("{:?}", tensor.dtype()),
            names.join(" or "),
            fits,
        )
    }

    fn within(&self, what: &str, value: usize, least: u32, most: u32) -> Result<u32, Error> {
        let fitting = u32::try_from(value).ok().filter(|value| (least..=most).contains(value));
        fitting.ok_or_else(|| self.refuse(what, value, format_args!("{least} to {most}")))
    }

    fn expect(&self, what: impl Display, value: impl Display, limit: impl Display, fits: bool) -> Result<(), Error> {
        if fits { Ok(()) } else { Err(self.refuse(what, value, limit)) }
    }

    fn refuse(&self, what: impl Display, value: impl Display, limit: impl Display) -> Error {
        Error::invalid(format_args!("{}: {what}", self.names_file), value, limit)
    }
}

fn show(shape: &[usize]) -> String {
    format!("{shape:?}")
}

/// The little-endian numbers in `bytes`, each of `N` bytes.
fn numbers<const N: usize, T>(bytes: &[u8], read: impl Fn([u8; N]) -> T) -> Vec<T> {
    let (chunks, _) = bytes.as_chunks::<N>();
    chunks.iter().map(|&chunk| read(chunk)).collect()
}
