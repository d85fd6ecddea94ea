//! One rank's lanes behind a proxy, as the host holds them.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use ep_core::port::{LaneId, Scope};
use ep_core::transport::{DeviceLanes, Lanes};
use ep_core::{Error, Fault, LaneCause, Rank};

use super::cores::Cores;
use super::fifo::Taker;
use super::lane::Lane;
use super::memory::Reached;
use super::thread::Shared;

/// The lanes of one rank that a thread of the host posts to for its device, over the lanes `L` of a transport of hosts.
#[derive(Debug)]
pub struct ProxyLanes<L: Lanes, M: Reached> {
    pub(super) shared: Arc<Shared<L, M>>,
    thread: Option<JoinHandle<()>>,
    me: Rank,
}

impl<L: Lanes + 'static, M: Reached + 'static> ProxyLanes<L, M> {
    /// Of all lanes, each with the queue of the transport that takes what is posted to it. `silence`: how long nothing may be under way to a peer before the transport
    /// probes.
    pub(super) fn open(
        transport: L,
        me: Rank,
        all: Vec<(LaneId, LaneId)>,
        log_slots: u32,
        silence: Duration,
        take: &impl Fn(usize) -> Result<M, Error>,
        cores: Cores,
    ) -> Result<Self, Error> {
        let each = Taker::bytes(log_slots);
        let lane = |(number, (id, queue))| Lane::new(id, queue, Taker::new(number * each, log_slots));
        let lanes: Vec<_> = all.into_iter().enumerate().map(lane).collect();
        let memory = take(each * lanes.len().max(1))?;
        let shared = Arc::new(Shared::new(transport, lanes, memory, silence));
        let run = Arc::clone(&shared);
        let thread = thread::Builder::new().name(format!("proxy of rank {me}")).spawn(move || {
            cores.keep();
            run.run();
        });
        let thread = thread.map_err(|error| {
            Error::broken(
                format_args!("the proxy's thread of rank {me}"),
                error,
                "raise the limit of threads (ulimit -u)",
            )
        })?;
        let lanes = Self { shared, thread: Some(thread), me };
        lanes.shared.between_turns().lanes.iter_mut().try_for_each(|lane| lane.reset(&lanes.shared.memory))?;
        Ok(lanes)
    }

    fn has_ended(&self) -> bool {
        self.shared.ended.load(Ordering::Acquire)
    }
}

impl<L: Lanes + 'static, M: Reached + 'static> DeviceLanes for ProxyLanes<L, M> {
    fn offer(&mut self) -> Result<Vec<u8>, Error> {
        if self.has_ended() {
            let what = format_args!("the proxy of rank {}", self.me);
            return Err(Error::broken(what, "its thread has ended", "make the communicator anew"));
        }
        let mut work = self.shared.between_turns();
        work.connected = false;
        work.lanes.iter_mut().try_for_each(|lane| lane.reset(&self.shared.memory))?;
        work.transport.offer()
    }

    fn connect(&mut self, offers: &[Option<Vec<u8>>]) -> Result<(), Error> {
        let mut work = self.shared.between_turns();
        work.transport.connect(offers)?;
        work.silence.restart();
        work.connected = true;
        Ok(())
    }

    fn state(&self, lane: LaneId) -> Option<u64> {
        let work = self.shared.between_turns();
        work.lanes.iter().find(|known| known.id == lane).map(|known| known.fifo.state(&self.shared.memory))
    }

    fn probe(&mut self, peer: Rank) {
        self.shared.between_turns().transport.probe(peer);
    }

    fn broken(&self, peer: Rank) -> Option<Fault> {
        let (ended, work) = (self.has_ended(), self.shared.between_turns());
        let lanes = || work.lanes.iter().filter(|lane| lane.id.peer == peer);
        let known = lanes().find_map(|lane| lane.fault);
        let gone = || ended.then(|| lanes().next().map(|lane| lane.broken(LaneCause::NoPoster))).flatten();
        known.or_else(gone).or_else(|| work.connected.then(|| work.transport.broken(peer)).flatten())
    }

    fn drain(&mut self, scope: Scope) -> bool {
        let mut work = self.shared.between_turns();
        if self.has_ended() {
            // What nobody posts any more never arrives.
            return work.transport.drain(scope);
        }
        let moved = work.turn(&self.shared.memory, true);
        let drained = work.transport.drain(scope);
        let idle = |lane: &Lane| !scope.covers(lane.id) || lane.is_idle();
        !moved && drained && work.lanes.iter().all(idle)
    }

    fn cut(&mut self, scope: Scope) {
        let mut work = self.shared.between_turns();
        work.transport.cut(scope);
        for lane in work.lanes.iter_mut().filter(|lane| scope.covers(lane.id)) {
            if !lane.is_idle() {
                lane.fail(&self.shared.memory, lane.broken(LaneCause::Cut));
            }
        }
    }

    fn is_copied(&self) -> bool {
        self.shared.between_turns().transport.is_copied()
    }

    fn is_staged(&self) -> bool {
        self.shared.between_turns().transport.is_staged()
    }
}

impl<L: Lanes, M: Reached> Drop for ProxyLanes<L, M> {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // One that panicked has told its lanes so.
            let _ = thread.join();
        }
    }
}
