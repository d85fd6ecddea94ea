//! A Rust test binary as cargo makes them, for the self-test: it runs in the guest, and its failures come back.

use std::fs;

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

#[test]
fn both_devices_are_active() {
    let devices = std::env::var("SOFTROCE_DEVICES").expect("the harness names its devices");
    let devices: Vec<&str> = devices.split(',').collect();
    assert_eq!(devices.len(), 2);
    for device in devices {
        let state = read(&format!("/sys/class/infiniband/{device}/ports/1/state"));
        assert!(state.contains("ACTIVE"), "{device}: {state}");
    }
}

#[test]
fn environment_and_files_arrive() {
    assert_eq!(std::env::var("SELFTEST").as_deref(), Ok("two words"));
    let file = std::env::var("SELFTEST_FILE").expect("the self-test names a file");
    assert!(read(&file).contains("environment_and_files_arrive"));
}

#[test]
#[ignore = "fails, so that the self-test sees a failure come back"]
fn planted() {
    panic!("planted");
}
