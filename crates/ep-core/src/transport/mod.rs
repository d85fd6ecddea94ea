//! How lanes between nodes plug into backends: a network is a value that the caller passes, and no backend names one.
//!
//! | where ranks run | who posts | a network offers |
//! |---|---|---|
//! | on CPUs | the rank's thread | [`Transport`], [`Lanes`] |
//! | on a device | a warp of a kernel | [`DeviceTransport`], [`DeviceLanes`]; of the device it may need [`PostingDevice`] |

mod any;
mod device;
mod host;
mod posting;
mod ranges;

pub use any::{AnyLanes, AnyTransport};
pub use device::{DeviceLanes, DevicePlace, DeviceSource, DeviceTransport, Mirror, WindowCopies, WindowMemory};
pub use host::{Lanes, NoLanes, NoTransport, Place, Transport};
pub use posting::{Home, PostingDevice, PostingMemory};
pub use ranges::Ranges;

use crate::layout::{Layout, Queues};
use crate::port::LaneKind;
use crate::topology::Rank;

/// The ranks of other nodes that `me` has queues to, with these.
fn peers(me: Rank, layout: &Layout, queues: Queues) -> impl Iterator<Item = (Rank, Vec<LaneKind>)> + use<'_> {
    let between = move |peer| (peer, queues.between(layout, me, peer));
    layout.topology().all().map(between).filter(|(_, queues)| !queues.is_empty())
}
