//! Draws the choices of one token after another.

use ep_core::{Error, Shape};
use rand::Rng;
use rand::seq::SliceRandom;

use super::{Purpose, Random, RoutingKind, stream};

/// A gate with its scratch memory.
pub(crate) struct Router {
    kind: RoutingKind,
    topk: usize,
    /// `[experts]`: some order of the experts. Skewed: by popularity.
    order: Vec<u32>,
    /// `[experts]`: scores of the current token.
    scores: Vec<f64>,
    /// Experts that the current token may choose.
    candidates: Vec<u32>,
}

impl Router {
    pub(crate) fn new(kind: RoutingKind, shape: &Shape, seed: u64) -> Result<Self, Error> {
        kind.check(shape)?;
        let mut order: Vec<u32> = (0..shape.experts()).collect();
        if matches!(kind, RoutingKind::Skewed { .. }) {
            order.shuffle(&mut stream(seed, Purpose::Popularity, 0));
        }
        Ok(Self {
            kind,
            topk: shape.topk() as usize,
            scores: vec![0.0; order.len()],
            candidates: Vec::with_capacity(order.len()),
            order,
        })
    }

    /// Appends the choices of the next token, and their weights.
    pub(crate) fn token(&mut self, random: &mut Random, topk_idx: &mut Vec<i64>, topk_weights: &mut Vec<f32>) {
        match self.kind {
            RoutingKind::Uniform => {
                let (chosen, _) = self.order.partial_shuffle(random, self.topk);
                topk_idx.extend(chosen.iter().map(|&expert| i64::from(expert)));
                push_normalised(topk_weights, (0..self.topk).map(|_| sigmoid(random)));
            }
            RoutingKind::Grouped { groups, limit } => {
                self.best_of_groups(random, groups as usize, limit as usize);
                topk_idx.extend(self.candidates.iter().map(|&expert| i64::from(expert)));
                push_normalised(topk_weights, self.candidates.iter().map(|&expert| self.scores[expert as usize]));
            }
            RoutingKind::Skewed { exponent } => {
                self.first_arrivals(random, exponent);
                topk_idx.extend(self.candidates.iter().map(|&place| i64::from(self.order[place as usize])));
                push_normalised(topk_weights, (0..self.topk).map(|_| sigmoid(random)));
            }
            RoutingKind::Single => {
                topk_idx.push(0);
                topk_weights.push(1.0);
                topk_idx.resize(topk_idx.len() + self.topk - 1, -1);
                topk_weights.resize(topk_weights.len() + self.topk - 1, 0.0);
            }
        }
    }

    /// Leaves the token's experts in `candidates`, best first.
    fn best_of_groups(&mut self, random: &mut Random, groups: usize, limit: usize) {
        self.scores.iter_mut().for_each(|score| *score = sigmoid(random));
        let size = self.scores.len() / groups;
        let mut ranking: Vec<(usize, f64)> = self.scores.chunks_exact(size).map(two_best).enumerate().collect();
        ranking.sort_unstable_by(|a, b| b.1.total_cmp(&a.1));
        self.candidates.clear();
        for &(group, _) in &ranking[..limit] {
            self.candidates.extend((group * size..(group + 1) * size).map(|expert| expert as u32));
        }
        self.candidates.sort_unstable_by(|&a, &b| self.scores[b as usize].total_cmp(&self.scores[a as usize]));
        self.candidates.truncate(self.topk);
    }

    /// Leaves the token's places in the order of popularity in `candidates`.
    ///
    /// Drawing without replacement in proportion to weights is a race of exponential arrivals whose rates are the
    /// weights. Logarithms, because the weights of steep laws underflow.
    fn first_arrivals(&mut self, random: &mut Random, exponent: f64) {
        for (place, arrival) in self.scores.iter_mut().enumerate() {
            let wait = -(1.0 - random.random::<f64>()).ln();
            *arrival = wait.ln() + exponent * ((place + 1) as f64).ln();
        }
        self.candidates.clear();
        self.candidates.extend(0..self.scores.len() as u32);
        let by_arrival = |&a: &u32, &b: &u32| self.scores[a as usize].total_cmp(&self.scores[b as usize]);
        if self.topk < self.candidates.len() {
            self.candidates.select_nth_unstable_by(self.topk, by_arrival);
            self.candidates.truncate(self.topk);
        }
        self.candidates.sort_unstable_by(by_arrival);
    }
}

