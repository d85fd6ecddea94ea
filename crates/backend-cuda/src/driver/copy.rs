//! Copies and fills of device memory.

use cudarc::driver::sys;

use super::relaxed::Relaxed;
use super::{Device, Stream, check};
use crate::error::CudaError;

/// Words that the driver stores at a time, at most.
const MOST_STORES: usize = 128;

impl Stream {
    /// Copies `bytes` to device memory; they may be changed on return.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    ///
    /// # Safety
    /// There is memory with room for them at `to`, which work of this stream may write to.
    pub(crate) unsafe fn upload(&self, to: u64, bytes: &[u8]) -> Result<(), CudaError> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.must_run("a copy from the host")?;
        // A copy of pageable memory waits inside the driver for what was enqueued before; see `Stream::synchronize`.
        self.synchronize()?;
        let _relaxed = Relaxed::enter();
        // SAFETY: as the caller promises. Bytes of pageable memory are staged, and the wait below, which is made even where the call
        // fails, covers what is not.
        let code = unsafe { sys::cuMemcpyHtoDAsync_v2(to, bytes.as_ptr().cast(), bytes.len(), self.raw()) };
        let ended = self.synchronize();
        check("cuMemcpyHtoDAsync", code).and(ended)
    }

    /// Fills device memory with a byte, enqueued.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    ///
    /// # Safety
    /// There are `bytes` bytes of memory at `at`, which work of this stream may write to until this has ended; of what is captured, as
    /// long as anything made of the capture lives.
    pub(crate) unsafe fn fill(&self, at: u64, byte: u8, bytes: usize) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        self.device().bind()?;
        // SAFETY: as the caller promises.
        check("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(at, byte, bytes, self.raw()) })
    }

    /// Copies device memory into `into`, after everything enqueued.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    ///
    /// # Safety
    /// There is memory of that size at `from`, which work of this stream may read.
    pub(crate) unsafe fn download(&self, from: u64, into: &mut [u8]) -> Result<(), CudaError> {
        if into.is_empty() {
            return self.synchronize();
        }
        self.must_run("a copy to the host")?;
        // As in `upload`.
        self.synchronize()?;
        let _relaxed = Relaxed::enter();
        // SAFETY: as the caller promises; the copy has ended on return, also where the call fails.
        let code = unsafe { sys::cuMemcpyDtoHAsync_v2(into.as_mut_ptr().cast(), from, into.len(), self.raw()) };
        let ended = self.synchronize();
        check("cuMemcpyDtoHAsync", code).and(ended)
    }

    /// Stores a word of device memory at once, behind everything enqueued, enqueued.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    ///
    /// # Safety
    /// Eight aligned bytes of memory lie at `at`, which work of this stream may write to until this has ended.
    pub(crate) unsafe fn store(&self, at: u64, bits: u64) -> Result<(), CudaError> {
        self.device().bind()?;
        // SAFETY: as the caller promises.
        check("cuStreamWriteValue64", unsafe { sys::cuStreamWriteValue64_v2(self.raw(), at, bits, 0) })
    }

    /// Stores words of device memory, one after the other, behind everything enqueued, enqueued: in one question to the driver, and one change from its
    /// copy engine to what stores words, which takes as long as a copy of 100 KB.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    ///
    /// # Safety
    /// As [`store`](Self::store) of each.
    pub(crate) unsafe fn store_all(&self, words: &[(u64, u64)]) -> Result<(), CudaError> {
        self.device().bind()?;
        let operation = sys::CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WRITE_VALUE_64;
        for some in words.chunks(MOST_STORES) {
            let mut asked: Vec<_> = some
                .iter()
                .map(|&(address, value64)| {
                    let mut one = sys::CUstreamBatchMemOpParams { pad: [0; 6] };
                    one.writeValue = sys::CUstreamBatchMemOpParams_union_CUstreamMemOpWriteValueParams_st {
                        operation,
                        address,
                        __bindgen_anon_1:
                            sys::CUstreamBatchMemOpParams_union_CUstreamMemOpWriteValueParams_st__bindgen_ty_1 {
                                value64,
                            },
                        flags: 0,
                        alias: 0,
                    };
                    one
                })
                .collect();
            // SAFETY: as the caller promises; the driver reads the array before it returns.
            let code = unsafe { sys::cuStreamBatchMemOp_v2(self.raw(), asked.len() as u32, asked.as_mut_ptr(), 0) };
            check("cuStreamBatchMemOp", code)?;
        }
        Ok(())
    }

    /// Copies `rows` rows of `width` bytes between device memories with their own strides, enqueued.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    ///
    /// # Safety
    /// There is memory for so many rows, each a stride behind the other, at both addresses. Work of this stream may write to the one and
    /// read the other until this has ended; of what is captured, as long as anything made of the capture lives.
    pub unsafe fn copy_rows(
        &self,
        to: (u64, usize),
        from: (u64, usize),
        width: usize,
        rows: usize,
    ) -> Result<(), CudaError> {
        if width == 0 || rows == 0 {
            return Ok(());
        }
        self.device().bind()?;
        let all = width.checked_mul(rows).filter(|_| to.1 == width && from.1 == width);
        if let Some(all) = all {
            // SAFETY: as the caller promises.
            let code = unsafe { sys::cuMemcpyDtoDAsync_v2(to.0, from.0, all, self.raw()) };
            return check("cuMemcpyDtoDAsync", code);
        }
        let copy = sys::CUDA_MEMCPY2D {
            srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
            srcDevice: from.0,
            srcPitch: from.1,
            dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
            dstDevice: to.0,
            dstPitch: to.1,
            WidthInBytes: width,
            Height: rows,
            srcXInBytes: 0,
            srcY: 0,
            srcHost: std::ptr::null(),
            srcArray: std::ptr::null_mut(),
            dstXInBytes: 0,
            dstY: 0,
            dstHost: std::ptr::null_mut(),
            dstArray: std::ptr::null_mut(),
        };
        // SAFETY: as the caller promises, row by row.
        check("cuMemcpy2DAsync", unsafe { sys::cuMemcpy2DAsync_v2(&raw const copy, self.raw()) })
    }
}

impl Device {
    /// Fills memory of this GPU with a byte, enqueued to a stream by the driver's handle.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    ///
    /// # Safety
    /// The stream is of this GPU and lives. There are `bytes` bytes of its memory at `at`, which nobody else uses until this has ended.
    pub(crate) unsafe fn fill_on(&self, stream: usize, at: u64, byte: u8, bytes: usize) -> Result<(), CudaError> {
        self.bind()?;
        // SAFETY: as the caller promises.
        check("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(at, byte, bytes, stream as sys::CUstream) })
    }
}
