//! Low latency: a dispatch.

use std::sync::Arc;

use ep_core::engine::Ready;
use ep_core::engine::low_latency::{LowOrder, LowReceived, LowRouting, LowRoutingOf};
use ep_core::layout::LowKind;
use ep_core::plan::{Plan, Repeats, TopK};
use ep_core::{Element, Endpoint as _, Error};

use super::super::rows::Held;
use super::super::{Array, AscendEndpoint, Rows};
use super::halves::Work;
use super::{Dispatching, Inner, LowArrays, LowHandle, Routed};
use crate::args::{Low, Positions};

impl AscendEndpoint {
    /// Bytes of a row of a dispatch as it travels.
    fn low_row_bytes(&self) -> u64 {
        let row = self.layout().row();
        row.header_bytes() + row.payload_bytes()
    }

    pub(super) async fn low_send_dispatch(
        &mut self,
        x: &Rows,
        routing: &LowRoutingOf<Self>,
    ) -> Result<Dispatching, Error> {
        self.check_low_send()?;
        routing.check_repeats()?;
        let LowRouting { topk_idx, topk_weights, repeats, order, coded } = routing;
        if *order != LowOrder::ByExpert {
            return Err(Error::unsupported(
                "low latency by source, or packed, on NPUs",
                "LowOrder::ByExpert, or throughput mode",
            ));
        }
        if *coded {
            return Err(Error::unsupported("coded rows of low latency on NPUs", "bf16 rows, or throughput mode"));
        }
        let (device, weights) = (Arc::clone(self.device.device()), topk_weights.as_ref());
        let tokens = self.desk.check_low_batch(x.extent(), topk_idx.len(), weights.map(Array::len), false)?;
        self.check_low_rows()?;
        x.check_home("x", &device)?;
        topk_idx.check_home("topk_idx", &device)?;
        weights.map_or(Ok(()), |weights| weights.check_home("topk_weights", &device))?;
        let (ranks, experts) = (self.topology().ranks() as usize, self.shape().experts() as usize);
        let routed = Arc::new(Routed {
            tokens,
            topk_idx: topk_idx.clone(),
            topk_weights: topk_weights.clone(),
            position: Array::filled(&device, tokens as usize * ranks, 0xff)?,
            counted: Array::filled(&device, 2 * ranks, 0)?,
        });
        let numbers: Array<u32> = Array::filled(&device, ranks + experts, 0)?;
        let args = Low {
            x: x.address(),
            x_stride: x.row_bytes() as u64,
            topk_weights: weights.map_or(0, Array::address),
            ..routed.args()
        };
        let memory = [x.memory(), numbers.memory()].into_iter().chain(routed.memory()).collect();
        let (repeats, kept) = (*repeats, Arc::clone(&routed));
        let positions = move |this: &mut Self| {
            let args = Positions {
                topk_idx: kept.topk_idx.address(),
                position: kept.position.address(),
                numbers: numbers.address(),
                tokens,
                repeats: repeats.into(),
                ..Positions::default()
            };
            this.keep(kept.memory().into_iter().chain([numbers.memory()]));
            let call = this.low_call();
            this.launched();
            // SAFETY: arrays of this device, of the lengths that the struct says, kept until the launch has ended. What this rank launched before
            // has ended.
            unsafe { this.device.low_positions(&call, args) }
        };
        let flight = match self.low_send(Work::new(LowKind::Dispatch, args, memory, x.are_lent()), positions).await? {
            Ok(flight) => flight,
            Err(_) => return Err(self.name_low_choices(topk_idx, repeats)),
        };
        let counted = routed.counted.to_vec()?;
        self.count_low(self.low_row_bytes(), |rank| (counted[rank.index()].into(), 0));
        Ok(Dispatching { flight, routed })
    }

    /// Bad choices that the device found, named as on the host.
    fn name_low_choices(&self, topk_idx: &Array<i64>, repeats: bool) -> Error {
        let planned = topk_idx.to_vec().and_then(|chosen| {
            let (repeats, chosen) = (Repeats::Once.where_allowed(repeats), TopK { topk_idx: &chosen });
            Plan::of_choices(self.shape(), self.topology().ranks(), &self.low.mask, chosen, repeats)
        });
        let changed =
            || Error::invalid("topk_idx", "changed while it was dispatched", "the same until the call has ended");
        planned.err().unwrap_or_else(changed)
    }

    /// Memory of this rank's own for what a dispatch brings.
    pub(super) fn low_arrays(&self) -> Result<LowArrays, Error> {
        let device = self.device.device();
        let [ranks, local] = [self.topology().ranks(), self.layout().local_experts()].map(|number| number as usize);
        let (rows, row_bytes) = (self.layout().low_expert_rows()?, self.layout().row().payload_bytes() as usize);
        Ok(LowArrays {
            x: Rows::landing(device, rows, row_bytes, self.shape().element() != Element::Bf16)?,
            expert_counts: Array::filled(device, local, 0)?,
            segments: Array::filled(device, local * ranks, 0)?,
            source_token: Array::filled(device, rows as usize, 0)?,
        })
    }

    /// `owner` keeps what is not this rank's own.
    pub(in crate::endpoint) async fn low_receive_dispatch(
        &mut self,
        sent: &Dispatching,
        into: LowArrays,
        owner: Option<Held>,
    ) -> Result<LowReceived<Self>, Error> {
        let Dispatching { flight, routed } = sent;
        let LowArrays { x, expert_counts, segments, source_token } = into;
        let device = Arc::clone(self.device.device());
        let ranks = self.topology().ranks() as usize;
        let kept = ranks * self.shape().max_tokens() as usize * 2 * (1 + self.shape().topk() as usize);
        let records: Array<u32> = Array::filled(&device, 2 * ranks + kept, 0)?;
        let args = Low {
            out: x.address(),
            expert_counts: expert_counts.address(),
            segments: segments.address(),
            source_token: source_token.address(),
            records: records.address(),
            ..routed.args()
        };
        let arrays = [expert_counts.memory(), segments.memory(), source_token.memory(), records.memory()];
        let memory = arrays.into_iter().chain([x.memory()]).chain(owner).collect();
        self.low_take(flight, args, memory).await?;
        for (sum, &rows) in self.stats.expert_rows.iter_mut().zip(&expert_counts.to_vec()?) {
            *sum += rows as u64;
        }
        let received = records.first(2 * ranks)?;
        self.count_low(self.low_row_bytes(), |rank| (0, received[rank.index()].into()));
        let inner = Inner { mark: flight.mark().clone(), routed: Arc::clone(routed), records, received };
        let handle = LowHandle { inner: Arc::new(inner) };
        Ok(LowReceived {
            x,
            expert_counts,
            segments,
            source_token,
            by_source: None,
            packed: None,
            handle,
            event: Ready,
        })
    }
}

impl Routed {
    /// What halves are given of it.
    pub(super) fn args(&self) -> Low {
        Low {
            topk_idx: self.topk_idx.address(),
            position: self.position.address(),
            counted: self.counted.address(),
            tokens: self.tokens,
            ..Low::default()
        }
    }

    pub(super) fn memory(&self) -> Vec<Held> {
        let all = [self.topk_idx.memory(), self.position.memory(), self.counted.memory()];
        all.into_iter().chain(self.topk_weights.iter().map(Array::memory)).collect()
    }
}
