//! Kernels whose launches may begin while the one before them ends: they wait for that end before anything else, and let the next one begin when
//! they wait for nobody any more.

use std::fs;
use std::path::Path;

#[test]
fn dependent_kernels_wait_first_and_let_go_last() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/low_latency");
    for name in ["dispatch.cu", "combine.cu"] {
        let text = fs::read_to_string(folder.join(name)).expect("text");
        let (_, kernel) = text.split_once("__global__").expect("a kernel");
        let (_, body) = kernel.split_once(" {\n").expect("a body");
        assert_eq!(body.lines().next().map(str::trim), Some("ep_wait_for_launches_before();"), "{name}");
        let (_, rest) = body.split_once("ep_let_next_begin();\n").expect("lets the next begin");
        assert!(rest.trim_start().starts_with("const ep_u32 last = ep_low_last_block("), "{name}");
    }
}
