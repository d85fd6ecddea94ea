//! What ranks on the twin are to do, and what came of it, held against the oracle.

use ep_ascend::Roles;
use ep_ascend::args::{Combine, Dispatch, Launch, Line, Queue, mail_words};
use ep_ascend::twin::{Library, Machine, Reach, TwinError};
use ep_conformance::arrival::Arrival;
use ep_conformance::case::{Case, Draw, positions};
use ep_conformance::verify::{self, Compared, Observed};
use ep_conformance::workload::RoutingKind;
use ep_core::device::{Local, RankView, Report};
use ep_core::layout::{KernelRings, KernelWindow, Kind};
use ep_core::plan::{Exchange, Plan};
use ep_core::reference::World;
use ep_core::ring::Geometry;
use ep_core::{Layout, Placement, Rank, RankSet, Rings, Settings, Shape, Topology};

const GENERATION: u32 = 1;
/// Turns of the scheduler, at most: far more than any of these jobs takes.
const TURNS: u64 = 200_000_000;
/// Elements of a queue between servers.
const DEPTH: u32 = 4;

/// A communicator, and what it carries.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    /// Batches, and everything that the twin draws.
    pub(crate) seed: u64,
    pub(crate) nodes: u32,
    /// In all.
    pub(crate) ranks: u32,
    pub(crate) local_experts: u32,
    pub(crate) topk: u32,
    pub(crate) hidden: u32,
    pub(crate) channels: u32,
    pub(crate) geometry: Geometry,
    pub(crate) roles: Roles,
    pub(crate) rounds: Vec<Round>,
    /// Nanoseconds that an operation may take.
    pub(crate) allowed: u64,
    /// Whether kernels take completions of their queues themselves.
    pub(crate) polls: bool,
    /// Number of a planted fault; 0 for none.
    pub(crate) plant: u32,
    /// A rank that launches nothing.
    pub(crate) absent: Option<u32>,
    /// What rank 0 launches in place of its first dispatch.
    pub(crate) misuse: Misuse,
}

/// What rank 0 does otherwise than the others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Misuse {
    None,
    /// It combines where the others dispatch.
    Kind,
    /// It has other settings.
    Settings,
    /// It knows from the host that the absent rank is gone.
    KnowsWhoIsGone,
}

/// A dispatch and a combine.
#[derive(Clone, Debug)]
pub(crate) struct Round {
    pub(crate) tokens: Vec<u32>,
    pub(crate) routing: RoutingKind,
    /// Each choice is dropped with this probability.
    pub(crate) drop: f64,
    /// Rows of bias, 0 to 2.
    pub(crate) bias: usize,
    /// How the rings of the calls are cut.
    pub(crate) rings: Rings,
}

/// How a job ended.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) reports: Vec<Report>,
    /// None where a rank has failed.
    pub(crate) compared: Option<Compared>,
    /// `[ranks]`: alarms that they published.
    pub(crate) alarms: Vec<u32>,
    pub(crate) history: u64,
    pub(crate) cycles: u64,
}

/// What a rank keeps over its launches.
struct Memory {
    view: RankView,
    lines: u64,
    mail: u64,
    queues: u64,
}

/// Where what a rank gets in a round lies.
struct Given {
    rows: usize,
    tokens: usize,
    x: u64,
    idx: u64,
    weights: u64,
    token: u64,
    rank: u64,
    combined: u64,
    combined_weights: u64,
}

impl Job {
    fn layout(&self) -> Layout {
        let shape = Shape::builder().experts(self.local_experts * self.ranks).topk(self.topk).hidden(self.hidden);
        let shape = shape.max_tokens(64).build().expect("a valid shape");
        let topology = Topology::new(self.nodes, self.ranks / self.nodes).expect("a valid topology");
        let Geometry { slots, chunk, credit } = self.geometry;
        let settings = Settings::builder(&shape, &topology).channels(self.channels).slots(slots).chunk(chunk);
        let settings = settings.credit(credit).placement(Placement::Ring).low_latency(false).build();
        let layout = Layout::new(&shape, &topology, &settings.expect("valid settings")).expect("a valid layout");
        ep_ascend::check(&layout).expect("what the kernels can do");
        layout
    }

