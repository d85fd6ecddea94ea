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
