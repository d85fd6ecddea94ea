//! Rows by expert: where each choice of the received rows stands when every choice has a row of its own.

use crate::error::Error;

/// Rows by expert at most, padding included: their numbers are `i32`.
const MOST_SLOTS: u64 = i32::MAX as u64;

/// The choices of the rows that a rank received, in the order of the rows.
#[derive(Clone, Copy, Debug)]
pub struct LocalChoices<'a> {
    /// `[rows, topk]`: expert on this rank, or -1.
    pub topk_idx: &'a [i64],
    /// `[rows]`: rank that each row came from, ascending.
    pub source_rank: &'a [i32],
}

/// A place, its *slot*, for each choice of a received row: expert-major, the first slot of each expert at a multiple of the alignment,
/// those of an expert by (source rank, token, choice). Slots that are no choice's are padding.
///
/// ```
/// use ep_core::plan::{Expansion, LocalChoices};
///
/// // Three rows of two choices, from ranks 0, 0 and 1, to a rank with two experts; alignment 4.
/// let choices = LocalChoices { topk_idx: &[1, 0, -1, 1, 0, -1], source_rank: &[0, 0, 1] };
/// let expansion = Expansion::new(choices, 2, 2, 4)?;
/// assert_eq!(expansion.slots(), [4, 0, -1, 5, 1, -1]);
/// assert_eq!((expansion.first(), expansion.counts()), (&[0, 4, 8][..], &[2, 2][..]));
/// assert_eq!(expansion.offsets(), [0, 4, 1, 6]);
/// # Ok::<(), ep_core::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Expansion {
    topk: usize,
    first: Vec<u32>,
    counts: Vec<u32>,
    slots: Vec<i32>,
    offsets: Vec<i32>,
    /// Slots that there is room for, at least those that [`Expansion::first`] ends with.
    room: u32,
}

impl Expansion {
    /// Places the choices of a rank with `local_experts` experts among `ranks` ranks; `alignment` is at least 1.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an expert or a source rank that does not exist, choices that are not equally many for each row, sources that
    /// do not ascend, and for what [`Expansion::first_slots`] refuses.
    pub fn new(choices: LocalChoices<'_>, ranks: u32, local_experts: u32, alignment: u32) -> Result<Self, Error> {
        let LocalChoices { topk_idx, source_rank } = choices;
        let topk = topk_idx.len().checked_div(source_rank.len()).unwrap_or(0);
        if topk * source_rank.len() != topk_idx.len() {
            let limit = format_args!("a multiple of the {} rows", source_rank.len());
            return Err(Error::invalid("length of topk_idx", topk_idx.len(), limit));
        }
        let counts = counted(topk_idx, local_experts)?;
        let first = Self::first_slots(&counts, alignment)?;
        let mut next: Vec<i32> = first[..counts.len()].iter().map(|&first| first as i32).collect();
        let mut slots = vec![-1; topk_idx.len()];
        let mut offsets = Vec::with_capacity(ranks as usize * counts.len());
        let mut begun = 0;
        for (row, &source) in source_rank.iter().enumerate() {
            let is_due = u32::try_from(source).is_ok_and(|source| source < ranks && source + 1 >= begun);
            if !is_due {
                let limit = format_args!("{} to {}", begun.saturating_sub(1), ranks.saturating_sub(1));
                return Err(Error::invalid(format_args!("source rank of row {row}"), source, limit));
            }
            while begun <= source as u32 {
                offsets.extend_from_slice(&next);
                begun += 1;
            }
            for at in row * topk..(row + 1) * topk {
                if let Ok(expert) = usize::try_from(topk_idx[at]) {
                    slots[at] = next[expert];
                    next[expert] += 1;
                }
            }
        }
        (begun..ranks).for_each(|_| offsets.extend_from_slice(&next));
        let room = first.last().copied().unwrap_or(0);
        Ok(Self { topk, first, counts, slots, offsets, room })
    }

    /// The same in room for `rows` received rows of `topk` choices each, those beyond the ones that came having no slots, and for `slots`
    /// slots, those beyond the last expert's being padding.
    ///
    /// # Errors
    /// [`Error::Invalid`] where that is less than there is.
    pub fn in_room(mut self, topk: u32, rows: u32, slots: u32) -> Result<Self, Error> {
        let (choices, has_topk) = (rows as usize * topk as usize, self.slots.is_empty() || self.topk == topk as usize);
        if choices < self.slots.len() || !has_topk {
            let limit =
                format_args!("at least {} of topk {}", self.slots.len().checked_div(self.topk).unwrap_or(0), self.topk);
            return Err(Error::invalid("received rows to make room for", format_args!("{rows} of topk {topk}"), limit));
        }
        if slots < self.room {
            return Err(Error::invalid(
                "rows by expert to make room for",
                slots,
                format_args!("at least {}", self.room),
            ));
        }
        self.slots.resize(choices, -1);
        (self.topk, self.room) = (topk as usize, slots);
        Ok(self)
    }

