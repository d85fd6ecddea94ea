//! What a job chooses.

use std::fmt;
use std::str::FromStr;

use ep_core::Error;
use ep_core::layout::Queues;
use ep_rdma::{Wire, within};

use crate::device::Choices;

/// How a cell is raised after the rows before it (rule F3).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Signal {
    /// A write of the value, behind the rows' writes on their queue pair. Right where the memory's writes become visible in the
    /// order in which they came: not with relaxed ordering, nor where the network spreads a queue pair over several paths.
    OrderedWrite,
    /// An 8-byte fetch-add of the difference on the rows' queue pair: an atomic is executed after all earlier requests,
    /// however these were placed.
    FetchAdd,
    /// Every row's write carries an immediate, which the receiver counts; the value travels as a message, with the number
    /// of writes before it, and the receiver's own core raises the cell when so many have arrived. Needs no order at all. The
    /// receiver must look at its queue: while it does nothing, a sender may have to wait.
    Counting,
}

impl fmt::Display for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OrderedWrite => "ordered-write",
            Self::FetchAdd => "fetch-add",
            Self::Counting => "counting",
        })
    }
}

impl FromStr for Signal {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let all = [Self::OrderedWrite, Self::FetchAdd, Self::Counting];
        let found = all.into_iter().find(|signal| signal.to_string() == text);
        found.ok_or_else(|| Error::invalid("signal", text, "ordered-write, fetch-add or counting"))
    }
}

/// Which signal serves where none was asked for, and why. `atomics`: the device has them; `relaxed`: the window's memory
/// has relaxed ordering.
pub(crate) const fn automatic(atomics: bool, relaxed: bool) -> (Signal, &'static str) {
    match (atomics, relaxed) {
        (true, _) => {
            (Signal::FetchAdd, "the device has atomics, which come after all earlier requests of their queue pair")
        }
        (false, false) => (Signal::OrderedWrite, "the device has no atomics, and the memory keeps writes in order"),
        (false, true) => (Signal::Counting, "the device has no atomics, and the memory does not keep writes in order"),
    }
}

/// Settings of the transport; the same on all ranks.
#[derive(Clone, PartialEq, Eq, Debug)]
#[must_use]
pub struct Settings {
    pub(crate) devices: Choices,
    pub(crate) signal: Option<Signal>,
    pub(crate) far_lanes: Queues,
    pub(crate) relaxed: bool,
    pub(crate) mtu: Option<u32>,
    pub(crate) wire: Wire,
    pub(crate) depth: u32,
    pub(crate) receives: u32,
    pub(crate) inline: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            devices: Choices::default(),
            signal: None,
            far_lanes: Queues::ROWS_WITH_CREDIT,
            relaxed: false,
            mtu: None,
            wire: Wire::default(),
            depth: 256,
            receives: 512,
            inline: 64,
        }
    }
}

impl Settings {
    /// All automatic: a device for each rail, the port's MTU, service level and traffic class 0, an ack timeout of 14, six
    /// retries.
    pub fn new() -> Self {
        Self::default()
    }

    /// Which devices the ranks use.
    pub fn devices(self, devices: Choices) -> Self {
        Self { devices, ..self }
    }

    /// How cells are raised. Automatic: as the device can.
    pub fn signal(self, signal: Signal) -> Self {
        Self { signal: Some(signal), ..self }
    }

    /// Which lanes to a rank share a queue pair, posted to by a coordinator. Unless this says otherwise: those of rows and
    /// credit ([`Queues::ROWS_WITH_CREDIT`]).
    pub fn far_lanes(self, far_lanes: Queues) -> Self {
        Self { far_lanes, ..self }
    }

    /// Registers the window with relaxed ordering, where the system has that: faster on some hosts, and then
    /// [`Signal::OrderedWrite`] is refused.
    pub fn relaxed_ordering(self, relaxed: bool) -> Self {
        Self { relaxed, ..self }
    }

