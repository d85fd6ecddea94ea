//! The roles of an operation: each an `async fn` over a port that reads like its description.
//!
//! ```text
//! dispatch  control: counts -> notes ............................... done
//!           sender ==ring==> receiver          placer ==puts==> collector (direct placement)
//!           sender (rows in its outbox) <==gets== receivers (pulled placement)
//! combine   control: notes ......................................... done
//!           returner ==ring==> reducer         (rows in the window, or in an outbox) <==gets== reducer
//! nodes     sender ==far ring==> forwarder ==rings==> receivers;  returners ==rings==> gatherer ==far ring==> reducer
//!           far rows, tails, credits, counts and done by way of coordinators, where lanes share queues
//! always    watch: alarms
//! ```

mod accumulator;
mod board;
mod control;
mod coordinator;
mod dispatch;
mod forwarder;
mod gather;
mod gatherer;
mod inlet;
mod intake;
pub(crate) mod low_latency;
mod operation;
mod outbox;
mod outlet;
mod placer;
mod reducer;
mod returner;
mod voice;
mod watch;

pub(crate) use accumulator::Accumulator;
pub(crate) use board::Board;
pub(crate) use control::Control;
pub(crate) use coordinator::{Standing, coordinate};
pub(crate) use dispatch::{collect, keep, receive, send};
pub(crate) use forwarder::{forward, send_far};
pub(crate) use gatherer::gather_for;
pub(crate) use intake::{HeaderBytes, Intake, Outgoing, Taken};
pub(crate) use operation::{Attended, Operation, RoleFuture, Times, beside, join};
pub(crate) use outbox::{lay, pull};
pub(crate) use placer::deliver;
pub(crate) use reducer::{Incoming, Reduction, Sums, reduce};
pub(crate) use returner::{Returns, give_back};
pub(crate) use watch::{Vigil, given_up, last_words, verdict, watch};
