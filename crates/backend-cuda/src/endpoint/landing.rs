//! Memory for the rows of a dispatch, and the kernels that bring them.

use std::sync::Arc;

use ep_core::engine::Scalar;
use ep_core::layout::{Block, KernelRings, Kind, NO_BASE};
use ep_core::settings::OutboxSteps;
use ep_core::{Endpoint as _, Error, Rings};

use super::by_expert::{Placed, Spreading};
use super::{Array, CudaEndpoint, Rows};
use crate::args;
use crate::driver::Capture;
use crate::rank::{Aside, Call, DevicePlan};

/// What a dispatch is made of, checked.
pub(super) struct Batch<'a> {
    pub(super) call: Call,
    pub(super) rings: Rings,
    /// What it uses of outboxes, where its rows are pulled from some.
    pub(super) pulled: Option<OutboxSteps>,
    pub(super) x: &'a Rows,
    pub(super) tokens: u32,
    pub(super) plan: &'a DevicePlan,
    /// Addresses of choices and weights; 0 where there are none.
    pub(super) choices: (u64, u64),
    /// `[room]`: token and rank of each row at its source. A cached dispatch has those of the first, and leaves them as they are.
    pub(super) sources: (Array<i32>, Array<i32>),
    /// Rows to make room for.
    pub(super) room: u32,
    /// Whether fewer may come.
    pub(super) spare: bool,
    /// Whether rows beyond those that come become zeros.
    pub(super) zero_spare: bool,
    /// Whether the host does not know yet that there is room for them all: then the kernels look.
    pub(super) is_ahead: bool,
    /// Where they are to stand by expert.
    pub(super) placed: Option<&'a Placed>,
}

/// Where a dispatch's results go.
pub(super) struct Landing {
    pub(super) block: Option<Block>,
    pub(super) x: Option<Rows>,
    pub(super) topk_idx: Array<i64>,
    pub(super) topk_weights: Array<f32>,
    /// Where rows are to stand by expert, and the weights of their choices where these travel.
    pub(super) by_expert: Option<(Rows, Option<Array<f32>>)>,
}

impl CudaEndpoint {
    /// Waits for memory where the rows would be placed and have no room: they would go through rings.
    pub(super) async fn make_room_for(&self, batch: &Batch<'_>) {
        if self.places() && batch.pulled.is_none() {
            self.make_room(self.layout().row(), batch.room).await;
        }
    }

    /// Takes a block for as many rows of a batch, to be granted; none where there is no room.
    pub(super) fn take_block(&mut self, rows: u32) {
        *self.desk.granted() = self.desk.arena().take(self.layout().row(), rows);
    }

    /// Gives back the block that was taken: peers were told nothing of it.
    pub(super) fn give_block(&mut self) {
        self.desk.granted().take().into_iter().for_each(|block| self.desk.arena().give(&block));
    }

    /// Takes memory for what comes, and enqueues the kernels that bring it.
    pub(super) fn landed(&mut self, batch: &Batch<'_>, capture: Option<&Capture>) -> Result<Landing, Error> {
        if self.places() && batch.pulled.is_none() {
            self.take_block(batch.room);
        }
        self.enqueued(batch, capture)
    }

    /// The same where a block was taken already, or there is none.
    pub(super) fn enqueued(&mut self, batch: &Batch<'_>, capture: Option<&Capture>) -> Result<Landing, Error> {
        let landing = self.landing(batch);
        let moved = landing.and_then(|landing| self.move_rows(batch, &landing).map(|()| landing));
        if moved.is_err() && capture.is_some() {
            self.give_block();
        }
        moved
    }

    /// Room for `len` numbers, undefined; of none it costs nothing.
    pub(super) fn room_for<T: Scalar>(&self, len: usize) -> Result<Array<T>, Error> {
        match len {
            0 => Ok(Array::of_memory(Arc::clone(&self.device.nothing), 0)),
            _ => Array::new(self.stream(), len),
        }
    }

