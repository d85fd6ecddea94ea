//! What a handle keeps: a plan on the device, and what the host knows of it.

use std::sync::{Arc, OnceLock};

use ep_core::engine::Kept;
use ep_core::plan::{Exchange, Membership, Plan};
use ep_core::{Error, Rank, RankSet, Shape, Topology};

use super::Array;
use super::by_expert::Placed;
use super::rows::Held;
use crate::driver::Device;

/// The plan of a dispatch on the device.
#[derive(Debug)]
pub(super) struct DevicePlan {
    pub(super) tokens: u32,
    ranks: u32,
    /// `[tokens, ranks]`: position of a token's row among those from here to the rank, or -1.
    pub(super) position: Array<i32>,
    /// Rows to each rank `[ranks]`, then choices of each expert `[experts]`.
    pub(super) numbers: Array<u32>,
    /// `[ranks, ranks]`: rows from source to destination.
    pub(super) matrix: Array<u32>,
    /// `[ranks]`: tokens of each batch.
    pub(super) tokens_of: Array<u32>,
    /// `[local experts]`: choices received.
    pub(super) arrived: Array<u32>,
    /// `[ranks + 1]`: first row of each source.
    pub(super) first_of: Array<u32>,
    /// Over several servers, once tokens are counted: where the rows went that this rank passes on.
    pub(super) fanout: Option<Fanout>,
}

/// Where the rows went that a rank passes on, by server.
#[derive(Debug)]
pub(super) struct Fanout {
    /// `[nodes]` of `[tokens of the rail peer there, ranks of a node]`: positions, or -1.
    tables: Vec<Array<i32>>,
    /// Their addresses.
    at: Array<i64>,
}

impl Fanout {
    /// Room for what a dispatch of so many tokens passes on.
    fn new(device: &Arc<Device>, topology: &Topology, me: Rank, exchange: &Exchange) -> Result<Self, Error> {
        let table = |node| {
            let tokens = exchange.tokens(topology.rank_at(node, topology.local_of(me)));
            Array::filled(device, tokens as usize * topology.ranks_per_node() as usize, 0xff)
        };
        let tables = topology.all_nodes().map(table).collect::<Result<Vec<_>, _>>()?;
        let at: Vec<i64> = tables.iter().map(|table| table.address() as i64).collect();
        Ok(Self { at: Array::from_values(device, &at)?, tables })
    }

    fn memory(&self) -> impl Iterator<Item = Held> {
        self.tables.iter().map(Array::memory).chain([self.at.memory()])
    }
}

impl DevicePlan {
    /// Room for a plan that the device is to find.
    pub(super) fn new(device: &Arc<Device>, tokens: u32, ranks: u32, shape: &Shape) -> Result<Self, Error> {
        let position = Array::filled(device, tokens as usize * ranks as usize, 0xff)?;
        let numbers = Array::filled(device, (ranks + shape.experts()) as usize, 0)?;
        Self::with(device, tokens, ranks, shape, (position, numbers))
    }

    /// Of a plan that the host has found.
    pub(super) fn of(device: &Arc<Device>, plan: &Plan, ranks: u32, shape: &Shape) -> Result<Self, Error> {
        let numbers: Vec<u32> = plan.rows().iter().chain(plan.experts()).copied().collect();
        let numbers = Array::from_values(device, &numbers)?;
        let position = Array::from_values(device, &positions(plan, ranks))?;
        Self::with(device, plan.tokens(), ranks, shape, (position, numbers))
    }

    fn with(
        device: &Arc<Device>,
        tokens: u32,
        ranks: u32,
        shape: &Shape,
        (position, numbers): (Array<i32>, Array<u32>),
    ) -> Result<Self, Error> {
        let (wide, local_experts) = (ranks as usize, shape.experts() / ranks);
        Ok(Self {
            tokens,
            ranks,
            position,
            numbers,
            matrix: Array::filled(device, wide * wide, 0)?,
            tokens_of: Array::filled(device, wide, 0)?,
            arrived: Array::filled(device, local_experts as usize, 0)?,
            first_of: Array::filled(device, wide + 1, 0)?,
            fanout: None,
        })
    }

