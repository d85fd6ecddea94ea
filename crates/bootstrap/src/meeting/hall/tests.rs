//! Who may join, without a socket: programs that this test cannot run as.

use super::*;
use crate::wire::decode;

fn terms() -> Terms {
    Terms { said_by: Some(0), world: 2, program: Program::this(), identity: Identity::new().number("hidden", 7168) }
}

fn join(rank: u32, program: Program) -> Request {
    let Terms { world, identity, .. } = terms();
    Request::Join { rank, world, program, identity, within: 1_000_000_000 }
}

/// What rank 0 and rank 1 are told when rank 1 is another program.
fn told(program: Program) -> Vec<Reply> {
    let (mut hall, now) = (Hall::new(terms()), Instant::now());
    hall.hear(Guest(0), join(0, Program::this()), now).unwrap();
    hall.hear(Guest(1), join(1, program), now).unwrap();
    let said = |action| match action {
        Action::Tell(_, body) => Some(decode(&body.bytes).unwrap()),
        Action::Dismiss(_) => None,
    };
    hall.actions().into_iter().filter_map(said).collect()
}

#[test]
fn another_byte_order_version_or_build_is_told_to_all_by_name() {
    let this = Program::this();
    assert_eq!(told(this.clone()), [Reply::Joined, Reply::Joined]);
    let other = "other".to_owned();
    for (program, field, mine) in [
        (Program { byte_order: other.clone(), ..this.clone() }, "byte order", &this.byte_order),
        (Program { crate_version: other.clone(), ..this.clone() }, "crate version", &this.crate_version),
        (Program { sources: other, ..this.clone() }, "build (hash of the protocol's sources)", &this.sources),
    ] {
        let replies = told(program);
        assert_eq!(replies.len(), 2);
        for reply in replies {
            let Reply::NotJoined(verdict) = reply else { panic!("{reply:?}") };
            assert_eq!(verdict.to_string(), format!("{field} is {mine} on rank 0 and other on rank 1"));
        }
    }
}

/// A launcher holds the place: its build is none of the ranks' concern, who must be alike among themselves.
#[test]
fn ranks_of_another_build_than_the_place_that_is_held_for_them_meet() {
    let other = |sources: &str| Program { sources: sources.to_owned(), ..Program::this() };
    let meet = |second: Program| {
        let (mut hall, now) = (Hall::new(Terms { said_by: None, ..terms() }), Instant::now());
        hall.hear(Guest(0), join(1, other("one")), now).unwrap();
        hall.hear(Guest(1), join(0, second), now).unwrap();
        let told = |action| match action {
            Action::Tell(_, body) => Some(decode::<Reply>(&body.bytes).unwrap()),
            Action::Dismiss(_) => None,
        };
        hall.actions().into_iter().filter_map(told).collect::<Vec<_>>()
    };
    assert_eq!(meet(other("one")), [Reply::Joined, Reply::Joined]);
    let [Reply::NotJoined(verdict), _] = &meet(other("two"))[..] else { panic!("they met") };
    assert!(verdict.to_string().ends_with("is one on rank 1 and two on rank 0"), "{verdict}");
}