    fn case(&self, layout: &Layout, number: usize) -> Case {
        let Round { tokens, routing, drop, bias, .. } = self.rounds[number].clone();
        let draw = Draw { tokens, routing, drop, bias, seed: self.seed * 1000 + number as u64 * 10 };
        Case::new(*layout.shape(), *layout.topology(), &draw).expect("a routing that fits the shape")
    }

    /// Runs the job: what the ranks reported and, where nobody failed, what was compared and found equal.
    pub(crate) fn run(&self, library: &Library) -> Result<Outcome, String> {
        let layout = self.layout();
        let mut machine =
            Machine::new(library, self.seed, self.ranks, self.ranks / self.nodes).map_err(|e| e.to_string())?;
        let cases: Vec<_> = (0..self.rounds.len()).map(|number| self.case(&layout, number)).collect();
        let (memories, given) = self.enqueue(&layout, &mut machine, &cases).map_err(|e| e.to_string())?;
        machine.run(TURNS).map_err(|e| e.to_string())?;
        let report = |memory: &Memory| machine.read::<Report>(memory.view.report, 1).map(|reports| reports[0]);
        let reports: Vec<_> = memories.iter().map(report).collect::<Result<_, _>>().map_err(|e| e.to_string())?;
        let alarms = |memory: &Memory| machine.read::<Local>(memory.view.local, 1).map(|local| local[0].serial);
        let alarms = memories.iter().map(alarms).collect::<Result<_, _>>().map_err(|e| e.to_string())?;
        let failed = reports.iter().any(|report| report.status != 0);
        let compared = if failed { None } else { Some(self.verify(&layout, &machine, &cases, &given)?) };
        Ok(Outcome { reports, compared, alarms, history: machine.history(), cycles: machine.cycles() })
    }

    fn enqueue(
        &self,
        layout: &Layout,
        machine: &mut Machine,
        cases: &[Case],
    ) -> Result<(Vec<Memory>, Vec<Vec<Given>>), TwinError> {
        let window = KernelWindow::from(layout);
        let windows = (0..self.ranks).map(|rank| {
            // Behind it lie the words that its queues publish from.
            let at = machine.alloc(rank, self.registered(layout), Reach::Group)?;
            // Cells begin as 0. All else is what the device happens to hold.
            let lanes = 4 + 2 * u64::from(window.tracks);
            machine.write(at + window.cells, &vec![0u8; (2 * u64::from(self.ranks) * lanes * 64) as usize])?;
            Ok(at)
        });
        let windows = windows.collect::<Result<Vec<u64>, TwinError>>()?;
        let mut memories = Vec::new();
        for rank in 0..self.ranks {
            memories.push(self.memory(machine, rank, window, &windows)?);
        }
        let mut given = Vec::new();
        for (round, case) in self.rounds.iter().zip(cases) {
            let plans = case.plans(layout.shape()).expect("valid choices");
            let matrix: Vec<u32> = plans.iter().flat_map(|plan| plan.rows().to_vec()).collect();
            let exchange = Exchange::new(matrix.clone(), round.tokens.clone(), Vec::new()).expect("few rows");
            let mut of_round = Vec::new();
            for (rank, memory) in (0..self.ranks).zip(&memories) {
                let first = given.is_empty() && rank == 0;
                let misuse = if first { self.misuse } else { Misuse::None };
                let part =
                    Part { layout, round, case, plan: &plans[rank as usize], exchange: &exchange, matrix: &matrix };
                of_round.push(self.enqueue_round(machine, memory, rank, &part, misuse)?);
            }
            given.push(of_round);
        }
        Ok((memories, given))
    }

    fn memory(&self, machine: &mut Machine, rank: u32, w: KernelWindow, windows: &[u64]) -> Result<Memory, TwinError> {
        let mut local = vec![0u8; Local::bytes(self.ranks as usize)];
        local[std::mem::offset_of!(Local, generation)] = GENERATION as u8;
        if let (0, Misuse::KnowsWhoIsGone, Some(gone)) = (rank, self.misuse, self.absent) {
            local[Local::gone(Rank(gone))] = 1;
        }
        let cursors = vec![0u64; 2 * (self.ranks * w.tracks) as usize];
        let lines = vec![Line::default(); self.roles.cores() as usize];
        let view = RankView {
            w,
            windows: machine.place(rank, windows, Reach::ReadOnly)?,
            local: machine.place(rank, &local, Reach::Own)?,
            report: machine.place(rank, &[Report::default()], Reach::Own)?,
            cursors: machine.place(rank, &cursors, Reach::Own)?,
            first_op: 1,
            allowed: self.allowed,
            me: rank,
            generation: GENERATION,
            ..RankView::default()
        };
        let queues = self.queues(machine, rank, windows)?;
        let mail = vec![0u64; mail_words(self.nodes, w.channels)];
        Ok(Memory {
            view,
            lines: machine.place(rank, &lines, Reach::Own)?,
            mail: machine.place(rank, &mail, Reach::Own)?,
            queues: machine.place(rank, &queues, Reach::Own)?,
        })
    }

