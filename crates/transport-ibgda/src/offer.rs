//! What a rank tells the others so that they can connect to it.

use ep_core::Rank;
use ep_core::port::LaneKind;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::error::Error;

/// Of this form; another one is refused.
const VERSION: u32 = 0x4942_0001;

type U32 = zerocopy::little_endian::U32;
type U64 = zerocopy::little_endian::U64;

/// What holds for all lanes of a rank. Numbers are little-endian.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct Header {
    pub(crate) version: U32,
    /// As verbs number it.
    pub(crate) mtu: u8,
    /// 1: Ethernet.
    pub(crate) ethernet: u8,
    /// Of the port, on InfiniBand.
    pub(crate) lid: [u8; 2],
    /// Of the port.
    pub(crate) gid: [u8; 16],
    /// Where the window begins, by its keys.
    pub(crate) window: U64,
    /// Its length.
    pub(crate) bytes: U64,
    /// The key that others write its rows with.
    pub(crate) rows_key: U32,
    /// The key that others raise its cells with: a region of its own, whose writes stay in order.
    pub(crate) cells_key: U32,
}

/// One end of a lane.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct End {
    /// The rank at the other end.
    peer: U32,
    /// [`LaneKind::index`]
    kind: U32,
    /// Of the queue pair.
    pub(crate) number: U32,
    /// The packet sequence number that it begins with.
    pub(crate) psn: U32,
}

impl End {
    pub(crate) fn new(peer: Rank, kind: LaneKind, number: u32, psn: u32) -> Self {
        Self { peer: peer.0.into(), kind: (kind.index() as u32).into(), number: number.into(), psn: psn.into() }
    }
}

/// An offer of one rank.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Offer {
    pub(crate) header: Header,
    pub(crate) ends: Vec<End>,
}

impl Header {
    pub(crate) fn new() -> Self {
        Self { version: VERSION.into(), ..Self::read_from_bytes(&[0; size_of::<Self>()]).expect("its size") }
    }
}

impl Offer {
    /// As it is told.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        [self.header.as_bytes(), self.ends.as_bytes()].concat()
    }

    /// As `rank` told it.
    pub(crate) fn from_bytes(rank: Rank, bytes: &[u8]) -> Result<Self, Error> {
        let wrong = |why| Error::Peer { rank, why };
        let short = |_| wrong(format!("its offer has {} bytes only", bytes.len()));
        let (header, rest) = Header::read_from_prefix(bytes).map_err(short)?;
        if header.version != VERSION {
            let told = header.version;
            return Err(wrong(format!(
                "its offer has version {told:#x}, this one is {VERSION:#x}: set the same transport on all ranks"
            )));
        }
        let (whole, rest) = rest.as_chunks::<{ size_of::<End>() }>();
        if !rest.is_empty() {
            return Err(wrong(format!("its offer has {} bytes too many", rest.len())));
        }
        let ends = whole.iter().map(|bytes| zerocopy::transmute!(*bytes)).collect();
        Ok(Self { header, ends })
    }

    /// The end of its lane of this kind to `peer`.
    pub(crate) fn end(&self, peer: Rank, kind: LaneKind) -> Option<&End> {
        self.ends.iter().find(|end| end.peer == peer.0 && end.kind == kind.index() as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offers_arrive_as_they_were_told_and_others_are_refused() {
        let end = End::new(Rank(3), LaneKind::Control, 77, 88);
        let offer = Offer { header: Header { rows_key: 5.into(), ..Header::new() }, ends: vec![end] };
        let bytes = offer.to_bytes();
        let read = Offer::from_bytes(Rank(1), &bytes).unwrap();
        assert_eq!(read, offer);
        assert_eq!(read.end(Rank(3), LaneKind::Control), Some(&end));
        assert_eq!(read.end(Rank(3), LaneKind::Watch), None);
        let refused = |bytes: &[u8]| Offer::from_bytes(Rank(1), bytes).unwrap_err().to_string();
        assert_eq!(refused(&bytes[..10]), "rank 1: its offer has 10 bytes only");
        assert_eq!(refused(&bytes[..bytes.len() - 1]), "rank 1: its offer has 15 bytes too many");
        assert!(refused(&[9; 60]).contains("version 0x9090909, this one is 0x49420001"));
    }
}
