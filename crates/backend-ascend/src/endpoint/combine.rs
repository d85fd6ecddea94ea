//! Combine: rows go back through rings and are summed where their tokens are.

use std::sync::Arc;

use ep_core::engine::{Combine, Combined, Handle, Ready};
use ep_core::layout::Kind;
use ep_core::{Endpoint as _, Error};

use super::replayed::Replayed;
use super::{Array, AscendEndpoint, Rows};
use crate::args;
use crate::rank::Call;

impl AscendEndpoint {
    pub(super) async fn combine_rows(
        &mut self,
        y: &Rows,
        handle: &Handle,
        options: &Combine<'_, Self>,
    ) -> Result<Combined<Self>, Error> {
        self.desk.ready()?;
        self.desk.check_handle(handle)?;
        let kept: &Replayed = handle.kept()?;
        let device = Arc::clone(self.device.device());
        let bias: Vec<&Rows> = options.bias.into_iter().flatten().collect();
        let weights = options.topk_weights;
        let extents = bias.iter().map(|bias| bias.extent());
        let rings = self.desk.check_combine(handle, options.rings, y.extent(), extents, weights.map(Array::len))?;
        options.outbox.check()?;
        if options.remainder {
            return Err(Error::unsupported(
                "remainders of a combine by expert on NPUs",
                "sums of all choices, or of each by itself",
            ));
        }
        y.check_home("y", &device)?;
        bias.iter().try_for_each(|bias| bias.check_home("bias", &device))?;
        weights.map_or(Ok(()), |weights| weights.check_home("topk_weights", &device))?;
        let row = self.shape().result_bytes() as usize;
        let out = Rows::new(&device, handle.tokens(), row)?;
        let topk = self.shape().topk() as usize;
        let sums: Array<f32> =
            Array::filled(&device, if weights.is_some() { handle.tokens() as usize * topk } else { 0 }, 0)?;
        let call = Call { kind: Kind::Combine, rings, alike: handle.op().wrapping_add(options.said_alike()) };

        self.unused().await?;
        self.desk.start();
        let plan = &kept.on_device;
        let mut bias_at = [0; 2];
        for (at, bias) in bias_at.iter_mut().zip(&bias) {
            *at = bias.address();
        }
        let launch = self.device.prepared(&call, false);
        let sums_of_choices = match &kept.placed {
            Some(placed) => Some(self.fold(launch, y, kept.exchange.received(self.desk.rank()), placed)?),
            None => None,
        };
        let y = sums_of_choices.as_ref().unwrap_or(y);
        let args = args::Combine {
            launch,
            y: y.address(),
            y_stride: row as u64,
            position: plan.position.address(),
            matrix: plan.matrix.address(),
            first_of: plan.first_of.address(),
            source_token: kept.source_token.address(),
            tokens_of: plan.tokens_of.address(),
            own_weights: weights.map_or(0, Array::address),
            bias: bias_at,
            bias_stride: row as u64,
            out: out.address(),
            out_stride: row as u64,
            weights: if weights.is_some() { sums.address() } else { 0 },
            fanout: plan.fanout(),
            tokens: handle.tokens(),
            reserved: 0,
        };
        self.keep([y.memory(), out.memory(), sums.memory(), kept.source_token.memory()]);
        self.keep(plan.memory());
        self.keep(bias.iter().map(|bias| bias.memory()).chain(weights.map(Array::memory)));
        self.launched();
        // SAFETY: rows, plan and results are of this device, with room for the rows and tokens of the handle, and kept until the launch has
        // ended. What this rank launched before has ended, but for the sums of rows by expert.
        unsafe { self.device.combine(&args) }?;
        self.finish_last().await?;
        self.desk.set_poisoned(None);
        self.count(&kept.exchange, &call.rings, false)?;
        self.desk.ways.combined(handle.rows(), false);
        Ok(Combined { x: out, topk_weights: sums, event: Ready })
    }
}