    /// Bytes of payload in a packet: at most so many, and no more than both ports allow.
    ///
    /// # Errors
    /// [`Error::Invalid`] for others than 256, 512, 1024, 2048 and 4096.
    pub fn mtu(self, bytes: u32) -> Result<Self, Error> {
        if !(256..=4096).contains(&bytes) || !bytes.is_power_of_two() {
            return Err(Error::invalid("MTU", bytes, "256, 512, 1024, 2048 or 4096"));
        }
        Ok(Self { mtu: Some(bytes.ilog2() - 7), ..self })
    }

    /// The service level of all packets; on Ethernet, their priority (PCP) where there is a VLAN.
    ///
    /// # Errors
    /// [`Error::Invalid`] above 15.
    pub fn service_level(self, level: u32) -> Result<Self, Error> {
        Ok(Self { wire: Wire { service_level: within("service level", level, 0, 15)? as u8, ..self.wire }, ..self })
    }

    /// The traffic class of all packets: on RoCEv2 the IP header's byte with DSCP (upper 6 bits) and ECN.
    pub fn traffic_class(self, class: u8) -> Self {
        Self { wire: Wire { traffic_class: class, ..self.wire }, ..self }
    }

    /// How long an adapter waits for an answer before it repeats a request: 4.096 us x 2^`exponent`; adapters may take up to
    /// four times as long. With all retries that is how long a dead peer is not noticed: about 0.5 s at 14.
    ///
    /// # Errors
    /// [`Error::Invalid`] for 0, which means for ever, and above 31.
    pub fn ack_timeout(self, exponent: u32) -> Result<Self, Error> {
        Ok(Self { wire: Wire { ack_timeout: within("ack timeout", exponent, 1, 31)? as u8, ..self.wire }, ..self })
    }

    /// How often a request is repeated that nobody answers.
    ///
    /// # Errors
    /// [`Error::Invalid`] above 6: 7 means for ever on some devices.
    pub fn retries(self, retries: u32) -> Result<Self, Error> {
        Ok(Self { wire: Wire { retries: within("retries", retries, 0, 6)? as u8, ..self.wire }, ..self })
    }

    /// Requests that a lane holds before its poster has to wait.
    ///
    /// # Errors
    /// [`Error::Invalid`] for less than 2 and more than 32768.
    pub fn queue_depth(self, requests: u32) -> Result<Self, Error> {
        Ok(Self { depth: within("queue depth", requests, 2, 32768)?, ..self })
    }

    /// Writes and messages that the receiver of a lane has room for, with [`Signal::Counting`].
    ///
    /// # Errors
    /// [`Error::Invalid`] for less than 1 and more than 32768.
    pub fn receive_depth(self, requests: u32) -> Result<Self, Error> {
        Ok(Self { receives: within("receive depth", requests, 1, 32768)?, ..self })
    }

    /// Writes of up to so many bytes travel inside their requests, where the device has room for that: it need not fetch them.
    ///
    /// # Errors
    /// [`Error::Invalid`] above 1024.
    pub fn inline_bytes(self, bytes: u32) -> Result<Self, Error> {
        Ok(Self { inline: within("inline bytes", bytes, 0, 1024)?, ..self })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_outside_their_limits_are_named() {
        let refused = |settings: Result<Settings, Error>| settings.unwrap_err().to_string();
        assert_eq!(refused(Settings::new().retries(7)), "retries is 7, allowed: 0 to 6");
        assert_eq!(refused(Settings::new().ack_timeout(0)), "ack timeout is 0, allowed: 1 to 31");
        assert!(refused(Settings::new().mtu(1500)).contains("1024, 2048"));
        assert_eq!([256, 1024, 4096].map(|mtu| Settings::new().mtu(mtu).unwrap().mtu), [Some(1), Some(3), Some(5)]);
        assert!("often".parse::<Signal>().is_err());
        assert_eq!("fetch-add".parse(), Ok(Signal::FetchAdd));
    }

    #[test]
    fn without_atomics_order_decides() {
        assert_eq!(automatic(true, true).0, Signal::FetchAdd);
        assert_eq!(automatic(true, false).0, Signal::FetchAdd);
        assert_eq!(automatic(false, false).0, Signal::OrderedWrite);
        assert_eq!(automatic(false, true).0, Signal::Counting);
    }
}
