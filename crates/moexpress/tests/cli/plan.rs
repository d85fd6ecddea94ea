//! `moexpress plan`.

use crate::moexpress;

#[test]
fn regions_fill_the_window() {
    let object = moexpress("plan --json --placement direct").json();
    let mut end = 0;
    for region in object["regions"].as_array().expect("regions") {
        assert_eq!(region["offset"], end, "{region}");
        end += region["bytes"].as_u64().expect("a size");
    }
    assert_eq!(object["window_bytes"], end);
    assert!(object["arena_bytes"].as_u64().is_some_and(|bytes| bytes > 0));
}

#[test]
fn ring_sizes_follow_the_settings() {
    let object = moexpress("plan --json --slots 10 --channels 3 --hidden 16 --topk 2").json();
    assert_eq!(object["row"]["slot_bytes"], 128);
    assert_eq!(object["rings"]["bytes_per_writer"], 3 * 10 * 128);
}

#[test]
fn deepep_is_compared_with_for_a_known_layer() {
    let line = "plan --json --hidden 7168 --experts 288 --topk 8 --max-tokens 128";
    let deepep = &moexpress(line).json()["deepep_v1"];
    assert_eq!(deepep["low_latency_rdma_bytes"], 4 * 128 * 288 * 14560u64 + 2 * 1152 + 128);
    assert_eq!(deepep["normal_rdma_bytes"], 0);
}

#[test]
fn the_table_names_every_region() {
    let text = moexpress("plan").success();
    for name in ["cells", "counts", "rings", "staging", "arena", "in all", "DeepEP V1", "low latency, RDMA"] {
        assert!(text.contains(name), "{name} in {text}");
    }
    assert!(moexpress("plan --ranks-per-node 1").success().contains("no default configuration for 1 rank"));
}

#[test]
fn bad_values_are_refused() {
    assert!(moexpress("plan --nodes 3").refusal().contains("a multiple of the 24 ranks"));
    assert!(moexpress("plan --max-tokens 0").refusal().contains("max tokens is 0, allowed: 1 to "));
}

#[test]
fn low_latency_adds_its_regions() {
    let low_bytes = |line: &str| {
        let object = moexpress(line).json();
        let regions = object["regions"].as_array().expect("an array").clone();
        let low = regions.iter().filter(|region| region["name"].as_str().is_some_and(|name| name.starts_with("low ")));
        low.map(|region| region["bytes"].as_u64().expect("a number")).collect::<Vec<_>>()
    };
    assert_eq!(low_bytes("plan --json"), [0; 2]);
    assert!(low_bytes("plan --json --low-latency").iter().all(|&bytes| bytes > 0));
}

#[test]
fn memory_is_told_however_much_it_is() {
    let object = moexpress("plan --json --ranks-per-node 4 --nodes 2").json();
    let memory = &object["memory"];
    assert_eq!(memory["node_windows_bytes"], 4 * object["window_bytes"].as_u64().unwrap());
    let run = |on: &str| memory["run_bytes"][on].as_u64().unwrap();
    assert!(run("timed_payload_elided") < run("host") && run("host") <= run("sim"));
    let text = moexpress("plan --nodes 2048 --experts 16384 --max-tokens 4096").success();
    assert!(text.contains("windows of the ranks of a node") && text.contains(" TiB"), "{text}");
}
