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

/// A reader whose time was up owes credit that its senders wait for, though all has come, and no wait of its own has ended badly.
#[test]
fn who_owes_credit_at_the_end_says_so() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/throughput");
    let ends = "if (role.task == EP_TASK_CREDIT) ep_end_credit(r, c.in, c.track, began);";
    for file in ["dispatch_pulled.cu", "combine_pulled.cu"] {
        let text = fs::read_to_string(folder.join(file)).expect("text");
        assert_eq!(text.matches("ep_give_credit(r,").count(), text.matches(ends).count(), "{file}");
    }
    let text = fs::read_to_string(folder.join("ep_outbox.h")).expect("text");
    let body = text.split("EP_DEV void ep_end_credit(").nth(1).expect("how a reader ends");
    assert!(body.contains("owed |= in[rank].told != in[rank].slots;"), "it looks at all that is owed");
    assert!(body.contains("if (__any_sync(EP_FULL, owed)) ep_teller_ends(r, began);"), "and says so");
}
