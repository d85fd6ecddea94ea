//! Agreement on how to go on: the semantics of the `Bootstrap` trait.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use ep_bootstrap::{Member, Verdict};
use ep_core::machine::{Agreement, Bootstrap as _, Proposal};
use ep_core::{Error, Fault, Nanos, Phase, Rank};
use futures_executor::block_on;

use super::{LONG, SHORT, ranks, set, until_counted, until_lost};

fn proposal(mask: &[u32], generation: u16, op: u64) -> Proposal {
    Proposal { mask: set(mask), generation, op }
}

fn agree_within(member: &Member, proposal: Proposal, within: Duration) -> Result<Agreement, Error> {
    let within = Nanos(within.as_nanos() as u64);
    block_on(member.agree(proposal, member.now() + within))
}

fn agree(member: &Member, proposal: Proposal) -> Result<Agreement, Error> {
    agree_within(member, proposal, LONG)
}

/// Keeps rank 0, and with it the meeting place, until the others are done.
fn linger(member: &Member) {
    if member.rank() == Rank(0) {
        (1..member.world()).for_each(|rank| until_lost(member, rank));
    }
}

#[test]
fn an_agreement_is_the_union_of_masks_and_the_highest_numbers() {
    let agreed = ranks(4, |member| {
        let mine = match member.rank().0 {
            0 => proposal(&[], 4, 17),
            1 => proposal(&[3], 3, 18),
            _ => proposal(&[], 0, 0),
        };
        let agreed = agree(&member, mine);
        linger(&member);
        agreed
    });
    for agreed in &agreed[..3] {
        assert_eq!(*agreed, Ok(Agreement { mask: set(&[3]), generation: 5, op: 18 }));
    }
    assert_eq!(agreed[3], Err(Error::Excluded { rank: Rank(3) }));
}

#[test]
fn a_masked_rank_is_not_waited_for_and_is_told_when_it_comes() {
    let agreed = ranks(3, |member| {
        if member.rank() == Rank(2) {
            std::thread::sleep(SHORT);
        }
        let agreed = agree(&member, proposal(if member.rank() == Rank(0) { &[2] } else { &[] }, 0, 0));
        if member.rank() == Rank(2) {
            let error = member.barrier(LONG).unwrap_err();
            assert_eq!(error.verdict(), Some(&Verdict::Excluded { rank: 2 }));
        }
        linger(&member);
        agreed
    });
    assert_eq!(agreed[1], Ok(Agreement { mask: set(&[2]), generation: 1, op: 0 }));
    assert_eq!(agreed[2], Err(Error::Excluded { rank: Rank(2) }));
}

#[test]
fn ranks_that_give_up_on_each_other_are_both_excluded() {
    let here = AtomicU32::new(0);
    let agreed = ranks(3, |member| {
        let mask: &[u32] = match member.rank().0 {
            1 => &[2],
            2 => &[1],
            _ => &[],
        };
        // Rank 0 comes last, when both masks are there.
        if member.rank() == Rank(0) {
            until_counted(&here, 2);
            std::thread::sleep(SHORT);
        }
        here.fetch_add(1, Ordering::SeqCst);
        let agreed = agree(&member, proposal(mask, 7, 1));
        linger(&member);
        agreed
    });
    assert_eq!(agreed[0], Ok(Agreement { mask: set(&[1, 2]), generation: 8, op: 1 }));
    assert_eq!(agreed[1], Err(Error::Excluded { rank: Rank(1) }));
    assert_eq!(agreed[2], Err(Error::Excluded { rank: Rank(2) }));
}

