//! A process is stopped at a random moment, the others give it up and recover, and it goes on: no row of theirs is wrong, and nobody else
//! is blamed.
//!
//! `EP_ZOMBIES` says how often; 500 times is what a release is checked with. `EP_SEED` is the first seed, as in `kills`.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use super::kills::{Draws, factor, number};
use super::{Started, start_held};

const RANKS: u32 = 4;
/// All ranks are at work: one is stopped within so long. Many rounds.
const MOMENT: Duration = Duration::from_millis(60);
/// The others have recovered: it goes on within so long.
const RETURN: Duration = Duration::from_millis(60);

fn signal(rank: &Started, signal: Signal) {
    kill_process(Pid::from_child(&rank.process), signal).unwrap();
}

fn haunt(seed: u64, plan: &str) {
    let mut draws = Draws(seed);
    let victim = draws.below(u64::from(RANKS)) as usize;
    let [stopped, gone_on] = [MOMENT, RETURN].map(|limit| draws.within(limit * factor()));
    let zombie = format!("EP_SEED={seed}: rank {victim} stopped after {stopped:?}, going on after {gone_on:?} more");
    let (_place, mut ranks) = start_held(1, RANKS, plan);
    for rank in &ranks {
        assert_eq!(rank.hear(), "at work", "{zombie}");
    }
    thread::sleep(stopped);
    signal(&ranks[victim], Signal::STOP);
    let others = || (0..RANKS as usize).filter(|rank| *rank != victim);
    for word in [format!("lost {victim}"), "recovered".to_owned()] {
        for rank in others() {
            assert_eq!(ranks[rank].hear(), word, "{zombie}: said by rank {rank}");
        }
    }
    thread::sleep(gone_on);
    signal(&ranks[victim], Signal::CONT);
    for rank in others() {
        let said = ranks[rank].hear();
        let rows: u64 = said.strip_prefix("verified ").and_then(|rows| rows.parse().ok()).unwrap_or(0);
        assert!(rows > 0, "{zombie}: rank {rank} said {said}");
    }
    // Whomever it blames itself: it is told that the others have gone on.
    let last = ranks[victim].said.iter().take(2).last();
    assert_eq!(last, Some(format!("rank {victim} was masked out by the other ranks")), "{zombie}");
    ranks.iter_mut().for_each(Started::succeeds);
}

fn haunt_all(often: u64, plan: &str) {
    let first = number("EP_SEED", 1);
    (first..first + number("EP_ZOMBIES", often)).for_each(|seed| haunt(seed, plan));
}

/// The worst that a process can do that was given up: it writes over all that it has mapped of windows, again and again.
#[test]
fn a_process_that_was_given_up_cannot_reach_the_windows_of_the_others() {
    const VICTIM: usize = 1;
    for plan in ["haunted", "haunted throughput"] {
        let (_place, mut ranks) = start_held(1, RANKS, plan);
        assert!(ranks.iter().all(|rank| rank.hear() == "at work"));
        signal(&ranks[VICTIM], Signal::STOP);
        let others = || (0..RANKS as usize).filter(|rank| *rank != VICTIM);
        for word in [format!("lost {VICTIM}"), "recovered".to_owned()] {
            for rank in others() {
                assert_eq!(ranks[rank].hear(), word, "{plan}: said by rank {rank}");
            }
        }
        let id = ranks[VICTIM].process.id();
        let windows = windows(id);
        assert_eq!(windows.len(), RANKS as usize, "{plan}");
        let memory = File::options().write(true).open(format!("/proc/{id}/mem")).unwrap();
        for byte in 0..20 {
            for window in &windows {
                memory.write_all_at(&vec![byte * 13; (window.end - window.start) as usize], window.start).unwrap();
            }
            thread::sleep(Duration::from_millis(2));
        }
        for rank in others() {
            let said = ranks[rank].hear();
            assert!(said.starts_with("verified "), "{plan}: rank {rank} said {said}");
            ranks[rank].succeeds();
        }
    }
}

/// Where a process has windows mapped.
fn windows(id: u32) -> Vec<Range<u64>> {
    let maps = std::fs::read_to_string(format!("/proc/{id}/maps")).unwrap();
    let range = |line: &str| {
        let (start, end) = line.split_once(' ')?.0.split_once('-')?;
        Some(u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?)
    };
    maps.lines().filter(|line| line.contains("/memfd:ep-window")).filter_map(range).collect()
}

#[test]
fn a_process_that_goes_on_after_it_was_given_up_harms_nobody_in_low_latency() {
    haunt_all(4, "haunted");
}

#[test]
fn a_process_that_goes_on_after_it_was_given_up_harms_nobody_in_throughput_mode() {
    haunt_all(2, "haunted throughput");
}
