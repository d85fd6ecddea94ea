//! Low latency as DeepEP V1 does it, written as roles over the machine contract: one row for each token and expert, sent
//! straight to the expert's rank whether near or far, none left out although a rank has several of a token's experts;
//! and one row back for each.
//!
//! ```text
//! dispatch   stager (a token)        quantises its row into the window
//!            sender (an expert)      puts the rows of its tokens there, then publishes how many these were
//!            receiver (a local expert and source)   waits for that number, copies the rows out
//! combine    returner (a local expert and source)   copies the results in, puts them to the source, publishes
//!            waiter (an expert)      waits for its rows
//!            reducer (a token)       once all rows are there, sums those of its experts
//! ```
//!
//! Payload is never written, so that it has no memory, but travels in full; every row's header does both, and is checked
//! where it arrives.

use std::num::NonZeroUsize;

use ep_conformance::workload::Workload;
use ep_core::machine::{Machine as _, Opening};
use ep_core::port::{Cell, Counter, Duty, LaneId, LaneKind, Need, Offset, Port as _, Role, Work};
use ep_core::topology::Reach;
use ep_core::{Error, Failure, Fault, Nanos, Rank, Settings, Shape, Topology};
use ep_sim::{Cluster, Machine, Model, Port};
use futures_util::future::{try_join, try_join_all};

use crate::layer::{Stopped, Times, meet};

/// What travels with each row.
const HEADER_BYTES: u64 = 16;

/// Sizes of the form.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Form {
    pub(crate) tokens: u32,
    pub(crate) experts: u32,
    pub(crate) topk: u32,
    /// bf16 elements of a row as the user has it.
    pub(crate) hidden: u32,
}

impl Form {
    /// bf16, as stagers read it and results return.
    fn row_bytes(&self) -> u64 {
        2 * u64::from(self.hidden)
    }

    /// A row there: header, E4M3 codes, an f32 scale for every 128 of them.
    pub(crate) fn dispatch_bytes(&self) -> u64 {
        HEADER_BYTES + u64::from(self.hidden) + 4 * u64::from(self.hidden.div_ceil(128))
    }

    /// A row back: header, bf16.
    pub(crate) fn combine_bytes(&self) -> u64 {
        HEADER_BYTES + self.row_bytes()
    }
}

/// Where rows lie in the arena, the same on every rank. Slots are as long as the longer row.
#[derive(Clone, Copy)]
struct Places {
    base: Offset,
    slot: u64,
    tokens: u64,
    experts: u64,
    ranks: u64,
}

impl Places {
    fn arena_bytes(&self) -> u64 {
        self.at(self.tokens + 2 * self.experts * self.tokens + self.experts * self.tokens).0 - self.base.0
    }

    fn at(&self, slot: u64) -> Offset {
        self.base.plus(slot * self.slot)
    }

    /// The own row of `token` on its way out.
    fn staged(&self, token: u32) -> Offset {
        self.at(u64::from(token))
    }

    /// Row `index` from `source` for the local expert `local`.
    fn received(&self, local: u32, source: Rank, index: u32) -> Offset {
        let row = (u64::from(local) * self.ranks + u64::from(source.0)) * self.tokens + u64::from(index);
        self.at(self.tokens + row)
    }

    /// The result of that row on its way out.
    fn result(&self, local: u32, source: Rank, index: u32) -> Offset {
        self.received(local, source, index).plus(self.experts * self.tokens * self.slot)
    }

    /// The result of `expert` for the own `token`.
    fn returned(&self, expert: u32, token: u32) -> Offset {
        let row = u64::from(expert) * self.tokens + u64::from(token);
        self.at(self.tokens + 2 * self.experts * self.tokens + row)
    }
}

/// One rank's work.
struct Worker<'a> {
    machine: &'a Machine,
    form: Form,
    places: Places,
    local_experts: u32,
    me: Rank,
    before: Nanos,
    /// `[ranks][tokens, topk]`
    choices: &'a [Vec<i64>],
}

