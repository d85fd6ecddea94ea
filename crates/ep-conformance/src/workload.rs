//! Batches and routings from a seed.
//!
//! Every rank draws from a stream of its own, so that the batch of a rank depends on the seed, the rank and its own
//! number of tokens only.

mod kind;
mod router;

pub use kind::RoutingKind;

use ep_core::{Error, Rank, Shape, reference};
use rand::{Rng, RngCore, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use router::Router;

/// The generator of all workloads.
pub(crate) type Random = Xoshiro256PlusPlus;

/// What one rank brings to a dispatch.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Batch {
    /// Number of tokens.
    pub tokens: u32,
    /// `[tokens, hidden]`: bits of bf16.
    pub x: Vec<u16>,
    /// `[tokens, topk]`: expert over all ranks, or -1.
    pub topk_idx: Vec<i64>,
    /// `[tokens, topk]`: weights.
    pub topk_weights: Vec<f32>,
}

impl Batch {
    /// The batch as the oracle takes it.
    pub fn reference(&self) -> reference::Batch<'_> {
        reference::Batch {
            x: &self.x,
            routing: reference::Routing::TopK { topk_idx: &self.topk_idx, topk_weights: Some(&self.topk_weights) },
        }
    }

    /// Turns each choice into -1 with probability `p`. The weights stay: nobody may look at those of dropped choices.
    ///
    /// # Errors
    /// [`Error::Invalid`] when `p` is not a probability.
    pub fn drop_choices(&mut self, p: f64, seed: u64, rank: Rank) -> Result<(), Error> {
        check_probability(p)?;
        let mut random = stream(seed, Purpose::Drop, rank.0);
        for choice in self.topk_idx.iter_mut().filter(|choice| **choice >= 0) {
            if random.random_bool(p) {
                *choice = -1;
            }
        }
        Ok(())
    }
}

/// Describes the batches of all ranks.
#[derive(Clone, Debug)]
#[must_use]
pub struct Workload {
    shape: Shape,
    tokens: Vec<u32>,
    kind: RoutingKind,
    drop: f64,
    seed: u64,
}

impl Workload {
    /// Uniform routing of `tokens[rank]` tokens on each rank, nothing dropped, seed 0.
    pub const fn new(shape: Shape, tokens: Vec<u32>) -> Self {
        Self { shape, tokens, kind: RoutingKind::Uniform, drop: 0.0, seed: 0 }
    }

    /// How tokens choose experts.
    pub const fn kind(mut self, kind: RoutingKind) -> Self {
        self.kind = kind;
        self
    }

    /// Each choice becomes -1 with this probability.
    pub const fn drop(mut self, p: f64) -> Self {
        self.drop = p;
        self
    }

    /// What everything is drawn from.
    pub const fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// `[ranks]`: the batches. Rows hold no NaN, infinity or zero; their magnitudes span eight binades, so that a sum's
    /// order and rounding show. The weights of a token's choices sum to 1 before any are dropped.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the kind does not fit the shape, or the probability is none.
    pub fn batches(&self) -> Result<Vec<Batch>, Error> {
        (0..self.tokens.len() as u32).map(|rank| self.batch(Rank(rank))).collect()
    }

    /// The batch of `rank`.
    ///
    /// # Errors
    /// As [`Workload::batches`].
    pub fn batch(&self, rank: Rank) -> Result<Batch, Error> {
        check_probability(self.drop)?;
        let mut router = Router::new(self.kind, &self.shape, self.seed)?;
        let tokens = self.tokens[rank.index()];
        let choices = tokens as usize * self.shape.topk() as usize;
        let mut batch = Batch {
            tokens,
            x: rows(&mut stream(self.seed, Purpose::Rows, rank.0), tokens as usize * self.shape.hidden() as usize),
            topk_idx: Vec::with_capacity(choices),
            topk_weights: Vec::with_capacity(choices),
        };
        let mut random = stream(self.seed, Purpose::Routing, rank.0);
        for _ in 0..tokens {
            router.token(&mut random, &mut batch.topk_idx, &mut batch.topk_weights);
        }
        if self.drop > 0.0 {
            batch.drop_choices(self.drop, self.seed, rank)?;
        }
        Ok(batch)
    }
}

