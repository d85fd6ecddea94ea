//! Barrier, all-gather, broadcast.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use ep_bootstrap::{Error, MAX_CONTRIBUTION, Verdict};
use ep_core::Rank;

use super::{LONG, SHORT, WHILE, ranks, set, until_counted, until_lost};

#[test]
fn all_gather_gives_everybody_everything_by_rank() {
    for world in [1, 2, 7] {
        let part = |rank: u32| Some(vec![rank as u8; rank as usize]);
        let gathered = ranks(world, |member| {
            let mine = part(member.rank().0).unwrap();
            let gathered = (0..20).map(|_| member.all_gather(&mine, LONG).unwrap()).last();
            member.barrier(LONG).unwrap();
            gathered.unwrap()
        });
        assert!(gathered.iter().all(|gathered| *gathered == (0..world).map(part).collect::<Vec<_>>()));
    }
}

#[test]
fn who_has_nothing_to_bring_is_named_to_all_with_its_words_and_the_next_meeting_goes_well() {
    let broken = |error: Error| ep_core::Error::broken("a meeting", error, "none");
    let heard = ranks(4, |member| {
        let me = member.rank();
        let own = match me.0 {
            1 | 3 => Err(ep_core::Error::broken(format_args!("the oven of rank {me}"), "cold", "heat it")),
            _ => Ok(me),
        };
        let heard = member.try_all_gather(own, |_| vec![1], LONG, broken).map(drop).unwrap_err().to_string();
        // What looks like words of a rank that has nothing is a part, too.
        let parts = member.try_all_gather(Ok(me), |me| vec![1, me.0 as u8], LONG, broken).unwrap();
        assert_eq!(parts, (me, (0..4).map(|rank| Some(vec![1, rank])).collect()));
        heard
    });
    let own = |rank: u32| format!("the oven of rank {rank} failed: cold; heat it");
    let others = format!("the start of rank 1 failed: {}; mend that there, and start again, on all ranks", own(1));
    assert_eq!(heard, [others.clone(), own(1), others, own(3)]);
}

#[test]
fn words_without_end_are_cut_and_parts_of_another_kind_are_refused() {
    let broken = |error: Error| ep_core::Error::broken("a meeting", error, "none");
    let heard = ranks(3, |member| {
        let own = match member.rank().0 {
            0 => Err(ep_core::Error::broken("all", "ä".repeat(1 << 20), "")),
            _ => Ok(()),
        };
        let heard = member.try_all_gather(own, |()| Vec::new(), LONG, broken).unwrap_err().to_string();
        let mixed = match member.rank().0 {
            0 => member.all_gather(&[7; 5], LONG).map(drop).map_err(broken),
            _ => member.try_all_gather(Ok(()), |()| Vec::new(), LONG, broken).map(drop),
        };
        (heard, mixed.map_err(|error| error.to_string()))
    });
    assert!(heard[0].0.len() > 2 << 20 && heard[0].1.is_ok());
    for (words, mixed) in &heard[1..] {
        assert!((900..1200).contains(&words.len()) && words.contains("failed: ää"), "{}", words.len());
        assert!(mixed.as_ref().unwrap_err().contains("rank 0 told 5 bytes of another kind"), "{mixed:?}");
    }
}

#[test]
fn nobody_leaves_a_barrier_before_all_have_come() {
    let come = AtomicU32::new(0);
    ranks(5, |member| {
        for round in 1..=20 {
            come.fetch_add(1, Ordering::SeqCst);
            member.barrier(LONG).unwrap();
            assert!(come.load(Ordering::SeqCst) >= 5 * round);
        }
        member.barrier(LONG).unwrap();
    });
}

#[test]
fn broadcast_gives_everybody_the_bytes_of_its_root() {
    let got = ranks(4, |member| {
        let got = member.broadcast(Rank(2), &[member.rank().0 as u8], LONG).unwrap();
        member.barrier(LONG).unwrap();
        got
    });
    assert!(got.iter().all(|bytes| *bytes == [2]));
}

