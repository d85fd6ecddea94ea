//! What ranks that meet after a failure agree on: pure, the same rule for every control plane.

use super::{Agreement, Proposal};
use crate::error::Error;
use crate::topology::{Rank, RankSet};

/// The ranks that have come to agree, and what they propose.
///
/// A control plane keeps who has come and when each stops waiting; this says who is still missing, and what all are told once nobody is.
#[derive(Clone, Debug)]
pub struct Assembly {
    ranks: u32,
    come: RankSet,
    mask: RankSet,
    /// The highest that a rank proposed which nobody gave up on.
    generation: u16,
    op: u64,
}

impl Assembly {
    /// Of those who have come, of `ranks` ranks; `out` are those that an earlier agreement went on without.
    pub fn new<'a>(ranks: u32, out: &RankSet, come: impl Iterator<Item = (Rank, &'a Proposal)> + Clone) -> Self {
        let mut mask = out.clone();
        come.clone().for_each(|(_, proposal)| mask.extend(&proposal.mask));
        let members = come.clone().filter(|(rank, _)| !mask.contains(*rank)).map(|(_, proposal)| proposal);
        let highest = |(generation, op): (u16, u64), proposal: &Proposal| {
            (generation.max(proposal.generation), op.max(proposal.op))
        };
        let (generation, op) = members.fold((0, 0), highest);
        Self { ranks, come: come.map(|(rank, _)| rank).collect(), mask, generation, op }
    }

    /// All ranks that those who have come gave up on, and those of before.
    pub const fn mask(&self) -> &RankSet {
        &self.mask
    }

    /// The ranks that have to come and have not, ascending.
    pub fn missing(&self) -> impl Iterator<Item = Rank> + '_ {
        (0..self.ranks).map(Rank).filter(|&rank| !self.mask.contains(rank) && !self.come.contains(rank))
    }

    /// What a rank that has come is told when nobody is missing.
    ///
    /// # Errors
    /// [`Error::Excluded`] to a rank that was given up; [`Error::Unsupported`] to all when no generation is left.
    pub fn answer(&self, rank: Rank) -> Result<Agreement, Error> {
        let spent = || Error::unsupported("a generation after 65535", "a new communicator");
        let generation = self.generation.checked_add(1).ok_or_else(spent)?;
        if self.mask.contains(rank) {
            return Err(Error::Excluded { rank });
        }
        Ok(Agreement { mask: self.mask.clone(), generation, op: self.op })
    }

    /// The members of the next generation.
    pub fn members(&self) -> impl Iterator<Item = Rank> + '_ {
        self.come.iter().filter(|rank| !self.mask.contains(*rank))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proposal(mask: &[u32], generation: u16, op: u64) -> Proposal {
        Proposal { mask: mask.iter().copied().map(Rank).collect(), generation, op }
    }

    fn assembly(ranks: u32, out: &[u32], come: &[(u32, Proposal)]) -> Assembly {
        let out = out.iter().copied().map(Rank).collect();
        Assembly::new(ranks, &out, come.iter().map(|(rank, proposal)| (Rank(*rank), proposal)))
    }

    #[test]
    fn survivors_agree_on_the_union_and_the_highest() {
        let come = [(0, proposal(&[2], 3, 7)), (1, proposal(&[3], 5, 6))];
        let all = assembly(5, &[4], &come);
        assert_eq!(all.missing().next(), None);
        let agreed = all.answer(Rank(1)).unwrap();
        assert_eq!((agreed.generation, agreed.op), (6, 7));
        assert_eq!(agreed.mask.iter().collect::<Vec<_>>(), [Rank(2), Rank(3), Rank(4)]);
        assert_eq!(all.members().collect::<Vec<_>>(), [Rank(0), Rank(1)]);
    }

    #[test]
    fn who_was_given_up_is_told_and_not_counted() {
        let come = [(0, proposal(&[1], 1, 4)), (1, proposal(&[], 9, 99))];
        let all = assembly(3, &[], &come);
        assert_eq!(all.missing().collect::<Vec<_>>(), [Rank(2)]);
        assert_eq!(all.answer(Rank(1)), Err(Error::Excluded { rank: Rank(1) }));
        let agreed = all.answer(Rank(0)).unwrap();
        assert_eq!((agreed.generation, agreed.op), (2, 4));
    }

    #[test]
    fn the_last_generation_is_not_left() {
        let all = assembly(1, &[], &[(0, proposal(&[], u16::MAX, 1))]);
        assert!(matches!(all.answer(Rank(0)), Err(Error::Unsupported { .. })));
    }
}
