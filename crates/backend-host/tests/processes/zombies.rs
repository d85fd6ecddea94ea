//! A process is stopped at a random moment, the others give it up and recover, and it goes on: no row of theirs is wrong, and nobody else
//! is blamed.
//!
//! `EP_ZOMBIES` says how often; 500 times is what a release is checked with. `EP_SEED` is the first seed, as in `kills`.

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

#[test]
fn a_process_that_goes_on_after_it_was_given_up_harms_nobody_in_low_latency() {
    haunt_all(4, "haunted");
}

#[test]
fn a_process_that_goes_on_after_it_was_given_up_harms_nobody_in_throughput_mode() {
    haunt_all(2, "haunted throughput");
}
