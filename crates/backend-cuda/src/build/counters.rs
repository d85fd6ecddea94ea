//! Where the result of an atomic decides who is last, who is first or what is whose: `docs/cuda.md` says of each what it is and when it goes back. And the fences
//! before what is counted or told, which no device here would miss.

use super::bodies::functions;

/// Atomics by their beginnings.
const ATOMICS: [&str; 9] = [
    "atomicAdd(",
    "atomicCAS(",
    "atomicExch(",
    "atomicAdd_system(",
    "ep_atomic_add(",
    "ep_atomic_exchange(",
    "ep_atomic_replace(",
    "ep_hca_add(",
    "ep_hca_add_acquire(",
];

/// What only names an atomic, or counts for tests.
const NAMES: [&str; 6] =
    ["ep_atomic_add", "ep_atomic_exchange", "ep_atomic_replace", "ep_hca_add", "ep_hca_add_acquire", "ep_event"];

/// A fence, and what it comes before, in the function of that name.
const FENCED: [(&str, &str, &str); 8] = [
    ("ep_last_block", "ep_fence_device();", "ep_atomic_add("),
    ("ep_low_last_block", "ep_fence_device();", "atomicAdd("),
    ("ep_low_tell_received", "ep_fence_sys();", "ep_low_publish("),
    ("ep_low_count_staged", "ep_fence_device();", "atomicAdd("),
    ("ep_tell_count", "ep_fence_block();", "ep_tell_word("),
    ("ep_count_pulled", "ep_fence_block();", "ep_atomic_add("),
    ("ep_count_stored", "ep_fence_block();", "ep_atomic_add("),
    ("ep_hca_count", "ep_fence_sys();", "ep_hca_add("),
];

/// Whether a function goes on by what an atomic finds. A statement that begins with one does not look at it.
fn decides(body: &str) -> bool {
    body.lines().filter(|line| !line.trim_start().starts_with(['*', '/'])).any(|line| {
        ATOMICS.iter().any(|atomic| {
            line.match_indices(atomic).any(|(at, _)| {
                let before = line[..at].trim_end();
                let is_name =
                    before.ends_with(|c: char| c.is_alphanumeric() || c == '_') && !before.ends_with("return");
                !(is_name || before.is_empty() || before.ends_with([')', '{', ';', '}']))
            })
        })
    })
}

fn is_fenced(body: &str, fence: &str, act: &str) -> bool {
    body.find(fence).zip(body.find(act)).is_some_and(|(fence, act)| fence < act)
}

#[test]
fn atomics_that_decide_are_audited() {
    let audit = include_str!("../../../../docs/cuda.md");
    let functions = functions();
    let all = functions.iter().filter(|(name, body)| !NAMES.contains(&name.as_str()) && decides(body));
    let missing: Vec<_> = all.map(|(name, _)| name).filter(|name| !audit.contains(&format!("`{name}`"))).collect();
    assert!(missing.is_empty(), "docs/cuda.md has no row for the counters of {missing:?}");
}

#[test]
fn what_decides_is_told_from_what_counts() {
    for text in [
        "    if (atomicExch(at, 1u) == 0) return;",
        "    const ep_u32 all = atomicAdd(at, mine) + mine;",
        "EP_DEV bool ep_low_take(const EpRank& r) { return atomicExch(at, 1u) == 0; }",
        "    if (speak && atomicCAS(at, 0u, 1u) == 0) {",
    ] {
        assert!(decides(text), "{text}");
    }
    for text in [
        "    atomicAdd(at, 1u);",
        "    if (count) atomicAdd(at, 1u);",
        "    { ep_atomic_exchange(at, 0u); }",
        " * atomicAdd(at)",
    ] {
        assert!(!decides(text), "{text}");
    }
}

#[test]
fn what_is_counted_or_told_is_fenced_before() {
    let functions = functions();
    for (name, fence, act) in FENCED {
        let body = functions.get(name).unwrap_or_else(|| panic!("no function {name}"));
        assert!(is_fenced(body, fence, act), "{name}: {act} is not behind {fence}");
        // As a text without it is found.
        assert!(!is_fenced(&body.replacen(fence, "", 1), fence, act), "{name}");
    }
}