    /// Slots that `rows` received rows take at most, of `choices` choices on this rank each, whatever their experts are: rounded up to the
    /// alignment.
    ///
    /// # Errors
    /// As [`Expansion::first_slots`].
    pub fn most_slots(rows: u32, choices: u32, local_experts: u32, alignment: u32) -> Result<u32, Error> {
        let padding = u64::from(alignment).checked_sub(1).ok_or_else(no_alignment)? * u64::from(local_experts);
        let taken = u64::from(rows) * u64::from(choices);
        let most = taken.checked_add(padding).and_then(|most| most.checked_next_multiple_of(alignment.into()));
        let most = most.unwrap_or(u64::MAX);
        if most > MOST_SLOTS { Err(too_many(most)) } else { Ok(most as u32) }
    }

    /// `[local experts + 1]`: the first slot of each expert, where each has so many choices; last, slots in all.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an alignment of 0, and for 2^31 slots or more.
    pub fn first_slots(counts: &[u32], alignment: u32) -> Result<Vec<u32>, Error> {
        if alignment == 0 {
            return Err(no_alignment());
        }
        let mut first = Vec::with_capacity(counts.len() + 1);
        let mut sum = 0u64;
        first.push(0);
        for &count in counts {
            sum += u64::from(count).next_multiple_of(alignment.into());
            if sum > MOST_SLOTS {
                return Err(too_many(sum));
            }
            first.push(sum as u32);
        }
        Ok(first)
    }

    /// Slots, padding included: rows by expert, or those that there is room for ([`Expansion::in_room`]).
    pub const fn rows(&self) -> u32 {
        self.room
    }

    /// `[local experts + 1]`: the first slot of each expert, a multiple of the alignment; last, behind the last expert's padding:
    /// [`Expansion::rows`] where there is no room for more.
    pub fn first(&self) -> &[u32] {
        &self.first
    }

    /// `[local experts]`: choices of each expert, padding not counted.
    pub fn counts(&self) -> &[u32] {
        &self.counts
    }

    /// `[rows, topk]`: the slot of each choice, or -1.
    pub fn slots(&self) -> &[i32] {
        &self.slots
    }

    /// `[ranks, local experts]`: the slot of the first choice of each source at each expert; where a source has none there, that of the next
    /// source.
    pub fn offsets(&self) -> &[i32] {
        &self.offsets
    }

    /// The slots of the choices of received row `row`, in their order.
    pub fn slots_of(&self, row: u32) -> impl DoubleEndedIterator<Item = u32> + '_ {
        let at = row as usize * self.topk;
        self.slots[at..at + self.topk].iter().filter_map(|&slot| u32::try_from(slot).ok())
    }

    /// The slots that are padding, ascending.
    pub fn padding(&self) -> impl Iterator<Item = u32> + '_ {
        let experts = self.counts.iter().zip(self.first.windows(2));
        let spare = self.first.last().copied().unwrap_or(0)..self.room;
        experts.flat_map(|(&count, bounds)| bounds[0] + count..bounds[1]).chain(spare)
    }
}

fn no_alignment() -> Error {
    Error::invalid("expert alignment", 0, "at least 1")
}

fn too_many(slots: u64) -> Error {
    Error::invalid("rows by expert", slots, format_args!("at most {MOST_SLOTS}"))
}

