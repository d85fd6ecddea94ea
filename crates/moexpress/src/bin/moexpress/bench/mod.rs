//! `moexpress bench`: times of a backend beside what its machine could do.

#[cfg(feature = "cuda")]
mod cuda;

use crate::args::{Backend, BenchArgs};
use crate::failure::Failure;

pub(crate) fn bench(args: &BenchArgs) -> Result<String, Failure> {
    match args.backend {
        Backend::Sim => Err(Failure::bad_input(
            "--backend is sim, allowed: cuda; times of the simulator are virtual: moexpress run --schedule timed",
        )),
        Backend::Host => Err(Failure::bad_input("--backend is host, allowed: cuda")),
        #[cfg(feature = "cuda")]
        Backend::Cuda => cuda::bench(args),
        #[cfg(not(feature = "cuda"))]
        Backend::Cuda => Err(Failure::bad_input("--backend cuda: this program was built without the feature cuda")),
    }
}
