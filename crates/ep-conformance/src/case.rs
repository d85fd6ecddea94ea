//! A dispatch and a combine that call no endpoint: what each rank brings, and what the oracle says of it. Devices that run kernels by hand take
//! their jobs from here.

use ep_core::plan::{Plan, TopK};
use ep_core::reference::{self, Combined, Returned, World};
use ep_core::{Error, Rank, RankSet, Shape, Topology};

use crate::arrival::Arrival;
use crate::workload::{Batch, RoutingKind, Workload};

/// What is drawn for the ranks.
#[derive(Clone, Debug)]
pub struct Draw {
    /// `[ranks]`.
    pub tokens: Vec<u32>,
    /// How tokens choose experts.
    pub routing: RoutingKind,
    /// Each choice is dropped with this probability.
    pub drop: f64,
    /// Rows of bias, 0 to 2.
    pub bias: usize,
    /// Rows and choices come from it; rows of bias from the two seeds behind it.
    pub seed: u64,
}

/// Everything that the oracle knows of a dispatch and a combine.
#[derive(Clone, Debug)]
pub struct Case {
    /// `[ranks]`: what they bring.
    pub batches: Vec<Batch>,
    /// `[ranks]`: what they receive.
    pub arrivals: Vec<Arrival>,
    /// `[ranks]`: `[rows, hidden]` of bf16, the experts' results for the received rows.
    pub y: Vec<Vec<u16>>,
    /// `[ranks]`: rows of bias, `[tokens, hidden]` of bf16 each.
    pub bias: Vec<Vec<Vec<u16>>>,
    /// `[ranks]`: what they get back.
    pub combined: Vec<Combined>,
}

impl Case {
    /// Draws what the ranks bring, and asks the oracle.
    ///
    /// # Errors
    /// [`Error::Invalid`] where a probability is none, the routing does not fit the shape, or ranks do not divide the experts.
    pub fn new(shape: Shape, topology: Topology, draw: &Draw) -> Result<Self, Error> {
        let world = World::new(shape, topology, RankSet::new())?;
        let drawn =
            |seed, drop| Workload::new(shape, draw.tokens.clone()).kind(draw.routing).drop(drop).seed(seed).batches();
        let batches = drawn(draw.seed, draw.drop)?;
        let arrivals = Arrival::expected(&world, &batches);
        let y: Vec<_> = (0..).map(Rank).zip(&arrivals).map(|(rank, got)| got.experts(&world, rank)).collect();
        let rows = (1..=draw.bias as u64).map(|which| drawn(draw.seed + which, 0.0)).collect::<Result<Vec<_>, _>>()?;
        let of_rank = |rank: usize| rows.iter().map(|batches| batches[rank].x.clone()).collect();
        let bias: Vec<Vec<_>> = (0..batches.len()).map(of_rank).collect();
        let returned: Vec<_> = (0..batches.len())
            .map(|rank| Returned {
                y: &y[rank],
                topk_weights: Some(&arrivals[rank].received.topk_weights),
                tokens: batches[rank].tokens as usize,
                bias: [0, 1].map(|which| bias[rank].get(which).map(|bias| &bias[..])),
            })
            .collect();
        let received: Vec<_> = arrivals.iter().map(|arrival| arrival.received.clone()).collect();
        let combined = reference::combine(&world, &received, &returned);
        Ok(Self { batches, arrivals, y, bias, combined })
    }

    /// `[ranks]`: what their choices say.
    ///
    /// # Errors
    /// As [`Plan::of_topk`].
    pub fn plans(&self, shape: &Shape) -> Result<Vec<Plan>, Error> {
        let ranks = self.batches.len() as u32;
        let plan = |batch: &Batch| Plan::of_topk(shape, ranks, &RankSet::new(), TopK { topk_idx: &batch.topk_idx });
        self.batches.iter().map(plan).collect()
    }
}

/// i32 `[tokens, ranks]` of a plan, as kernels take it: positions, -1 where a token does not go.
pub fn positions(plan: &Plan, ranks: u32) -> Vec<i32> {
    let mut positions = vec![-1; (plan.tokens() * ranks) as usize];
    for token in 0..plan.tokens() {
        for &(rank, position) in plan.reached(token) {
            positions[(token * ranks) as usize + rank.index()] = position as i32;
        }
    }
    positions
}
