//! `moexpress run --backend ascend`: on the twin, and where there is no NPU.

use crate::{moexpress, moexpress_with_env};

#[test]
fn the_twin_moves_a_layer_and_a_seed_repeats_it() {
    let layer = "run --backend ascend --twin --ranks-per-node 3 --tokens 6,0,5 --hidden 40 --experts 6 --topk 2 --channels 2 --json";
    let report = moexpress(layer).json();
    assert_eq!(report["verified"], true, "{report}");
    for dtype in ["fp8", "int8"] {
        let odd = moexpress(&format!("{layer} --dtype {dtype} --seed 3")).json();
        assert_eq!(odd["verified"], true, "{odd}");
    }
}

#[test]
fn the_twin_moves_a_layer_in_low_latency() {
    let layer =
        "run --backend ascend --twin --mode low-latency --ranks-per-node 2 --tokens 3 --hidden 40 --experts 8 --topk 2";
    for servers in ["--dtype int8", "--nodes 2"] {
        let report = moexpress(&format!("{layer} {servers} --json")).json();
        assert_eq!(report["verified"], true, "{report}");
    }
}

#[test]
fn processes_on_twins_of_their_own_move_a_layer_over_servers() {
    let program = env!("CARGO_BIN_EXE_moexpress");
    let layer = "run --backend ascend --twin --processes --tokens 3,5 --hidden 40 --experts 6 --topk 2 --json";
    let ran = moexpress(&format!("launch -n 2 --nodes 2 -- {program} {layer}"));
    let said = ran.success();
    assert!(said.replace(" ", "").contains(r#""verified":true"#), "{said}");
}

#[test]
fn without_an_npu_it_says_what_is_missing() {
    let refusal = moexpress("run --backend ascend --ranks-per-node 2 --tokens 3").refusal();
    assert!(refusal.contains("libascendcl.so") || refusal.contains("EP_ASCEND_KERNELS"), "{refusal}");
    let no_compiler = moexpress_with_env(
        "run --backend ascend --twin --ranks-per-node 2 --tokens 3",
        &[("PATH", "/nowhere"), ("CXX", "/nowhere/c++")],
    );
    assert!(no_compiler.refusal().contains("the twin needs a C++17 compiler"));
}

#[test]
fn what_npus_do_not_do_is_refused() {
    let says = |arguments: &str, what: &str| {
        let refusal = moexpress(arguments).refusal();
        assert!(refusal.contains(what), "{refusal}");
    };
    says("run --backend host --twin", "--backend with --twin is host, allowed: ascend");
    says(
        "run --backend ascend --twin --nodes 5 --ranks-per-node 1 --experts 10 --tokens 3",
        "nodes is 5, allowed: 1 to 4",
    );
    says(
        "run --backend ascend --twin --processes",
        "moexpress launch -n 4 -- moexpress run --backend ascend --processes",
    );
    says("bench --backend ascend", "no NPU has run the kernels yet");
}
