//! A handle's plan on the device.

use std::sync::Arc;

use ep_core::device::PlanHead;
use ep_core::{Rank, Topology};

use crate::driver::{Scratch, Stream};
use crate::error::CudaError;

/// Where a handle's plan lies on the device.
#[derive(Debug)]
pub(crate) struct DevicePlan {
    /// i32 `[tokens, ranks]`.
    pub(crate) position: Scratch,
    /// `EpPlan`; then u32 matrix `[ranks, ranks]`, first_at `[ranks]`, first_of `[ranks + 1]`, tokens_of `[ranks]`, choices of
    /// each expert `[experts]`, and choices received of each local expert.
    numbers: Scratch,
    /// Over several nodes: i32 `[tokens, ranks of a node]` for each rank of this rail in other nodes, to which ranks of this node its tokens go, one after the other.
    fanout: Option<Scratch>,
    ranks: u32,
    tokens: u32,
    experts: u32,
}

/// Bytes before a handle's numbers.
const PLAN_BYTES: u64 = size_of::<PlanHead>() as u64;

impl DevicePlan {
    pub(crate) fn new(stream: &Arc<Stream>, tokens: u32, ranks: u32, experts: u32) -> Result<Self, CudaError> {
        let wide = ranks as usize;
        let numbers = wide * wide + 3 * wide + 1 + (experts + experts / ranks) as usize;
        Ok(Self {
            // A captured dispatch goes nowhere before its graph has run.
            position: Scratch::of_byte_at_first(stream, tokens as usize, wide * 4, 0xff)?,
            numbers: Scratch::new(stream, PLAN_BYTES as usize + 4 * numbers)?,
            fanout: None,
            ranks,
            tokens,
            experts,
        })
    }

    /// Takes memory for what `me` learns of the rows that it fans out: of batches of as many tokens as `tokens` says of each rank.
    pub(crate) fn fan_out(
        &mut self,
        topology: &Topology,
        me: Rank,
        tokens: impl Fn(Rank) -> u32,
    ) -> Result<(), CudaError> {
        let (local, node) = (topology.local_of(me), topology.node_of(me));
        let others = topology.all_nodes().filter(|other| *other != node);
        let tokens: usize = others.map(|other| tokens(topology.rank_at(other, local)) as usize).sum();
        self.fanout = Some(Scratch::of(self.position.stream(), tokens, 4 * topology.ranks_per_node() as usize)?);
        Ok(())
    }

    /// Where it lies what is fanned out; 0 on one node.
    pub(crate) fn fanout(&self) -> u64 {
        self.fanout.as_ref().map_or(0, Scratch::address)
    }

    /// Words of its numbers, from the one at an address on. Waits.
    pub(crate) fn words(&self, at: u64, count: usize) -> Result<Vec<u32>, CudaError> {
        words(&self.numbers, (at - self.address()) as usize, count)
    }

    /// Tokens of the batch that it is of.
    pub(crate) const fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Where its numbers lie.
    pub(crate) const fn address(&self) -> u64 {
        self.numbers.address()
    }

    pub(crate) const fn matrix(&self) -> u64 {
        self.address() + PLAN_BYTES
    }

    pub(crate) const fn first_at(&self) -> u64 {
        self.matrix() + 4 * self.ranks as u64 * self.ranks as u64
    }

    pub(crate) const fn first_of(&self) -> u64 {
        self.first_at() + 4 * self.ranks as u64
    }

    pub(crate) const fn tokens_of(&self) -> u64 {
        self.first_of() + 4 * (self.ranks as u64 + 1)
    }

    pub(crate) const fn chosen(&self) -> u64 {
        self.tokens_of() + 4 * self.ranks as u64
    }

    pub(crate) const fn arrived(&self) -> u64 {
        self.chosen() + 4 * self.experts as u64
    }

    /// `[tokens, ranks]`: 1 where a token goes to a rank; and choices of each expert, `[experts]`. Waits.
    pub(crate) fn membership(&self) -> Result<(Vec<u8>, Vec<u32>), CudaError> {
        let positions = words(&self.position, 0, self.tokens as usize * self.ranks as usize)?;
        let in_rank = positions.into_iter().map(|position| u8::from(position != u32::MAX)).collect();
        Ok((in_rank, self.words(self.chosen(), self.experts as usize)?))
    }

    /// What was exchanged: rows from source to destination `[ranks, ranks]`, tokens of each rank's batch `[ranks]`, and choices
    /// received of each local expert. Waits.
    pub(crate) fn exchanged(&self) -> Result<[Vec<u32>; 3], CudaError> {
        let (ranks, local) = (self.ranks as usize, (self.experts / self.ranks) as usize);
        Ok([
            self.words(self.matrix(), ranks * ranks)?,
            self.words(self.tokens_of(), ranks)?,
            self.words(self.arrived(), local)?,
        ])
    }
}

/// Words of device memory, from byte `at` on. Waits.
fn words(memory: &Scratch, at: usize, count: usize) -> Result<Vec<u32>, CudaError> {
    let mut bytes = vec![0; 4 * count];
    memory.read(at, &mut bytes)?;
    Ok(bytes.as_chunks::<4>().0.iter().map(|&word| u32::from_le_bytes(word)).collect())
}
