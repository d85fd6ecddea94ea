//! `moexpress run --schedule timed`.

use crate::{moexpress, moexpress_with};

const SMALL: &str = "run --json --schedule timed --ranks-per-node 4 --tokens 32 --hidden 256 --experts 16 --topk 4";

#[test]
fn time_is_virtual_and_repeats_to_the_nanosecond() {
    let run = || {
        let mut object = moexpress(SMALL).json();
        object["memory_peak_bytes"] = serde_json::Value::Null;
        object
    };
    let one = run();
    assert_eq!(one, run());
    assert_eq!((&one["clock"], &one["model"]), (&"virtual".into(), &"h800-cx7".into()));
    assert_eq!((&one["verified"], &one["payload_elided"]), (&true.into(), &false.into()));
    let other = moexpress(&format!("{SMALL} --model h200-node")).json();
    assert!(other["dispatch_ns"].as_u64() < one["dispatch_ns"].as_u64(), "its links are faster");
    let looped = moexpress(&format!("{SMALL} --model h200-loop")).json();
    assert_eq!(&looped["model"], "h200-loop");
    let npus = moexpress(&format!("{SMALL} --model ascend-a2")).json();
    assert!(npus["dispatch_ns"].as_u64() > one["dispatch_ns"].as_u64(), "everything costs more");
}

#[test]
fn rates_are_bytes_by_rank_and_time() {
    let line = "--nodes 2 --ranks-per-node 2 --tokens 64 --hidden 512 --experts 16 --topk 4 --schedule timed";
    let object = moexpress(&format!("run --json {line}")).json();
    for (key, bytes) in [("near", &object["bytes_near"]), ("far", &object["bytes_far"])] {
        let sent = |operation: &str| {
            let time = object[format!("{operation}_ns")].as_f64().unwrap();
            object[format!("{operation}_{key}_gb_s")].as_f64().unwrap() * time * 4.0
        };
        let (both, bytes) = (sent("dispatch") + sent("combine"), bytes.as_f64().unwrap());
        assert!(bytes > 0.0 && (both - bytes).abs() < 1.0, "{key}: {both} of {bytes}");
    }
    let text = moexpress(&format!("run {line}")).success();
    for part in ["sim (timed on h800-cx7, seed 0)", "virtual time of the slowest rank", "far rate", "VERIFIED"] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[test]
fn elided_payload_changes_neither_time_nor_bytes_but_what_is_verified() {
    for more in ["", " --dtype fp8", " --placement direct", " --nodes 2 --ranks-per-node 2 --dtype fp8 --hidden 1024"] {
        let line = format!("{SMALL}{more}")
            .replace("--ranks-per-node 4", if more.contains("--nodes") { "" } else { "--ranks-per-node 4" });
        let line = line.replacen("--hidden 256", if more.contains("--hidden") { "" } else { "--hidden 256" }, 1);
        let whole = moexpress(&line).json();
        let elided = moexpress(&format!("{line} --elide-payload")).json();
        for key in ["dispatch_ns", "combine_ns", "bytes_own", "bytes_near", "bytes_far", "rows_near", "events"] {
            assert_eq!(whole[key], elided[key], "{key} of{more}");
        }
        assert_eq!((&whole["verified"], &elided["verified"]), (&true.into(), &false.into()), "{more}");
        assert_eq!((&elided["error"], &elided["payload_elided"]), (&serde_json::Value::Null, &true.into()));
        assert_eq!(whole["verified_indices"], elided["verified_indices"]);
        assert_eq!(whole["verified_weights"], elided["verified_weights"]);
        assert!(elided["verified_values"].as_u64() < whole["verified_values"].as_u64());
    }
}

#[test]
fn elided_payload_is_said_to_be_unverified() {
    let text = moexpress(&format!("{} --elide-payload", SMALL.replace(" --json", ""))).success();
    assert!(text.contains("PAYLOAD ELIDED: rows' values are NOT verified. Of each row 1 of 256 values"), "{text}");
    assert!(!text.contains("\nVERIFIED"), "{text}");
}

#[test]
fn many_ranks_fit_without_payload() {
    let line = "run --json --schedule timed --elide-payload --nodes 8 --ranks-per-node 8 --experts 64 --topk 2 --tokens 8 --hidden 7168";
    assert_eq!(moexpress(line).json()["error"], serde_json::Value::Null);
}

#[test]
fn a_trace_has_virtual_times() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("trace.json");
    let object = moexpress_with(&format!("{SMALL} --elide-payload --trace"), &[path.to_str().unwrap()]).json();
    let trace: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).expect("a trace")).expect("JSON");
    let events = trace["traceEvents"].as_array().expect("events");
    let last = events.iter().filter_map(|event| event["ts"].as_f64()).fold(0.0, f64::max);
    let took = (object["dispatch_ns"].as_f64().unwrap() + object["combine_ns"].as_f64().unwrap()) / 1e3;
    assert!(last > 0.5 * took && last < 1.5 * took, "the last event is at {last} us, the run took {took} us");
}

#[test]
fn arguments_that_do_not_go_together_are_refused() {
    for (options, says) in [
        ("--elide-payload", "--schedule with --elide-payload is explore, allowed: timed"),
        ("--model h200-node", "--schedule with --model is explore, allowed: timed"),
        ("--schedule timed --elide-payload --dump d", "allowed: one of them: there is no payload to write"),
    ] {
        let refusal = moexpress(&format!("run {options}")).refusal();
        assert!(refusal.contains(says), "{options}: {refusal}");
    }
}
