//! Who may join, and what the others are told.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use ep_bootstrap::{Error, Identity, Member, Verdict};

use super::{LONG, SHORT, WHILE, listener, ranks, ranks_with, secret, set, settings};

#[test]
fn any_number_of_ranks_meets() {
    for world in 1..=16 {
        assert_eq!(
            ranks(world, |member| (member.rank().0, member.world())),
            Vec::from_iter((0..world).map(|r| (r, world)))
        );
    }
}

#[test]
fn a_missing_rank_is_named_to_all_at_the_deadline() {
    let (listener, address) = listener();
    let early = settings(1, 4, &address).within(WHILE);
    let start = Instant::now();
    let errors = thread::scope(|scope| {
        let other = scope.spawn(move || Member::join(early).map(drop).unwrap_err());
        let host = Member::host(listener, settings(0, 4, &address)).map(drop).unwrap_err();
        [host, other.join().unwrap()]
    });
    for error in errors {
        let missing = Verdict::Missing { ranks: set(&[2, 3]), turned_away: Vec::new() };
        assert_eq!(error.verdict(), Some(&missing), "{error}");
    }
    assert!(start.elapsed() >= WHILE && start.elapsed() < LONG);
}

#[test]
fn a_process_with_another_secret_or_none_cannot_join_and_the_missing_rank_says_so() {
    for theirs in [secret("guess"), None] {
        let results = ranks_with(
            2,
            &|rank, settings| if rank == 1 { settings.secret(theirs.clone()) } else { settings.within(WHILE) },
            drop,
        );
        assert!(matches!(results[1], Err(Error::WrongSecret { rank: 1, .. })), "{:?}", results[1]);
        let Err(Error::Refused { verdict: Verdict::Missing { ranks, turned_away }, .. }) = &results[0] else {
            panic!("{:?}", results[0]);
        };
        assert_eq!(*ranks, set(&[1]));
        assert!(turned_away[0].contains("another secret, or none"), "{turned_away:?}");
    }
}

#[test]
fn a_process_with_a_secret_does_not_join_a_meeting_without() {
    let results =
        ranks_with(2, &|rank, settings| if rank == 0 { settings.secret(None).within(WHILE) } else { settings }, drop);
    assert!(matches!(results[1], Err(Error::WrongSecret { .. })));
}

#[test]
fn without_a_secret_ranks_meet_on_loopback_addresses_only() {
    let results = ranks_with(3, &|_, settings| settings.secret(None), |member| member.barrier(LONG));
    assert!(results.into_iter().all(|result| result == Ok(Ok(()))));
    for rank in [0, 1] {
        let error = Member::join(settings(rank, 2, "192.0.2.1:4000").secret(None)).unwrap_err();
        assert_eq!(error, Error::SecretNeeded { address: "192.0.2.1:4000".to_owned() });
    }
    let open = std::net::TcpListener::bind("0.0.0.0:0").unwrap();
    let error = Member::host(open, settings(0, 2, "").secret(None)).unwrap_err();
    assert!(matches!(error, Error::SecretNeeded { .. }));
}

#[test]
fn another_layout_hash_is_told_to_all_with_both_values_and_ranks() {
    let other = Identity::new().number("hidden", 7168).number("layout hash", 6);
    let adjust = |rank, settings: ep_bootstrap::Settings| {
        if rank == 2 { settings.identity(other.clone()) } else { settings }
    };
    for result in ranks_with(3, &adjust, drop) {
        let error = result.unwrap_err();
        let text = error.verdict().map_or_else(|| format!("{error:?}"), ToString::to_string);
        assert_eq!(text, "layout hash is 5 on rank 0 and 6 on rank 2");
    }
}

#[test]
fn another_world_size_is_told_to_all() {
    let (listener, address) = listener();
    thread::scope(|scope| {
        let host = settings(0, 2, &address);
        let host = scope.spawn(move || Member::host(listener, host).map(drop));
        let other = Member::join(settings(1, 3, &address)).map(drop);
        for result in [host.join().unwrap(), other] {
            let text = result.unwrap_err().verdict().unwrap().to_string();
            assert_eq!(text, "world size is 2 on rank 0 and 3 on rank 1");
        }
    });
}

