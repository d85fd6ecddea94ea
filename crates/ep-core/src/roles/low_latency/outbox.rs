//! Staging memory of low latency: slots that are used in turn, across operations.

use std::collections::VecDeque;

use super::{Call, Faults};
use crate::error::Fault;
use crate::layout::Layout;
use crate::machine::Machine;
use crate::plant::Plant;
use crate::port::{LaneId, Port, Scope, Ticket};
use crate::roles::Attended;

/// Which puts may still read each slot.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    slots: u32,
    current: u32,
    /// Puts in the order in which they were posted, and so in the order in which their slots come again. A slot may be the
    /// source of puts to several peers.
    readers: VecDeque<Reader>,
}

#[derive(Debug)]
struct Reader {
    slot: u32,
    lane: LaneId,
    ticket: Ticket,
}

impl Outbox {
    pub(crate) fn new(layout: &Layout) -> Self {
        let slots = if layout.settings().low_latency() { layout.low_staging_slots() } else { 0 };
        Self { slots, current: 0, readers: VecDeque::new() }
    }

    /// The next slot, once nothing reads it any more (F5). Low latency's lanes to a peer that keeps reading are reset: it is cut off
    /// from this operation.
    pub(super) async fn slot<M: Machine>(
        &mut self,
        call: &Call<'_, M>,
        port: &mut Attended<M::Port>,
        faults: &mut Faults,
    ) -> Result<u32, Fault> {
        self.current = (self.current + 1) % self.slots;
        let current = self.current;
        let readers = self.readers.iter().take_while(|reader| reader.slot == current).count();
        for Reader { lane, ticket, .. } in self.readers.drain(..readers) {
            // A masked peer's lanes have been reset.
            if call.mask.contains(lane.peer) {
                continue;
            }
            if call.plants(Plant::SkippedFlush) {
                continue;
            }
            if let Err(fault) = port.flush(lane, ticket).await {
                call.machine.reset(Scope::LowLatency(lane.peer)).await;
                faults.note(lane.peer, fault)?;
            }
        }
        Ok(current)
    }

    /// The current slot is the source of this put.
    pub(super) fn sent(&mut self, (lane, ticket): (LaneId, Ticket)) {
        self.readers.push_back(Reader { slot: self.current, lane, ticket });
    }
}