/// The score of a logit drawn evenly from -4 to 4.
fn sigmoid(random: &mut Random) -> f64 {
    1.0 / (1.0 + (-random.random_range(-4.0..4.0f64)).exp())
}

fn two_best(scores: &[f64]) -> f64 {
    let (mut first, mut second) = (0.0, 0.0);
    for &score in scores {
        if score > first {
            (first, second) = (score, first);
        } else if score > second {
            second = score;
        }
    }
    first + second
}

/// Appends `scores` scaled to sum to 1.
fn push_normalised(weights: &mut Vec<f32>, scores: impl Iterator<Item = f64>) {
    let start = weights.len();
    weights.extend(scores.map(|score| score as f32));
    let sum: f32 = weights[start..].iter().sum();
    weights[start..].iter_mut().for_each(|weight| *weight /= sum);
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKENS: usize = 2000;

    fn choices(kind: &str, experts: u32, topk: u32, seed: u64) -> Vec<Vec<i64>> {
        let shape = Shape::builder().experts(experts).topk(topk).hidden(1).build().unwrap();
        let mut router = Router::new(kind.parse().unwrap(), &shape, seed).unwrap();
        let mut random = stream(seed, Purpose::Routing, 0);
        let (mut idx, mut weights) = (Vec::new(), Vec::new());
        (0..TOKENS).for_each(|_| router.token(&mut random, &mut idx, &mut weights));
        assert_eq!(weights.len(), idx.len());
        idx.chunks(topk as usize).map(<[i64]>::to_vec).collect()
    }

    fn loads(choices: &[Vec<i64>], experts: usize) -> Vec<usize> {
        let mut loads = vec![0; experts];
        choices.iter().flatten().for_each(|&expert| loads[expert as usize] += 1);
        loads
    }

    #[test]
    fn a_token_never_names_an_expert_twice() {
        for kind in ["uniform", "grouped:4:2", "skewed:3"] {
            for mut token in choices(kind, 16, 8, 1) {
                token.sort_unstable();
                token.dedup();
                assert_eq!(token.len(), 8, "{kind}");
                assert!(token.iter().all(|expert| (0..16).contains(expert)));
            }
        }
        assert!(choices("skewed:50", 8, 8, 1).iter().all(|token| token.len() == 8));
    }

    #[test]
    fn uniform_loads_are_even() {
        let expected = TOKENS * 4 / 16;
        assert!(loads(&choices("uniform", 16, 4, 2), 16).iter().all(|load| load.abs_diff(expected) < expected / 4));
    }

    #[test]
    fn grouped_tokens_stay_within_their_limit() {
        let mut widest = 0;
        for token in choices("grouped:8:3", 64, 6, 3) {
            let mut groups: Vec<_> = token.iter().map(|expert| expert / 8).collect();
            groups.sort_unstable();
            groups.dedup();
            assert!(groups.len() <= 3);
            widest = widest.max(groups.len());
        }
        assert_eq!(widest, 3);
    }

    #[test]
    fn skewed_loads_fall_by_zipf_in_an_order_of_the_seed() {
        let order = |seed| {
            let loads = loads(&choices("skewed:1", 8, 1, seed), 8);
            let mut order: Vec<_> = (0..8).collect();
            order.sort_by_key(|&expert| std::cmp::Reverse(loads[expert]));
            (order.clone(), loads[order[0]], loads[order[1]])
        };
        let (first, most, second) = order(4);
        // 1 / (1 + 1/2 + ... + 1/8) of the tokens go to the most popular, half as many to the next.
        assert!(most.abs_diff(TOKENS * 1000 / 2718) < TOKENS / 20 && second.abs_diff(most / 2) < TOKENS / 20);
        assert_ne!(first, order(5).0);
    }

    #[test]
    fn single_means_expert_0_only() {
        assert!(choices("single", 8, 3, 0).iter().all(|token| token[..] == [0, -1, -1]));
    }
}
