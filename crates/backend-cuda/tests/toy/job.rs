//! What ranks on the toy device are to do, and what came of it, as its program reads and writes them.

use ep_conformance::arrival::travelling;
use ep_conformance::case::{Case, Draw, positions};
use ep_conformance::verify::{self, Observed, bytes_of};
use ep_conformance::workload::RoutingKind;
use ep_core::device::{Report, ring_roles, ring_roles_of};
use ep_core::layout::{KernelRings, KernelWindow, Kind};
use ep_core::plan::Exchange;
use ep_core::reference::World;
use ep_core::ring::Geometry;
use ep_core::{Element, Layout, Placement, RankSet, Rings, Settings, Shape, Topology};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// A communicator, and what it carries.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    /// Batches, turns of lanes, the time of puts and delays are drawn from it.
    pub(crate) seed: u64,
    /// Nodes, and ranks of each.
    pub(crate) topology: (u32, u32),
    pub(crate) local_experts: u32,
    pub(crate) topk: u32,
    pub(crate) hidden: u32,
    pub(crate) element: Element,
    pub(crate) channels: u32,
    pub(crate) geometry: Geometry,
    pub(crate) rounds: Vec<Round>,
    /// Nanoseconds that waits may take.
    pub(crate) allowed: u64,
    /// Number of a planted fault; 0 for none.
    pub(crate) plant: u32,
    /// Nanoseconds of the longest delay; 0 for none.
    pub(crate) longest: u64,
    /// A rank that does nothing.
    pub(crate) absent: Option<u32>,
}

/// A dispatch and a combine.
#[derive(Clone, Debug)]
pub(crate) struct Round {
    /// `[ranks]`.
    pub(crate) tokens: Vec<u32>,
    pub(crate) routing: RoutingKind,
    /// Each choice is dropped with this probability.
    pub(crate) drop: f64,
    /// Rows of bias, 0 to 2.
    pub(crate) bias: usize,
    /// Channels of the calls, at most the communicator's.
    pub(crate) channels: u32,
}

impl Job {
    pub(crate) fn layout(&self) -> Layout {
        let (nodes, width) = self.topology;
        let experts = self.local_experts * nodes * width;
        let shape = Shape::builder().experts(experts).topk(self.topk).hidden(self.hidden).max_tokens(64);
        let shape = shape.element(self.element).build().expect("a valid shape");
        let topology = Topology::new(nodes, width).expect("a valid topology");
        let Geometry { slots, chunk, credit } = self.geometry;
        let settings = Settings::builder(&shape, &topology).channels(self.channels).slots(slots).chunk(chunk);
        let settings = settings.far_slots(slots).far_chunk(chunk).far_credit(credit);
        let settings = settings.credit(credit).placement(Placement::Ring).low_latency(false).build();
        Layout::new(&shape, &topology, &settings.expect("valid settings")).expect("a valid layout")
    }

    fn world(layout: &Layout) -> World {
        World::new(*layout.shape(), *layout.topology(), RankSet::new()).expect("ranks that divide the experts")
    }

    fn case(&self, layout: &Layout, number: u64) -> Case {
        let Round { ref tokens, routing, drop, bias, .. } = self.rounds[number as usize];
        let seed = self.seed * 1000 + number * 10;
        let draw = Draw { tokens: tokens.clone(), routing, drop, bias, seed };
        Case::new(*layout.shape(), *layout.topology(), &draw).expect("a routing that fits the shape")
    }

    fn rings(&self, round: &Round) -> Rings {
        Rings::uniform(round.channels, self.geometry)
    }

