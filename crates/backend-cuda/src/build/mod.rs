//! From kernel sources to code for the GPU at hand: compiled with NVRTC at first use, kept on disk.

mod cache;
mod cubin;
mod nvrtc;
mod sources;

pub use cache::Cache;
pub use cubin::{Resources, resources};
pub use nvrtc::version;
pub(crate) use sources::PULL_WIDTHS;
pub use sources::{ALL, Source, headers};

use crate::error::CudaError;

/// What one compilation is for.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Target {
    /// The kernel file.
    pub source: Source,
    /// Such as `sm_90a`.
    pub arch: String,
    /// Constants of the specialisation, `NAME=value`.
    pub defines: Vec<String>,
}

impl Target {
    /// A kernel file for an architecture, with the constants that it always needs.
    pub fn new(source: Source, arch: &str) -> Self {
        Self { source, arch: arch.to_owned(), defines: source.sizes() }
    }

    /// With a constant more.
    #[must_use]
    pub fn define(mut self, name: &str, value: impl std::fmt::Display) -> Self {
        self.defines.push(format!("{name}={value}"));
        self
    }

    /// Built for tests: [`crate::checks`].
    #[must_use]
    pub fn for_tests(self, on: bool) -> Self {
        if on { self.define("EP_TEST", 1) } else { self }
    }

    fn options(&self) -> Vec<String> {
        let mut options =
            vec![format!("--gpu-architecture={}", self.arch), "--std=c++17".to_owned(), "--fmad=false".to_owned()];
        options.extend(self.defines.iter().map(|define| format!("-D{define}")));
        options
    }
}

/// Compiles, without a GPU and without the cache.
///
/// # Errors
/// [`CudaError::LibraryMissing`] without NVRTC; [`CudaError::Compile`].
pub fn compile(target: &Target) -> Result<Vec<u8>, CudaError> {
    nvrtc::compile(target, &target.options())
}

/// Compiles all kernels for `arch` into a cache, with those for tests where `tests`: nothing is compiled on the GPU's host then, if its NVRTC
/// has the same version.
///
/// # Errors
/// As [`compile`].
pub fn fill(cache: &Cache, arch: &str, tests: bool) -> Result<(), CudaError> {
    for target in ALL.into_iter().flat_map(|source| source.variants(arch)) {
        code(cache, &target)?;
        if tests {
            code(cache, &target.for_tests(true))?;
        }
    }
    Ok(())
}

/// The code for a target: from the cache where it is there and whole.
///
/// # Errors
/// As [`compile`].
pub fn code(cache: &Cache, target: &Target) -> Result<Vec<u8>, CudaError> {
    let key = cache::Key::new(target, &target.options(), version()?);
    if let Some(cubin) = cache.load(&key) {
        return Ok(cubin);
    }
    let cubin = compile(target)?;
    if let Err(problem) = cache.store(&key, &cubin) {
        tracing::warn!(%problem, "the compiled kernel is not kept");
    }
    Ok(cubin)
}

/// Compiles all kernels for `arch` and returns what each needs; fails where one that moves rows uses local memory.
///
/// # Errors
/// As [`compile`], and [`CudaError::Compile`] for local memory.
pub fn check(arch: &str) -> Result<Vec<(String, Resources)>, CudaError> {
    let mut all = Vec::new();
    for source in ALL {
        for target in source.variants(arch) {
            compile(&target.clone().for_tests(true))?;
            let cubin = compile(&target)?;
            let said = |log: String| CudaError::Compile { kernel: source.name(), arch: arch.to_owned(), log };
            for (kernel, needs) in resources(&cubin).map_err(|problem| said(problem.to_owned()))? {
                if needs.local_memory > 0 {
                    return Err(said(format!("{kernel} uses {} bytes of local memory", needs.local_memory)));
                }
                all.push((format!("{kernel} {}", target.defines.join(" ")), needs));
            }
        }
    }
    Ok(all)
}
