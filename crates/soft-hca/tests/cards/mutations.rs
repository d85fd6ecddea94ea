//! What drivers get wrong: each is caught by a test of its name, where the right driver passes on the same seeds.

use soft_hca::{Link, Mood, Rule};

use crate::Pair;
use crate::poster::{Broken, Mutation, Poster, SIGNAL};
use crate::traffic::{Outcome, Signal, Traffic, run};

const SEEDS: u64 = 24;

/// The traffic is right on all seeds without the change, and on some seed with it ends as one of `ways`, never otherwise.
fn caught(ways: &[Outcome], change: impl Fn(&mut Traffic)) {
    let mut seen = Vec::new();
    for seed in 0..SEEDS {
        let mut traffic = Traffic::new(seed);
        traffic.double_bell = false;
        assert_eq!(run(&traffic), Outcome::Right, "seed {seed}, the right driver");
        change(&mut traffic);
        let outcome = run(&traffic);
        if outcome != Outcome::Right {
            assert!(ways.contains(&outcome), "seed {seed}: {outcome:?}, expected one of {ways:?}");
            seen.push(outcome);
        }
    }
    assert!(!seen.is_empty(), "nothing noticed on any of {SEEDS} seeds");
}

fn mutation(mutation: Mutation, ways: &[Outcome]) {
    caught(ways, |traffic| traffic.mutation = Some(mutation));
}

fn complained(rule: Rule) -> Outcome {
    Outcome::Complained(rule)
}

/// Also what a missing fence looks like.
#[test]
fn bell_before_the_element() {
    mutation(Mutation::BellBeforeElement, &[complained(Rule::Element)]);
}

#[test]
fn record_before_the_element() {
    mutation(Mutation::RecordBeforeElement, &[complained(Rule::Element)]);
}

#[test]
fn ready_out_of_order() {
    mutation(Mutation::ReadyOutOfOrder, &[complained(Rule::Element), complained(Rule::Changed)]);
}

#[test]
fn wrong_half_of_the_record() {
    mutation(Mutation::RecordHalf, &[complained(Rule::Record)]);
}

#[test]
fn record_in_the_wrong_byte_order() {
    mutation(Mutation::RecordLittleEndian, &[complained(Rule::Record)]);
}

#[test]
fn record_never_written() {
    // By each way in which a card comes to read it, alone.
    for way in 0..3 {
        caught(&[Outcome::Stuck, complained(Rule::Index)], |traffic| {
            let chances = [(50, 0, 0), (0, 5, 0), (0, 0, 2)];
            (traffic.mood.record, traffic.mood.early, traffic.mood.recover) = chances[way];
            traffic.mutation = Some(Mutation::RecordNever);
        });
    }
}

#[test]
fn record_after_the_only_bell() {
    caught(&[Outcome::Stuck], |traffic| {
        traffic.mutation = Some(Mutation::RecordAfterBell);
        traffic.mood.early = 0;
        traffic.mood.recover = 0;
    });
}

#[test]
fn bell_in_the_wrong_byte_order() {
    mutation(Mutation::BellLittleEndian, &[complained(Rule::Bell)]);
}

#[test]
fn half_a_bell() {
    mutation(Mutation::BellTorn, &[complained(Rule::Bell)]);
}

#[test]
fn bell_never_rung() {
    caught(&[Outcome::Stuck], |traffic| {
        traffic.mutation = Some(Mutation::BellNever);
        traffic.mood.early = 0;
        traffic.mood.recover = 0;
    });
}

#[test]
fn producer_index_one_more() {
    mutation(Mutation::IndexOneMore, &[complained(Rule::Element), complained(Rule::Slot)]);
}

#[test]
fn producer_index_one_less() {
    mutation(Mutation::IndexOneLess, &[Outcome::Stuck]);
}

#[test]
fn index_modulo_depth() {
    mutation(Mutation::IndexModuloDepth, &[complained(Rule::Element)]);
}

#[test]
fn slot_reused_early() {
    let ways = [Rule::Slot, Rule::Changed, Rule::Element, Rule::Index].map(complained);
    mutation(Mutation::NoSlotCheck, &ways);
}

