//! `moexpress bench`: times of a backend beside what its machine could do.

#[cfg(feature = "cuda")]
mod cuda;
#[cfg(all(feature = "host", target_os = "linux"))]
mod host;
#[cfg(feature = "cuda")]
mod nodes;
#[cfg(any(feature = "cuda", all(feature = "host", target_os = "linux")))]
mod table;

use crate::args::{Backend, BenchArgs};
use crate::failure::Failure;

pub(crate) fn bench(args: &BenchArgs) -> Result<String, Failure> {
    args.check().map_err(Failure::bad_input)?;
    match args.backend {
        Backend::Sim => Err(Failure::bad_input(
            "--backend is sim, allowed: host, cuda; times of the simulator are virtual: moexpress run --schedule timed",
        )),
        #[cfg(all(feature = "host", target_os = "linux"))]
        Backend::Host => host::bench(args),
        #[cfg(not(all(feature = "host", target_os = "linux")))]
        Backend::Host => {
            Err(Failure::bad_input("--backend host: this program was built without the feature host, or not for Linux"))
        }
        Backend::Ascend => Err(Failure::bad_input(
            "--backend is ascend, allowed: host, cuda; no NPU has run the kernels yet, and times of their twin say nothing",
        )),
        #[cfg(feature = "cuda")]
        Backend::Cuda => cuda::bench(args),
        #[cfg(not(feature = "cuda"))]
        Backend::Cuda => Err(Failure::bad_input("--backend cuda: this program was built without the feature cuda")),
    }
}
