//! Which kernels look thread by thread whether their rank has failed: those alone in which no thread waits for another of its warp or block, or
//! nobody fails. In the others a block that runs already may fail while one begins, of which then a part would be gone.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Why each may.
const APART: [(&str, &str); 4] = [
    ("blank.cu", "nobody waits for another thread"),
    ("offer.cu", "nobody waits for another thread"),
    ("positions.cu", "nothing in it fails, and nothing runs beside it"),
    ("unpack.cu", "nobody waits for another thread"),
];

#[test]
fn who_waits_for_others_ends_with_them() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/throughput");
    let files = fs::read_dir(folder).expect("a folder of kernels").flatten();
    let mut apart = BTreeSet::new();
    let mut together = 0;
    for file in files.filter(|file| file.path().extension().is_some_and(|extension| extension == "cu")) {
        let text = fs::read_to_string(file.path()).expect("text");
        for looks in text.lines().filter(|line| line.contains("ep_closed(r)")) {
            match looks.trim() {
                "if (ep_block_any(ep_closed(r))) return;" => together += 1,
                "if (ep_closed(r)) return;" => drop(apart.insert(file.file_name().to_string_lossy().into_owned())),
                other => panic!("{:?}: {other}", file.path()),
            }
        }
    }
    assert_eq!(apart.iter().map(String::as_str).collect::<Vec<_>>(), APART.map(|(name, _)| name));
    assert_eq!(together, 11, "kernels that look together");
}

/// Behind a launch's last meeting threads go on that may fail, by what they publish or compare, while others still look.
#[test]
fn who_goes_on_behind_a_meeting_looks_together() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/throughput");
    let mut together = 0;
    for file in fs::read_dir(folder).expect("a folder of kernels").flatten() {
        let text = fs::read_to_string(file.path()).expect("text");
        let looks = ["ep_last_block_goes_on(r, EP_MEETING_MOVED)", "ep_last_block_has_pulled(r, EP_MEETING_MOVED)"];
        together += looks.iter().map(|looks| text.matches(looks).count()).sum::<usize>();
        assert!(!text.contains("ep_last_block(r, EP_MEETING_MOVED)"), "{:?} looks apart", file.path());
    }
    assert_eq!(together, 6, "kernels whose last block goes on");
}
