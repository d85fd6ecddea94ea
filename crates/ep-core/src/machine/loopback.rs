//! For the decorators' tests: a machine of one rank whose verbs take effect at once, and whose waits that nothing can
//! end jump to the deadline.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use async_trait::async_trait;
use futures_util::FutureExt;

use super::{Agreement, Bootstrap, Capabilities, Machine, Opening, Proposal, Window};
use crate::error::{Error, Fault};
use crate::port::{
    Cell, Counter, Duty, LaneId, LaneKind, Nanos, Need, Offset, Port, Role, Scope, Span, Tag, Ticket, UNIT_DATA, Units,
    Work, pack_unit, unit_count, unpack_units,
};
use crate::{Layout, Rank, Settings, Shape, Topology};

/// Bytes of a loopback window.
pub(crate) const WINDOW: u64 = 256;
/// When waits of a loopback port end.
pub(crate) const DEADLINE: Nanos = Nanos(1_000);
/// A data lane to the own rank.
pub(crate) const PROBE_LANE: LaneId = LaneId { peer: Rank(0), kind: LaneKind::Data(0) };
/// A cell of that lane.
pub(crate) const PROBE: Cell = Cell::new(Rank(0), LaneKind::Data(0), Counter::Probe);

/// What a loopback port is opened for.
pub(crate) fn opening() -> Opening {
    Opening { role: Role::new(Duty::Probe), op: 9, generation: 1, deadline: DEADLINE }
}

/// The result of a future that never has to wait.
pub(crate) fn finish<T>(future: impl Future<Output = T>) -> T {
    future.now_or_never().expect("a loopback verb never pends")
}

#[derive(Debug)]
struct State {
    now: Nanos,
    window: Vec<u8>,
    cells: BTreeMap<Cell, u64>,
    tickets: u64,
    flushed: Option<Ticket>,
}

#[derive(Clone, Debug)]
pub(crate) struct Loopback {
    state: Rc<RefCell<State>>,
}

impl Loopback {
    pub(crate) fn new() -> Self {
        let window = vec![0; WINDOW as usize];
        let state = State { now: Nanos(0), window, cells: BTreeMap::new(), tickets: 0, flushed: None };
        Self { state: Rc::new(RefCell::new(state)) }
    }

    /// The last ticket that was flushed.
    pub(crate) fn flushed(&self) -> Option<Ticket> {
        self.state.borrow().flushed
    }

    fn copy(&self, from: Span, to: Offset) -> Result<Ticket, Fault> {
        from.within(WINDOW)?;
        to.span(from.len).within(WINDOW)?;
        let state = &mut *self.state.borrow_mut();
        if from.len > 0 {
            state.window.copy_within(from.offset.0 as usize..from.end() as usize, to.0 as usize);
        }
        state.tickets += 1;
        Ok(Ticket(state.tickets))
    }
}

impl Port for Loopback {
    fn now(&self) -> Nanos {
        self.state.borrow().now
    }

    fn peek(&self, cell: Cell) -> u64 {
        self.state.borrow().cells.get(&cell).copied().unwrap_or(0)
    }

    async fn wait_any(&mut self, needs: &[Need]) -> Result<usize, Fault> {
        if let Some(met) = needs.iter().position(|need| self.peek(need.cell) >= need.at_least) {
            return Ok(met);
        }
        let Need { cell, at_least } = needs[0];
        let seen = self.peek(cell);
        let waited = DEADLINE - std::mem::replace(&mut self.state.borrow_mut().now, DEADLINE);
        let lane = LaneId { peer: cell.writer, kind: cell.lane };
        Err(Fault::Timeout { phase: cell.counter.phase(), peer: cell.writer, lane, seen, awaited: at_least, waited })
    }

    async fn put(&mut self, _lane: LaneId, from: Span, to: Offset) -> Result<Ticket, Fault> {
        self.copy(from, to)
    }

    async fn get(&mut self, _lane: LaneId, from: Span, to: Offset) -> Result<Ticket, Fault> {
        self.copy(from, to)
    }

    async fn publish(&mut self, _lane: LaneId, cell: Cell, value: u64) -> Result<(), Fault> {
        self.state.borrow_mut().cells.insert(cell, value);
        Ok(())
    }

