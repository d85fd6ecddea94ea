//! Combine: rows are pulled where they lie in the windows, and go through rings where they do not.

use std::sync::Arc;

use ep_core::engine::{Combine, Combined, Handle, Held};
use ep_core::layout::{Block, KernelRings, Kind, NO_BASE};
use ep_core::{Endpoint as _, Error};

use super::replayed::Replayed;
use super::{Array, CudaEndpoint, Rows};
use crate::args;
use crate::rank::{Aside, Call, Offered};

impl CudaEndpoint {
    pub(super) async fn combine_rows(
        &mut self,
        y: &Rows,
        handle: &Handle,
        options: &Combine<'_, Self>,
    ) -> Result<Combined<Self>, Error> {
        let capture = self.begin()?;
        self.desk.check_handle(handle)?;
        let kept: &Replayed = handle.kept()?;
        let bias = options.bias.into_iter().flatten();
        let weights = options.topk_weights.map(Array::len);
        let rings =
            self.desk.check_combine(handle, options.rings, y.extent(), bias.clone().map(Rows::extent), weights)?;
        options.outbox.check()?;
        options.check_remainder(kept.placed.is_some())?;
        self.check_home("y", y)?;
        bias.into_iter().try_for_each(|bias| self.check_home("bias", bias))?;
        options.topk_weights.map_or(Ok(()), |weights| weights.check_home("topk_weights", self.stream()))?;
        let topk = self.shape().topk();
        let stream = Arc::clone(self.stream());
        let out = Rows::new(&stream, handle.tokens(), self.shape().result_bytes() as usize)?;
        let weighed = if options.topk_weights.is_some() { handle.tokens() as usize * topk as usize } else { 0 };
        let sums: Array<f32> = self.room_for(weighed)?;
        let lies_well =
            kept.placed.is_none() && y.lease().is_some_and(|lease| lease.block_in(self.desk.arena()).is_some());
        if self.far().is_none() && !self.is_pulled(handle.outboxes()) && !lies_well {
            self.make_room(&self.layout().row().results(), handle.rows()).await;
        }
        let folding = match &kept.placed {
            Some(placed) => Some((placed, self.room_for_sums(handle)?)),
            None => None,
        };
        let plan = &kept.plan;
        let call = self.start(Kind::Combine, (&rings, options.said_alike()), plan.address(), capture.is_some());
        let (rings, pulled) = self.way(Kind::Combine, rings, handle.outboxes(), options.outbox);
        let results = y;
        let mut aside = None;
        if let Some((placed, sums)) = &folding {
            let is_aside = pulled.is_none() && self.folds_beside(handle.tokens(), sums);
            aside = if is_aside { self.device.fork()? } else { None };
            self.fold(Call { is_aside, ..call }, results, sums, (plan, placed), options.remainder)?;
        }
        let y = folding.as_ref().map_or(results, |(_, sums)| sums);
        let (offered, copy) = if pulled.is_some() { (None, None) } else { self.offer(y, handle) };
        let copy_offered = copy.as_ref().filter(|_| capture.is_none());
        copy_offered.inspect(|copy| copy.offer());
        let lease = y.lease().filter(|_| offered.is_some() && capture.is_none());
        lease.inspect(|lease| lease.offer());
        let own_weights = options.topk_weights.map_or(0, Array::address);
        if let Some(block) = offered.filter(|_| own_weights != 0) {
            let args = args::Offer {
                base: block.base().0,
                first_of: plan.first_of(),
                source_token: kept.source_token.address(),
                topk_weights: own_weights,
                rows: block.rows(),
                reserved: 0,
            };
            // SAFETY: arrays of the own stream's memory, for as many rows as the block has.
            unsafe { self.device.offer(call, &args) }?;
        }
        let bias = options.bias.map(|bias| bias.map_or(0, |bias| self.address(bias)));
        let bias = if bias[0] == 0 { [bias[1], 0] } else { bias };
        let combine = args::Combine {
            y: self.address(y),
            y_stride: y.stride() as u64,
            position: plan.position.address(),
            first_at: plan.first_at(),
            matrix: plan.matrix(),
            bias,
            bias_stride: out.stride() as u64,
            out: self.address(&out),
            out_stride: out.stride() as u64,
            weights: if weighed > 0 { sums.address() } else { 0 },
            own_weights,
            base: offered.as_ref().map_or(NO_BASE, |block| block.base().0),
            first_of: plan.first_of(),
            base_rows: offered.as_ref().map_or(0, Block::room),
            offers_weights: (own_weights != 0).into(),
            tokens: handle.tokens(),
            ..args::Combine::default()
        };
        let args = args::CombineRing {
            combine,
            rings: KernelRings::new(self.layout(), Kind::Combine, &rings),
            source_token: kept.source_token.address(),
            tokens_of: plan.tokens_of(),
            fanout: plan.fanout(),
            ..args::CombineRing::default()
        };
        if let Some(steps) = &pulled {
            // SAFETY: results, what the handle keeps, and sums are memory of the own stream's, for the rows and tokens of the handle.
            unsafe { self.device.combine_pulled(call, &args, steps) }?;
        } else {
            // SAFETY: as above.
            let offered = match (&copy, &aside) {
                (Some(_), _) => Offered::Copied,
                (None, Some(_)) => Offered::Folded,
                (None, None) => Offered::Whole,
            };
            // SAFETY: as above.
            unsafe { self.device.combine(call, &args, offered) }?;
        }
        aside.map_or(Ok(()), Aside::join)?;
        let event = self.end(capture.is_some()).await?;
        self.desk.ways.combined(handle.rows(), offered.is_some());
        lease.inspect(|lease| lease.take_back());
        copy_offered.inspect(|copy| copy.take_back());
        // Whoever gets the block next does so on this stream, behind kernels that end when the peers have pulled; or that fail, which nobody knows yet
        // where the call has not waited. A graph offers it again and again.
        match (offered, &capture, y.lease().map(|lease| lease.held()).or(copy.as_ref())) {
            (Some(block), None, _) => self.tell(block, &event),
            (Some(_), Some(_), Some(held)) => self.pin(held),
            _ => {}
        }
        let combined = Combined::<Self> { x: out, topk_weights: sums, event };
        self.keep_for(capture.as_ref(), || {
            let bias = options.bias.into_iter().flatten().map(Rows::memory);
            let weights = options.topk_weights.map(Array::memory);
            let all = [y.memory(), Arc::new(handle.clone()) as _, combined.x.memory(), combined.topk_weights.memory()];
            all.into_iter()
                .chain([results.memory()])
                .chain(bias)
                .chain(weights)
                .chain(copy.map(|copy| copy as _))
                .collect()
        })?;
        Ok(combined)
    }

    /// The block that peers may pull from: where the rows lie, or one that they are copied to if there is room, which is returned
    /// beside it.
    fn offer(&self, y: &Rows, handle: &Handle) -> (Option<Block>, Option<Arc<Held>>) {
        if self.far().is_some() {
            return (None, None);
        }
        if let Some(block) = y.lease().and_then(|lease| lease.block_in(self.desk.arena())) {
            return (Some(block), None);
        }
        let block = self.desk.arena().take(&self.layout().row().results(), handle.rows());
        (block, block.map(|block| Arc::new(Held::new(self.desk.arena(), block))))
    }
}
