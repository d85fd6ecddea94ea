//! Which ranks and experts a batch goes to, for whoever asks before there is a communicator.

use moexpress::Error;
use moexpress::cuda::{Members as OfGpu, MembersOf};
use moexpress::shape::MAX_EXPERTS;
use pyo3::prelude::*;

use crate::error::of;
use crate::handle::slice;

/// Computes which ranks and experts a batch goes to: on a GPU, enqueued to the caller's stream, or on CPUs.
#[pyclass(frozen, module = "moexpress._native")]
pub(crate) struct Members {
    gpu: Option<OfGpu>,
}

#[pymethods]
impl Members {
    /// `gpu`: None on CPUs.
    #[new]
    #[pyo3(signature = (gpu=None))]
    fn new(py: Python<'_>, gpu: Option<usize>) -> PyResult<Self> {
        let gpu = py.detach(|| gpu.map(OfGpu::new).transpose()).map_err(|error| of(py, &error))?;
        Ok(Self { gpu })
    }

    /// From int64 `[tokens, topk]` to int32 `[ranks + experts]`, tokens for each rank and choices of each expert, and bool
    /// `[tokens, ranks]`. `experts` is a multiple of `ranks`. Choices that no expert has are refused on CPUs, and count nowhere on GPUs.
    ///
    /// `batch`: `(topk_idx, tokens, topk, ranks, experts)`.
    fn compute(
        &self,
        py: Python<'_>,
        stream: usize,
        batch: (usize, u32, u32, u32, u32),
        numbers: usize,
        in_rank: usize,
    ) -> PyResult<()> {
        let (topk_idx, tokens, topk, ranks, experts) = batch;
        let [topk_idx, numbers, in_rank] = [topk_idx, numbers, in_rank].map(|address| address as u64);
        let batch = MembersOf { topk_idx, tokens, topk, ranks, experts, numbers, in_rank };
        batch.check().and_then(|()| check(&batch)).map_err(|error| of(py, &error))?;
        let computed = py.detach(|| match &self.gpu {
            // SAFETY: this package's Python names its current stream, and contiguous tensors of these sizes.
            Some(gpu) => unsafe { gpu.enqueue(stream, &batch) },
            // SAFETY: as above; it holds them until this returns.
            None => unsafe { on_host(&batch) },
        });
        computed.map_err(|error| of(py, &error))
    }
}

/// Refuses sizes that nobody could have memory for, and choices that are not where numbers may be.
fn check(batch: &MembersOf) -> Result<(), Error> {
    if batch.experts > MAX_EXPERTS {
        return Err(Error::invalid("experts", batch.experts, format_args!("at most {MAX_EXPERTS}")));
    }
    let (address, align) = (batch.topk_idx, align_of::<i64>() as u64);
    if batch.tokens > 0 && batch.topk > 0 && (address == 0 || !address.is_multiple_of(align)) {
        return Err(Error::invalid(
            "address of topk_idx",
            address,
            format_args!("a multiple of {align}, where memory is"),
        ));
    }
    Ok(())
}

/// # Safety
/// The batch is checked. The addresses are of this process's memory, with room for what is said beside them, and nobody else uses it.
unsafe fn on_host(batch: &MembersOf) -> Result<(), Error> {
    let MembersOf { topk_idx, tokens, topk, ranks, experts, numbers, in_rank } = *batch;
    let [tokens, topk, ranks, experts] = [tokens, topk, ranks, experts].map(|size| size as usize);
    // SAFETY: as the caller promises.
    let topk_idx = unsafe { slice::<i64>(topk_idx as usize, tokens * topk) };
    let (mut counted, mut members) = (vec![0i32; ranks + experts], vec![0u8; tokens * ranks]);
    let (of_rank, of_expert) = counted.split_at_mut(ranks);
    for (token, members) in members.chunks_exact_mut(ranks).enumerate() {
        for &choice in topk_idx[token * topk..][..topk].iter().filter(|&&choice| choice != -1) {
            let expert = usize::try_from(choice).ok().filter(|&expert| expert < experts).ok_or_else(|| {
                let limit = format_args!("-1 to {}", experts - 1);
                Error::invalid(format_args!("topk_idx of token {token}"), choice, limit)
            })?;
            of_expert[expert] += 1;
            members[expert / (experts / ranks)] = 1;
        }
        for (count, member) in of_rank.iter_mut().zip(members) {
            *count += i32::from(*member);
        }
    }
    // SAFETY: as the caller promises.
    unsafe {
        std::ptr::copy_nonoverlapping(counted.as_ptr(), numbers as *mut i32, counted.len());
        std::ptr::copy_nonoverlapping(members.as_ptr(), in_rank as *mut u8, members.len());
    }
    Ok(())
}
