//! Compiles all kernels without a GPU and prints what they need: `ep-cuda-kernels [ARCH...]`, by default sm_80, sm_90a, sm_100a.
//!
//! | instead | does |
//! |---|---|
//! | `ep-cuda-kernels --into FOLDER [ARCH...]` | puts them into a cache, those for tests too: a GPU's host with the same version of NVRTC that is given the folder (`EP_CUDA_CACHE`) compiles nothing |
//! | `ep-cuda-kernels --ship FOLDER [ARCH...]` | puts into a folder what comes with a program: a GPU's host that is given it (`EP_CUDA_KERNELS`, or by the wheel) needs no NVRTC |
//! | `ep-cuda-kernels --shipped FOLDER [ARCH...]` | fails unless all of these are there and whole, made of the text that this program was built with |

use std::path::Path;
use std::process::ExitCode;

use ep_cuda::build::{self, Cache};

/// What is done for an architecture; what it prints, or what is wrong.
type Work<'a> = Box<dyn Fn(&str) -> Result<String, String> + 'a>;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (work, archs): (Work<'_>, _) = match &arguments[..] {
        [option, folder, archs @ ..] if option == "--into" => (into(folder), archs),
        [option, folder, archs @ ..] if option == "--ship" => (ship(folder), archs),
        [option, folder, archs @ ..] if option == "--shipped" => (shipped(folder), archs),
        [option, ..] if option.starts_with('-') => {
            eprintln!(
                "error: {option} is no architecture, allowed: sm_80, ...; --into, --ship or --shipped with a folder"
            );
            return ExitCode::from(2);
        }
        archs => (Box::new(check), archs),
    };
    let usual = ["sm_80", "sm_90a", "sm_100a"].map(str::to_owned);
    for arch in if archs.is_empty() { &usual[..] } else { archs } {
        match work(arch) {
            Ok(text) => print!("{text}"),
            Err(problem) => {
                eprintln!("error: {problem}");
                return ExitCode::FAILURE;
            }
        }
    }
    ExitCode::SUCCESS
}

fn check(arch: &str) -> Result<String, String> {
    let kernels = build::check(&Cache::of_user(), arch).map_err(|error| error.to_string())?;
    let line =
        |(kernel, needs): (String, build::Resources)| format!("{arch:8} {kernel:32} {:4} registers\n", needs.registers);
    Ok(kernels.into_iter().map(line).collect())
}

fn into(folder: &str) -> Work<'_> {
    let cache = Cache::at(folder.into());
    Box::new(move |arch| build::fill(&cache, arch, true).map(|()| String::new()).map_err(|error| error.to_string()))
}

fn ship(folder: &str) -> Work<'_> {
    Box::new(move |arch| {
        build::ship(&Cache::of_user(), Path::new(folder), arch)
            .map(|()| String::new())
            .map_err(|error| error.to_string())
    })
}

fn shipped(folder: &str) -> Work<'_> {
    Box::new(move |arch| {
        let absent: Vec<_> = build::absent(Path::new(folder), arch).iter().map(|target| target.source.name()).collect();
        if absent.is_empty() {
            return Ok(String::new());
        }
        Err(format!("{folder} lacks kernels for {arch}, or has others: {}", absent.join(", ")))
    })
}
