//! Ranks that are processes: they meet as a launcher tells them, work in both modes, and some are killed.
//!
//! The test binary runs itself again as each rank.

mod kills;
mod rank;
mod zombies;

use std::collections::BTreeSet;
use std::process::Child;
use std::thread;
use std::time::{Duration, Instant};

use ep_bootstrap::MeetingPlace;
use ep_conformance::processes::started::{Start, Started};

fn start(world: u32, plan: &str) -> Vec<Started> {
    start_on(1, world, plan)
}

fn start_on(nodes: u32, world: u32, plan: &str) -> Vec<Started> {
    Start::new(nodes, world, plan).start()
}

/// As [`start_on`], but the meeting place is in this process: whichever rank dies, the others can agree.
fn start_held(nodes: u32, world: u32, plan: &str) -> (MeetingPlace, Vec<Started>) {
    Start::new(nodes, world, plan).start_held()
}

/// The files that shared memory with names would lie in.
fn named_memory() -> BTreeSet<String> {
    let entries = std::fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    // Other programs of the machine come and go; ours would be named after the crate or the window.
    names.filter(|name| ["ep-", "ep_", "moexpress"].iter().any(|ours| name.contains(ours))).collect()
}

/// What a process has mapped: the files' names.
fn mapped(process: &Child) -> Vec<String> {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", process.id())).unwrap();
    maps.lines().filter_map(|line| line.split_whitespace().nth(5)).map(str::to_owned).collect()
}

/// RoCE between two nodes on the devices that the environment names: those of the guest of `ci/softroce/run`, or
/// `EP_ROCE_DEVICES`.
pub(crate) fn roce() -> ep_roce::Roce {
    let named = std::env::var("EP_ROCE_DEVICES").ok();
    let named = named.or_else(|| Some(std::env::var("SOFTROCE_DEVICES").ok()?.replace(',', "/")));
    let named = named.expect("RDMA devices: SOFTROCE_DEVICES or EP_ROCE_DEVICES; see ci/softroce/run");
    ep_roce::Roce::new(ep_roce::Settings::new().devices(named.parse().expect("names of devices")))
}

fn work_verified(world: u32) {
    all_verified(start(world, "work"));
}

fn all_verified(mut ranks: Vec<Started>) {
    for rank in &ranks {
        let said = rank.hear();
        let rows: u64 = said.strip_prefix("verified ").and_then(|rows| rows.parse().ok()).expect(&said);
        assert!(rows > 0);
    }
    ranks.iter_mut().for_each(Started::succeeds);
}

#[test]
fn two_processes_work_in_both_modes() {
    work_verified(2);
}

#[test]
fn four_processes_work_in_both_modes() {
    work_verified(4);
}

#[test]
#[ignore = "NOT RUN: needs two RDMA devices; ci/roce has them"]
fn two_nodes_over_roce_of_two_processes_each_work_in_both_modes() {
    roce();
    all_verified(start_on(2, 4, "work"));
}

/// Its lanes break, its node leaves as a whole, and the other goes on.
#[test]
#[ignore = "NOT RUN: needs two RDMA devices; ci/roce has them"]
fn a_process_killed_on_one_of_two_nodes_over_roce_is_named_and_the_other_node_recovers() {
    roce();
    let mut ranks = kill_one(start_on(2, 4, "persist"), 3, Duration::from_secs(5));
    assert_eq!(ranks[2].hear(), "rank 2 was masked out by the other ranks");
    for rank in &mut ranks[..2] {
        let said = rank.hear();
        assert!(said.starts_with("verified "), "{said}");
        rank.succeeds();
    }
    ranks[2].succeeds();
}

/// Starts four, waits until they are at work, kills one; the others name it long before the deadline, which is 20 s.
fn kill(victim: usize) -> Vec<Started> {
    kill_one(start(4, "persist"), victim, Duration::from_secs(10))
}

fn kill_one(mut ranks: Vec<Started>, victim: usize, within: Duration) -> Vec<Started> {
    assert!(ranks.iter().all(|rank| rank.hear() == "at work"));
    thread::sleep(Duration::from_millis(20));
    ranks[victim].process.kill().unwrap();
    let killed = Instant::now();
    for (rank, started) in ranks.iter().enumerate().filter(|(rank, _)| *rank != victim) {
        assert_eq!(started.hear(), format!("lost {victim}"), "said by rank {rank}");
    }
    let took = killed.elapsed();
    assert!(took < within, "{took:?}");
    println!("named within {took:?}");
    ranks
}

#[test]
fn a_killed_process_is_named_before_the_deadline_and_the_others_recover() {
    let mut ranks = kill(3);
    for rank in &mut ranks[..3] {
        let said = rank.hear();
        assert!(said.starts_with("verified "), "{said}");
        rank.succeeds();
    }
}

#[test]
fn when_the_process_with_the_meeting_place_is_killed_the_others_say_so() {
    let mut ranks = kill(0);
    for rank in &mut ranks[1..] {
        assert_eq!(rank.hear(), "rank 0 is gone, while waiting for recovery from it");
        rank.succeeds();
    }
}

#[test]
fn nothing_stays_behind_when_all_are_killed() {
    let before = named_memory();
    let mut ranks = start(2, "persist");
    assert!(ranks.iter().all(|rank| rank.hear() == "at work"));
    for rank in &ranks {
        let mapped = mapped(&rank.process);
        assert_eq!(mapped.iter().filter(|name| *name == "/memfd:ep-window").count(), 2, "{mapped:?}");
        assert!(!mapped.iter().any(|name| name.starts_with("/dev/shm")), "{mapped:?}");
    }
    assert_eq!(named_memory(), before, "while they run");
    ranks.iter_mut().for_each(|rank| rank.process.kill().unwrap());
    ranks.iter_mut().for_each(|rank| drop(rank.process.wait()));
    assert_eq!(named_memory(), before);
}

#[test]
fn different_settings_are_refused_by_all() {
    let mut ranks = start(2, "differ");
    for rank in &mut ranks {
        // Of rings, and of the time that operations are allowed.
        for _ in 0..2 {
            let said = rank.hear();
            assert!(said.contains("hash of shape, topology and settings of rank "), "{said}");
        }
        rank.succeeds();
    }
}

#[test]
fn what_one_has_no_memory_for_is_told_to_all() {
    let mut ranks = start(3, "short");
    let own = ranks[0].hear();
    assert!(own.starts_with("memory of the 3 ranks of this host is about "), "{own}");
    for rank in &ranks[1..] {
        let remedy = "mend that there, and start again, on all ranks";
        assert_eq!(rank.hear(), format!("the start of rank 0 failed: {own}; {remedy}"));
    }
    ranks.iter_mut().for_each(Started::succeeds);
}
