//! Which functions of the kernels fill or read shared memory that the bulk copy engine overwrites: `docs/cuda.md` says of each what orders
//! the two, and no device here would notice a missing fence.

use super::bodies::functions;

/// Those whose lanes touch a stage: each fences what it did, before the engine may do more to it.
const FENCED: [&str; 6] = ["ep_load_piece", "ep_store_piece", "ep_flow_push", "ep_flow_pop", "ep_sum_oldest", "ep_put"];

/// Those that wait for the engine where no device here would notice if they did not: before a stage is loaded again, before others are told of
/// what it has stored, before the kernel ends.
const AWAITED: [(&str, &str); 5] = [
    ("ep_hca_fetch", "ep_bulk_wait_read<0>();"),
    ("ep_hca_fetch", "ep_fence_seen();"),
    ("ep_hca_count", "ep_hca_await_stores<kLast>();"),
    ("ep_hca_finish", "ep_hca_await_stores<0>();"),
    ("ep_hca_work", "ep_hca_await_stores<0>();"),
];

#[test]
fn stages_are_audited_and_fenced() {
    let audit = include_str!("../../../../docs/cuda.md");
    let functions = functions();
    let loads = |body: &String| body.contains("ep_bulk_load(") || body.contains("ep_get_bulk(");
    let loading: Vec<_> = functions.iter().filter(|(_, body)| loads(body)).map(|(name, _)| name.as_str()).collect();
    assert_eq!(loading, ["ep_flow_push", "ep_hca_fetch", "ep_load_chunk", "ep_load_piece", "ep_pull_rows"]);
    for name in loading {
        assert!(audit.contains(&format!("| `{name}` (")), "docs/cuda.md has no row for the stage that {name} loads");
    }
    for name in FENCED {
        let body = functions.get(name).unwrap_or_else(|| panic!("no function {name}"));
        assert!(body.contains("ep_fence_bulk();"), "{name} lets the copy engine at a stage without a fence");
    }
    for (name, wait) in AWAITED {
        let body = functions.get(name).unwrap_or_else(|| panic!("no function {name}"));
        assert!(body.contains(wait), "{name} goes on before the copy engine: {wait}");
    }
}
