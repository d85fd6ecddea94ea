//! `moexpress doctor`: what this machine has.

use crate::{moexpress, moexpress_with_env};

#[test]
fn every_part_is_looked_at_and_what_is_missing_is_explained() {
    let text = moexpress("doctor").success();
    for part in ["host", "processes", "RDMA", "NVIDIA", "Ascend"] {
        assert!(text.lines().any(|line| line == part), "{text}");
    }
    let findings = moexpress("doctor --json").json();
    let findings = findings.as_array().expect("an array");
    assert!(findings.iter().any(|finding| finding["what"] == "cores" && finding["standing"] == "ok"), "{findings:?}");
    for finding in findings {
        assert_eq!(finding["standing"] == "ok", finding["prevents"].is_null(), "{finding}");
    }
    // The tests show no GPU to the program.
    assert!(findings.iter().any(|finding| finding["part"] == "NVIDIA" && finding["standing"] == "missing"), "{text}");
}

/// As runs go by it, so does what is said of them.
#[test]
fn how_much_memory_there_is_can_be_said() {
    for (said, standing, seen) in [
        ("1000", "limited", "1000 B, as MOEXPRESS_MEMORY says"),
        ("68719476736", "ok", "64.0 GiB, as MOEXPRESS_MEMORY says"),
        ("much", "missing", "MOEXPRESS_MEMORY is \"much\", allowed: a number of bytes"),
    ] {
        let findings = moexpress_with_env("doctor --json", &[("MOEXPRESS_MEMORY", said)]).json();
        let findings = findings.as_array().expect("an array");
        let memory = findings.iter().find(|finding| finding["what"] == "memory").expect("it is looked at");
        assert_eq!((&memory["standing"], &memory["seen"]), (&standing.into(), &seen.into()));
    }
}
