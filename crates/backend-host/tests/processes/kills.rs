//! A process is killed at a random moment, again and again: the others name it, go on without it, and what they do then is right.
//!
//! `EP_KILLS` says how often; a hundred times is what a release is checked with. `EP_SEED` is the first seed: victim and moment
//! come from it, but what the ranks are doing at that moment is the machine's affair.

use std::time::{Duration, Instant};
use std::{fmt, thread};

use super::{Started, named_memory, roce, start_held, start_on};

/// All ranks are at work: one is killed within so long, times `EP_TIME_FACTOR`. Some rounds of both modes, where ranks share cores.
const MOMENT: Duration = Duration::from_millis(60);
/// As long as all ranks together take to start and meet, and some more.
const START: Duration = Duration::from_millis(80);

pub(super) fn number(name: &str, otherwise: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name} is `{text}`, expected a number")),
        Err(_) => otherwise,
    }
}

pub(super) fn factor() -> u32 {
    number("EP_TIME_FACTOR", 1).try_into().expect("a small factor")
}

/// SplitMix64: the draws of one seed.
pub(super) struct Draws(pub(super) u64);

impl Draws {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    pub(super) fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    pub(super) fn within(&mut self, limit: Duration) -> Duration {
        Duration::from_micros(self.below(limit.as_micros() as u64))
    }
}

/// What is killed, and when.
#[derive(Clone, Copy, Debug)]
struct Kill {
    number: u64,
    seed: u64,
    victim: usize,
    moment: Duration,
}

impl fmt::Display for Kill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { number, seed, victim, moment } = self;
        write!(f, "kill {number}, EP_SEED={seed}: rank {victim} killed after {moment:?}")
    }
}

/// How long the others took.
#[derive(Clone, Copy, Debug)]
struct Took {
    /// Until all of them had named the victim.
    named: Duration,
    /// Until those that go on had recovered and verified a round of each mode.
    verified: Duration,
}

fn kills(often: u64, from: u32, to: u32, within: Duration) -> impl Iterator<Item = Kill> {
    let first = number("EP_SEED", 1);
    (first..first + often).map(move |seed| {
        let mut draws = Draws(seed);
        let victim = u64::from(from) + draws.below(u64::from(to - from));
        Kill { number: seed - first + 1, seed, victim: victim as usize, moment: draws.within(within) }
    })
}

/// Longest and median, for the log.
fn tell(what: &str, mut took: Vec<Duration>) {
    took.sort_unstable();
    if let Some(longest) = took.last() {
        println!("{what}: median {:?}, longest {longest:?} of {}", took[took.len() / 2], took.len());
    }
}

/// Ranks of `nodes` nodes at work, one killed. The rest of its node leaves with it where there are several; all others go on.
fn endure(nodes: u32, kill: Kill) -> Took {
    const RANKS: u32 = 4;
    let (_place, mut ranks) = start_held(nodes, RANKS, "endure");
    for rank in &ranks {
        assert_eq!(rank.hear(), "at work", "{kill}");
    }
    thread::sleep(kill.moment);
    ranks[kill.victim].process.kill().unwrap();
    let killed = Instant::now();
    let others = |rank: &usize| *rank != kill.victim;
    for rank in (0..RANKS as usize).filter(others) {
        assert_eq!(ranks[rank].hear(), format!("lost {}", kill.victim), "{kill}: said by rank {rank}");
    }
    let named = killed.elapsed();
    let each = RANKS as usize / nodes as usize;
    for rank in (0..RANKS as usize).filter(others) {
        let said = ranks[rank].hear();
        if nodes > 1 && rank / each == kill.victim / each {
            assert_eq!(said, format!("rank {rank} was masked out by the other ranks"), "{kill}");
        } else {
            let rows: u64 = said.strip_prefix("verified ").and_then(|rows| rows.parse().ok()).unwrap_or(0);
            assert!(rows > 0, "{kill}: rank {rank} said {said}");
        }
    }
    let verified = killed.elapsed();
    for rank in (0..RANKS as usize).filter(others) {
        ranks[rank].succeeds();
    }
    Took { named, verified }
}

fn endure_all(nodes: u32, kills: impl Iterator<Item = Kill>, limit: Duration) {
    let before = named_memory();
    let (mut named, mut verified) = (Vec::new(), Vec::new());
    for kill in kills {
        let took = endure(nodes, kill);
        assert!(took.named < limit, "{kill}: named after {:?}", took.named);
        println!("{kill}: named within {:?}, verified within {:?}", took.named, took.verified);
        named.push(took.named);
        verified.push(took.verified);
    }
    tell("named", named);
    tell("recovered and verified", verified);
    assert_eq!(named_memory(), before, "no shared memory stays behind");
}

#[test]
fn a_process_killed_at_a_random_moment_is_named_and_the_others_recover() {
    endure_all(1, kills(number("EP_KILLS", 12), 0, 4, MOMENT * factor()), Duration::from_secs(5) * factor());
}

#[test]
#[ignore = "NOT RUN: needs two RDMA devices; ci/roce has them"]
fn a_process_killed_at_a_random_moment_over_roce_is_named_and_the_other_node_recovers() {
    roce();
    let moment = MOMENT * factor();
    endure_all(2, kills(number("EP_KILLS", 4), 0, 4, moment), Duration::from_secs(5) * factor());
}

/// Ranks that are still on their way to each other. None can go on, as there is no communicator yet: all end with an error, soon. Who
/// notices first names the victim; the others may find that one gone.
#[test]
fn a_process_killed_while_ranks_meet_ends_that_for_all() {
    const RANKS: u32 = 4;
    for kill in kills(number("EP_KILLS", 12).div_ceil(3), 1, RANKS, START) {
        let mut ranks = start_on(1, RANKS, "meet");
        thread::sleep(kill.moment);
        ranks[kill.victim].process.kill().unwrap();
        let others = || (0..RANKS as usize).filter(|rank| *rank != kill.victim);
        let said: Vec<Vec<String>> = others().map(|rank| all_words(&ranks[rank])).collect();
        println!("{kill}: {said:?}");
        let names = format!("rank {}", kill.victim);
        let ended =
            |word: &str| said.iter().filter(|words| words.last().is_some_and(|last| last.starts_with(word))).count();
        if ended("verified ") == said.len() {
            assert!(
                said.iter().flatten().any(|word| *word == format!("lost {}", kill.victim)),
                "{kill}: said {said:?}"
            );
        } else {
            assert_eq!(ended("not met: "), said.len(), "{kill}: said {said:?}");
            assert!(said.iter().flatten().any(|word| word.contains(&names)), "{kill}: said {said:?}");
        }
        others().for_each(|rank| ranks[rank].succeeds());
    }
}

/// All that a rank has to say.
fn all_words(started: &Started) -> Vec<String> {
    started.said.iter().collect()
}
