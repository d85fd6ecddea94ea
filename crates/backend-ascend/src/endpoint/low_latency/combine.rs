//! Low latency: a combine.

use std::sync::Arc;

use ep_core::engine::Ready;
use ep_core::engine::low_latency::{LowCombined, LowOrder};
use ep_core::layout::{KernelWindow, LowKind};
use ep_core::{Endpoint as _, Error, LowLatency as _};

use super::super::{Array, AscendEndpoint, Rows};
use super::halves::Work;
use super::{Combining, Inner, LowHandle};
use crate::args::Low;

impl AscendEndpoint {
    /// Of `[2, ranks]` what counts in this form: rows, or choices.
    fn of_form(&self, kind: LowKind, counted: &[u32]) -> Vec<u32> {
        let ranks = self.topology().ranks() as usize;
        match kind {
            LowKind::PerChoice => counted[ranks..2 * ranks].to_vec(),
            LowKind::PerRank | LowKind::Dispatch => counted[..ranks].to_vec(),
        }
    }

    fn low_result_bytes(&self) -> u64 {
        let window = KernelWindow::from(self.layout());
        window.low_result_header_bytes + window.result_bytes
    }

    pub(super) async fn low_send_combine(
        &mut self,
        y: &Rows,
        handle: &LowHandle,
        topk_weights: Option<&Array<f32>>,
    ) -> Result<Combining, Error> {
        self.check_low_send()?;
        self.check_low_handle(handle)?;
        let Inner { routed, records, received, .. } = &*handle.inner;
        let (at_dispatch, here) = (routed.topk_weights.is_some(), topk_weights.is_some());
        let kind = LowOrder::ByExpert.combine(self.layout(), at_dispatch, here)?;
        self.desk.check_weights(topk_weights.map(Array::len), routed.topk_idx.len())?;
        let most = self.layout().low_expert_rows()?;
        self.desk.check_results("y", y.extent(), if received.iter().all(|&rows| rows == 0) { 0 } else { most })?;
        let device = self.device.device();
        y.check_home("y", device)?;
        topk_weights.map_or(Ok(()), |weights| weights.check_home("topk_weights", device))?;
        let args = Low {
            x: y.address(),
            x_stride: y.row_bytes() as u64,
            topk_weights: topk_weights.map_or(0, Array::address),
            records: records.address(),
            ..routed.args()
        };
        let weights = topk_weights.map(Array::memory);
        let memory = [y.memory(), records.memory()].into_iter().chain(routed.memory()).chain(weights).collect();
        let sent = self.low_send(Work::new(kind, args, memory, y.are_lent()), |_| Ok(())).await?;
        let flight = sent.map_err(|token| Error::invalid("token of a combine", token, "none that is wrong"))?;
        let returned = self.of_form(kind, received);
        self.count_low(self.low_result_bytes(), |rank| (returned[rank.index()].into(), 0));
        let owed = self.of_form(kind, &routed.counted.to_vec()?);
        Ok(Combining { flight, routed: Arc::clone(routed), owed })
    }

    /// `x`: room for the sums.
    pub(in crate::endpoint) async fn low_receive_combine(
        &mut self,
        sent: &Combining,
        x: Rows,
    ) -> Result<LowCombined<Self>, Error> {
        let Combining { flight, owed, .. } = sent;
        let row = self.shape().result_bytes() as usize;
        // An address of 0 would skip the operation; memory of no bytes has one, too.
        let args = Low { out: x.address(), out_stride: row as u64, ..flight.work().args };
        self.low_take(flight, args, vec![x.memory()]).await?;
        self.count_low(self.low_result_bytes(), |rank| (0, owed[rank.index()].into()));
        Ok(LowCombined { x, event: Ready })
    }
}
