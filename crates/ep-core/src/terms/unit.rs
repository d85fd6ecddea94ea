//! Units: 12 bytes of data and a tag, which are stored and seen at once.
//!
//! A payload that travels as units needs no publish behind it: whoever looks at a unit sees by its tag whether the data
//! beside it has come. Memory for units holds nothing else. It is zeroed once, and no unit has tag 0.

use super::{LaneId, Offset, Span};

/// Bytes of a unit; units lie at multiples of it.
pub const UNIT_BYTES: u64 = 16;
/// Bytes of data in a unit; the tag is behind them.
pub const UNIT_DATA: u64 = 12;

/// Says which operation a unit is of: what lay in its place before has another tag. Never 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Tag(u32);

impl Tag {
    /// Operations of a stretch, in whose first one unit memory is cleared: tags of two stretches all differ.
    pub(crate) const ERA: u64 = 1 << 30;
    /// How many there are; 0 is none.
    pub(crate) const COUNT: u64 = u32::MAX as u64;

    /// The tag of an operation, by its number among all operations of the communicator, those of earlier generations
    /// included: what a failed generation has left behind must not pass for what is new.
    pub const fn of(serial: u64) -> Self {
        Self((serial % Self::COUNT) as u32 + 1)
    }

    /// The stretch of operations that one belongs to. A rank clears what it reads units from in the first operation of each
    /// stretch; so no tag repeats in its memory, although 32 bits wrap.
    pub const fn era(serial: u64) -> u64 {
        serial / Self::ERA
    }

    /// The tag as it lies in a unit.
    pub const fn bits(self) -> u32 {
        self.0
    }
}

/// Units that `bytes` bytes of data take.
pub const fn unit_count(bytes: u64) -> u64 {
    bytes.div_ceil(UNIT_DATA)
}

/// Bytes of memory that `bytes` bytes of data take as units.
pub const fn unit_bytes(bytes: u64) -> u64 {
    unit_count(bytes) * UNIT_BYTES
}

/// A unit of at most [`UNIT_DATA`] bytes of data; what is missing is zero.
pub fn pack_unit(data: &[u8], tag: Tag) -> [u8; UNIT_BYTES as usize] {
    let mut unit = [0; UNIT_BYTES as usize];
    unit[..data.len()].copy_from_slice(data);
    unit[UNIT_DATA as usize..].copy_from_slice(&tag.0.to_le_bytes());
    unit
}

/// The data of a unit, if it bears this tag.
pub fn unpack_unit(unit: &[u8; UNIT_BYTES as usize], tag: Tag) -> Option<&[u8; UNIT_DATA as usize]> {
    let (data, rest) = unit.split_first_chunk()?;
    (rest == tag.0.to_le_bytes()).then_some(data)
}

/// Copies the data of those units of `stored` that bear this tag to their places in `into`, which is as long as the payload;
/// returns how many do.
pub fn unpack_units(stored: &[u8], tag: Tag, into: &mut [u8]) -> u64 {
    let (units, _) = stored.as_chunks::<{ UNIT_BYTES as usize }>();
    let mut come = 0;
    for (unit, place) in units.iter().zip(into.chunks_mut(UNIT_DATA as usize)) {
        if let Some(data) = unpack_unit(unit, tag) {
            place.copy_from_slice(&data[..place.len()]);
            come += 1;
        }
    }
    come
}

/// A payload that comes as units: who sends it on which lane, where they lie in the own window, how many bytes of data they
/// are, and their tag.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Units {
    /// The lane by which they come; its peer has put them.
    pub lane: LaneId,
    /// The first unit.
    pub at: Offset,
    /// Bytes of data.
    pub len: u64,
    /// The tag of all of them.
    pub tag: Tag,
}

impl Units {
    /// The memory that they take.
    pub const fn span(&self) -> Span {
        self.at.span(unit_bytes(self.len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_payload_takes_units_for_all_of_its_bytes() {
        let counts = [0, 1, 11, 12, 13, 24, 7168 + 224].map(unit_count);
        assert_eq!(counts, [0, 1, 1, 1, 2, 2, 616]);
        assert_eq!(unit_bytes(13), 32);
    }

    #[test]
    fn a_unit_shows_its_data_to_its_own_tag_alone() {
        let unit = pack_unit(b"five!", Tag::of(6));
        assert_eq!(unpack_unit(&unit, Tag::of(6)), Some(b"five!\0\0\0\0\0\0\0"));
        for other in [0, 4, 5, 7, 8, 1 << 30] {
            assert_eq!(unpack_unit(&unit, Tag::of(other)), None, "{other}");
        }
        // A torn one: the tag of the new unit beside the data of the old one shows the wrong data. So units must come whole.
        let (old, mut torn) = (pack_unit(b"old", Tag::of(4)), unit);
        torn[..4].copy_from_slice(&old[..4]);
        assert_ne!(unpack_unit(&torn, Tag::of(6)), unpack_unit(&unit, Tag::of(6)));
    }

    #[test]
    fn a_payload_has_come_when_all_of_its_units_have() {
        let payload: Vec<u8> = (1..=30).collect();
        let mut stored: Vec<u8> = payload.chunks(12).flat_map(|data| pack_unit(data, Tag::of(8))).collect();
        let mut seen = [0; 30];
        assert_eq!((unpack_units(&stored, Tag::of(8), &mut seen), &seen[..]), (3, &payload[..]));
        stored[16..32].copy_from_slice(&pack_unit(&payload[12..24], Tag::of(6)));
        assert_eq!(unpack_units(&stored, Tag::of(8), &mut seen), 2);
    }

    #[test]
    fn memory_that_nobody_wrote_has_no_tag() {
        for serial in [0, 1, Tag::COUNT - 1, Tag::COUNT, u64::MAX] {
            assert_eq!(unpack_unit(&[0; UNIT_BYTES as usize], Tag::of(serial)), None, "{serial}");
        }
    }

    /// Memory that is cleared in the first operation of each era, before the next one is put there, holds units of this era and,
    /// where that first one is still to come, of the one before.
    #[test]
    fn no_tag_repeats_within_two_eras() {
        for era in [0, 3, 4, u64::MAX / Tag::ERA - 8] {
            let (first, next) = (era * Tag::ERA, (era + 2) * Tag::ERA);
            assert_eq!([first, next - 1, next].map(Tag::era), [era, era + 1, era + 2]);
            // Tags count up and wrap, so they first repeat after as many operations as there are tags.
            let repeats = first + Tag::COUNT;
            assert_eq!(Tag::of(first), Tag::of(repeats));
            assert!(repeats >= next, "{era}");
            assert_ne!(Tag::of(repeats - 1), Tag::of(first));
        }
    }
}
