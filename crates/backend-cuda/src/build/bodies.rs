//! The functions of the kernels' files, as texts, for tests that look at what no device here would notice.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// What a function begins with, at the beginning of a line.
const MARKS: [&str; 4] = ["EP_DEV ", "EP_DEV_APART ", "EP_RARE ", "EP_KERNEL("];

/// Bodies by name; of several forms of one all together.
pub(super) fn functions() -> BTreeMap<String, String> {
    let mut functions = BTreeMap::<String, String>::new();
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
    let folders = fs::read_dir(kernels).expect("a folder of kernels").flatten().map(|entry| entry.path());
    let files = folders.filter(|path| path.is_dir()).flat_map(|path| fs::read_dir(path).expect("a folder").flatten());
    for file in files.map(|entry| entry.path()).filter(|path| !path.ends_with("ep_bulk.h")) {
        let mut name = String::new();
        for line in fs::read_to_string(&file).expect("text").lines() {
            name = begun(line).unwrap_or(name);
            let body = functions.entry(name.clone()).or_default();
            body.push_str(line);
            body.push('\n');
        }
    }
    functions
}

/// The name of the function that begins on a line.
fn begun(line: &str) -> Option<String> {
    let mark = MARKS.iter().find(|mark| line.contains(*mark)).filter(|_| !line.starts_with([' ', '#', '*', '/']))?;
    let rest = line.split(mark).nth(1)?;
    // The number of a kernel's threads stands before its name.
    let rest = if mark.ends_with('(') { rest.split_once(") ")?.1 } else { rest };
    let before = rest.split('(').next()?;
    before.rsplit([' ', '*', '&']).next().map(str::to_owned)
}

#[test]
fn functions_are_found_by_their_names() {
    for (line, name) in [
        ("EP_DEV bool ep_low_take(const EpRank& r) {", Some("ep_low_take")),
        ("template <int kLast> EP_DEV void ep_hca_count(const EpHcaArgs& a) {", Some("ep_hca_count")),
        ("EP_DEV ep_u32* ep_low_taken(const EpRank& r) {", Some("ep_low_taken")),
        ("EP_RARE void ep_low_say(const EpRank& r) {", Some("ep_low_say")),
        ("EP_KERNEL(32 * EP_WARPS) ep_move_kernel(EP_GIVEN(EpMoveArgs) a) {", Some("ep_move_kernel")),
        ("#define EP_DEV __device__ __forceinline__", None),
        (" * EP_DEV is said of functions", None),
    ] {
        assert_eq!(begun(line).as_deref(), name, "{line}");
    }
}
