//! Whose lanes are broken is blamed, unless somebody has said whom he gives up: who leaves says so before his lanes break. So alarms are looked at
//! after the lanes; in the other order a rank blamed who had left because of another, in one of some forty runs in which a process was killed.

use std::fs;
use std::path::Path;

#[test]
fn alarms_are_looked_at_after_the_lanes() {
    let text = |file: &str| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels").join(file);
        fs::read_to_string(path).expect("text")
    };
    // Each function that blames a lane: what it learns of the lane, and the alarms, in this order.
    for (file, function, lane) in [
        ("near/ep_wait.h", "bool ep_wait_is_vain(", "= ep_far_trouble("),
        ("throughput/ep_far_ring.h", "void ep_fail_lane(", "ep_u32 status"),
    ] {
        let text = text(file);
        let whole = text.split(function).nth(1).and_then(|rest| rest.split("\n}\n").next()).expect(function);
        let places = [lane, "EP_COUNTER_ALARM", "EP_STATUS_LANE"].map(|word| whole.find(word).expect(word));
        assert!(places.is_sorted(), "{file}, {function}: {places:?}");
        assert_eq!(text.matches("EP_STATUS_LANE").count(), 1, "{file} blames a lane somewhere else, too");
    }
}
