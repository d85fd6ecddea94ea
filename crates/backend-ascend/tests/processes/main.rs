//! Ranks that are processes, each on a twin of its own: they work in both modes, on one server and on several; some are killed or stopped, and
//! the others name them, recover, and verify what they do then.
//!
//! The test binary runs itself again as each rank. `EP_SEED` is the first seed of the draws of victims and moments.

mod rank;
mod strangers;

use std::process::Command;
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use ep_ascend::twin::Library;
use ep_bootstrap::MeetingPlace;
use ep_conformance::processes::started::{Start, Started};

/// The variable that says where the twin's library is.
const LIBRARY: &str = "EP_TEST_TWIN";
/// Of an operation, and of the meeting of ranks.
const DEADLINE: Duration = Duration::from_secs(30);
/// Of an operation where a rank is stopped, which only its deadline ends.
const STOPPED: Duration = Duration::from_secs(8);
/// Of the meeting of ranks of which one never comes.
const ALONE: Duration = Duration::from_secs(10);
/// After a rank was lost that was killed: the others learn of its end, and do not wait for three quarters of the deadline.
const SOON: Duration = Duration::from_secs(15);
/// After a rank was lost that was stopped: a kernel ends a quarter after the time allowed, and a busy machine is late.
const LATE: Duration = Duration::from_secs(30);

fn library() -> &'static Library {
    static BUILT: OnceLock<Library> = OnceLock::new();
    let build = || Library::build(&ep_ascend::headers(), &ep_ascend::sources(), &[]);
    BUILT.get_or_init(|| build().unwrap_or_else(|error| panic!("{error}")))
}

fn ranks(nodes: u32, world: u32, plan: &str) -> Start {
    let path = library().path();
    Start::new(nodes, world, plan).variable(LIBRARY, path.to_str().expect("a path of text"))
}

fn signal(rank: &Started, signal: &str) {
    let sent = Command::new("kill").args(["-s", signal, &rank.process.id().to_string()]).status();
    assert!(sent.expect("kill runs").success(), "{signal}");
}

fn verifies(rank: &Started) {
    let said = rank.hear();
    let rows: u64 = said.strip_prefix("verified ").and_then(|rows| rows.parse().ok()).unwrap_or(0);
    assert!(rows > 0, "rank {} said {said}", rank.rank);
}

/// A number of 0 to `limit` that is drawn from `EP_SEED` and a draw's number.
fn drawn(draw: u64, limit: u64) -> u64 {
    let seed: u64 = std::env::var("EP_SEED").map_or(1, |seed| seed.parse().expect("EP_SEED is a number"));
    (seed.wrapping_add(draw).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33) % limit
}

fn all_verify(nodes: u32, world: u32) {
    let mut started = ranks(nodes, world, "work").start();
    started.iter().for_each(verifies);
    started.iter_mut().for_each(Started::succeeds);
}

#[test]
fn processes_of_a_server_work_in_both_modes() {
    all_verify(1, 2);
    all_verify(1, 4);
}

#[test]
fn processes_of_two_and_of_three_servers_work_in_both_modes() {
    all_verify(2, 4);
    all_verify(3, 3);
}

/// Waits until ranks are at work, does something to one at a moment that is drawn, and until the others have named it, `within` so long.
fn lose(nodes: u32, plan: &str, how: &str, draw: u64, within: Duration) -> (MeetingPlace, Vec<Started>, usize) {
    const WORLD: u32 = 4;
    let (place, started) = ranks(nodes, WORLD, plan).start_held();
    let victim = drawn(draw, WORLD.into()) as usize;
    started.iter().for_each(|rank| assert_eq!(rank.hear(), "at work"));
    thread::sleep(Duration::from_millis(drawn(draw + 100, 300)));
    signal(&started[victim], how);
    let lost = Instant::now();
    for rank in others(&started, victim) {
        assert_eq!(rank.hear(), format!("lost {victim}"), "said by rank {}", rank.rank);
    }
    assert!(lost.elapsed() < within, "named after {:?}", lost.elapsed());
    (place, started, victim)
}

fn others(started: &[Started], victim: usize) -> impl Iterator<Item = &Started> {
    started.iter().filter(move |rank| rank.rank as usize != victim)
}

#[test]
fn a_killed_process_is_named_by_all_and_the_others_recover() {
    for draw in 0..3 {
        let (_place, mut started, victim) = lose(1, "endure", "KILL", draw, SOON);
        others(&started, victim).for_each(verifies);
        started.iter_mut().filter(|rank| rank.rank as usize != victim).for_each(Started::succeeds);
    }
}

