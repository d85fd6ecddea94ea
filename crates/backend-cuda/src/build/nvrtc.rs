//! NVRTC, safely.

use std::ffi::{CStr, CString, c_char};

use cudarc::nvrtc::sys;

use super::Target;
use crate::error::CudaError;

fn present() -> Result<(), CudaError> {
    // SAFETY: only tries to open libraries by their names.
    if unsafe { sys::is_culib_present() } {
        return Ok(());
    }
    Err(CudaError::LibraryMissing {
        library: "libnvrtc.so.13",
        install: "install the CUDA 13 toolkit, or `pip install nvidia-cuda-nvrtc==13.0.88` and put its folder \
                  nvidia/cu13/lib on LD_LIBRARY_PATH",
    })
}

/// Its version, major and minor.
///
/// # Errors
/// [`CudaError::LibraryMissing`].
pub fn version() -> Result<(u32, u32), CudaError> {
    present()?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the library is there; both numbers are written to.
    check("nvrtcVersion", unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) })?;
    Ok((major.unsigned_abs(), minor.unsigned_abs()))
}

fn check(call: &'static str, code: sys::nvrtcResult) -> Result<(), CudaError> {
    if code == sys::nvrtcResult::NVRTC_SUCCESS {
        return Ok(());
    }
    Err(CudaError::Driver { call, code: format!("{code:?}") })
}

/// A program of NVRTC, destroyed when dropped.
struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: made by nvrtcCreateProgram and not destroyed elsewhere.
        unsafe { sys::nvrtcDestroyProgram(&raw mut self.0) };
    }
}

fn text(value: &str) -> Result<CString, CudaError> {
    CString::new(value).map_err(|_| CudaError::Driver { call: "text for NVRTC", code: "a zero byte".into() })
}

fn texts<'a>(values: impl Iterator<Item = &'a str>) -> Result<(Vec<CString>, Vec<*const c_char>), CudaError> {
    let owned = values.map(text).collect::<Result<Vec<_>, _>>()?;
    let pointers = owned.iter().map(|value| value.as_ptr()).collect();
    Ok((owned, pointers))
}

pub(super) fn compile(target: &Target, options: &[String]) -> Result<Vec<u8>, CudaError> {
    present()?;
    let headers = target.headers();
    let (source, name) = (text(target.source.text())?, text(target.source.name())?);
    let (_names, names) = texts(headers.iter().map(|(name, _)| *name))?;
    let (_texts, texts_of) = texts(headers.iter().map(|(_, text)| text.as_str()))?;
    let (_options, options) = texts(options.iter().map(String::as_str))?;
    let mut raw = std::ptr::null_mut();
    // SAFETY: all strings end with zero and outlive the program; the arrays have as many entries as they say.
    check("nvrtcCreateProgram", unsafe {
        sys::nvrtcCreateProgram(
            &raw mut raw,
            source.as_ptr(),
            name.as_ptr(),
            headers.len() as i32,
            texts_of.as_ptr(),
            names.as_ptr(),
        )
    })?;
    let program = Program(raw);
    // SAFETY: the program lives; the array has as many entries as it says.
    let code = unsafe { sys::nvrtcCompileProgram(program.0, options.len() as i32, options.as_ptr()) };
    if code != sys::nvrtcResult::NVRTC_SUCCESS {
        let log = log(&program).unwrap_or_default();
        let log = if log.is_empty() { format!("{code:?}") } else { log };
        return Err(CudaError::Compile { kernel: target.source.name(), arch: target.arch.clone(), log });
    }
    let mut size = 0;
    // SAFETY: the program lives; the size is written to.
    check("nvrtcGetCUBINSize", unsafe { sys::nvrtcGetCUBINSize(program.0, &raw mut size) })?;
    let mut cubin = vec![0u8; size];
    // SAFETY: the buffer has the size that was asked for.
    check("nvrtcGetCUBIN", unsafe { sys::nvrtcGetCUBIN(program.0, cubin.as_mut_ptr().cast()) })?;
    Ok(cubin)
}

fn log(program: &Program) -> Option<String> {
    let mut size = 0;
    // SAFETY: the program lives; the size is written to.
    check("nvrtcGetProgramLogSize", unsafe { sys::nvrtcGetProgramLogSize(program.0, &raw mut size) }).ok()?;
    let mut bytes = vec![0u8; size];
    // SAFETY: the buffer has the size that was asked for.
    check("nvrtcGetProgramLog", unsafe { sys::nvrtcGetProgramLog(program.0, bytes.as_mut_ptr().cast()) }).ok()?;
    Some(CStr::from_bytes_until_nul(&bytes).ok()?.to_string_lossy().into_owned())
}