    /// Takes memory for what comes elsewhere than in the block.
    fn landing(&mut self, batch: &Batch<'_>) -> Result<Landing, Error> {
        let row = *self.layout().row();
        let stream = Arc::clone(self.stream());
        let block = *self.desk.granted();
        let x = match block {
            Some(_) => None,
            None => Some(Rows::landing(&stream, batch.room, &row)?),
        };
        let choices = if batch.choices.0 != 0 { batch.room as usize * row.topk() as usize } else { 0 };
        let by_expert = match batch.placed {
            Some(placed) => {
                // Also where no row comes: what a batch tells does not depend on what came. Zeros, once the slots are found.
                let weights = match batch.choices.0 {
                    0 => None,
                    _ => Some(Array::new(self.stream(), placed.room() as usize)?),
                };
                Some((Rows::landing(&stream, placed.room(), &row)?, weights))
            }
            None => None,
        };
        let (topk_idx, topk_weights) = (self.room_for(choices)?, self.room_for(choices)?);
        let landing = Landing { block, x, topk_idx, topk_weights, by_expert };
        if landing.block.is_none() && batch.spare {
            // Rows beyond those that come name no expert, token or rank; received ones are written over it.
            // SAFETY: where the call is captured, its results are kept by the graph (`keep_received`).
            unsafe {
                landing.topk_idx.fill(0xff)?;
                landing.topk_weights.fill(0)?;
                batch.sources.0.fill(0xff)?;
                batch.sources.1.fill(0xff)?;
            }
        }
        Ok(landing)
    }

    /// Enqueues the kernels of a batch whose counts are known, or that look by themselves whether there is room.
    fn move_rows(&mut self, batch: &Batch<'_>, landing: &Landing) -> Result<(), Error> {
        let direct = self.places();
        let fresh = batch.call.kind != Kind::CachedDispatch;
        let plan = batch.plan;
        let (topk_idx, topk_weights) = batch.choices;
        let (scales, strides) = self.scales(batch.x);
        let (tokens, ranks) = &batch.sources;
        let (out_token, out_rank) = if fresh { (tokens.address(), ranks.address()) } else { (0, 0) };
        let (idx, weights) =
            if topk_idx == 0 { (0, 0) } else { (landing.topk_idx.address(), landing.topk_weights.address()) };
        let ring = args::DispatchRing {
            rings: KernelRings::new(self.layout(), batch.call.kind, &batch.rings),
            x: self.address(batch.x),
            x_stride: batch.x.stride() as u64,
            scales,
            scales_token: strides.row,
            scales_word: strides.word,
            position: plan.position.address(),
            topk_idx,
            topk_weights,
            first_of: plan.first_of(),
            out: landing.x.as_ref().map_or(0, |x| self.address(x)),
            out_scales: landing.x.as_ref().map_or(0, |x| self.scales(x).0),
            out_idx: idx,
            out_weights: weights,
            out_token,
            out_rank,
            tokens: batch.tokens,
            notes: direct.into(),
            matrix: plan.matrix(),
            tokens_of: plan.tokens_of(),
            fanout: plan.fanout(),
            base: landing.block.as_ref().map_or(NO_BASE, |block| block.base().0),
            base_rows: landing.block.as_ref().map_or(0, Block::room),
            ahead: batch.is_ahead.into(),
            ..args::DispatchRing::default()
        };
        let unpack = landing.block.filter(|_| fresh).map(|block| args::Unpack {
            base: block.base().0,
            first_of: plan.first_of(),
            topk_idx: idx,
            topk_weights: weights,
            source_token: out_token,
            source_rank: out_rank,
            rows: block.rows(),
            ahead: batch.is_ahead.into(),
        });
        let block = landing.block.map(|block| (block.codes(0).offset, block.scales(0).offset));
        let block = block.map(|(codes, scales)| (self.window.address(codes), self.window.address(scales)));
        // Where rows come to, and their scales.
        let (x, scales) = block.unwrap_or((ring.out, ring.out_scales));
        let spreading = batch.placed.zip(landing.by_expert.as_ref()).map(|(placed, (out, of_slots))| Spreading {
            x: (x, scales),
            // A cached dispatch brings no choices: their slots are known.
            topk_idx: idx,
            unpack,
            plan,
            placed,
            sources: (tokens.address(), ranks.address()),
            weights: (weights, of_slots.as_ref().map_or(0, Array::address)),
            zeros: batch.zero_spare,
            out,
        });
        if let Some(steps) = &batch.pulled {
            // SAFETY: rows, routing, plan and results are memory of the own stream's, with room for so many rows.
            unsafe { self.device.dispatch_pulled(batch.call, &ring, steps, plan.tokens_of()) }?;
        } else if direct && self.far().is_none() {
            // Of a cached dispatch everybody knows what headers would say.
            let placing = args::Dispatch {
                ring,
                first_at: plan.first_at(),
                base: ring.base,
                base_rows: ring.base_rows,
                headers: fresh.into(),
                lots: self.device.lots(),
                ..args::Dispatch::default()
            };
            if let Some(spreading) = &spreading {
                let launches = self.launches(batch, landing);
                if launches > 1 {
                    return self.move_by_lots(batch.call, &placing, launches, spreading);
                }
            }
            let args = args::Dispatch { end_lot: placing.lots, ..placing };
            // SAFETY: rows, routing, plan and results are memory of the own stream's, with room for so many rows; where nobody knows that yet, the kernels
            // look before they touch any (EpLocal.ahead).
            unsafe { self.device.dispatch(batch.call, &args) }?;
        } else {
            // SAFETY: as above.
            unsafe { self.device.dispatch_ring(batch.call, &ring) }?;
        }
        if let Some(args) = unpack.as_ref().filter(|_| spreading.is_none()) {
            // SAFETY: as above, and as many rows as the block has.
            unsafe { self.device.unpack(batch.call, args) }?;
        }
        // Of rows by expert those by source are not the user's.
        if batch.zero_spare && batch.placed.is_none() {
            let args = args::Blank { first_of: plan.first_of(), x, scales, rows: batch.room, reserved: 0 };
            // SAFETY: as above, and as much room as the batch was given.
            unsafe { self.device.blank(batch.call, &args) }?;
        }
        spreading.map_or(Ok(()), |spreading| self.spread(batch.call, &spreading))
    }

