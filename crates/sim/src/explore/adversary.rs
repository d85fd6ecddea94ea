//! The adversary of the explore scheduler: seeded draws, shaped by a personality that is itself drawn from the seed.

use ep_core::Rank;
use ep_core::port::Role;
use rand_xoshiro::Xoshiro256PlusPlus;
use rand_xoshiro::rand_core::{RngCore, SeedableRng};

/// A probability in 1/256.
type Odds = u8;

/// Who runs (almost) only when nothing else can.
#[derive(Clone, Copy, Debug)]
enum Victim {
    Nobody,
    Rank(Rank),
    /// The roles of one rank that fall into one of [`CLASSES`] classes.
    Roles(Rank, u32),
}

const CLASSES: u32 = 3;

/// Inclinations that hold for a whole run: uniform draws alone would make every schedule look like every other.
#[derive(Clone, Copy, Debug)]
struct Personality {
    /// Delivering an effect, when a role could run instead.
    deliver: Odds,
    /// Holding back a publish that could be delivered, when a role could run instead.
    hold: Odds,
    /// Delivering only a piece of a transfer.
    tear: Odds,
    /// Parking a role at a verb. Never zero: a role that polls must not keep the others from running for ever.
    preempt: Odds,
    victim: Victim,
}

/// Draws every decision that the rules leave open.
#[derive(Debug)]
pub(crate) struct Adversary {
    draws: Xoshiro256PlusPlus,
    personality: Personality,
}

impl Adversary {
    /// The adversary of a seed, for a cluster of `ranks`.
    pub(crate) fn new(seed: u64, ranks: u32) -> Self {
        let mut draws = Xoshiro256PlusPlus::seed_from_u64(seed);
        let mut one_of = |choices: &[Odds]| choices[below(&mut draws, choices.len() as u64) as usize];
        let (deliver, hold) = (one_of(&[3, 32, 128, 224, 253]), one_of(&[0, 0, 128, 250]));
        let (tear, preempt) = (one_of(&[0, 32, 128]), one_of(&[4, 32, 128, 255]));
        let rank = Rank(below(&mut draws, u64::from(ranks)) as u32);
        let victim = match below(&mut draws, 4) {
            0 => Victim::Rank(rank),
            1 => Victim::Roles(rank, below(&mut draws, u64::from(CLASSES)) as u32),
            _ => Victim::Nobody,
        };
        Self { draws, personality: Personality { deliver, hold, tear, preempt, victim } }
    }

    /// A number below `limit`, which is not zero.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        below(&mut self.draws, limit as u64) as usize
    }

    /// Whether a role is parked at the verb that it starts.
    pub(crate) fn preempts(&mut self) -> bool {
        self.chance(self.personality.preempt)
    }

    /// Whether to deliver an effect although a role could run.
    pub(crate) fn delivers(&mut self) -> bool {
        self.chance(self.personality.deliver)
    }

    /// Whether to hold a publish back although it could be delivered.
    pub(crate) fn holds(&mut self) -> bool {
        self.chance(self.personality.hold)
    }

    /// Whether a victim gets a turn although others could run: without any, roles that poll would starve it for ever.
    pub(crate) fn pities(&mut self) -> bool {
        self.draws.next_u32() < 1 << 20
    }

    /// The piece `start..end` of a transfer of `len` bytes to deliver now: mostly all of it.
    pub(crate) fn tears(&mut self, len: u64) -> (u64, u64) {
        if len < 2 || !self.chance(self.personality.tear) {
            return (0, len);
        }
        let (a, b) = (below(&mut self.draws, len + 1), below(&mut self.draws, len + 1));
        if a == b { (0, len) } else { (a.min(b), a.max(b)) }
    }

    /// The units `start..end` of `count` to deliver now: a single one as often as a piece of them.
    pub(crate) fn scatters(&mut self, count: u64) -> (u64, u64) {
        if self.below(2) == 0 {
            return self.tears(count);
        }
        let one = below(&mut self.draws, count);
        (one, one + 1)
    }

    /// Whether the personality starves `role` of `rank`, or with no role the whole rank.
    pub(crate) fn starves(&self, rank: Rank, role: Option<Role>) -> bool {
        match (self.personality.victim, role) {
            (Victim::Rank(victim), _) => victim == rank,
            (Victim::Roles(victim, class), Some(role)) => {
                let peer = role.peer.map_or(0, |peer| peer.0);
                victim == rank && (role.duty as u32 + peer + u32::from(role.track)) % CLASSES == class
            }
            _ => false,
        }
    }

    fn chance(&mut self, odds: Odds) -> bool {
        (self.draws.next_u32() >> 24) < u32::from(odds)
    }
}

fn below(draws: &mut Xoshiro256PlusPlus, limit: u64) -> u64 {
    ((u128::from(draws.next_u64()) * u128::from(limit)) >> 64) as u64
}