#[test]
fn large_contributions_arrive_whole() {
    let bytes: Vec<u8> = (0..5u32 << 20).map(|at| (at % 251) as u8).collect();
    let same = ranks(3, |member| {
        let gathered = member.all_gather(&bytes, LONG).unwrap();
        member.barrier(LONG).unwrap();
        gathered.into_iter().all(|part| part.as_ref() == Some(&bytes))
    });
    assert!(same.into_iter().all(|same| same));
}

#[test]
fn contributions_over_the_limit_are_refused() {
    let errors = ranks(2, |member| {
        let error = member.all_gather(&vec![0; MAX_CONTRIBUTION + 1], LONG).unwrap_err();
        assert!(matches!(error, Error::Invalid { .. }));
        let error = member.all_gather(&vec![0; MAX_CONTRIBUTION * 2 / 3], LONG).unwrap_err();
        // Rank 0 holds the meeting place until both have been told.
        std::thread::sleep(SHORT);
        error
    });
    assert!(errors.iter().all(|error| matches!(error.verdict(), Some(Verdict::TooLong { .. }))), "{errors:?}");
}

#[test]
fn ranks_that_call_different_things_are_both_named() {
    let errors = ranks(2, |member| {
        let error = match member.rank() {
            Rank(0) => member.barrier(LONG).unwrap_err(),
            _ => member.all_gather(&[], LONG).unwrap_err(),
        };
        std::thread::sleep(SHORT);
        error
    });
    for error in errors {
        let text = error.verdict().unwrap().to_string();
        assert!(text.contains("barrier on rank 0") && text.contains("all-gather on rank 1"), "{text}");
    }
}

#[test]
fn a_rank_that_does_not_come_is_named_at_the_deadline_and_later_calls_fail_alike() {
    let missing = Verdict::Missing { ranks: set(&[1]), turned_away: Vec::new() };
    let [here, told, done] = [const { AtomicU32::new(0) }; 3];
    ranks(3, |member| {
        if member.rank() == Rank(1) {
            // It comes too late.
            until_counted(&told, 2);
        } else {
            // The two come at the same time: who comes alone names the other, too.
            here.fetch_add(1, Ordering::SeqCst);
            until_counted(&here, 2);
        }
        let start = Instant::now();
        let error = member.barrier(WHILE).unwrap_err();
        assert_eq!(error.verdict(), Some(&missing), "{error}");
        assert!(member.rank() == Rank(1) || start.elapsed() >= WHILE / 2);
        told.fetch_add(1, Ordering::SeqCst);
        assert_eq!(member.all_gather(&[], LONG).unwrap_err().verdict(), Some(&missing));
        // Rank 0 holds the meeting place until all have been told.
        done.fetch_add(1, Ordering::SeqCst);
        until_counted(&done, 3);
    });
}

#[test]
fn a_rank_that_leaves_is_lost_and_ends_the_waits_for_it_at_once() {
    ranks(3, |member| {
        if member.rank() == Rank(2) {
            return;
        }
        let start = Instant::now();
        let error = member.all_gather(&[1], LONG).unwrap_err();
        assert_eq!(error.verdict(), Some(&Verdict::Lost { ranks: set(&[2]) }), "{error}");
        assert!(start.elapsed() < LONG / 2);
        until_lost(&member, 2);
        assert_eq!(member.lost(), set(&[2]));
        std::thread::sleep(SHORT);
    });
}

#[test]
fn when_rank_0_leaves_the_others_are_told_at_once() {
    ranks(3, |member| {
        if member.rank() == Rank(0) {
            return;
        }
        let error = member.barrier(LONG).unwrap_err();
        let told = matches!(error, Error::Gone { .. }) || error.verdict() == Some(&Verdict::Lost { ranks: set(&[0]) });
        assert!(told, "{error}");
        until_lost(&member, 0);
    });
}