    /// Launches that place a batch's rows.
    fn launches(&self, batch: &Batch<'_>, landing: &Landing) -> u32 {
        if landing.block.is_none() || self.stream().is_capturing() {
            return 1;
        }
        let copies = u64::from(batch.tokens) * u64::from(self.shape().topk());
        self.device.launches(copies * self.shape().row_bytes())
    }

    /// Enqueues the kernels of a batch that is placed in several launches: while one brings rows, those of the one before are copied to their experts.
    fn move_by_lots(
        &self,
        call: Call,
        placing: &args::Dispatch,
        launches: u32,
        spreading: &Spreading<'_>,
    ) -> Result<(), Error> {
        let beside = Call { is_aside: true, ..call };
        let mut aside = None;
        for launch in 0..launches {
            let [lot, end_lot] = [launch, launch + 1].map(|launch| (placing.lots * launch).div_ceil(launches));
            // Lots that are left over are the first's: what the last brings is copied when nothing comes any more.
            // The first brings all headers, so that slots are found before the rows are there.
            let headers = if launch == 0 { placing.headers } else { 0 };
            // SAFETY: as in `move_rows`.
            unsafe { self.device.dispatch(call, &args::Dispatch { lot, end_lot, headers, ..*placing }) }?;
            match &aside {
                None => {
                    aside = self.device.fork()?;
                    self.find_slots(beside, spreading)?;
                }
                Some(aside) => aside.follow()?,
            }
            self.spread_lots(beside, spreading, lot..end_lot)?;
        }
        Ok(aside.map_or(Ok(()), Aside::join)?)
    }
}