/// What a stream of random numbers is for.
#[derive(Clone, Copy)]
pub(crate) enum Purpose {
    Rows = 1,
    Routing = 2,
    Drop = 3,
    Popularity = 4,
}

/// A stream of its own for each seed, purpose and rank.
pub(crate) fn stream(seed: u64, purpose: Purpose, rank: u32) -> Random {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    bytes[8..12].copy_from_slice(&rank.to_le_bytes());
    bytes[12] = purpose as u8;
    let mut random = Random::from_seed(bytes);
    // Seeds that differ in few bits give streams that begin alike.
    for _ in 0..16 {
        random.next_u64();
    }
    random
}

/// Numbers of any sign, 2^-6 to 2^2 in magnitude.
fn rows(random: &mut Random, elements: usize) -> Vec<u16> {
    let mut x = Vec::with_capacity(elements);
    while x.len() < elements {
        let bits = random.next_u64();
        let missing = elements - x.len();
        x.extend((0..4).map(|part| element((bits >> (16 * part)) as u16)).take(missing));
    }
    x
}

const fn element(bits: u16) -> u16 {
    const LEAST_EXPONENT: u16 = 127 - 6;
    let sign = bits & 0x8000;
    let exponent = LEAST_EXPONENT + (bits >> 7 & 7);
    sign | exponent << 7 | bits & 0x7f
}

fn check_probability(p: f64) -> Result<(), Error> {
    if (0.0..=1.0).contains(&p) { Ok(()) } else { Err(Error::invalid("drop", p, "0 to 1")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape() -> Shape {
        Shape::builder().experts(32).topk(4).hidden(33).max_tokens(64).build().unwrap()
    }

    #[test]
    fn a_seed_repeats_and_another_differs() {
        let make = |seed| Workload::new(shape(), vec![5, 0, 9]).seed(seed).batches().unwrap();
        assert_eq!(make(3), make(3));
        assert_ne!(make(3), make(4));
        assert_ne!(make(3)[0].x[..33], make(3)[2].x[..33]);
    }

    #[test]
    fn a_batch_does_not_depend_on_other_ranks() {
        let few = Workload::new(shape(), vec![5, 9]).batches().unwrap();
        let many = Workload::new(shape(), vec![50, 9]).batches().unwrap();
        assert_eq!(few[1], many[1]);
    }

    #[test]
    fn rows_are_finite_and_their_magnitudes_differ() {
        let batch = Workload::new(shape(), vec![64]).batch(Rank(0)).unwrap();
        let values: Vec<f32> = batch.x.iter().map(|&bits| half::bf16::from_bits(bits).to_f32()).collect();
        assert!(values.iter().all(|value| value.is_finite() && (0.015..4.0).contains(&value.abs())));
        assert!(values.iter().any(|value| value.abs() < 0.02) && values.iter().any(|value| value.abs() > 3.0));
        assert!(values.iter().any(|value| *value < 0.0));
    }

    #[test]
    fn weights_of_a_token_sum_to_one() {
        for kind in ["uniform", "grouped:8:2", "skewed:1.2", "single"] {
            let work = Workload::new(shape(), vec![40]).kind(kind.parse().unwrap());
            for weights in work.batch(Rank(0)).unwrap().topk_weights.chunks(4) {
                assert!((weights.iter().sum::<f32>() - 1.0).abs() < 1e-6, "{kind}: {weights:?}");
            }
        }
    }

    #[test]
    fn drops_take_the_share_they_are_told() {
        let batch = |p| Workload::new(shape(), vec![2500]).drop(p).batch(Rank(0)).unwrap();
        let dropped = |p| batch(p).topk_idx.iter().filter(|&&choice| choice == -1).count();
        assert_eq!((dropped(0.0), dropped(1.0)), (0, 10_000));
        assert!((2000..3000).contains(&dropped(0.25)));
        let error = Workload::new(shape(), vec![1]).drop(1.5).batch(Rank(0)).unwrap_err();
        assert_eq!(error.to_string(), "drop is 1.5, allowed: 0 to 1");
    }
}