    /// What the program reads.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let layout = self.layout();
        let mut out = Vec::new();
        let (rounds, absent) = (self.rounds.len() as u64, self.absent.unwrap_or(u32::MAX));
        let numbers = [self.seed, self.allowed, rounds, self.plant.into(), self.longest, absent.into()];
        put(&mut out, &numbers);
        put(&mut out, &[KernelWindow::from(&layout)]);
        for rank in layout.topology().all() {
            put(&mut out, &ring_roles(&layout, rank, Kind::Dispatch));
            put(&mut out, &ring_roles(&layout, rank, Kind::Combine));
        }
        for (number, round) in (0..).zip(&self.rounds) {
            self.put_round(&mut out, &layout, round, &self.case(&layout, number));
        }
        out
    }

    fn put_round(&self, out: &mut Vec<u8>, layout: &Layout, round: &Round, case: &Case) {
        let (ranks, rings) = (layout.topology().all(), self.rings(round));
        layout.check_rings(&rings).expect("rings that fit the window");
        let plans = case.plans(layout.shape()).expect("valid choices");
        let matrix: Vec<u32> = plans.iter().flat_map(|plan| plan.rows().to_vec()).collect();
        let exchange = Exchange::new(matrix, round.tokens.clone(), Vec::new()).expect("few rows");
        put(out, &[layout.hash(&rings)]);
        for kind in [Kind::Dispatch, Kind::Combine] {
            put(out, &[KernelRings::new(layout, kind, &rings)]);
            put(out, &[ring_roles_of(layout, kind, round.channels)]);
        }
        put(out, &round.tokens[..]);
        for (me, plan) in ranks.zip(&plans) {
            let (batch, row) = (&case.batches[me.index()], layout.row());
            let x = travelling(layout.shape(), &batch.x).expect("rows of the shape");
            let split = row.scales_offset().min(row.payload_bytes()) as usize;
            let rows = || x.chunks_exact(row.payload_bytes() as usize);
            put(out, &padded(rows().map(|row| &row[..split]), row.scales_offset()));
            put(out, &padded(rows().map(|row| &row[split..]), row.scales_stride()));
            put(out, &positions(plan, layout.topology().ranks()));
            put(out, &batch.topk_idx);
            put(out, &batch.topk_weights);
            put(out, plan.rows());
            put(out, plan.experts());
            put(out, &[exchange.received(me)]);
            put(out, &results(layout, Some(&case.y[me.index()])));
            for which in 0..2 {
                put(out, &results(layout, case.bias[me.index()].get(which)));
            }
        }
    }

    /// Holds what the program wrote against the oracle: what was compared, or what is wrong.
    pub(crate) fn verify(&self, mut written: &[u8]) -> Result<verify::Compared, String> {
        let layout = self.layout();
        let reports = reports(&mut written)?;
        if let Some((rank, report)) = (0..).zip(&reports).find(|(_, report)| report.status != 0) {
            return Err(format!("rank {rank}: {report:?}"));
        }
        let mut compared = verify::Compared::default();
        for number in 0..self.rounds.len() as u64 {
            let case = self.case(&layout, number);
            let seen = case.arrivals.iter().map(|_| observed(&layout, &mut written));
            let seen = seen.collect::<Result<Vec<_>, _>>()?;
            let world = Self::world(&layout);
            let checked = verify::dispatched(&world, &case.arrivals, &seen)
                .and_then(|there| verify::combined(&world, &case.combined, &seen).map(|back| (there, back)));
            let (there, back) = checked.map_err(|mismatch| format!("round {number}: {mismatch}"))?;
            compared += there;
            compared += back;
        }
        if written.is_empty() { Ok(compared) } else { Err(format!("{} bytes too many", written.len())) }
    }
}

/// What the ranks reported, off the front of what the program wrote.
pub(crate) fn reports(written: &mut &[u8]) -> Result<Vec<Report>, String> {
    take(written)
}

/// Rows one after the other, each padded to `stride`.
fn padded<'a>(rows: impl Iterator<Item = &'a [u8]>, stride: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    for row in rows {
        let end = bytes.len() + stride as usize;
        bytes.extend_from_slice(row);
        bytes.resize(end, 0);
    }
    bytes
}

/// Rows of bf16 as kernels read results; none where there are none.
fn results(layout: &Layout, rows: Option<&Vec<u16>>) -> Vec<u8> {
    let format = layout.row().results();
    let bytes = bytes_of(rows.map_or(&[], |rows| rows));
    padded(bytes.chunks_exact(format.payload_bytes() as usize), format.payload_stride())
}

/// Appends an array behind its length in bytes.
fn put<T: IntoBytes + Immutable>(out: &mut Vec<u8>, array: &[T]) {
    out.extend((size_of_val(array) as u64).to_le_bytes());
    out.extend_from_slice(array.as_bytes());
}

/// Takes one off the front.
fn take<T: FromBytes>(written: &mut &[u8]) -> Result<Vec<T>, String> {
    let short = || "the program wrote too little".to_owned();
    let (len, rest) = written.split_at_checked(8).ok_or_else(short)?;
    let len = u64::from_le_bytes(len.try_into().unwrap_or_default()) as usize;
    let (array, rest) = rest.split_at_checked(len).ok_or_else(short)?;
    *written = rest;
    Ok(array.chunks_exact(size_of::<T>()).filter_map(|one| T::read_from_bytes(one).ok()).collect())
}

/// What a rank saw in a round.
fn observed(layout: &Layout, written: &mut &[u8]) -> Result<Observed, String> {
    let (row, back) = (layout.row(), layout.row().results());
    let (codes, scales): (Vec<u8>, Vec<u8>) = (take(written)?, take(written)?);
    let mut recv_x = Vec::new();
    let split = row.scales_offset().min(row.payload_bytes()) as usize;
    let mut of_row = scales.chunks_exact(row.scales_stride().max(1) as usize);
    for codes in codes.chunks_exact(row.scales_offset() as usize) {
        recv_x.extend_from_slice(&codes[..split]);
        recv_x.extend_from_slice(of_row.next().map_or(&[], |scales| &scales[..row.scales_bytes() as usize]));
    }
    let (topk_idx, topk_weights) = (take(written)?, take(written)?);
    let (source_token, source_rank) = (take(written)?, take(written)?);
    let expert_counts = take(written)?;
    let combined: Vec<u8> = take(written)?;
    let combined = combined.chunks_exact(back.payload_stride() as usize);
    let combined_x = combined.flat_map(|row| &row[..back.payload_bytes() as usize]).copied().collect();
    Ok(Observed {
        recv_x,
        source_rank,
        source_token,
        topk_idx,
        topk_weights,
        expert_counts,
        combined_x,
        combined_topk_weights: take(written)?,
    })
}
