//! Cards of other processes: what a card's peers see of it, as bytes, and [`Fabric`]s of which one card alone is the process's own.

use crate::bits::Field;
use crate::carrier::Region;
use crate::devx::tables::qp::BYTES;
use crate::engine::network::Silence;
use crate::fabric::Fabric;
use crate::objects::{CardState, Sight};

/// What peers see of a card: its ends of connections that take what is sent to them, and the memory that they may name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Face {
    ends: Vec<Taking>,
    regions: Vec<Region>,
}

/// A queue pair that takes what its peer sends.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Taking {
    number: u32,
    domain: u32,
    context: [u8; BYTES],
}

/// The end of a connection that takes what is sent to it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct End<'a> {
    pub(crate) number: u32,
    pub(crate) domain: u32,
    context: &'a [u8],
}

impl End<'_> {
    /// A field of its context.
    pub(crate) fn get(&self, field: &Field) -> u64 {
        field.u64(self.context)
    }

    /// A field of its context that is wider than 64 bits.
    pub(crate) fn wide(&self, field: &Field) -> u128 {
        field.get(self.context)
    }
}

impl Face {
    fn of(number: usize, card: &CardState) -> Self {
        if card.dead {
            return Self::default();
        }
        let taking = |number: u32| {
            let End { number, domain, context } = card.end(number).ok()?;
            Some(Taking { number, domain, context: context.try_into().ok()? })
        };
        let regions = card.regions(number).filter(|region| region.access & Region::REMOTE != 0);
        Self { ends: card.qps.keys().copied().filter_map(taking).collect(), regions: regions.collect() }
    }

    /// Memory that peers may name: [`Region::base`] says where it lies in the card's own process.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// For other processes of the same program.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for count in [self.ends.len(), self.regions.len()] {
            bytes.extend((count as u32).to_le_bytes());
        }
        for end in &self.ends {
            bytes.extend(end.number.to_le_bytes());
            bytes.extend(end.domain.to_le_bytes());
            bytes.extend(end.context);
        }
        for region in &self.regions {
            let words = [region.domain, region.local_key, region.remote_key, region.access];
            bytes.extend(words.into_iter().flat_map(u32::to_le_bytes));
            bytes.extend([region.iova, region.base, region.bytes].into_iter().flat_map(u64::to_le_bytes));
        }
        bytes
    }

    /// Of the card `card`, as its process told it; none where that is no face.
    pub fn from_bytes(card: usize, told: &[u8]) -> Option<Self> {
        let mut left = told;
        let (ends, regions) = (word(&mut left)?, word(&mut left)?);
        let end = |left: &mut &[u8]| {
            let (number, domain) = (word(left)?, word(left)?);
            Some(Taking { number, domain, context: *taken(left)? })
        };
        let region = |left: &mut &[u8]| {
            let [domain, local_key, remote_key, access] = [word(left)?, word(left)?, word(left)?, word(left)?];
            let [iova, base, bytes] = [long(left)?, long(left)?, long(left)?];
            Some(Region { card, domain, local_key, remote_key, iova, base, bytes, access })
        };
        let ends = (0..ends).map(|_| end(&mut left)).collect::<Option<_>>()?;
        let regions = (0..regions).map(|_| region(&mut left)).collect::<Option<_>>()?;
        left.is_empty().then_some(Self { ends, regions })
    }

    pub(crate) fn end(&self, number: u32) -> Result<End<'_>, Silence> {
        // What is not shown yet is as good as lost: its sender tries again.
        let end = self.ends.iter().find(|end| end.number == number).ok_or(None)?;
        Ok(End { number, domain: end.domain, context: &end.context })
    }
}

fn taken<'a, const N: usize>(left: &mut &'a [u8]) -> Option<&'a [u8; N]> {
    let (first, rest) = left.split_first_chunk()?;
    *left = rest;
    Some(first)
}

fn word(left: &mut &[u8]) -> Option<u32> {
    taken(left).copied().map(u32::from_le_bytes)
}

fn long(left: &mut &[u8]) -> Option<u64> {
    taken(left).copied().map(u64::from_le_bytes)
}

impl CardState {
    /// The queue pair of this number, if it takes what is sent to it.
    pub(crate) fn end(&self, number: u32) -> Result<End<'_>, Silence> {
        match &self.sight {
            Sight::Own => {}
            Sight::Hidden => return Err(None),
            Sight::Seen(face) => return face.end(number),
        }
        let Some(qp) = self.qps.get(&number) else {
            return Err((!self.gone.contains(&number)).then(|| format!("the peer has no queue pair {number:#x}")));
        };
        if qp.cut || !qp.state.receives() {
            return Err(None);
        }
        Ok(End { number, domain: qp.pd, context: &qp.image })
    }

    /// Memory that is registered with it, the fabric's card of this number.
    pub(crate) fn regions(&self, card: usize) -> impl Iterator<Item = Region> + '_ {
        let own = self.mrs.values().map(move |mr| Region {
            card,
            domain: mr.pd,
            local_key: mr.lkey,
            remote_key: mr.rkey,
            iova: mr.iova,
            base: mr.memory.base() as u64,
            bytes: mr.memory.len() as u64,
            access: mr.access,
        });
        let seen = if let Sight::Seen(face) = &self.sight { &face.regions[..] } else { &[] };
        own.chain(seen.iter().copied())
    }
}

impl Fabric {
    /// Gives `take` what other processes are to be told of a card of this one. Nothing of it changes meanwhile, and
    /// [`Carrier::alters`](crate::Carrier::alters) is called before something does.
    ///
    /// # Panics
    /// Where there is no such card.
    pub fn show<R>(&self, card: usize, take: impl FnOnce(Face) -> R) -> R {
        let state = self.lock();
        take(Face::of(card, &state.cards[card]))
    }

    /// What is known of a card of another process from now on. Where that is nothing it does not answer, and nobody gives it up.
    ///
    /// # Panics
    /// Where there is no such card, and where it is this process's own.
    pub fn see(&self, card: usize, face: Option<Face>) {
        let sight = &mut self.lock().cards[card].sight;
        assert!(!matches!(sight, Sight::Own), "card {card} is of this process");
        *sight = face.map_or(Sight::Hidden, Sight::Seen);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn face() -> Face {
        let region = |base| Region {
            card: 3,
            domain: 5,
            local_key: 0,
            remote_key: 9,
            iova: 1 << 40,
            base,
            bytes: 4096,
            access: Region::REMOTE_WRITE,
        };
        let taking = |number| Taking { number, domain: 5, context: [number as u8; BYTES] };
        Face { ends: vec![taking(7), taking(8)], regions: vec![region(1 << 33), region(1 << 34)] }
    }

    #[test]
    fn a_face_is_told_as_it_is() {
        for face in [face(), Face::default()] {
            assert_eq!(Face::from_bytes(3, &face.to_bytes()), Some(face));
        }
    }

    #[test]
    fn what_is_no_face_is_none() {
        let bytes = face().to_bytes();
        for len in 0..bytes.len() {
            assert_eq!(Face::from_bytes(3, &bytes[..len]), None, "{len} bytes");
        }
        assert_eq!(Face::from_bytes(3, &[&bytes[..], &[0]].concat()), None);
        assert_eq!(Face::from_bytes(3, &[255; 64]), None, "more ends than there are bytes");
    }

    #[test]
    fn an_end_that_is_not_shown_does_not_answer_and_nobody_is_blamed() {
        assert!(face().end(8).is_ok_and(|end| end.domain == 5));
        assert!(matches!(face().end(9), Err(None)));
    }
}
