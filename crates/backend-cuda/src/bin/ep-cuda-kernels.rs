//! Compiles all kernels without a GPU and prints what they need: `ep-cuda-kernels [ARCH...]`, by default sm_80, sm_90a, sm_100a.
//!
//! `ep-cuda-kernels --into FOLDER [ARCH...]` puts them into a cache instead, those for tests too: a GPU's host with the same version of NVRTC
//! that is given the folder (`EP_CUDA_CACHE`) compiles nothing.

use std::process::ExitCode;

use ep_cuda::build::{self, Cache};

fn main() -> ExitCode {
    let mut archs: Vec<String> = std::env::args().skip(1).collect();
    let cache = (archs.first().is_some_and(|first| first == "--into") && archs.len() > 1).then(|| {
        archs.remove(0);
        Cache::at(archs.remove(0).into())
    });
    if archs.is_empty() {
        archs = ["sm_80", "sm_90a", "sm_100a"].map(str::to_owned).to_vec();
    }
    for arch in archs {
        if let Some(cache) = &cache {
            match build::fill(cache, &arch, true) {
                Ok(()) => continue,
                Err(error) => {
                    eprintln!("{error}");
                    return ExitCode::FAILURE;
                }
            }
        }
        match build::check(&arch) {
            Ok(kernels) => {
                for (kernel, needs) in kernels {
                    let kernel = kernel.split(" EP_SIZE").next().unwrap_or(&kernel).to_owned()
                        + kernel.split(" EP_PULL").nth(1).unwrap_or("");
                    println!("{arch:8} {kernel:32} {:4} registers", needs.registers);
                }
            }
            Err(error) => {
                eprintln!("{error}");
                return ExitCode::FAILURE;
            }
        }
    }
    ExitCode::SUCCESS
}