/// `[local experts]`: how often each is chosen.
fn counted(topk_idx: &[i64], local_experts: u32) -> Result<Vec<u32>, Error> {
    let mut counts = vec![0u32; local_experts as usize];
    for &expert in topk_idx.iter().filter(|&&expert| expert != -1) {
        let count = usize::try_from(expert).ok().and_then(|expert| counts.get_mut(expert));
        let Some(count) = count else {
            let limit = format_args!("-1 or 0 to {}", i64::from(local_experts) - 1);
            return Err(Error::invalid("local expert of a choice", expert, limit));
        };
        *count = count.saturating_add(1);
    }
    Ok(counts)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(choices: LocalChoices<'_>, alignment: u32) -> String {
        Expansion::new(choices, 2, 3, alignment).unwrap_err().to_string()
    }

    #[test]
    fn choices_that_cannot_be_are_refused() {
        let of = |topk_idx, source_rank| LocalChoices { topk_idx, source_rank };
        assert_eq!(said(of(&[3], &[0]), 1), "local expert of a choice is 3, allowed: -1 or 0 to 2");
        assert_eq!(said(of(&[-2], &[0]), 1), "local expert of a choice is -2, allowed: -1 or 0 to 2");
        assert_eq!(said(of(&[0, 1, 2], &[0, 0]), 1), "length of topk_idx is 3, allowed: a multiple of the 2 rows");
        assert_eq!(said(of(&[0], &[]), 1), "length of topk_idx is 1, allowed: a multiple of the 0 rows");
        assert_eq!(said(of(&[0, 1], &[1, 0]), 1), "source rank of row 1 is 0, allowed: 1 to 1");
        assert_eq!(said(of(&[0], &[2]), 1), "source rank of row 0 is 2, allowed: 0 to 1");
        assert_eq!(said(of(&[0], &[-1]), 1), "source rank of row 0 is -1, allowed: 0 to 1");
        assert_eq!(said(of(&[], &[]), 0), "expert alignment is 0, allowed: at least 1");
        assert_eq!(said(of(&[0], &[0]), 1 << 31), "rows by expert is 2147483648, allowed: at most 2147483647");
    }

    #[test]
    fn as_many_slots_as_can_be_numbered() {
        let most = MOST_SLOTS as u32;
        assert_eq!(Expansion::first_slots(&[most], 1), Ok(vec![0, most]));
        assert!(Expansion::first_slots(&[most, 1], 1).is_err());
    }

    #[test]
    fn room_for_more_is_padding_and_rows_without_slots() {
        let come = LocalChoices { topk_idx: &[1, 0, -1, 1], source_rank: &[0, 1] };
        let exact = Expansion::new(come, 2, 2, 2).unwrap();
        let roomy = exact.clone().in_room(2, 3, 6).unwrap();
        assert_eq!((roomy.first(), roomy.counts(), roomy.offsets()), (exact.first(), exact.counts(), exact.offsets()));
        assert_eq!((exact.rows(), roomy.rows()), (4, 6));
        assert_eq!(roomy.slots(), [2, 0, -1, 3, -1, -1]);
        assert_eq!(roomy.slots_of(2).count(), 0);
        assert_eq!(exact.padding().collect::<Vec<_>>(), [1]);
        assert_eq!(roomy.padding().collect::<Vec<_>>(), [1, 4, 5]);
        let none = Expansion::new(LocalChoices { topk_idx: &[], source_rank: &[] }, 2, 2, 2).unwrap();
        assert_eq!(none.in_room(3, 2, 1).unwrap().slots(), [-1; 6]);
        let said = |room: Result<Expansion, Error>| room.unwrap_err().to_string();
        assert_eq!(exact.clone().in_room(2, 2, 4).unwrap().slots(), exact.slots(), "what fits exactly");
        let few = said(exact.clone().in_room(2, 1, 6));
        assert_eq!(few, "received rows to make room for is 1 of topk 2, allowed: at least 2 of topk 2");
        let few = said(exact.in_room(2, 3, 3));
        assert_eq!(few, "rows by expert to make room for is 3, allowed: at least 4");
    }

    #[test]
    fn the_most_slots_are_enough_for_any_choices() {
        // 5 rows of 2 choices each among 3 experts, however they are dealt out.
        let most = Expansion::most_slots(5, 2, 3, 4).unwrap();
        assert_eq!(most, 20);
        for first in 0..=5 {
            let counts = [first, 5, 5 - first];
            assert!(*Expansion::first_slots(&counts, 4).unwrap().last().unwrap() <= most, "{counts:?}");
        }
        assert_eq!(Expansion::most_slots(7, 1, 2, 1), Ok(7));
        assert_eq!(Expansion::most_slots(u32::MAX >> 1, 1, 1, 1), Ok(u32::MAX >> 1));
        let said = |most: Result<u32, Error>| most.unwrap_err().to_string();
        assert_eq!(
            said(Expansion::most_slots(1 << 30, 2, 1, 1)),
            "rows by expert is 2147483648, allowed: at most 2147483647"
        );
        assert_eq!(said(Expansion::most_slots(1, 1, 1, 0)), "expert alignment is 0, allowed: at least 1");
        assert!(Expansion::most_slots(u32::MAX, u32::MAX, u32::MAX, u32::MAX).is_err());
    }

    #[test]
    fn experts_without_rows_take_no_room() {
        let none = Expansion::new(LocalChoices { topk_idx: &[], source_rank: &[] }, 2, 3, 8).unwrap();
        assert_eq!((none.rows(), none.first(), none.slots()), (0, &[0; 4][..], &[][..]));
        assert_eq!(none.offsets(), [0; 6]);
        let last = LocalChoices { topk_idx: &[-1, 2], source_rank: &[1] };
        let last = Expansion::new(last, 2, 3, 4).unwrap();
        assert_eq!((last.first(), last.slots()), (&[0, 0, 0, 4][..], &[-1, 0][..]));
        assert_eq!(last.padding().collect::<Vec<_>>(), [1, 2, 3]);
        assert_eq!(last.counts(), [0, 0, 1]);
    }

    #[test]
    fn an_expert_that_is_chosen_twice_has_two_rows() {
        let twice = LocalChoices { topk_idx: &[1, 1, 0, 1], source_rank: &[0, 1] };
        let twice = Expansion::new(twice, 2, 3, 1).unwrap();
        assert_eq!(twice.slots(), [1, 2, 0, 3]);
        assert_eq!(twice.slots_of(0).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(twice.padding().count(), 0);
    }
}
