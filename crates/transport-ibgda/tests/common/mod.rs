//! The text of the verbs, compiled for a CPU.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use ep_core::transport::DeviceSource;
use ep_ibgda::{Settings, source};

#[path = "../../../ep-core/tests/core/common/compiler.rs"]
mod compiler;

const DEVICE: &str = include_str!("ep_device.h");

/// A change of the text, made on purpose: what stands there, and what is put in its place.
pub(crate) type Mutation<'a> = (&'a str, &'a str);

/// Compiles `program` (a file's name and text) in `folder`, with the text of the verbs as it is or changed. None where there is no compiler.
pub(crate) fn compile(
    folder: &Path,
    settings: &Settings,
    mutation: Option<Mutation<'_>>,
    (name, program): (&str, &str),
    more: &[&str],
) -> Option<()> {
    let compiler = compiler::compiler()?;
    let DeviceSource { mut text, defines, .. } = source(settings);
    if let Some((from, to)) = mutation {
        assert_eq!(text.matches(from).count(), 1, "the text has it once: {from}");
        text = text.replace(from, to);
    }
    let own = [("ep_device.h", DEVICE.to_owned()), (name, program.to_owned()), (DeviceSource::NAME, text)];
    for (name, text) in ep_core::device::headers().into_iter().chain(own) {
        fs::write(folder.join(name), text).expect("the file can be written");
    }
    let defines = defines.iter().map(|(name, value)| format!("-D{name}={value}"));
    let mut command = Command::new(&compiler);
    // Words that the text does not say are declared and not defined.
    command.args(["-std=c++17", "-O0", "-Wall", "-Werror", "-Wno-unused-function", "-fno-strict-aliasing", "-pthread"]);
    command.args(defines).args(more).arg(name).current_dir(folder);
    let Output { status, stderr, .. } = command.output().expect("the compiler runs");
    assert!(status.success(), "{compiler}: {}", String::from_utf8_lossy(&stderr));
    Some(())
}