#[test]
fn a_second_process_of_a_rank_is_refused_and_the_meeting_goes_on() {
    let (listener, address) = listener();
    let settings = |rank| settings(rank, 3, &address);
    thread::scope(|scope| {
        let host = settings(0);
        let host = scope.spawn(move || Member::host(listener, host).and_then(|member| member.barrier(LONG)));
        let twins: Vec<_> = (0..2)
            .map(|_| {
                let settings = settings(1);
                scope.spawn(move || Member::join(settings).and_then(|member| member.barrier(LONG)))
            })
            .collect();
        // One of the two is refused at once; only then the last rank comes.
        while twins.iter().all(|twin| !twin.is_finished()) {
            thread::sleep(Duration::from_millis(2));
        }
        Member::join(settings(2)).unwrap().barrier(LONG).unwrap();
        assert_eq!(host.join().unwrap(), Ok(()));
        let results: Vec<_> = twins.into_iter().map(|twin| twin.join().unwrap()).collect();
        let refused: Vec<_> = results.iter().filter_map(|result| result.as_ref().err()?.verdict()).collect();
        assert_eq!(refused, [&Verdict::Duplicate { rank: 1 }]);
    });
}

#[test]
fn who_comes_after_all_have_joined_is_refused_and_disturbs_nobody() {
    let (listener, address) = listener();
    let (late, other) = (settings(1, 2, &address), settings(1, 2, &address));
    thread::scope(|scope| {
        let other = scope.spawn(move || Member::join(other).unwrap());
        let host = Member::host(listener, settings(0, 2, &address)).unwrap();
        let other = other.join().unwrap();
        assert_eq!(Member::join(late).unwrap_err().verdict(), Some(&Verdict::Duplicate { rank: 1 }));
        let barrier = scope.spawn(move || other.barrier(LONG));
        host.barrier(LONG).unwrap();
        barrier.join().unwrap().unwrap();
    });
}

#[test]
fn ranks_may_come_before_the_meeting_place_is_open() {
    let (listener, address) = listener();
    drop(listener);
    let early = settings(1, 2, &address);
    thread::scope(|scope| {
        let early = scope.spawn(move || Member::join(early).map(drop));
        thread::sleep(Duration::from_millis(50));
        drop(Member::join(settings(0, 2, &address)).unwrap());
        early.join().unwrap().unwrap();
    });
}

#[test]
fn no_meeting_place_at_all_is_said_at_the_deadline() {
    let (listener, address) = listener();
    drop(listener);
    let error = Member::join(settings(1, 2, &address).within(SHORT)).unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }) && error.to_string().contains(&address), "{error}");
}

#[test]
fn a_listener_that_never_answers_is_left_at_the_deadline() {
    let (_listener, address) = listener();
    let error = Member::join(settings(1, 2, &address).within(SHORT)).unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }), "{error}");
}

#[test]
fn silent_connections_are_closed_and_keep_nobody_out() {
    let (listener, address) = listener();
    // More than may be open at a time.
    let mut strangers: Vec<TcpStream> = (0..100).map(|_| TcpStream::connect(&address).unwrap()).collect();
    let dripping = strangers.last_mut().unwrap();
    dripping.write_all(&[200]).unwrap();
    let other = settings(1, 2, &address);
    thread::scope(|scope| {
        let other = scope.spawn(move || Member::join(other).unwrap());
        let host = Member::host(listener, settings(0, 2, &address)).unwrap();
        let other = other.join().unwrap();
        for mut stranger in strangers {
            stranger.set_read_timeout(Some(LONG)).unwrap();
            // Closed without a word, the latest at their deadline.
            assert!(matches!(stranger.read(&mut [0; 16]), Ok(0) | Err(_)));
        }
        let barrier = scope.spawn(move || other.barrier(LONG));
        host.barrier(LONG).unwrap();
        barrier.join().unwrap().unwrap();
    });
}

#[test]
fn a_rank_or_world_out_of_range_is_refused_before_anything_is_sent() {
    for (rank, world, text) in [
        (2, 2, "rank is 2, allowed: below the world size, 2"),
        (0, 0, "world size is 0, allowed: 1 to 16384"),
        (0, 20_000, "world size is 20000, allowed: 1 to 16384"),
    ] {
        assert_eq!(Member::join(settings(rank, world, "127.0.0.1:1")).unwrap_err().to_string(), text);
    }
}
