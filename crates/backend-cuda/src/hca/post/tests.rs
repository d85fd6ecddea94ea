//! Two posts of one process: who shows what, and when it is taken back.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use super::*;

const LONG: Duration = Duration::from_secs(60);

fn two() -> [Post; 2] {
    let doors = [Door::open().unwrap(), Door::open().unwrap()];
    let [first, second] = [0, 1].map(|rank: usize| doors[rank].address());
    let [left, right] = doors;
    [Post::of(0, left, vec![None, Some(second)]), Post::of(1, right, vec![Some(first), None])]
}

/// Hears one message, and does what it says.
fn hear(post: &Post) -> Option<Heard> {
    post.listen(Duration::from_millis(500));
    let heard = post.hear()?;
    match &heard {
        Heard::Withdrawn(from, number) => post.forget(*from, *number),
        Heard::Shown(from, number, file) => {
            post.see(*from, *number, file.try_clone().unwrap());
        }
        Heard::Else => {}
    }
    Some(heard)
}

fn show(post: &Post, bytes: &[u8]) -> u64 {
    let number = post.hold();
    post.show(number, bytes).unwrap();
    post.tell();
    number
}

/// Tells the others, and looks who has ended.
fn look(post: &Post) {
    post.said().looked = Instant::now().checked_sub(LOOK).unwrap();
    post.tell();
}

#[test]
fn what_is_shown_is_seen_until_it_is_withdrawn() {
    let [here, there] = two();
    assert!(there.has_news(), "nothing was passed on");
    show(&here, b"a card");
    assert!(matches!(hear(&there), Some(Heard::Shown(0, 0, _))));
    let (news, seen) = there.seen();
    assert_eq!(seen[0], Seen::Shown(b"a card"[..].into()));
    assert!(there.pass_on(news) && !there.has_news());
    thread::scope(|scope| {
        let withdrawn = scope.spawn(|| here.withdraw_within(LONG));
        assert!(matches!(hear(&there), Some(Heard::Withdrawn(0, 1))));
        while !withdrawn.is_finished() {
            hear(&here);
        }
    });
    assert_eq!(there.seen().1[0], Seen::Hidden);
    assert!(there.has_news() && !there.pass_on(news));
}

#[test]
fn it_is_not_withdrawn_before_the_other_has_stopped_to_go_by_it() {
    let [here, there] = two();
    show(&here, b"");
    hear(&there).unwrap();
    let stopped = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            here.withdraw_within(LONG);
            assert!(stopped.load(Ordering::SeqCst), "withdrawn too early");
        });
        scope.spawn(|| while !matches!(here.hear(), Some(Heard::Else)) {});
        there.listen(Duration::from_millis(500));
        assert!(matches!(there.hear(), Some(Heard::Withdrawn(0, 1))));
        thread::sleep(Duration::from_millis(30));
        stopped.store(true, Ordering::SeqCst);
        there.forget(0, 1);
    });
}

#[test]
fn what_comes_late_is_seen_by_nobody() {
    let [here, there] = two();
    let number = show(&here, b"old");
    let Some(Heard::Shown(0, _, file)) = hear(&there) else { panic!("nothing was shown") };
    there.forget(0, number + 1);
    assert!(!there.see(0, number, file), "behind its withdrawal");
    assert_eq!(there.seen().1[0], Seen::Hidden);
}

#[test]
fn who_has_ended_is_not_waited_for_and_shows_nothing() {
    let [here, there] = two();
    show(&here, b"");
    drop(there);
    here.withdraw_within(LONG);
    assert_eq!(here.seen().1[1], Seen::Ended);
    show(&here, b"again");
}

#[test]
fn who_does_not_answer_is_left_behind_once_and_hears_it_all_the_same() {
    let [here, there] = two();
    show(&here, b"");
    let began = Instant::now();
    here.withdraw_within(Duration::from_millis(50));
    assert!(began.elapsed() >= Duration::from_millis(50));
    show(&here, b"not for who was left");
    // Were it waited for again, this would not end.
    here.withdraw_within(LONG);
    // What it hears in the end is what holds no more, however little room it has.
    while there.hear().is_some() {}
    look(&here);
    assert!(matches!(hear(&there), Some(Heard::Withdrawn(0, 2))));
    hear(&here);
    assert!(!here.said().others[1].is_left, "it has answered");
}

#[test]
fn nobody_who_is_stopped_is_sent_more_than_it_must_hear() {
    let [here, there] = two();
    (0..100).for_each(|_| look(&here));
    assert!(!there.has_mail(), "whether it has ended is asked without a message");
}

#[test]
fn what_cannot_be_read_is_shown_again() {
    let [here, there] = two();
    show(&here, b"a card");
    there.listen(Duration::from_millis(500));
    assert!(matches!(there.hear(), Some(Heard::Shown(..))), "and is lost here");
    there.send(0, Kind::Again, 0, None);
    hear(&here);
    here.tell();
    assert!(matches!(hear(&there), Some(Heard::Shown(0, 0, _))));
}

#[test]
fn what_found_no_room_is_shown_later() {
    let [here, there] = two();
    while here.send(1, Kind::Again, 0, None) == Sent::There {}
    show(&here, b"late");
    while there.hear().is_some() {}
    here.tell();
    assert!(matches!(hear(&there), Some(Heard::Shown(0, 0, _))));
}