/// The rest of its server leaves with it.
#[test]
fn a_killed_process_takes_its_server_along_and_the_other_server_recovers() {
    for draw in 10..12 {
        let (_place, started, victim) = lose(2, "endure", "KILL", draw, SOON);
        for rank in others(&started, victim) {
            if rank.rank / 2 == victim as u32 / 2 {
                assert_eq!(rank.hear(), format!("rank {} was masked out by the other ranks", rank.rank));
            } else {
                verifies(rank);
            }
        }
    }
}

/// Stopped at any moment, given up at the deadline, it goes on: no row of the others is wrong, nobody else is blamed, and it is told.
#[test]
fn a_stopped_process_is_given_up_at_the_deadline_and_harms_nobody_when_it_goes_on() {
    for (draw, plan) in [(20, "haunted"), (21, "haunted throughput")] {
        let (_place, started, victim) = lose(1, plan, "STOP", draw, LATE);
        others(&started, victim).for_each(|rank| assert_eq!(rank.hear(), "recovered", "said by rank {}", rank.rank));
        signal(&started[victim], "CONT");
        others(&started, victim).for_each(verifies);
        // Whomever it blames itself: it is told that the others have gone on.
        let last = started[victim].said.iter().take(2).last();
        assert_eq!(last, Some(format!("rank {victim} was masked out by the other ranks")), "{plan}");
    }
}

#[test]
fn a_process_that_was_told_something_else_is_refused_by_all() {
    for (plan, what) in [
        ("other settings", "hash of shape, topology and settings of rank "),
        ("other cores", "cores of all roles of rank "),
    ] {
        let mut started = ranks(1, 2, plan).start();
        for rank in &mut started {
            let said = rank.hear();
            assert!(said.contains(what), "{said}");
            rank.succeeds();
        }
    }
}

/// Before the ranks have met, and behind it.
#[test]
fn what_one_process_lacks_is_told_to_all_and_nobody_waits() {
    for (plan, lacks) in [("no device", "77"), ("no kernels", "nowhere.o")] {
        let began = Instant::now();
        let mut started = ranks(1, 3, plan).start();
        let said: Vec<String> = started.iter().map(Started::hear).collect();
        let own = &said[rank::POOR.index()];
        assert!(own.contains(lacks), "{own}");
        let others = format!("the start of rank 1 failed: {own}; mend that there, and start again, on all ranks");
        assert!(said[0] == others && said[2] == others, "{said:?}");
        started.iter_mut().for_each(Started::succeeds);
        // Less than they wait for a rank that does not come.
        assert!(began.elapsed() < Duration::from_secs(50), "after {:?}", began.elapsed());
    }
}

/// A rank that never comes, and one that believes in another number of ranks: the others say which.
#[test]
fn a_rank_that_is_missing_or_counts_otherwise_is_named() {
    let all = ranks(1, 3, "missing");
    let two = Start { world: 2, ..all.clone() };
    let port = std::net::TcpListener::bind("127.0.0.1:0").and_then(|it| it.local_addr()).expect("a free port").port();
    let started = [all.rank(0, port, None), two.rank(1, port, None)];
    let said: Vec<String> = started.iter().map(Started::hear).collect();
    assert!(said.iter().all(|said| said.starts_with("not met: ")), "{said:?}");
    assert!(said.iter().any(|said| said.contains("world")), "{said:?}");

    let began = Instant::now();
    let alone = all.rank(0, port, None);
    let said = alone.hear();
    assert!(said.starts_with("not met: ") && said.contains("ranks 1, 2"), "{said}");
    assert!(began.elapsed() < 2 * ALONE, "{:?}", began.elapsed());
}

/// Nobody is there any more.
#[test]
fn a_meeting_place_that_is_gone_is_named() {
    let held = ranks(1, 2, "missing").start_held();
    let (place, mut started) = held;
    drop(place);
    started.iter_mut().for_each(|rank| drop(rank.process.wait()));
    let address = std::net::TcpListener::bind("127.0.0.1:0").and_then(|it| it.local_addr()).expect("a free port");
    let late = ranks(1, 2, "missing").rank(1, address.port(), Some(address));
    let said = late.hear();
    assert!(said.starts_with("not met: ") && said.contains(&address.to_string()), "{said}");
}
