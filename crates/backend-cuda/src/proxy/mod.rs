//! Lanes between nodes where a thread of the host posts for the device: a *proxy*, over any transport of hosts.
//!
//! ```text
//!   kernel                      memory that both reach                      the proxy's thread
//!   ep_far_put, ep_far_publish  --> FIFO of the lane, 16 bytes a command -->  Lanes::put, Lanes::raise
//!   flush, poll, pulse          <-- taken, settled, status, pulse       <--  Lanes::flush, Lanes::broken
//! ```
//!
//! [`Proxy`] is a [`DeviceTransport`] of any [`Transport`]. It supplies `ep_far_proxy.h`, which NVRTC and g++ compile, and
//! [`ProxyLanes`]: a FIFO for each lane, and the thread. Lanes may share a queue of the transport: the thread is the coordinator that posts to it, so a
//! device needs none. What a command's words hold stands in that header, and in
//! [`command`].
//!
//! # What holds
//!
//! - A FIFO has one writer, a thread of the device, and one reader. Neither has a lock or an atomic addition.
//! - A command that is written in halves is not taken: each of its words has the phase of its round.
//! - A put is taken when a bell rings behind it: that of a publish, of a flush, or of a quarter of the FIFO. What the device did
//!   before is visible then.
//! - A slot is never overwritten before it was taken: the writer has credit for what the proxy said it took.
//! - The proxy posts a lane's commands in their order, and a publish reaches the transport after all puts before it (F3).
//! - `settled` covers a put when the transport's flush of it is through, no earlier (F5).
//! - What is no command, or reaches out of the window, breaks its lane (F8).
//! - Every verb ends (F6): by its deadline when the proxy takes nothing ([`FarStatus::Stalled`]) or the network does not
//!   get on ([`FarStatus::Timeout`]); at once when the lane broke or the thread ended, however it did
//!   ([`FarStatus::Broken`], [`FarStatus::Gone`]). [`DeviceLanes::broken`] has the reason.
//!
//! # Staging
//!
//! Where an adapter does not reach memory of the device, another transport goes around the one that was given: rows travel by way of pinned memory of the
//! host at both ends (`proxy/staged`).
//!
//! # The thread
//!
//! One for each rank. It looks at all FIFOs in turn, and waits busily while commands come; after a thousand turns in which
//! nothing moved it yields at each. Where nothing has been under way to a peer for a thirty-second of the deadline, it lets the transport probe: so a rank that only
//! waits finds a lost link, too. It does so once something was posted to the peer, which has connected then. It stays on cores beside the GPU where the system says which those are. Calls of the control plane take the lanes from it for as long as they last.

pub mod command;
mod cores;
mod fifo;
mod lane;
mod lanes;
mod memory;
mod pinned;
mod staged;
#[cfg(test)]
mod tests;
mod thread;

use std::time::Duration;

use ep_core::Error;
use ep_core::declare::CStruct as _;
use ep_core::layout::Queues;
use ep_core::port::LaneId;
use ep_core::transport::{DevicePlace, DeviceSource, DeviceTransport, Transport};

pub use lanes::ProxyLanes;
pub use memory::{HostMemory, Reached, STATE_WORDS};
pub use pinned::PinnedFifos;
pub(crate) use staged::Staged;

#[cfg(doc)]
use ep_core::device::FarStatus;
#[cfg(doc)]
use ep_core::transport::DeviceLanes;

use cores::Cores;
use fifo::{Fifo, FifoAnswers};

/// A thirty-second of the deadline without anything under way to a peer makes the transport probe.
const PROBE: u64 = 32;
/// Slots of a FIFO, as the power of two.
const LOG_SLOTS: u32 = 9;

/// A transport of hosts that a thread drives for a device, whose memory for FIFOs `take` gives: pinned and mapped, where that
/// is a GPU.
#[derive(Clone, Debug)]
pub struct Proxy<T, F> {
    transport: T,
    take: F,
    log_slots: u32,
    cores: Cores,
}

impl<T: Transport, M: Reached + 'static, F: Fn(usize) -> Result<M, Error>> Proxy<T, F> {
    /// Over `transport`; FIFOs of 512 commands lie in what `take` gives for so many bytes.
    pub const fn new(transport: T, take: F) -> Self {
        Self { transport, take, log_slots: LOG_SLOTS, cores: Cores::none() }
    }

    /// With its thread on cores beside the device that has this place on the PCI bus, where the system knows which they are.
    #[must_use]
    pub fn beside(mut self, pci: &str) -> Self {
        self.cores = Cores::beside(pci);
        self
    }

    /// With FIFOs of `2^log_slots` commands.
    ///
    /// # Errors
    /// [`Error::Invalid`] for more than 65,536 commands.
    pub fn log_slots(mut self, log_slots: u32) -> Result<Self, Error> {
        if log_slots > 16 {
            return Err(Error::invalid("the power of two of a FIFO's commands", log_slots, "0 to 16"));
        }
        self.log_slots = log_slots;
        Ok(self)
    }
}

impl<T, M, F> DeviceTransport for Proxy<T, F>
where
    T: Transport,
    T::Lanes: 'static,
    M: Reached + 'static,
    F: Fn(usize) -> Result<M, Error>,
{
    type Lanes = ProxyLanes<T::Lanes, M>;

    /// A FIFO for each lane: the proxy's thread posts for all of them, whichever share a queue of the transport.
    fn far_lanes(&self) -> Queues {
        Queues::PER_ROLE
    }

    fn source(&self) -> DeviceSource {
        source()
    }

    fn open(&self, place: DevicePlace<'_>) -> Result<Self::Lanes, Error> {
        let lanes = self.transport.open_for_device(place)?;
        let DevicePlace { me, layout, .. } = place;
        let queue = |lane| self.transport.far_lanes().queue(layout, me, lane);
        let of_peer = |(peer, kinds): (_, Vec<_>)| kinds.into_iter().map(move |kind| LaneId { peer, kind });
        let all = place.peers(self.far_lanes()).flat_map(of_peer).map(|lane| (lane, queue(lane))).collect();
        let silence = Duration::from_nanos(layout.settings().deadline().0 / PROBE);
        ProxyLanes::open(lanes, me, all, self.log_slots, silence, &self.take, self.cores.clone())
    }
}

/// The text of the verbs: the structs of [`fifo`], then `ep_far_proxy.h`.
pub(crate) fn source() -> DeviceSource {
    let begin = "#ifndef EP_FAR_LANES_H\n#define EP_FAR_LANES_H\n#include \"ep_far.h\"\n";
    let structs = [Fifo::declaration(), FifoAnswers::declaration()].concat();
    let text = [begin, &structs, include_str!("../../kernels/far/ep_far_proxy.h")].concat();
    DeviceSource { text, defines: Vec::new(), state_bytes: size_of::<Fifo>() as u64 }
}
