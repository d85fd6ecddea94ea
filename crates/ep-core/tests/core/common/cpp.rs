//! Programs in C++ that print what the generated headers compute.

use std::fs;
use std::process::Command;

use ep_core::device::headers;

pub(crate) use super::compiler::compiler;

/// What the compiler says of a program that includes headers: nothing where all is well, and the program.
pub(crate) fn compile(
    compiler: &str,
    program: &str,
    headers: &[(&'static str, String)],
) -> Result<tempfile::TempDir, String> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for (name, text) in headers {
        fs::write(folder.path().join(name), text).expect("the header can be written");
    }
    let (source, binary) = (folder.path().join("program.cpp"), folder.path().join("program"));
    fs::write(&source, program).expect("the program can be written");
    let flags = ["-std=c++17", "-Wall", "-Wextra", "-Wpedantic", "-Wno-long-long", "-Werror", "-nostdinc", "-o"];
    let compiled = Command::new(compiler).args(flags).arg(&binary).arg(&source).output().expect("the compiler runs");
    match compiled.status.success() {
        true => Ok(folder),
        false => Err(String::from_utf8_lossy(&compiled.stderr).into_owned()),
    }
}

/// Compiles and runs a program, and returns the numbers that it prints, one a line; none without a compiler.
pub(crate) fn printed(program: &str) -> Option<Vec<u64>> {
    printed_with(program, &headers())
}

/// The same with other headers.
pub(crate) fn printed_with(program: &str, headers: &[(&'static str, String)]) -> Option<Vec<u64>> {
    let compiler = compiler()?;
    let folder = compile(&compiler, program, headers).unwrap_or_else(|said| panic!("{compiler}: {said}"));
    let run = Command::new(folder.path().join("program")).output().expect("the program runs");
    assert!(run.status.success(), "the program failed: {}", run.status);
    let text = String::from_utf8(run.stdout).expect("numbers are text");
    Some(text.lines().map(|line| line.parse().expect("a number a line")).collect())
}
