//! What is measured: sizes, which experts are chosen, and the rows.

use ep_core::memory::Estimate;
use ep_core::{Element, Error, Layout, Placement, Settings, Shape, Topology};

use super::devices;
use crate::memory;
use crate::rank::layout_of;

/// Which experts tokens choose; all are equally likely.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Choice {
    /// Of all ranks.
    #[default]
    Any,
    /// Of other ranks: no row stays at home, so that with two ranks the links bound what many multiprocessors do.
    Peers,
}

/// What is measured.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Ranks, one a GPU as far as these go.
    pub ranks: u32,
    /// Tokens of each rank.
    pub tokens: u32,
    /// Elements of a row.
    pub hidden: u32,
    /// Choices of a token.
    pub topk: u32,
    /// Experts in all.
    pub experts: u32,
    /// How rows travel to the experts.
    pub element: Element,
    /// Which experts are chosen.
    pub choice: Choice,
    /// Repetitions; the median is told.
    pub repetitions: u32,
}

impl Plan {
    pub(super) fn shape(&self) -> Result<Shape, Error> {
        let Self { experts, topk, hidden, tokens, element, .. } = *self;
        Shape::builder().experts(experts).topk(topk).hidden(hidden).max_tokens(tokens).element(element).build()
    }

    /// Tokens of all ranks: as many rows as one of them may get.
    fn most(&self) -> u64 {
        u64::from(self.ranks) * u64::from(self.tokens)
    }

    pub(super) fn layout(&self) -> Result<Layout, Error> {
        let (shape, topology) = (self.shape()?, Topology::new(1, self.ranks)?);
        let row = shape.result_bytes().max(shape.row_bytes()) + 160;
        let settings = Settings::builder(&shape, &topology)
            .placement(Placement::Direct)
            .arena_bytes(self.most().saturating_mul(3 * row))
            .slots(1)
            .deadline(ep_core::Nanos::from_secs(2))
            .build()?;
        layout_of(&shape, &topology, &settings)
    }

    /// About what one rank takes of its GPU. No GPU is needed.
    ///
    /// # Errors
    /// [`Error::Invalid`] for sizes.
    pub fn footprint(&self) -> Result<Estimate, Error> {
        let layout = self.layout()?;
        let (row, result) = (layout.row().payload_stride(), layout.row().results().payload_stride());
        let (tokens, ranks, topk) = (u64::from(self.tokens), u64::from(self.ranks), u64::from(self.topk));
        let batch = row + 8 * topk + 4 * ranks + result;
        Ok(memory::of_window(&layout)
            .with("batch", tokens.saturating_mul(batch))
            .with("rows of other ranks", self.most().saturating_mul(12 * topk + 8 + result)))
    }

    /// The groups of `width` ranks to which a token's choices go, ascending.
    pub(super) fn groups(&self, choices: &[i64], width: u32) -> Vec<u32> {
        let experts = i64::from(self.experts / self.ranks * width);
        let mut groups: Vec<u32> = choices.iter().map(|expert| (expert / experts) as u32).collect();
        groups.sort_unstable();
        groups.dedup();
        groups
    }

    /// Refuses what its GPUs have no room for, before anything is taken.
    ///
    /// # Errors
    /// [`Error::Invalid`] for sizes and memory; what is missing.
    pub fn admit(&self) -> Result<(), Error> {
        let footprint = self.footprint()?;
        memory::admit(&devices(self.ranks)?, &footprint)
    }
}

/// A choice of experts from a counter: distinct experts.
pub(super) fn route(plan: &Plan, rank: u32) -> Vec<i64> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(u64::from(rank) + 1);
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    };
    let (local, experts) = (plan.experts / plan.ranks, i64::from(plan.experts));
    let own = i64::from(rank * local)..i64::from((rank + 1) * local);
    let is_meant = |expert: &i64| plan.choice == Choice::Any || plan.ranks == 1 || !own.contains(expert);
    let mut all: Vec<i64> = (0..experts).filter(is_meant).collect();
    let mut chosen = Vec::with_capacity((plan.tokens * plan.topk) as usize);
    for _ in 0..plan.tokens {
        for k in 0..plan.topk as usize {
            let other = k + (next() % (all.len() - k) as u64) as usize;
            all.swap(k, other);
        }
        chosen.extend_from_slice(&all[..plan.topk as usize]);
    }
    chosen
}

/// The rows of a rank: values that differ between tokens, ranks and places, all exact in bf16.
pub(super) fn fill(plan: &Plan, rank: u32, stride: usize) -> Vec<u8> {
    let mut bytes = vec![0u8; plan.tokens as usize * stride];
    for (token, row) in bytes.chunks_exact_mut(stride).enumerate() {
        for (at, two) in row.chunks_exact_mut(2).enumerate() {
            let value = ((token * 31 + at * 7 + rank as usize * 13) % 61) as f32 - 30.0;
            two.copy_from_slice(&half::bf16::from_f32(value).to_le_bytes());
        }
    }
    bytes
}
