//! The twin's network: what an element, a doorbell or a key must be, and what of the order of messages is promised.

use std::sync::OnceLock;

use ep_ascend::twin::{Library, Machine, Reach, TwinError};

/// Enough that a rate of 3 in 10 shows in a quarter of them.
const SEEDS: u64 = 200;
const TURNS: u64 = 3_000_000;
const DEPTH: u32 = 8;
/// Two laps and a half of the queue.
const COUNT: u64 = 10;
const BLOCK: u64 = 8192;

fn library() -> &'static Library {
    static BUILT: OnceLock<Library> = OnceLock::new();
    let kernels = [("roce.cpp", include_str!("roce.cpp"))];
    BUILT.get_or_init(|| Library::build(&[], &kernels, &[]).unwrap_or_else(|error| panic!("{error}")))
}

/// Rank 0 posts to rank 1 of another server; whether rank 1 found every block whole when it was announced.
fn run(wrong: u64, polls: bool, seed: u64) -> Result<bool, TwinError> {
    let mut machine = Machine::new(library(), seed, 2, 1)?;
    let sources = 2 * BLOCK + u64::from(DEPTH) * 8;
    let targets = COUNT * BLOCK + 64;
    let from = machine.place(0, &vec![0u8; sources as usize], Reach::Group)?;
    let to = machine.place(1, &vec![0u8; targets as usize], Reach::Group)?;
    let out = machine.place(1, &[7u64], Reach::Own)?;
    let view = machine.queue(0, 1, DEPTH, polls)?;
    let keys = [machine.key(0, from, sources, false)?, machine.key(1, to, targets, true)?].map(u64::from);
    let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
    let args = [
        pair(view.number, view.depth),
        pair(view.level, view.completion_depth),
        view.elements,
        view.doorbell,
        view.tail,
        view.completions,
        view.completions_taken,
        view.posted.into(),
        keys[0],
        keys[1],
        from,
        from + 2 * BLOCK,
        to,
        to + COUNT * BLOCK,
        COUNT,
        wrong,
        out,
    ];
    for (rank, kernel) in [(0, "post"), (1, "look")] {
        let args = machine.place(rank, &args, Reach::ReadOnly)?;
        machine.launch(rank, kernel, 2, args)?;
    }
    machine.run(TURNS)?;
    Ok(machine.read::<u64>(out, 1)? == [1])
}

#[test]
fn what_is_posted_rightly_comes_in_order_by_both_routes_of_completion() {
    for polls in [false, true] {
        for seed in 0..SEEDS {
            assert_eq!(run(0, polls, seed), Ok(true), "seed {seed}, polls: {polls}");
        }
    }
}

/// A wrong step, by its number in the kernels; the route that shows it; what the twin says; the least number of the seeds that catch it.
const FAULTS: [(u64, bool, &str, u64); 15] = [
    (1, false, "belongs to another lap", SEEDS),
    (2, false, "has a key of nobody's: the source's", SEEDS),
    (3, false, "has a key of nobody's: the target's", SEEDS),
    (4, false, "reaches out of what its target's key names", SEEDS),
    (5, false, "more elements than the queue has room for", 50),
    (19, false, "is overwritten, which is not done", 150),
    (6, false, "a doorbell of 4 bytes, allowed: 8", SEEDS),
    (7, false, "element", SEEDS),
    (8, false, "it names another queue", SEEDS),
    (9, false, "it names another service level", SEEDS),
    (10, false, "element", SEEDS),
    (14, false, "posts to a queue of core", SEEDS),
    (15, true, "no room for a completion", SEEDS),
    (17, false, "opcode is 5, allowed: 3, a write", SEEDS),
    (18, false, "has not one source", SEEDS),
];

#[test]
fn each_wrong_element_doorbell_and_key_is_named() {
    for (wrong, polls, says, least) in FAULTS {
        let faults = (0..SEEDS).filter(|&seed| match run(wrong, polls, seed) {
            Ok(_) => false,
            Err(TwinError::Fault(said)) if said.starts_with("roce: ") && said.contains(says) => true,
            Err(other) => panic!("wrong step {wrong}, seed {seed}: {other}"),
        });
        let caught = faults.count() as u64;
        assert!(caught >= least, "wrong step {wrong} is caught in {caught} of {SEEDS} seeds, expected {least}: {says}");
    }
    // Nobody but the card counts what is done where its firmware polls.
    let said = run(16, false, 1).map_err(|fault| fault.to_string());
    assert!(said.as_ref().is_err_and(|said| said.contains("a write to memory that is only read")), "{said:?}");
}

/// Steps that break no rule of the card, and give wrong bytes: a count that ends the message which it announces, the word of a count that
/// is written anew before its message was sent, a block that is.
#[test]
fn what_is_not_promised_does_not_hold() {
    for (wrong, least) in [(11, 100), (12, 60), (13, 50)] {
        let broken = (0..SEEDS).filter(|&seed| match run(wrong, false, seed) {
            Ok(right) => !right,
            Err(TwinError::Watchdog(_)) => true,
            Err(other) => panic!("wrong step {wrong}, seed {seed}: {other}"),
        });
        let broken = broken.count() as u64;
        assert!(broken >= least, "wrong step {wrong} shows in {broken} of {SEEDS} seeds, expected {least}");
    }
}
