//! What a rank tells the others so that they can connect to it.

use ep_core::Rank;
use ep_core::port::LaneKind;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::error::Error;
use crate::port::{Gid, Port};

type U32 = zerocopy::little_endian::U32;
type U64 = zerocopy::little_endian::U64;

/// What holds for all lanes of a rank, whatever the transport. Numbers are little-endian.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Header {
    version: U32,
    /// As verbs number it.
    mtu: u8,
    /// 1: Ethernet.
    ethernet: u8,
    /// Of the port, on InfiniBand.
    pub(crate) lid: [u8; 2],
    /// Of the port.
    pub(crate) gid: [u8; 16],
    /// Where the window begins, by its keys.
    window: U64,
    /// Its length.
    bytes: U64,
    /// The key that others write its rows with.
    pub rows_key: U32,
    /// The key that others raise its cells with: a region of its own, whose writes stay in order.
    pub cells_key: U32,
}

impl Header {
    /// Of a rank at this port, without a window.
    pub fn new(port: &Port, mtu: u32, gid: &Gid) -> Self {
        Self {
            version: 0.into(),
            mtu: mtu as u8,
            ethernet: port.ethernet.into(),
            lid: port.lid.to_le_bytes(),
            gid: gid.bytes,
            window: 0.into(),
            bytes: 0.into(),
            rows_key: 0.into(),
            cells_key: 0.into(),
        }
    }

    /// The same with a window of `bytes` bytes, which begins at `window` for whoever has the keys of its rows and of its cells.
    #[must_use]
    pub fn with_window(self, window: u64, bytes: u64, rows_key: u32, cells_key: u32) -> Self {
        let (window, bytes) = (window.into(), bytes.into());
        Self { window, bytes, rows_key: rows_key.into(), cells_key: cells_key.into(), ..self }
    }

    pub(crate) fn mtu(&self) -> u32 {
        self.mtu.into()
    }

    /// Where the window begins, by its keys.
    pub fn window(&self) -> u64 {
        self.window.get()
    }

    /// Refuses a rank that a rank at `port` with a window of `bytes` bytes cannot connect to.
    ///
    /// # Errors
    /// [`Error::Peer`] with what differs.
    pub fn check(&self, rank: Rank, port: &Port, bytes: u64) -> Result<(), Error> {
        let wrong = |why| Err(Error::Peer { rank, why });
        if self.ethernet != u8::from(port.ethernet) {
            return wrong("one of its port and this rank's is Ethernet, the other InfiniBand".into());
        }
        if self.bytes.get() != bytes {
            return wrong(format!("its window has {} bytes, this rank's {bytes}", self.bytes));
        }
        Ok(())
    }
}

/// One end of a lane.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct End {
    /// The rank at the other end.
    peer: U32,
    /// [`LaneKind::index`]
    kind: U32,
    number: U32,
    psn: U32,
}

impl End {
    /// That of the queue pair `number`, for the lane of this kind to `peer`; its packets begin with `psn`.
    pub fn new(peer: Rank, kind: LaneKind, number: u32, psn: u32) -> Self {
        Self { peer: peer.0.into(), kind: (kind.index() as u32).into(), number: number.into(), psn: psn.into() }
    }

    pub(crate) fn number(&self) -> u32 {
        self.number.get()
    }

    pub(crate) fn psn(&self) -> u32 {
        self.psn.get()
    }
}

/// An offer of one rank, in the form `VERSION`. As bytes it is what [`ep_core::transport::Lanes::offer`] returns.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Offer<const VERSION: u32, T> {
    /// What holds for all its lanes.
    pub header: Header,
    /// What this transport alone tells.
    pub own: T,
    /// Its ends of lanes.
    pub ends: Vec<End>,
}

impl<const VERSION: u32, T: FromBytes + IntoBytes + Immutable + Copy> Offer<VERSION, T> {
    /// As it is told.
    pub fn to_bytes(&self) -> Vec<u8> {
        let header = Header { version: VERSION.into(), ..self.header };
        [header.as_bytes(), self.own.as_bytes(), self.ends.as_bytes()].concat()
    }

    /// As `rank` told it.
    ///
    /// # Errors
    /// [`Error::Peer`] when it is none.
    pub fn from_bytes(rank: Rank, bytes: &[u8]) -> Result<Self, Error> {
        let wrong = |why| Error::Peer { rank, why };
        let short = || wrong(format!("its offer has {} bytes only", bytes.len()));
        let (header, rest) = Header::read_from_prefix(bytes).map_err(|_| short())?;
        if header.version != VERSION {
            let told = header.version;
            return Err(wrong(format!(
                "its offer has version {told:#x}, this one is {VERSION:#x}: set the same transport on all ranks"
            )));
        }
        let (own, rest) = T::read_from_prefix(rest).map_err(|_| short())?;
        let (whole, rest) = rest.as_chunks::<{ size_of::<End>() }>();
        if !rest.is_empty() {
            return Err(wrong(format!("its offer has {} bytes too many", rest.len())));
        }
        let ends = whole.iter().map(|bytes| zerocopy::transmute!(*bytes)).collect();
        Ok(Self { header: Header { version: 0.into(), ..header }, own, ends })
    }

    /// The end of `rank`'s lane of this kind to `peer`.
    ///
    /// # Errors
    /// [`Error::Peer`] when it has none.
    pub fn end(&self, rank: Rank, peer: Rank, kind: LaneKind) -> Result<&End, Error> {
        let found = self.ends.iter().find(|end| end.peer == peer.0 && end.kind == kind.index() as u32);
        let why = || format!("it has no lane {kind:?}: set the same lanes on all ranks");
        found.ok_or_else(|| Error::Peer { rank, why: why() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Tested = Offer<0x4942_0001, U32>;

    #[test]
    fn offers_arrive_as_they_were_told_and_others_are_refused() {
        let end = End::new(Rank(3), LaneKind::Control, 77, 88);
        let zero = Header::read_from_bytes(&[0; size_of::<Header>()]).unwrap();
        let offer = Tested { header: Header { rows_key: 5.into(), ..zero }, own: 6.into(), ends: vec![end] };
        let bytes = offer.to_bytes();
        let read = Tested::from_bytes(Rank(1), &bytes).unwrap();
        assert_eq!(read, offer);
        assert_eq!(read.end(Rank(1), Rank(3), LaneKind::Control).unwrap(), &end);
        let missing = read.end(Rank(1), Rank(3), LaneKind::Watch).unwrap_err().to_string();
        assert_eq!(missing, "rank 1: it has no lane Watch: set the same lanes on all ranks");
        let refused = |bytes: &[u8]| Tested::from_bytes(Rank(1), bytes).unwrap_err().to_string();
        assert_eq!(refused(&bytes[..10]), "rank 1: its offer has 10 bytes only");
        assert_eq!(refused(&bytes[..50]), "rank 1: its offer has 50 bytes only");
        assert_eq!(refused(&bytes[..bytes.len() - 1]), "rank 1: its offer has 15 bytes too many");
        assert!(refused(&[9; 68]).contains("version 0x9090909, this one is 0x49420001"));
    }
}
