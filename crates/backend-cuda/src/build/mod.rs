//! From kernel sources to code for the GPU at hand: it comes with the program, or is compiled with NVRTC at first use and kept on disk.

#[cfg(feature = "workshop")]
mod ahead;
#[cfg(test)]
mod blame;
#[cfg(test)]
mod bodies;
mod cache;
#[cfg(test)]
mod closed;
#[cfg(test)]
mod counters;
mod cubin;
#[cfg(test)]
mod dependent;
#[cfg(test)]
mod last_looks;
mod nvrtc;
#[cfg(feature = "workshop")]
mod resources;
mod shipped;
mod side_by_side;
mod sources;
mod specialised;
#[cfg(test)]
mod stages;

#[cfg(feature = "workshop")]
pub use ahead::{fill, ship};
pub use cache::{Cache, come_from};
pub(crate) use cubin::is_whole;
pub use nvrtc::version;
#[cfg(feature = "workshop")]
pub use resources::{Resources, check, check_over, resources};
#[cfg(feature = "workshop")]
pub use shipped::absent;
pub use shipped::absent_names;
#[cfg(feature = "workshop")]
pub use sources::ALL;
pub use sources::{Source, headers, targets};
pub(crate) use sources::{combines, copies_in_bulk, low_combine_ready, targets_between};
pub(crate) use specialised::{shape_of, specialises};

use std::collections::HashMap;
use std::sync::Arc;

use ep_core::device::LAYOUT_HEADER;
use ep_core::transport::DeviceSource;

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
    /// The text by which kernels post to lanes between nodes; none where they know of no other nodes.
    pub far: Option<String>,
    /// The header of the layout for the one shape that it is for, where it is specialised.
    pub shape: Option<Arc<str>>,
}

impl Target {
    /// A kernel file for an architecture.
    pub fn new(source: Source, arch: &str) -> Self {
        Self { source, arch: arch.to_owned(), defines: Vec::new(), far: None, shape: None }
    }

    /// With a constant more.
    #[must_use]
    pub fn define(mut self, name: &str, value: impl std::fmt::Display) -> Self {
        self.defines.push(format!("{name}={value}"));
        self
    }

    /// With the lanes of a transport between nodes.
    #[must_use]
    pub fn over(self, source: &DeviceSource) -> Self {
        let with = |target: Self, (name, value): &(&str, String)| target.define(name, value);
        source.defines.iter().fold(Self { far: Some(source.text.clone()), ..self }, with)
    }

    /// The headers that it is compiled with: all of the kernels'; a transport's text in place of that which says that there is none, and the layout's of its
    /// shape.
    pub fn headers(&self) -> Vec<(&'static str, String)> {
        let mut headers = headers();
        let others = [(DeviceSource::NAME, self.far.as_deref()), (LAYOUT_HEADER, self.shape.as_deref())];
        for (name, kept) in &mut headers {
            if let Some(text) = others.into_iter().find(|(other, _)| other == name).and_then(|(_, text)| text) {
                text.clone_into(kept);
            }
        }
        headers
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

/// The code for a target: what came with the program, or from the cache where it is there and whole, or compiled.
///
/// # Errors
/// As [`compile`]; what came with the program needs no compiler.
pub fn code(cache: &Cache, target: &Target) -> Result<Vec<u8>, CudaError> {
    if let Some(cubin) = cache.shipped(target) {
        return Ok(cubin);
    }
    let key = cache::Key::compiled(target, version()?);
    if let Some(cubin) = cache.load(&key) {
        return Ok(cubin);
    }
    // Ranks that are processes of one host begin together, without it.
    let _claim = cache.claim(&key);
    if let Some(cubin) = cache.load(&key) {
        return Ok(cubin);
    }
    let cubin = compile(target)?;
    if let Err(problem) = cache.store(&key, &cubin) {
        tracing::warn!(%problem, "the compiled kernel is not kept");
    }
    Ok(cubin)
}

/// The code for each of several targets, which are compiled side by side where they must be.
///
/// # Errors
/// As [`code`].
pub fn codes(cache: &Cache, targets: Vec<Target>) -> Result<HashMap<Target, Vec<u8>>, CudaError> {
    let codes = side_by_side::each(&targets, |target| code(cache, target))?;
    Ok(targets.into_iter().zip(codes).collect())
}
