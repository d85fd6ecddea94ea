//! How the processes of one communicator meet: the control plane under every backend of several processes.
//!
//! A launcher tells each process its place ([`Environment`]). Rank 0 opens a *meeting place*, a TCP port and a thread;
//! every rank connects there, rank 0 too ([`Member::join`]):
//!
//! ```text
//!  rank 0 ----+---------------------+        1. both sides prove that they hold the job's secret
//!             | meeting place       |        2. the rank says who it is and what it has in common with all
//!  rank 1 ----+ (a thread of rank 0)|        3. all have joined: everybody returns from join
//!   ...       |                     |        4. barrier, all-gather, broadcast, agreement; notice of who is gone
//!  rank n ----+---------------------+
//! ```
//!
//! It carries handles, sizes and verdicts, never rows: messages have at most 16 MiB ([`MAX_MESSAGE`]).
//!
//! # What holds
//!
//! - **Every call ends**: with its result, at its deadline with the ranks that did not come, or as soon as a rank
//!   that it waits for is gone. A rank's process that ends is noticed at once, a machine that vanishes within about
//!   half a minute.
//! - **One verdict**: a join or collective that fails tells all ranks the same. A collective that failed stays failed
//!   until the survivors agreed on how to go on ([`ep_core::machine::Bootstrap::agree`], which [`Member`] implements).
//! - **Nobody strange joins**: who has not proved to hold the job's [`Secret`] is told a nonce, a protocol version
//!   and no more, may send 4 KiB, and has five seconds; such connections are bounded in number, and who has not even
//!   said hello gives way first. After the proofs every message carries a tag, so that nobody on the way changes or
//!   repeats one. Messages are not encrypted: `docs/threats.md` says why.
//!   Without a secret, the ranks meet on loopback addresses only, where every user of the machine may join.
//! - **Nobody different joins**: ranks whose [`Identity`] (shape, layout hash), world size, byte order, version or build
//!   differs from rank 0's cannot meet, and all are told the field, both values and both ranks.
//!
//! The meeting place lives and dies with the process that holds it: without it nobody can agree on anything. That is
//! rank 0's, unless a launcher holds it ([`MeetingPlace::hold`]), as `moexpress launch` does: then the others recover
//! whoever ended.
//!
//! # Example
//!
//! Four ranks, here threads, meet at a port that the system chose:
//!
//! ```
//! use std::time::Duration;
//! use ep_bootstrap::{Identity, Member, Settings};
//! use ep_core::Rank;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
//! let address = listener.local_addr()?.to_string();
//! let settings = |rank| Settings::new(Rank(rank), 4, &address).identity(Identity::new().number("hidden", 7168));
//! let second = Duration::from_secs(1);
//! let gathered = std::thread::scope(|scope| {
//!     for rank in 1..4 {
//!         let settings = settings(rank);
//!         scope.spawn(move || Member::join(settings)?.all_gather(&[rank as u8], second));
//!     }
//!     Member::host(listener, settings(0))?.all_gather(&[0], second)
//! })?;
//! assert_eq!(gathered, [0, 1, 2, 3].map(|rank| Some(vec![rank])));
//! # Ok(())
//! # }
//! ```
//!
//! A process that a launcher started reads its place and the secret from its environment:
//!
//! ```no_run
//! use ep_bootstrap::{Environment, Member, Secret, Settings};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let member = Member::join(Settings::of(&Environment::detect()?).secret(Secret::detect()?))?;
//! # Ok(())
//! # }
//! ```
//!
//! Ranks that are threads of one process need none of this to agree: [`LocalMeeting`].
//!
//! # Where to go next
//!
//! `cargo run -p ep-bootstrap --example meet` shows processes that meet, and agree without one of them. [`Settings`]
//! has deadlines, secret and identity; [`Environment`] the launchers that are known.
//!
//! # Tests
//!
//! `cargo test` feeds 20,000 malformed messages to a connection and to a live meeting place. `MOEXPRESS_FUZZ=1000000`
//! sets how many.
#![forbid(unsafe_code)]

#[cfg(target_os = "linux")]
mod door;
pub mod environment;
mod error;
mod host;
mod identity;
mod local;
mod meeting;
mod member;
mod peers;
mod program;
mod secret;
mod socket;
mod verdict;
mod wire;

#[cfg(target_os = "linux")]
pub use door::{DOOR_MESSAGE, Door, DoorAddress, Visit};
pub use environment::{Environment, EnvironmentError, MEETING_VARIABLE};
pub use error::{Call, Error};
pub use host::Host;
pub use identity::{Identity, Value};
pub use local::{LocalMeeting, joined};
pub use meeting::MeetingPlace;
pub use member::{MAX_CONTRIBUTION, Member, Parts, Settings};
pub use peers::Peers;
pub use secret::{SECRET_VARIABLE, Secret};
pub use verdict::{Mismatch, Verdict, listed};
pub use wire::{MAX_MESSAGE, Malformed};
