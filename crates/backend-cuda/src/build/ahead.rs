//! Kernels that are compiled ahead, into folders.

use std::path::Path;

use super::cache::{self, Key};
use super::{ALL, Cache, Target, code, is_whole, side_by_side, targets};
use crate::error::CudaError;
use crate::proxy;

/// Puts all that a GPU of `arch` is given into a folder, which a program names by [`come_from`](super::come_from). What a cache lacks is
/// compiled.
///
/// # Errors
/// As [`code`]; [`CudaError::Cache`] where the folder cannot be written.
pub fn ship(cache: &Cache, folder: &Path, arch: &str) -> Result<(), CudaError> {
    let made = side_by_side::each(&targets(arch), |target| {
        let cubin = code(cache, target)?;
        is_whole(&cubin).map_err(|problem| CudaError::Compile {
            kernel: target.source.name(),
            arch: arch.to_owned(),
            log: problem.to_owned(),
        })?;
        cache::store(folder, &Key::shipped(target), &cubin)
    });
    made.map(drop)
}

/// Compiles all kernels for `arch` into a cache, with those for tests where `tests`: nothing is compiled on the GPU's host then, if its NVRTC
/// has the same version.
///
/// # Errors
/// As [`code`].
pub fn fill(cache: &Cache, arch: &str, tests: bool) -> Result<(), CudaError> {
    let plain = ALL
        .into_iter()
        .flat_map(|source| source.variants(arch).into_iter().chain(source.between_nodes(arch, &proxy::source())));
    let wanted: Vec<Target> = match tests {
        true => plain.flat_map(|target| [target.clone().for_tests(true), target]).collect(),
        false => plain.collect(),
    };
    side_by_side::each(&wanted, |target| code(cache, target)).map(drop)
}
