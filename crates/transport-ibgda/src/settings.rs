//! What a job chooses.

use ep_core::Error;
use ep_core::layout::Queues;
use ep_rdma::{Wire, within};

/// How an adapter is told that there are new elements.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Doorbell {
    /// The record, a fence, then the register.
    #[default]
    Single,
    /// The register, the record, a fence, and the register once more: the first is faster by a fence, and the second serves an adapter that
    /// recovers by the record.
    Double,
}

/// How a cell is raised after the rows before it (rule F3).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Signal {
    /// An 8-byte fetch-add of the difference on the rows' queue pair: an atomic is executed after all earlier requests, however these were placed.
    #[default]
    FetchAdd,
    /// A write of the value, which lies in the element itself: the adapter fetches nothing, and nothing comes back. Right where a write into
    /// memory without relaxed ordering, as that of cells, becomes visible after all earlier ones of its queue pair: not where the network spreads a
    /// queue pair over several paths.
    OrderedWrite,
}

/// Settings of the transport; the same on all ranks.
#[derive(Clone, PartialEq, Eq, Debug)]
#[must_use]
pub struct Settings {
    pub(crate) devices: Vec<String>,
    pub(crate) far_lanes: Queues,
    pub(crate) relaxed: bool,
    pub(crate) doorbell: Doorbell,
    pub(crate) signal: Signal,
    pub(crate) wire: Wire,
    pub(crate) log_depth: u32,
    pub(crate) batch: u32,
    pub(crate) longest: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            devices: Vec::new(),
            far_lanes: Queues::PER_ROLE,
            relaxed: false,
            doorbell: Doorbell::Single,
            signal: Signal::FetchAdd,
            wire: Wire::default(),
            log_depth: 8,
            batch: 32,
            longest: 1 << 30,
        }
    }
}

impl Settings {
    /// All automatic: an adapter for each rail, a queue pair for each role, service level and traffic class 0, an ack timeout of 14, six
    /// retries.
    pub fn new() -> Self {
        Self::default()
    }

    /// Names of adapters, as `ibv_devices` lists them, for the ranks of a node in turn: a rank whose adapter cannot be used takes no other. None: all that
    /// have an active port.
    pub fn devices(self, devices: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self { devices: devices.into_iter().map(Into::into).collect(), ..self }
    }

    /// Which lanes to a rank share a queue pair. Unless this says otherwise each has its own: no kernel has a coordinator.
    pub fn far_lanes(self, far_lanes: Queues) -> Self {
        Self { far_lanes, ..self }
    }

    /// Registers rows with relaxed ordering, where the adapter has that: faster on some hosts. Cells never have it: they are a memory
    /// region of their own.
    pub fn relaxed_ordering(self, relaxed: bool) -> Self {
        Self { relaxed, ..self }
    }

    /// How an adapter is told that there are new elements.
    pub fn doorbell(self, doorbell: Doorbell) -> Self {
        Self { doorbell, ..self }
    }

    /// How a cell is raised after the rows before it.
    pub fn signal(self, signal: Signal) -> Self {
        Self { signal, ..self }
    }

    /// The service level of all packets; on Ethernet, their priority (PCP) where there is a VLAN.
    ///
    /// # Errors
    /// [`Error::Invalid`] above 15, and on Ethernet [`Error::Unsupported`] above 7 when lanes are opened.
    pub fn service_level(self, level: u32) -> Result<Self, Error> {
        Ok(Self { wire: Wire { service_level: within("service level", level, 0, 15)? as u8, ..self.wire }, ..self })
    }

    /// The traffic class of all packets: on RoCEv2 the IP header's byte with DSCP (upper 6 bits) and ECN.
    pub fn traffic_class(self, class: u8) -> Self {
        Self { wire: Wire { traffic_class: class, ..self.wire }, ..self }
    }

    /// How long an adapter waits for an answer before it repeats a request: 4.096 us x 2^`exponent`; adapters may take up to
    /// four times as long. With all retries that is how long a dead peer is not noticed: 0.5 s to 2 s at 14. It must end well before an
    /// operation's deadline.
    ///
    /// # Errors
    /// [`Error::Invalid`] for 0, which means for ever, and above 18, with which it may take half a minute.
    pub fn ack_timeout(self, exponent: u32) -> Result<Self, Error> {
        Ok(Self { wire: Wire { ack_timeout: within("ack timeout", exponent, 1, 18)? as u8, ..self.wire }, ..self })
    }

    /// How often a request is repeated that nobody answers.
    ///
    /// # Errors
    /// [`Error::Invalid`] above 7.
    pub fn retries(self, retries: u32) -> Result<Self, Error> {
        Ok(Self { wire: Wire { retries: within("retries", retries, 0, 7)? as u8, ..self.wire }, ..self })
    }

    /// Elements that a queue holds, as the power of two.
    ///
    /// # Errors
    /// [`Error::Invalid`] for less than 6 (a page) and more than 15: an adapter counts elements in 16 bits.
    pub fn log_depth(self, log_depth: u32) -> Result<Self, Error> {
        Ok(Self { log_depth: within("the power of two of a queue's elements", log_depth, 6, 15)?, ..self })
    }

    /// Elements after which a put rings by itself, so that the adapter has work while a long chunk is written.
    ///
    /// # Errors
    /// [`Error::Invalid`] for 0 and above 32768.
    pub fn batch(self, elements: u32) -> Result<Self, Error> {
        Ok(Self { batch: within("elements of a batch", elements, 1, 32768)?, ..self })
    }

    /// Bytes of the longest message; a longer put takes several.
    ///
    /// # Errors
    /// [`Error::Invalid`] for 0 and above 2^30, the most that all adapters take.
    pub fn longest_message(self, bytes: u32) -> Result<Self, Error> {
        Ok(Self { longest: within("bytes of a message", bytes, 1, 1 << 30)?.into(), ..self })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_outside_their_limits_are_named() {
        let refused = |settings: Result<Settings, Error>| settings.unwrap_err().to_string();
        assert_eq!(refused(Settings::new().ack_timeout(0)), "ack timeout is 0, allowed: 1 to 18");
        assert_eq!(refused(Settings::new().retries(8)), "retries is 8, allowed: 0 to 7");
        assert_eq!(
            refused(Settings::new().log_depth(16)),
            "the power of two of a queue's elements is 16, allowed: 6 to 15"
        );
        assert_eq!(refused(Settings::new().batch(0)), "elements of a batch is 0, allowed: 1 to 32768");
        assert_eq!(
            refused(Settings::new().longest_message(1 << 31)),
            "bytes of a message is 2147483648, allowed: 1 to 1073741824"
        );
    }
}
