//! The roles of an operation: each an `async fn` over a port that reads like its description.
//!
//! ```text
//! dispatch  control: counts -> notes ............................... done
//!           sender ==ring==> receiver          placer ==puts==> collector (direct placement)
//! combine   control: notes ......................................... done
//!           returner ==ring==> reducer         (rows in the window) <==gets== reducer
//! always    watch: alarms
//! ```

mod board;
mod control;
mod dispatch;
mod inlet;
mod intake;
mod operation;
mod outlet;
mod placer;
mod reducer;
mod returner;
mod watch;

pub(crate) use board::Board;
pub(crate) use control::Control;
pub(crate) use dispatch::{collect, receive, send};
pub(crate) use intake::{HeaderBytes, Intake, Outgoing, Taken};
pub(crate) use operation::{Attended, Operation, RoleFuture, Times, join};
pub(crate) use placer::deliver;
pub(crate) use reducer::{Reduction, Sums, reduce};
pub(crate) use returner::{Returns, give_back};
pub(crate) use watch::{Vigil, verdict, watch};