    async fn flush(&mut self, _lane: LaneId, upto: Ticket) -> Result<(), Fault> {
        self.state.borrow_mut().flushed = Some(upto);
        Ok(())
    }

    async fn put_units(&mut self, _lane: LaneId, from: Span, to: Offset, tag: Tag) -> Result<Ticket, Fault> {
        let mut bytes = vec![0; from.len as usize];
        Port::read(self, from.offset, &mut bytes)?;
        let units = bytes.chunks(UNIT_DATA as usize).flat_map(|data| pack_unit(data, tag)).collect::<Vec<_>>();
        Port::write(self, to, &units)?;
        self.copy(from.offset.span(0), to)
    }

    fn poll_units(&self, units: &Units, into: &mut [u8]) -> Result<bool, Fault> {
        let mut bytes = vec![0; units.span().len as usize];
        Port::read(self, units.at, &mut bytes)?;
        Ok(unpack_units(&bytes, units.tag, into) == unit_count(units.len))
    }

    async fn wait_units(&mut self, units: &[Units], or: &[Need]) -> Result<usize, Fault> {
        for (at, units) in units.iter().enumerate() {
            if self.poll_units(units, &mut vec![0; units.len as usize])? {
                return Ok(at);
            }
        }
        self.wait_any(or).await.map(|at| units.len() + at)
    }

    fn read(&self, from: Offset, into: &mut [u8]) -> Result<(), Fault> {
        let span = from.span(into.len() as u64);
        span.within(WINDOW)?;
        into.copy_from_slice(&self.state.borrow().window[from.0 as usize..span.end() as usize]);
        Ok(())
    }

    fn write(&mut self, to: Offset, bytes: &[u8]) -> Result<(), Fault> {
        let span = to.span(bytes.len() as u64);
        span.within(WINDOW)?;
        self.state.borrow_mut().window[to.0 as usize..span.end() as usize].copy_from_slice(bytes);
        Ok(())
    }

    fn charge(&self, _work: Work) {}
}

impl Window for Loopback {
    fn read(&self, from: Offset, into: &mut [u8]) -> Result<(), Fault> {
        Port::read(self, from, into)
    }

    fn write(&self, to: Offset, bytes: &[u8]) -> Result<(), Fault> {
        Port::write(&mut self.clone(), to, bytes)
    }
}

pub(crate) struct LoopbackMachine {
    port: Loopback,
    layout: Layout,
    gets: bool,
}

impl LoopbackMachine {
    pub(crate) fn new() -> Self {
        let shape = Shape::builder().experts(8).hidden(16).build().expect("a valid shape");
        let topology = Topology::new(1, 1).expect("one rank is valid");
        Self::with(&shape, &topology, &Settings::auto(&shape, &topology))
    }

    /// Rank 0 of a communicator whose other ranks never do anything, and agree to all that it proposes.
    pub(crate) fn with(shape: &Shape, topology: &Topology, settings: &Settings) -> Self {
        let layout = Layout::new(shape, topology, settings).expect("a valid layout");
        Self { port: Loopback::new(), layout, gets: true }
    }

    /// The same, whose ports say that they do not get.
    pub(crate) fn without_get(self) -> Self {
        Self { gets: false, ..self }
    }
}

impl Machine for LoopbackMachine {
    type Port = Loopback;
    type Window = Loopback;

    fn rank(&self) -> Rank {
        Rank(0)
    }

    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::new(self.gets)
    }

    fn now(&self) -> Nanos {
        self.port.now()
    }

    fn port(&self, _opening: Opening) -> Loopback {
        self.port.clone()
    }

    fn window(&self) -> Loopback {
        self.port.clone()
    }

    async fn reset(&self, _scope: Scope) {}

    fn bootstrap(&self) -> &dyn Bootstrap {
        self
    }
}

#[async_trait(?Send)]
impl Bootstrap for LoopbackMachine {
    async fn agree(&self, proposal: Proposal, _deadline: Nanos) -> Result<Agreement, Error> {
        Ok(Agreement { mask: proposal.mask, generation: proposal.generation + 1, op: proposal.op })
    }
}
