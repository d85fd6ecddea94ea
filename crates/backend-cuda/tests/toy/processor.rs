//! The toy's processor: the twin's, with its words and verbs in place of the GPU's.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use ep_cuda_twin::{FLAGS, Twin};

/// Where it lies.
fn folder() -> PathBuf {
    static TWIN: OnceLock<Twin> = OnceLock::new();
    TWIN.get_or_init(|| Twin::build().unwrap_or_else(|error| panic!("{error}"))).toy()
}

/// Whether it has a header of this name. Beside a program's text that of the GPU would come first.
pub(crate) fn has(name: &str) -> bool {
    folder().join(name).is_file()
}

/// Compiles programs in a folder for it.
pub(crate) fn compiler_in(program: &Path, compiler: &str) -> Command {
    let toy = folder();
    let mut command = Command::new(compiler);
    // First of all includes: then it is the one that is compiled already.
    command
        .args(FLAGS.split(' '))
        .args(["-include", "machine.h"])
        .args(["-I", ".", "-I"])
        .arg(&toy)
        .arg(toy.join("machine.o"));
    command.current_dir(program);
    command
}