/// Runs a dispatch and a combine, each `before` after all ranks have begun it.
pub(crate) fn run(
    form: Form,
    topology: Topology,
    model: Model,
    before: Nanos,
    threads: NonZeroUsize,
) -> Result<Times, Stopped> {
    let builder = Shape::builder().experts(form.experts).topk(form.topk).max_tokens(form.tokens);
    let shape = builder.hidden(form.hidden).build()?;
    // Only choices are wanted: rows of one element.
    let work = Workload::new(builder.hidden(1).build()?, vec![form.tokens; topology.ranks() as usize]);
    let choices: Vec<_> = work.batches()?.into_iter().map(|batch| batch.topk_idx).collect();
    let local_experts = shape.local_experts(topology.ranks())?;
    let mut places = Places {
        base: Offset(0),
        slot: form.dispatch_bytes().max(form.combine_bytes()),
        tokens: form.tokens.into(),
        experts: form.experts.into(),
        ranks: topology.ranks().into(),
    };
    // A lane for each local expert, as DeepEP has a queue pair for each.
    let settings = Settings::builder(&shape, &topology).channels(local_experts.div_ceil(topology.nodes()));
    let settings = settings.slots(1).arena_bytes(places.arena_bytes()).build()?;
    let builder = Cluster::builder(topology).settings(settings).timed(model).elide_payload(true);
    let cluster = builder.max_events(u64::MAX).build(shape).map_err(Stopped::of_build)?;
    places.base = cluster.layout().arena().offset;
    let run = cluster.run_machines_on(threads, async |machine| {
        let (me, choices) = (machine.rank(), &choices[..]);
        Worker { machine: &machine, form, places, local_experts, me, before, choices }.layer().await
    });
    let run = run.map_err(|violation| Stopped::Failed(violation.to_string()))?;
    let events = run.events;
    let ranks: Result<Vec<_>, Error> = run.finished().into_iter().collect();
    Ok(Times::of(&ranks?, events))
}

