//! Which functions of the kernels fill or read shared memory that the bulk copy engine overwrites: `docs/cuda.md` says of each what orders
//! the two, and no device here would notice a missing fence.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

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

/// Bodies of the functions in the kernels' files, by name; of several forms of one all together.
fn functions() -> BTreeMap<String, String> {
    let mut functions = BTreeMap::<String, String>::new();
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
    let folders = fs::read_dir(kernels).expect("a folder of kernels").flatten().map(|entry| entry.path());
    let files = folders.filter(|path| path.is_dir()).flat_map(|path| fs::read_dir(path).expect("a folder").flatten());
    for file in files.map(|entry| entry.path()).filter(|path| !path.ends_with("ep_bulk.h")) {
        let mut name = String::new();
        for line in fs::read_to_string(&file).expect("text").lines() {
            if let Some(begun) = line.split("EP_DEV ").nth(1).filter(|_| !line.starts_with(' ')) {
                let before = begun.split('(').next().unwrap_or_default();
                name = before.rsplit([' ', '*', '&']).next().unwrap_or_default().to_owned();
            }
            let body = functions.entry(name.clone()).or_default();
            body.push_str(line);
            body.push('\n');
        }
    }
    functions
}

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
