//! The text of the verbs by itself: it compiles for a CPU, and every byte that it writes and every completion that it reads is as the adapter has it.

#[path = "../common/mod.rs"]
mod common;

use std::process::Command;

use common::{Mutation, compile};
use ep_ibgda::{Doorbell, Settings, Signal};

/// What the program says, run with this text; `Err` where something is not as it should be. None without a compiler.
fn run(settings: &Settings, mutation: Option<Mutation<'_>>, more: &[&str]) -> Option<Result<String, String>> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let program = ("elements.cpp", include_str!("elements.cpp"));
    compile(folder.path(), settings, mutation, program, &[more, &["-o", "elements"]].concat())?;
    let said = Command::new(folder.path().join("elements")).output().expect("the program runs");
    let out = String::from_utf8_lossy(&said.stdout).into_owned();
    Some(if said.status.success() { Ok(out) } else { Err(out) })
}

#[test]
fn elements_doorbells_and_completions_are_those_of_the_vectors() {
    for doorbell in [Doorbell::Single, Doorbell::Double] {
        for signal in [Signal::FetchAdd, Signal::OrderedWrite] {
            let Some(said) = run(&Settings::new().doorbell(doorbell).signal(signal), None, &[]) else { return };
            assert_eq!(said, Ok("all as expected\n".to_owned()), "{doorbell:?}, {signal:?}");
        }
    }
}

#[test]
#[ignore = "needs libibverbs-dev"]
fn elements_and_completions_are_those_of_mlx5dv() {
    for signal in [Signal::FetchAdd, Signal::OrderedWrite] {
        let Some(said) = run(&Settings::new().signal(signal), None, &["-DORACLE"]) else { return };
        assert_eq!(said, Ok("all as expected\n".to_owned()), "{signal:?}");
    }
}

/// Errors that the bytes alone show.
const MUTATIONS: [(&str, Mutation<'_>); 12] = [
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
    ("a fetch-add by the rows' key", ("q->cells_key, add", "q->rows_key, add")),
    ("the value and not the difference", ("bits - *last", "bits")),
];

/// The same of a publish that is a write.
const WRITTEN: [(&str, Mutation<'_>); 4] = [
    ("a length without its mark", ("EP_MLX5_INLINE | 8", "8")),
    ("another length", ("EP_MLX5_INLINE | 8", "EP_MLX5_INLINE | 4")),
    (
        "the halves of the value in the other order",
        ("(ep_i32)bits, (ep_i32)(bits >> 32), 0", "(ep_i32)(bits >> 32), (ep_i32)bits, 0"),
    ),
    ("a write by the rows' key", ("q->cells_key, value", "q->rows_key, value")),
];

#[test]
fn text_that_writes_other_bytes_is_found() {
    for (what, mutation) in MUTATIONS {
        let Some(said) = run(&Settings::new(), Some(mutation), &[]) else { return };
        assert!(said.is_err(), "not found: {what}");
    }
    let settings = Settings::new().signal(Signal::OrderedWrite);
    for (what, mutation) in WRITTEN {
        let Some(said) = run(&settings, Some(mutation), &[]) else { return };
        assert!(said.is_err(), "not found: {what}");
    }
}
