//! What a dispatch brings to a rank and takes from it: the user's side of the roles.

use std::cell::RefCell;

use zerocopy::{FromBytes, IntoBytes};

use super::Operation;
use crate::buffers::HostRows;
use crate::error::Fault;
use crate::layout::{Block, Choice, RowFormat, RowHeader};
use crate::machine::Machine;
use crate::plan::Plan;
use crate::plant::Plant;
use crate::port::{Offset, Port, Work};
use crate::room::{NoMemory, filled, zeroed};
use crate::shape::MAX_TOPK;
use crate::topology::Rank;

/// A row's header as it travels: its own, then topk choices.
#[derive(Clone)]
pub(crate) struct HeaderBytes {
    bytes: [u8; size_of::<RowHeader>() + MAX_TOPK as usize * size_of::<Choice>()],
    topk: usize,
}

impl HeaderBytes {
    pub(crate) fn new(format: &RowFormat) -> Self {
        let bytes = [0; size_of::<RowHeader>() + MAX_TOPK as usize * size_of::<Choice>()];
        Self { bytes, topk: format.topk() as usize }
    }

    pub(crate) fn set(&mut self, header: &RowHeader, choice: impl Fn(usize) -> Choice) {
        let (own, choices) = self.bytes.split_at_mut(size_of::<RowHeader>());
        own.copy_from_slice(header.as_bytes());
        for (at, bytes) in choices.chunks_exact_mut(size_of::<Choice>()).take(self.topk).enumerate() {
            bytes.copy_from_slice(choice(at).as_bytes());
        }
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.bytes[..size_of::<RowHeader>() + self.topk * size_of::<Choice>()]
    }

    pub(crate) fn as_mut_bytes(&mut self) -> &mut [u8] {
        &mut self.bytes[..size_of::<RowHeader>() + self.topk * size_of::<Choice>()]
    }

    /// Makes of a header that came along the rail that of the row at `position` for `destination`, whose experts are the
    /// `local` from the first on.
    pub(crate) fn localize(&mut self, far: &Self, destination: Rank, local: u32, position: u32) {
        let first = i64::from(destination.0) * i64::from(local);
        self.set(&RowHeader { position, ..far.header() }, |at| {
            let Choice { expert, weight } = far.choice(at);
            let own = i64::from(expert) - first;
            if expert < 0 || !(0..i64::from(local)).contains(&own) {
                return Choice::NONE;
            }
            Choice { expert: own as i32, weight }
        });
    }

    pub(crate) fn header(&self) -> RowHeader {
        RowHeader::read_from_prefix(&self.bytes).map_or(RowHeader::default(), |(header, _)| header)
    }

    pub(crate) fn choice(&self, at: usize) -> Choice {
        let start = size_of::<RowHeader>() + at * size_of::<Choice>();
        Choice::read_from_prefix(&self.bytes[start..]).map_or(Choice::NONE, |(choice, _)| choice)
    }
}

/// What a rank sends: its batch, its plan and the router's choices.
pub(crate) struct Outgoing<'a, W: crate::machine::Window> {
    pub(crate) x: &'a HostRows<W>,
    pub(crate) plan: &'a Plan,
    /// `[tokens, topk]` experts and weights; none when rows carry no choices.
    pub(crate) choices: Option<(&'a [i64], Option<&'a [f32]>)>,
}

