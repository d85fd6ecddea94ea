//! What cases share.

use std::fmt::Display;

use ep_core::ring::Geometry;
use ep_core::{Element, Error, Nanos, Placement, Rings, Settings, Shape, Topology};

pub(super) use crate::backend::finished;
use crate::backend::{Backend, Requirement, Setup};
use crate::harness::env_number;
use crate::scenario::{Scenario, Turn};
use crate::workload::{Batch, RoutingKind, Workload};

/// What a case returns.
pub(super) type Verdict = Result<(), String>;

/// An error as a case reports it.
pub(super) fn text(error: impl Display) -> String {
    error.to_string()
}

/// Fails with `message` unless `holds`.
pub(super) fn ensure(holds: bool, message: impl FnOnce() -> String) -> Verdict {
    if holds { Ok(()) } else { Err(message()) }
}

/// Time allowed to an operation: so many seconds where ranks have free cores, more on machines that are said to be slow
/// (`EP_TIME_FACTOR`).
pub(super) fn allowed(seconds: u64) -> Nanos {
    Nanos::from_secs(seconds * u64::from(env_number("EP_TIME_FACTOR").unwrap_or(1)))
}

/// Seconds allowed to an operation that must succeed, or is refused: nobody waits for them, and a machine that stands still for a moment ends no wait.
pub(super) const PATIENCE: u64 = 60;

/// A plain fresh round.
pub(super) const TURN: Turn = Turn { cached: false, pull: false, return_weights: true, bias: 0, channels: 1 };

/// A small scenario with rings of four slots, to be varied.
pub(super) fn scenario(ranks: u32, tokens: u32) -> Scenario {
    Scenario {
        seed: 5,
        nodes: 1,
        local_experts: 2,
        topk: 3.min(2 * ranks),
        hidden: 40,
        element: Element::Bf16,
        tokens: vec![tokens; ranks as usize],
        routing: RoutingKind::Uniform,
        drop: 0.0,
        rings: Rings::uniform(1, Geometry { slots: 4, chunk: 2, credit: 2 }),
        placement: Placement::Ring,
        arena_bytes: 0,
        outboxes: None,
        uses: Vec::new(),
        full: None,
        rounds: vec![TURN],
        zombie: None,
    }
}

/// Where rows may land on this backend, within a node.
pub(super) fn placements<B: Backend>(backend: &B) -> Vec<Placement> {
    let pulled = backend.lacks(Requirement::Get).is_none().then_some(Placement::Pulled);
    [Placement::Ring, Placement::Direct].into_iter().chain(pulled).collect()
}

/// A scenario whose rows are pulled.
pub(super) fn pulled(ranks: u32, tokens: u32) -> Scenario {
    Scenario { placement: Placement::Pulled, ..scenario(ranks, tokens) }
}

/// A direct scenario with an ample arena.
pub(super) fn direct(ranks: u32, tokens: u32) -> Scenario {
    Scenario { placement: Placement::Direct, arena_bytes: 4 << 20, ..scenario(ranks, tokens) }
}

/// A direct scenario whose batches go through outboxes where they have no room.
pub(super) fn overflowing(ranks: u32, tokens: u32) -> Scenario {
    Scenario { arena_bytes: 0, outboxes: Some((2, 2)), ..direct(ranks, tokens) }
}

/// Checks a scenario under several seeds of the backend's freedom.
pub(super) fn check<B: Backend>(backend: &B, scenario: &Scenario) -> Verdict {
    (0..backend.seeds(3)).try_for_each(|more| {
        let scenario = Scenario { seed: scenario.seed + more, ..scenario.clone() };
        let compared = scenario.check(backend).map_err(|error| format!("seed {}: {error}", scenario.seed))?;
        let expects_rows = scenario.tokens.iter().any(|&tokens| tokens > 0);
        ensure(!expects_rows || compared.rows > 0, || "nothing was compared".into())
    })
}

/// A communicator and the batches it carries.
pub(super) struct Layer {
    pub(super) setup: Setup,
    pub(super) batches: Vec<Batch>,
}

/// `ranks` ranks with two experts each and `tokens` tokens each, top-2, hidden 32.
pub(super) fn layer(ranks: u32, tokens: u32, seed: u64, placement: Placement) -> Result<Layer, Error> {
    let topology = Topology::new(1, ranks)?;
    let shape = Shape::builder().experts(2 * ranks).topk(2).hidden(32).max_tokens(tokens.max(1)).build()?;
    let settings = Settings::builder(&shape, &topology).slots(3).chunk(2).credit(2).placement(placement).build()?;
    let batches = Workload::new(shape, vec![tokens; ranks as usize]).seed(seed).batches()?;
    Ok(Layer { setup: Setup::new(shape, topology, seed)?.settings(settings), batches })
}
