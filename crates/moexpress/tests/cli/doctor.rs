//! `moexpress doctor`: what this machine has.

use crate::moexpress;

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