impl Worker<'_> {
    async fn layer(&self) -> Result<[Nanos; 2], Error> {
        let failed = |fault| {
            let (op, culprit, reporter) = (1, self.me, self.me);
            Error::Failed(Failure { op, culprit, reporter, fault })
        };
        let begun = self.begin().await?;
        self.dispatch().await.map_err(failed)?;
        let dispatched = self.machine.now() - begun;
        let begun = self.begin().await?;
        self.combine().await.map_err(failed)?;
        Ok([dispatched, self.machine.now() - begun])
    }

    /// All ranks begin an operation at one time.
    async fn begin(&self) -> Result<Nanos, Error> {
        meet(self.machine).await?;
        let begun = self.machine.now();
        self.machine.spend(self.before);
        Ok(begun)
    }

    fn port(&self, op: u64, role: Role) -> Port {
        self.machine.port(Opening { role, op, generation: 1, deadline: Nanos(u64::MAX) })
    }

    fn token_port(&self, op: u64, duty: Duty, token: u32) -> Port {
        self.port(op, Role { duty, peer: None, track: token as u16 })
    }

    /// The rank and local index of an expert.
    fn home(&self, expert: u32) -> (Rank, u32) {
        (Rank(expert / self.local_experts), expert % self.local_experts)
    }

    fn is_own(&self, peer: Rank) -> bool {
        self.machine.layout().topology().reach(self.me, peer) == Reach::Own
    }

    /// The tokens of `source` that chose `expert`.
    fn tokens_of(&self, source: Rank, expert: u32) -> impl Iterator<Item = u32> {
        let tokens = (0..).zip(self.choices[source.index()].chunks_exact(self.form.topk as usize));
        tokens.filter(move |(_, choices)| choices.contains(&i64::from(expert))).map(|(token, _)| token)
    }

    fn all_sources(&self) -> impl Iterator<Item = (u32, Rank)> + use<> {
        let ranks = self.machine.layout().topology().ranks();
        (0..self.local_experts).flat_map(move |local| (0..ranks).map(move |source| (local, Rank(source))))
    }

    async fn dispatch(&self) -> Result<(), Fault> {
        const OP: u64 = 1;
        let stagers = (0..self.form.tokens).map(|token| self.stage(self.token_port(OP, Duty::Placer, token), token));
        together(stagers).await?;
        let senders = (0..self.form.experts).map(|expert| {
            let (peer, local) = self.home(expert);
            self.send(self.port(OP, Role::serving(Duty::Sender, peer, local as u16)), expert)
        });
        let receivers = self.all_sources().map(|(local, source)| {
            self.receive(self.port(OP, Role::serving(Duty::Receiver, source, local as u16)), local, source)
        });
        try_join(together(senders), together(receivers)).await?;
        Ok(())
    }

    async fn stage(&self, mut port: Port, token: u32) -> Result<(), Fault> {
        port.charge(Work::Row { bytes: self.form.row_bytes() });
        port.write(self.places.staged(token), &self.header(token))
    }

    fn header(&self, token: u32) -> [u8; HEADER_BYTES as usize] {
        header(self.me, token)
    }

    async fn send(&self, mut port: Port, expert: u32) -> Result<(), Fault> {
        let (peer, local) = self.home(expert);
        let kind = LaneKind::Data(local as u16);
        let (lane, bytes) = (LaneId { peer, kind }, self.form.dispatch_bytes());
        let mut rows = 0;
        for token in self.tokens_of(self.me, expert) {
            let to = self.places.received(local, self.me, rows);
            if self.is_own(peer) {
                port.charge(Work::Row { bytes });
                port.write(to, &self.header(token))?;
            } else {
                port.put(lane, self.places.staged(token).span(bytes), to).await?;
            }
            rows += 1;
        }
        port.publish(lane, Cell::new(self.me, kind, Counter::Tail), u64::from(rows) + 1).await
    }

    async fn receive(&self, mut port: Port, local: u32, source: Rank) -> Result<(), Fault> {
        let cell = Cell::new(source, LaneKind::Data(local as u16), Counter::Tail);
        port.wait_any(&[Need { cell, at_least: 1 }]).await?;
        for index in 0..(port.peek(cell) - 1) as u32 {
            let mut bytes = [0; HEADER_BYTES as usize];
            port.read(self.places.received(local, source, index), &mut bytes)?;
            check("source of a row", source.0, read(&bytes, 0), source)?;
            port.charge(Work::Row { bytes: self.form.dispatch_bytes() });
        }
        Ok(())
    }

    async fn combine(&self) -> Result<(), Fault> {
        const OP: u64 = 2;
        let returners = self.all_sources().map(|(local, source)| {
            let port = self.port(OP, Role::serving(Duty::Returner, source, local as u16));
            self.give_back(port, local, source)
        });
        let waiters = (0..self.form.experts).map(|expert| {
            let (peer, local) = self.home(expert);
            self.wait(self.port(OP, Role::serving(Duty::Collector, peer, local as u16)), expert)
        });
        try_join(together(returners), together(waiters)).await?;
        let reducers = (0..self.form.tokens).map(|token| self.reduce(self.token_port(OP, Duty::Reducer, token), token));
        together(reducers).await
    }

    async fn give_back(&self, mut port: Port, local: u32, peer: Rank) -> Result<(), Fault> {
        let kind = LaneKind::Data(local as u16);
        let (lane, bytes) = (LaneId { peer, kind }, self.form.combine_bytes());
        let expert = self.me.0 * self.local_experts + local;
        for (index, token) in (0..).zip(self.tokens_of(peer, expert)) {
            let mut came = [0; HEADER_BYTES as usize];
            port.read(self.places.received(local, peer, index), &mut came)?;
            check("token of a row", token, read(&came, 1), peer)?;
            let (from, to) = (self.places.result(local, peer, index), self.places.returned(expert, token));
            port.charge(Work::Row { bytes });
            if self.is_own(peer) {
                port.write(to, &header(self.me, token))?;
            } else {
                port.write(from, &header(self.me, token))?;
                port.put(lane, from.span(bytes), to).await?;
            }
        }
        port.publish(lane, Cell::new(self.me, kind, Counter::Placed), 1).await
    }

    async fn wait(&self, mut port: Port, expert: u32) -> Result<(), Fault> {
        let (peer, local) = self.home(expert);
        let cell = Cell::new(peer, LaneKind::Data(local as u16), Counter::Placed);
        port.wait_any(&[Need { cell, at_least: 1 }]).await.map(|_| ())
    }

    async fn reduce(&self, port: Port, token: u32) -> Result<(), Fault> {
        let topk = self.form.topk as usize;
        for &expert in &self.choices[self.me.index()][token as usize * topk..][..topk] {
            let mut bytes = [0; HEADER_BYTES as usize];
            port.read(self.places.returned(expert as u32, token), &mut bytes)?;
            let peer = self.home(expert as u32).0;
            check("source of a result", peer.0, read(&bytes, 0), peer)?;
            check("token of a result", token, read(&bytes, 1), peer)?;
            port.charge(Work::Reduce { bytes: self.form.row_bytes() });
        }
        Ok(())
    }
}

/// Runs roles whose ports are open, all of them, before the first one runs: they begin at one time.
async fn together(roles: impl Iterator<Item = impl Future<Output = Result<(), Fault>>>) -> Result<(), Fault> {
    try_join_all(roles.collect::<Vec<_>>()).await.map(|_| ())
}

fn header(from: Rank, token: u32) -> [u8; HEADER_BYTES as usize] {
    let mut bytes = [0; HEADER_BYTES as usize];
    bytes[..4].copy_from_slice(&from.0.to_le_bytes());
    bytes[4..8].copy_from_slice(&token.to_le_bytes());
    bytes
}

/// Word `at` of a header.
fn read(bytes: &[u8; HEADER_BYTES as usize], at: usize) -> u32 {
    u32::from_le_bytes([0, 1, 2, 3].map(|byte| bytes[4 * at + byte]))
}

fn check(field: &'static str, mine: u32, theirs: u32, peer: Rank) -> Result<(), Fault> {
    if mine == theirs { Ok(()) } else { Err(Fault::Mismatch { field, mine: mine.into(), theirs: theirs.into(), peer }) }
}
