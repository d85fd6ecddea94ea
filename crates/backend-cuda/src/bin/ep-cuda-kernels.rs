//! Compiles all kernels without a GPU and prints what they need: `ep-cuda-kernels [ARCH...]`, by default sm_80, sm_90a, sm_100a.

use std::process::ExitCode;

fn main() -> ExitCode {
    let mut archs: Vec<String> = std::env::args().skip(1).collect();
    if archs.is_empty() {
        archs = ["sm_80", "sm_90a", "sm_100a"].map(str::to_owned).to_vec();
    }
    for arch in archs {
        match ep_cuda::build::check(&arch) {
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