    /// Bytes of a window, and of the words behind it.
    fn registered(&self, layout: &Layout) -> u64 {
        layout.window_bytes() + u64::from(self.nodes * DEPTH) * 8
    }

    /// `[ranks]`: the queues of a rank to its rail peers.
    fn queues(&self, machine: &mut Machine, rank: u32, windows: &[u64]) -> Result<Vec<Queue>, TwinError> {
        let (each, bytes) = (self.ranks / self.nodes, self.registered(&self.layout()));
        let own = windows[rank as usize];
        let source_key = machine.key(rank, own, bytes, false)?;
        let to = |peer: u32| {
            let node = peer / each;
            if peer == rank || peer % each != rank % each {
                return Ok(Queue::default());
            }
            let view = machine.queue(rank, peer, DEPTH, self.polls)?;
            let target_key = machine.key(peer, windows[peer as usize], bytes, true)?;
            Ok(Queue {
                number: view.number,
                depth: view.depth,
                level: view.level,
                completion_depth: view.completion_depth,
                source_key,
                target_key,
                head: view.posted,
                taken: 0,
                elements: view.elements,
                doorbell: view.doorbell,
                tail: view.tail,
                completions: view.completions,
                completions_taken: view.completions_taken,
                words: own + bytes - u64::from((self.nodes - node) * DEPTH) * 8,
            })
        };
        (0..self.ranks).map(to).collect()
    }

    /// Where a rank keeps what it has passed on: an array for each server.
    fn fanout(&self, machine: &mut Machine, rank: u32, round: &Round) -> Result<u64, TwinError> {
        let each = self.ranks / self.nodes;
        let tables = (0..self.nodes).map(|node| {
            let tokens = round.tokens[(node * each + rank % each) as usize];
            machine.place(rank, &vec![-1i32; (tokens * each).max(1) as usize], Reach::Own)
        });
        let tables = tables.collect::<Result<Vec<u64>, _>>()?;
        machine.place(rank, &tables, Reach::ReadOnly)
    }