impl<W: crate::machine::Window> Outgoing<'_, W> {
    /// Fills the header of the row of `token` for a rank of another node to fan out: choices name experts of all ranks.
    pub(crate) fn far_head<M: Machine>(&self, operation: &Operation<'_, M>, header: &mut HeaderBytes, token: u32) {
        let own = RowHeader {
            source_rank: operation.me.0 + u32::from(operation.plants(Plant::FarRowOfAnotherSource)),
            source_token: token,
            position: 0,
            op: operation.op as u32 + u32::from(operation.plants(Plant::FarRowOfAnotherOp)),
        };
        let topk = operation.layout.shape().topk() as usize;
        header.set(&own, |at| {
            let Some((experts, weights)) = self.choices else { return Choice::NONE };
            let at = token as usize * topk + at;
            match i32::try_from(experts[at]) {
                Ok(expert @ 0..) => Choice { expert, weight: weights.map_or(1.0, |weights| weights[at]) },
                _ => Choice::NONE,
            }
        });
    }

    /// Fills the header of the row of `token` at `position` for `destination`.
    pub(crate) fn head<M: Machine>(
        &self,
        operation: &Operation<'_, M>,
        header: &mut HeaderBytes,
        destination: Rank,
        token: u32,
        position: u32,
    ) {
        let position = position + u32::from(operation.plants(Plant::PositionOffByOne));
        let own = RowHeader { source_rank: operation.me.0, source_token: token, position, op: operation.op as u32 };
        let local = i64::from(operation.layout.local_experts());
        let topk = operation.layout.shape().topk() as usize;
        let first = i64::from(destination.0) * local;
        header.set(&own, |at| {
            let Some((experts, weights)) = self.choices else { return Choice::NONE };
            let at = token as usize * topk + at;
            let expert = experts[at] - first;
            if experts[at] < 0 || !(0..local).contains(&expert) {
                return Choice::NONE;
            }
            Choice { expert: expert as i32, weight: weights.map_or(1.0, |weights| weights[at]) }
        });
    }
}

/// What a rank receives, filled by several roles in any order: each row has its own place.
pub(crate) struct Intake<W: crate::machine::Window> {
    inner: RefCell<Taken<W>>,
}

/// The received rows and what is known of them.
pub(crate) struct Taken<W: crate::machine::Window> {
    pub(crate) x: HostRows<W>,
    /// `[rows, topk]`, or empty when rows carry no choices.
    pub(crate) topk_idx: Vec<i64>,
    pub(crate) topk_weights: Vec<f32>,
    pub(crate) source_token: Vec<i32>,
    pub(crate) source_rank: Vec<i32>,
    /// Rows whose headers have come.
    pub(crate) arrived: u32,
}

impl<W: crate::machine::Window> Intake<W> {
    /// Room for `rows` rows in `x`; `topk` choices of each are kept.
    pub(crate) fn new(x: HostRows<W>, rows: u32, topk: u32) -> Result<Self, NoMemory> {
        let (rows, topk) = (rows as usize, topk as usize);
        let inner = Taken {
            x,
            topk_idx: filled(rows * topk, -1)?,
            topk_weights: zeroed(rows * topk)?,
            source_token: filled(rows, -1)?,
            source_rank: filled(rows, -1)?,
            arrived: 0,
        };
        Ok(Self { inner: RefCell::new(inner) })
    }

    /// Takes a payload from the own window into row `row`.
    pub(crate) fn payload(&self, port: &impl Port, from: Offset, row: u32) -> Result<(), Fault> {
        let mut inner = self.inner.borrow_mut();
        port.charge(Work::Row { bytes: inner.x.row_bytes() as u64 });
        inner.x.fill(row, |part, into| port.read(from.plus(part.start as u64), into))
    }

    /// Takes a payload from the user's memory of the same rank into row `row`, of the own block where there is one.
    pub(crate) fn own(&self, port: &mut impl Port, block: Option<&Block>, row: u32, bytes: &[u8]) -> Result<(), Fault> {
        port.charge(Work::Row { bytes: bytes.len() as u64 });
        match block {
            Some(block) => block.parts(row).try_for_each(|(part, to)| port.write(to, &bytes[part])),
            None => self.inner.borrow_mut().x.write(row, bytes),
        }
    }

    /// Notes what a header says about row `row`.
    pub(crate) fn header(&self, header: &HeaderBytes, row: u32) {
        let mut inner = self.inner.borrow_mut();
        let inner = &mut *inner;
        let (own, at) = (header.header(), row as usize);
        inner.arrived += 1;
        inner.source_token[at] = own.source_token as i32;
        inner.source_rank[at] = own.source_rank as i32;
        let topk = inner.topk_idx.len() / inner.source_token.len();
        for choice in 0..topk {
            let Choice { expert, weight } = header.choice(choice);
            inner.topk_idx[at * topk + choice] = expert.into();
            inner.topk_weights[at * topk + choice] = weight;
        }
    }

    pub(crate) fn into_inner(self) -> Taken<W> {
        self.inner.into_inner()
    }
}
