//! The text of the verbs by itself: it compiles for a CPU, and every byte that it writes and every completion that it reads is as the adapter has it.

#[path = "../../../ep-core/tests/core/common/compiler.rs"]
mod compiler;

use std::fs;
use std::process::Command;

use compiler::compiler;
use ep_core::transport::DeviceSource;
use ep_ibgda::{Doorbell, Settings, source};

const DEVICE: &str = include_str!("ep_device.h");
const ELEMENTS: &str = include_str!("elements.cpp");

/// A change of the text, made on purpose: what stands there, and what is put in its place.
type Mutation = (&'static str, &'static str);

/// What the program says, run with this text; `Err` where something is not as it should be. None without a compiler.
fn run(settings: &Settings, mutation: Option<Mutation>, more: &[&str]) -> Option<Result<String, String>> {
    let compiler = compiler()?;
    let DeviceSource { mut text, defines, .. } = source(settings);
    if let Some((from, to)) = mutation {
        assert_eq!(text.matches(from).count(), 1, "the text has it once: {from}");
        text = text.replace(from, to);
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let own = [("ep_device.h", DEVICE.to_owned()), ("elements.cpp", ELEMENTS.to_owned()), (DeviceSource::NAME, text)];
    for (name, text) in ep_core::device::headers().into_iter().chain(own) {
        fs::write(folder.path().join(name), text).expect("the file can be written");
    }
    let defines = defines.iter().map(|(name, value)| format!("-D{name}={value}"));
    let mut command = Command::new(&compiler);
    // Words that the text does not say are declared and not defined.
    command.args(["-std=c++17", "-O1", "-Wall", "-Werror", "-Wno-unused-function", "-fno-strict-aliasing"]);
    command.args(defines).args(more).args(["-o", "elements", "elements.cpp", "-pthread"]).current_dir(folder.path());
    let said = command.output().expect("the compiler runs");
    assert!(said.status.success(), "{compiler}: {}", String::from_utf8_lossy(&said.stderr));
    let said = Command::new(folder.path().join("elements")).output().expect("the program runs");
    let out = String::from_utf8_lossy(&said.stdout).into_owned();
    Some(if said.status.success() { Ok(out) } else { Err(out) })
}

#[test]
fn elements_doorbells_and_completions_are_those_of_the_vectors() {
    for doorbell in [Doorbell::Single, Doorbell::Double] {
        let Some(said) = run(&Settings::new().doorbell(doorbell), None, &[]) else { return };
        assert_eq!(said, Ok("all as expected\n".to_owned()), "{doorbell:?}");
    }
}

#[test]
#[ignore = "needs libibverbs-dev"]
fn elements_and_completions_are_those_of_mlx5dv() {
    let Some(said) = run(&Settings::new(), None, &["-DORACLE"]) else { return };
    assert_eq!(said, Ok("all as expected\n".to_owned()));
}

/// Errors that the bytes alone show.
const MUTATIONS: [(&str, Mutation); 12] = [
    ("the wrong half of the element's number and segments", ("q->number << 8 | segments", "segments << 8 | q->number")),
    (
        "the index off by one",
        ("const ep_u32 index = (ep_u32)q->posted & 0xffff;", "const ep_u32 index = ((ep_u32)q->posted + 1) & 0xffff;"),
    ),
    (
        "the index modulo the depth",
        ("const ep_u32 index = (ep_u32)q->posted & 0xffff;", "const ep_u32 index = (ep_u32)q->posted & 63;"),
    ),
    (
        "a record that is not masked",
        ("const ep_u32 count = (ep_u32)q->posted & 0xffff;", "const ep_u32 count = (ep_u32)q->posted;"),
    ),
    ("a record in the host's order", ("ep_mlx5_big(count));", "count);")),
    (
        "a put that rings",
        ("    *ticket = q->put = q->posted;\n", "    *ticket = q->put = q->posted;\n    ep_mlx5_ring(q);\n"),
    ),
    (
        "a place that is written early",
        ("if (q->posted - q->completed < places) return", "if (q->posted - q->completed <= places) return"),
    ),
    ("an owner that is not looked at", ("((end ^ round) & 1) != 0 || ", "round == 12345 || ")),
    (
        "an error that is late and no more",
        ("    q->status = EP_FAR_BROKEN;\n    return EP_FAR_BROKEN;", "    return EP_MLX5_UNDER_WAY;"),
    ),
    ("a completion of whatever element", ("opcode == 0 && end >> 16 == (ep_u32)(index & 0xffff)", "opcode == 0")),
    ("a fetch-add by the rows' key", ("q->to + cell, q->cells_key", "q->to + cell, q->rows_key")),
    ("the value and not the difference", ("bits - *last", "bits")),
];

#[test]
fn text_that_writes_other_bytes_is_found() {
    for (what, mutation) in MUTATIONS {
        let Some(said) = run(&Settings::new(), Some(mutation), &[]) else { return };
        assert!(said.is_err(), "not found: {what}");
    }
}
