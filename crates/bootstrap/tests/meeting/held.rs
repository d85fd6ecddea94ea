//! A meeting place that no rank holds.

use std::thread;

use ep_bootstrap::{Error, MeetingPlace, Member, Settings, Verdict};
use ep_core::machine::{Agreement, Bootstrap as _, Proposal};
use ep_core::{Nanos, Rank};
use futures_executor::block_on;

use super::{Adjust, LONG, listener, secret, set, settings, until_lost};

/// What each of `world` ranks makes of joining at a held place with `adjust`ed settings, and of `body`; the place closes after.
fn ranks_at<T: Send>(world: u32, adjust: Adjust<'_>, body: impl Fn(Member) -> T + Sync) -> Vec<Result<T, Error>> {
    let (listener, address) = listener();
    let _place = MeetingPlace::hold(listener, world, secret("test")).unwrap();
    let (body, address) = (&body, &address);
    thread::scope(|scope| {
        let rank = |rank| {
            let settings = adjust(rank, settings(rank, world, address).held_elsewhere(true));
            scope.spawn(move || Member::join(settings).map(body))
        };
        let threads: Vec<_> = (0..world).map(rank).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn agree(member: &Member, mask: &[u32]) -> Result<Agreement, ep_core::Error> {
    let proposal = Proposal { mask: set(mask), generation: 4, op: 9 };
    block_on(member.agree(proposal, member.now() + Nanos(LONG.as_nanos() as u64)))
}

#[test]
fn the_others_agree_and_go_on_without_rank_0() {
    let agreed = ranks_at(3, &|_, settings| settings, |member| {
        member.barrier(LONG).unwrap();
        if member.rank() == Rank(0) {
            return None;
        }
        until_lost(&member, 0);
        let agreed = agree(&member, &[0]).unwrap();
        let parts = member.all_gather(&[member.rank().0 as u8], LONG).unwrap();
        Some((agreed, parts))
    });
    let agreed: Vec<_> = agreed.into_iter().map(Result::unwrap).collect();
    let both = Some((Agreement { mask: set(&[0]), generation: 5, op: 9 }, vec![None, Some(vec![1]), Some(vec![2])]));
    assert_eq!(agreed, [None, both.clone(), both]);
}

#[test]
fn ranks_that_differ_are_told_by_whom() {
    let outcomes = ranks_at(
        2,
        &|rank, settings| {
            let identity = ep_bootstrap::Identity::new().number("hidden", 7168 + u64::from(rank));
            settings.identity(identity)
        },
        |_| (),
    );
    for outcome in outcomes {
        let error = outcome.unwrap_err();
        let Some(Verdict::Mismatch(mismatch)) = error.verdict() else { panic!("{error}") };
        let mut said = [(mismatch.ranks[0], &*mismatch.values[0]), (mismatch.ranks[1], &*mismatch.values[1])];
        said.sort_unstable();
        assert_eq!((&*mismatch.field, said), ("hidden", [(0, "7168"), (1, "7169")]));
    }
}

#[test]
fn who_waits_for_a_process_that_has_ended_is_told_at_once() {
    let (listener, address) = listener();
    let place = MeetingPlace::hold(listener, 3, secret("test")).unwrap();
    let join = |rank| Member::join(settings(rank, 3, &address).held_elsewhere(true).within(LONG)).map(drop);
    let told = thread::scope(|scope| {
        let first = scope.spawn(|| join(0));
        place.has_ended(Rank(1));
        // Told, or refused: whether it comes before or after that.
        [first.join().unwrap(), join(2)]
    });
    for outcome in told {
        let error = outcome.unwrap_err();
        let ended = Verdict::Ended { ranks: set(&[1]), turned_away: Vec::new() };
        assert_eq!(error.verdict(), Some(&ended), "{error}");
        assert!(error.to_string().contains("rank 1 ended before joining"), "{error}");
    }
}

#[test]
fn a_process_that_joined_and_ends_is_no_concern_of_the_place() {
    let (listener, address) = listener();
    let place = MeetingPlace::hold(listener, 2, secret("test")).unwrap();
    let join = |rank| Member::join(settings(rank, 2, &address).held_elsewhere(true)).unwrap();
    let members = thread::scope(|scope| {
        let threads = [0, 1].map(|rank| scope.spawn(move || join(rank)));
        threads.map(|thread| thread.join().unwrap())
    });
    place.has_ended(Rank(1));
    thread::scope(|scope| {
        let threads = members.each_ref().map(|member| scope.spawn(move || member.barrier(LONG)));
        threads.into_iter().for_each(|thread| thread.join().unwrap().unwrap());
    });
}

#[test]
fn without_the_place_nobody_is_named() {
    let (listener, address) = listener();
    let place = MeetingPlace::hold(listener, 1, secret("test")).unwrap();
    let member = Member::join(settings(0, 1, &address).held_elsewhere(true)).unwrap();
    drop(place);
    let error = agree(&member, &[]).unwrap_err().to_string();
    assert!(error.contains("the meeting place is gone"), "{error}");
    assert!(member.lost().is_empty());
}

#[test]
fn a_place_has_ranks_and_a_secret_where_others_reach_it() {
    let error = MeetingPlace::hold(listener().0, 0, None).unwrap_err().to_string();
    assert!(error.contains("world size is 0"), "{error}");
    let everywhere = std::net::TcpListener::bind("0.0.0.0:0").unwrap();
    let error = MeetingPlace::hold(everywhere, 2, None).unwrap_err();
    assert!(matches!(error, Error::SecretNeeded { .. }), "{error}");
    let (_, address) = listener();
    let alone = Settings::new(Rank(0), 1, address).held_elsewhere(true).within(super::SHORT);
    assert!(matches!(Member::join(alone).unwrap_err(), Error::Unreachable { .. }));
}