    fn enqueue_round(
        &self,
        machine: &mut Machine,
        memory: &Memory,
        rank: u32,
        part: &Part<'_>,
        misuse: Misuse,
    ) -> Result<Given, TwinError> {
        let Part { layout, round, case, plan, exchange, matrix } = *part;
        let (me, batch) = (Rank(rank), &case.batches[rank as usize]);
        let mut put = |bytes: &[u8]| machine.place(rank, bytes, Reach::ReadOnly);
        let x = put(zerocopy::IntoBytes::as_bytes(&batch.x[..]))?;
        let y = put(zerocopy::IntoBytes::as_bytes(&case.y[rank as usize][..]))?;
        let topk_idx = put(zerocopy::IntoBytes::as_bytes(&batch.topk_idx[..]))?;
        let topk_weights = put(zerocopy::IntoBytes::as_bytes(&batch.topk_weights[..]))?;
        let mut bias = [0; 2];
        for (at, rows) in bias.iter_mut().zip(&case.bias[rank as usize]) {
            *at = put(zerocopy::IntoBytes::as_bytes(&rows[..]))?;
        }
        let position = machine.place(rank, &positions(plan, self.ranks), Reach::ReadOnly)?;
        let all = || layout.topology().all();
        let first_of: Vec<u32> =
            all().map(|source| exchange.first_row(source, me)).chain([exchange.received(me)]).collect();
        let (rows, tokens) = (exchange.received(me) as usize, batch.tokens as usize);
        let (row, topk) = (u64::from(self.hidden) * 2, self.topk as usize);
        let mut out = |bytes: usize| machine.alloc(rank, bytes as u64, Reach::Own);
        let given = Given {
            rows,
            tokens,
            x: out(rows * row as usize)?,
            idx: out(rows * topk * 8)?,
            weights: out(rows * topk * 4)?,
            token: out(rows * 4)?,
            rank: out(rows * 4)?,
            combined: out(tokens * row as usize)?,
            combined_weights: out(tokens * topk * 4)?,
        };
        let first_of = machine.place(rank, &first_of, Reach::ReadOnly)?;
        let fanout = self.fanout(machine, rank, round)?;
        let launch = |kind: Kind| {
            let settings = layout.hash(&round.rings) + u64::from(misuse == Misuse::Settings);
            let r = RankView { settings, kind: kind as u32, ..memory.view };
            let (roles, plant) = (self.roles, self.plant);
            let &Memory { lines, mail, queues, .. } = memory;
            let rings = KernelRings::new(layout, kind, &round.rings);
            Launch { r, rings, roles, nanos_per_tick: 20, plant, follows: 0, lines, mail, queues }
        };
        let dispatch = Dispatch {
            launch: launch(Kind::Dispatch),
            x,
            x_stride: row,
            position,
            topk_idx,
            topk_weights,
            first_of,
            out: given.x,
            out_idx: given.idx,
            out_weights: given.weights,
            out_token: given.token,
            out_rank: given.rank,
            fanout,
            tokens: batch.tokens,
            reserved: 0,
        };
        let combine = Combine {
            launch: launch(Kind::Combine),
            y,
            y_stride: row,
            position,
            matrix: machine.place(rank, matrix, Reach::ReadOnly)?,
            first_of,
            source_token: given.token,
            tokens_of: machine.place(rank, &round.tokens, Reach::ReadOnly)?,
            own_weights: given.weights,
            bias,
            bias_stride: row,
            out: given.combined,
            out_stride: row,
            weights: given.combined_weights,
            fanout,
            tokens: batch.tokens,
            reserved: 0,
        };
        if self.absent == Some(rank) {
            return Ok(given);
        }
        let dispatch = machine.place(rank, &[dispatch], Reach::ReadOnly)?;
        let combine = machine.place(rank, &[combine], Reach::ReadOnly)?;
        if misuse != Misuse::Kind {
            machine.launch(rank, "ep_dispatch", self.roles.cores(), dispatch)?;
        }
        machine.launch(rank, "ep_combine", self.roles.cores(), combine)?;
        Ok(given)
    }

    fn verify(
        &self,
        layout: &Layout,
        machine: &Machine,
        cases: &[Case],
        given: &[Vec<Given>],
    ) -> Result<Compared, String> {
        let world = World::new(*layout.shape(), *layout.topology(), RankSet::new()).expect("as the cases");
        let mut compared = Compared::default();
        for (number, (case, given)) in cases.iter().zip(given).enumerate() {
            let seen = case.arrivals.iter().zip(given).map(|(arrival, given)| self.observed(machine, arrival, given));
            let seen = seen.collect::<Result<Vec<_>, _>>().map_err(|e| e.to_string())?;
            let checked = verify::dispatched(&world, &case.arrivals, &seen)
                .and_then(|there| verify::combined(&world, &case.combined, &seen).map(|back| (there, back)));
            let (there, back) = checked.map_err(|mismatch| format!("round {number}: {mismatch}"))?;
            compared += there;
            compared += back;
        }
        Ok(compared)
    }

    fn observed(&self, machine: &Machine, arrival: &Arrival, given: &Given) -> Result<Observed, TwinError> {
        let (row, topk) = (self.hidden as usize * 2, self.topk as usize);
        Ok(Observed {
            recv_x: machine.read(given.x, given.rows * row)?,
            source_rank: machine.read(given.rank, given.rows)?,
            source_token: machine.read(given.token, given.rows)?,
            topk_idx: machine.read(given.idx, given.rows * topk)?,
            topk_weights: machine.read(given.weights, given.rows * topk)?,
            // The host has planned: no kernel counts.
            expert_counts: arrival.received.expert_counts.clone(),
            combined_x: machine.read(given.combined, given.tokens * row)?,
            combined_topk_weights: machine.read(given.combined_weights, given.tokens * topk)?,
        })
    }
}

/// What a rank needs to know of a round.
#[derive(Clone, Copy)]
struct Part<'a> {
    layout: &'a Layout,
    round: &'a Round,
    case: &'a Case,
    plan: &'a Plan,
    exchange: &'a Exchange,
    matrix: &'a [u32],
}