    /// What was exchanged.
    pub(super) fn exchanged(&self) -> Result<Exchange, Error> {
        Exchange::new(self.matrix.to_vec()?, self.tokens_of.to_vec()?, self.arrived.to_vec()?)
    }

    /// Takes room for where the rows go that this rank passes on.
    pub(super) fn expect(
        &mut self,
        device: &Arc<Device>,
        topology: &Topology,
        me: Rank,
        exchange: &Exchange,
    ) -> Result<(), Error> {
        if topology.nodes() > 1 {
            self.fanout = Some(Fanout::new(device, topology, me, exchange)?);
        }
        Ok(())
    }

    /// Address of the tables of what is passed on, or 0.
    pub(super) fn fanout(&self) -> u64 {
        self.fanout.as_ref().map_or(0, |fanout| fanout.at.address())
    }

    /// The plan that the device has found.
    fn found(&self, shape: &Shape) -> Result<Plan, Error> {
        let in_rank: Vec<u8> = self.position.to_vec()?.into_iter().map(|at| u8::from(at >= 0)).collect();
        let numbers = self.numbers.to_vec()?;
        let membership = Membership { in_rank: &in_rank, tokens_per_expert: &numbers[self.ranks as usize..] };
        // What goes to masked ranks has been left out.
        Plan::of_membership(shape, self.ranks, &RankSet::new(), membership)
    }

    /// Its memory.
    pub(super) fn memory(&self) -> Vec<Held> {
        let Self { position, numbers, matrix, tokens_of, arrived, first_of, .. } = self;
        let [position, first_of] = [position.memory(), first_of.memory()];
        let six = [position, numbers.memory(), matrix.memory(), tokens_of.memory(), arrived.memory(), first_of];
        six.into_iter().chain(self.fanout.iter().flat_map(Fanout::memory)).collect()
    }
}

fn positions(plan: &Plan, ranks: u32) -> Vec<i32> {
    let mut positions = vec![-1; plan.tokens() as usize * ranks as usize];
    for token in 0..plan.tokens() {
        for &(rank, position) in plan.reached(token) {
            positions[token as usize * ranks as usize + rank.index()] = position as i32;
        }
    }
    positions
}

/// First row of each source at `me`, and the number of all rows.
pub(super) fn first_rows(exchange: &Exchange, ranks: u32, me: Rank) -> Vec<u32> {
    (0..ranks).map(|source| exchange.first_row(Rank(source), me)).chain([exchange.received(me)]).collect()
}

/// What a handle keeps.
#[derive(Debug)]
pub(super) struct Replayed {
    pub(super) on_device: DevicePlan,
    pub(super) shape: Shape,
    /// Fetched when somebody asks.
    pub(super) plan: OnceLock<Arc<Plan>>,
    pub(super) exchange: Arc<Exchange>,
    /// `[rows]`: where each row came from.
    pub(super) source_token: Array<i32>,
    pub(super) source_rank: Array<i32>,
    /// Where each choice stands, if the rows are by expert.
    pub(super) placed: Option<Placed>,
    /// Rows that there is room for.
    pub(super) rows: u32,
    /// Whether those beyond the ones that come become zeros.
    pub(super) zero_spare: bool,
}

impl Kept for Replayed {
    fn size(&self) -> (u32, u32) {
        (self.on_device.tokens, self.rows)
    }

    fn plan(&self) -> Result<Arc<Plan>, Error> {
        if let Some(plan) = self.plan.get() {
            return Ok(Arc::clone(plan));
        }
        let found = Arc::new(self.on_device.found(&self.shape)?);
        Ok(Arc::clone(self.plan.get_or_init(|| found)))
    }

    fn slots(&self) -> Option<u32> {
        self.placed.as_ref().map(Placed::room)
    }

    fn exchange(&self) -> Result<Arc<Exchange>, Error> {
        Ok(Arc::clone(&self.exchange))
    }
}