#[test]
fn two_posters() {
    let ways = [Rule::Element, Rule::Changed, Rule::Index, Rule::Slot].map(complained);
    let ways = [&ways[..], &[Outcome::Stuck, Outcome::Wrong]].concat();
    caught(&ways, |traffic| traffic.two_posters = true);
}

#[test]
fn source_reused_early() {
    caught(&[Outcome::Wrong], |traffic| traffic.mutation = Some(Mutation::SourceReused));
}

#[test]
fn signal_on_another_queue_pair() {
    caught(&[Outcome::Wrong], |traffic| traffic.signal = Signal::OtherQueue);
}

#[test]
fn write_into_relaxed_memory_as_signal() {
    caught(&[Outcome::Wrong], |traffic| traffic.signal = Signal::RelaxedWrite);
}

#[test]
fn fetch_add_into_relaxed_memory_as_signal() {
    caught(&[Outcome::Wrong], |traffic| traffic.signal = Signal::RelaxedFetchAdd);
}

/// Where fetch-adds keep behind writes, it is right: the mode alone makes the difference.
#[test]
fn fetch_add_into_relaxed_memory_is_right_on_cards_that_order_it() {
    for seed in 0..SEEDS {
        let mut traffic = Traffic { signal: Signal::RelaxedFetchAdd, ..Traffic::new(seed) };
        traffic.mood.fetch_add_passes = false;
        assert_eq!(run(&traffic), Outcome::Right, "seed {seed}");
    }
}

/// A right driver says the syndrome; one that looks at the counter alone takes the failure for success.
#[test]
fn error_ignored() {
    for seed in 0..SEEDS {
        let broken = Some((20, 0x13));
        let traffic = Traffic { broken, ..Traffic::new(seed) };
        let outcome = run(&traffic);
        assert!(matches!(outcome, Outcome::Broken(0x13 | 5)), "seed {seed}, the right driver: {outcome:?}");
        let ignorant = Traffic { mutation: Some(Mutation::ErrorIgnored), collapsed: true, ..traffic };
        assert_eq!(run(&ignorant), Outcome::Stuck, "seed {seed}");
    }
}

/// Posts so many elements that do nothing, a few a bell, and waits for all.
fn nops(pair: &Pair, poster: &mut Poster, upto: u64) -> Result<bool, Broken> {
    let queue = &pair.a.queues[0];
    while poster.next < upto {
        for last in [false, false, false, true] {
            poster.element(queue, 0, if last { SIGNAL } else { 0 }, &[]);
        }
        poster.ring(queue);
        if poster.room(queue) < 4 && !poster.drain(&pair.fabric, queue)? {
            return Ok(false);
        }
    }
    poster.drain(&pair.fabric, queue)
}

fn long_pair(seed: u64) -> Pair {
    let mood = Mood { late: 0, ..Mood::hostile() };
    Pair::new(Link::Ethernet, mood, seed, 1, 8, 4, true)
}

/// Indices wrap at 16 bits, in elements, bells and records alike.
#[test]
fn record_not_masked() {
    let pair = long_pair(3);
    let mut right = Poster::new(None);
    assert_eq!(nops(&pair, &mut right, 66_000), Ok(true));
    pair.close();

    let pair = long_pair(3);
    let mut unmasked = Poster::new(Some(Mutation::RecordUnmasked));
    let _ = nops(&pair, &mut unmasked, 66_000);
    assert_eq!(pair.fabric.complaints().first().map(|complaint| complaint.rule), Some(Rule::Record));
}

/// The completion's counter has 16 bits: compared with an index of long ago, it lies behind it.
#[test]
fn unguarded_16_bit_comparison() {
    let pair = long_pair(4);
    let mut poster = Poster::new(None);
    assert_eq!(nops(&pair, &mut poster, 40_000), Ok(true));
    assert!(poster.is_done(&pair.a.queues[0], 11));
    poster.mutation = Some(Mutation::Unguarded16Bits);
    assert!(!poster.is_done(&pair.a.queues[0], 11), "the mutation would wait for ever");
    pair.close();
}