#[test]
fn a_rank_that_does_not_come_is_named_at_each_deadline() {
    let answered = AtomicU32::new(0);
    let answers = ranks(3, |member| {
        // Rank 0 gives up first; rank 2 must not blame it.
        let within = if member.rank() == Rank(2) { SHORT * 3 / 2 } else { SHORT };
        let answer =
            (member.rank() != Rank(1)).then(|| agree_within(&member, proposal(&[], 1, 5), within).unwrap_err());
        if answer.is_some() {
            answered.fetch_add(1, Ordering::SeqCst);
        }
        // Rank 1 is there until both have given up, and so is the meeting place.
        until_counted(&answered, 2);
        answer
    });
    for (answer, reporter) in answers.into_iter().zip(0..).filter_map(|(answer, rank)| Some((answer?, Rank(rank)))) {
        let failure = *answer.failure().unwrap();
        assert_eq!((failure.culprit, failure.reporter, failure.op), (Rank(1), reporter, 5));
        let Fault::Timeout { phase: Phase::Recovery, peer: Rank(1), waited, .. } = failure.fault else {
            panic!("{failure}");
        };
        assert!(waited >= Nanos::from_millis(290), "{waited}");
    }
}

#[test]
fn a_rank_that_died_ends_the_wait_once_all_others_have_come() {
    let answers = ranks(3, |member| {
        if member.rank() == Rank(2) {
            return None;
        }
        let start = Instant::now();
        let error = agree(&member, proposal(&[], 0, 3)).unwrap_err();
        assert!(start.elapsed() < LONG / 2);
        // Without it they can go on, and call collectives again.
        let agreement = agree(&member, proposal(&[2], 0, 3)).unwrap();
        let gathered = member.all_gather(&[member.rank().0 as u8], LONG).unwrap();
        assert_eq!(gathered, [Some(vec![0]), Some(vec![1]), None]);
        linger(&member);
        Some((error, agreement))
    });
    for (error, agreement) in answers.into_iter().flatten() {
        let gone = Fault::PeerGone { peer: Rank(2), phase: Phase::Recovery };
        assert_eq!(error.failure().unwrap().fault, gone);
        assert_eq!(agreement, Agreement { mask: set(&[2]), generation: 1, op: 3 });
    }
}

#[test]
fn a_rank_that_died_is_no_hindrance_where_somebody_gave_up_on_it() {
    let agreed = ranks(3, |member| {
        if member.rank() == Rank(2) {
            return None;
        }
        until_lost(&member, 2);
        if member.rank() == Rank(1) {
            std::thread::sleep(SHORT);
        }
        let agreed = agree(&member, proposal(if member.rank() == Rank(1) { &[2] } else { &[] }, 0, 0));
        linger(&member);
        Some(agreed)
    });
    assert!(agreed.into_iter().flatten().all(|agreed| agreed.is_ok()));
}

#[test]
fn an_agreement_ends_a_broken_collective_and_later_ones_succeed() {
    let told = AtomicU32::new(0);
    ranks(3, |member| {
        if member.rank() == Rank(1) {
            until_counted(&told, 2);
        }
        member.barrier(SHORT).unwrap_err();
        told.fetch_add(1, Ordering::SeqCst);
        agree(&member, proposal(&[], 0, 0)).unwrap();
        member.barrier(LONG).unwrap();
    });
}

#[test]
fn a_caller_that_gives_up_has_not_come() {
    ranks(2, |member| {
        if member.rank() == Rank(1) {
            let mut call = member.agree(proposal(&[], 0, 0), Nanos(u64::MAX));
            let waker = std::task::Waker::noop();
            assert!(call.as_mut().poll(&mut std::task::Context::from_waker(waker)).is_pending());
            drop(call);
            member.barrier(LONG).unwrap();
            member.barrier(LONG).unwrap();
        } else {
            member.barrier(LONG).unwrap();
            let error = agree_within(&member, proposal(&[], 0, 0), SHORT).unwrap_err();
            assert_eq!(error.failure().unwrap().culprit, Rank(1));
            member.barrier(LONG).unwrap();
        }
    });
}

#[test]
fn a_mask_or_generation_out_of_range_is_refused() {
    ranks(1, |member| {
        assert!(matches!(agree(&member, proposal(&[1], 0, 0)), Err(Error::Invalid { .. })));
        assert!(matches!(agree(&member, proposal(&[], u16::MAX, 0)), Err(Error::Unsupported { .. })));
        assert_eq!(agree(&member, proposal(&[], 0, 9)).map(|agreed| agreed.op), Ok(9));
    });
}
