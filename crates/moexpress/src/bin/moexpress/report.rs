//! What `moexpress run` prints.

use std::fmt::Write;

use ep_conformance::verify::Compared;
use ep_conformance::workload::Batch;
use ep_core::ring::Geometry;
use ep_core::{Nanos, Placement, Settings, Shape, Topology};
use serde_json::{Value, json};

use crate::args::{Backend, Mode, Results, RunArgs, Schedule, name_of};
use crate::backend::Timing;
use crate::show;
use crate::traffic::{Flow, Traffic};

mod details;

pub(crate) use details::Details;

/// What a run was, and what came of it as far as it came.
pub(crate) struct Report<'a> {
    pub(crate) args: &'a RunArgs,
    /// The layer that was asked for.
    pub(crate) shape: Shape,
    /// The layer that ranks saw: with elided payload another one.
    pub(crate) seen: Shape,
    pub(crate) topology: Topology,
    pub(crate) settings: Settings,
    pub(crate) timing: Option<Timing>,
    pub(crate) batches: &'a [Batch],
    /// Bytes of this machine's memory, as was estimated before the run.
    pub(crate) memory: u64,
    /// Things that the backend let happen, if it counts them.
    pub(crate) events: Option<u64>,
    /// None when a rank failed.
    pub(crate) measured: Option<Measured>,
    /// What was verified, or what went wrong.
    pub(crate) verdict: Result<Compared, String>,
}

/// What was measured, over all ranks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Measured {
    pub(crate) dispatch: Traffic,
    pub(crate) combine: Traffic,
    /// On the host's clock, from the first rank's start to the last one's end; in virtual time, and of processes, that of the slowest rank.
    pub(crate) dispatch_time: Nanos,
    /// Likewise.
    pub(crate) combine_time: Nanos,
    pub(crate) busiest: Busiest,
    pub(crate) details: Details,
}

/// How uneven the routing was.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Busiest {
    pub(crate) expert: usize,
    pub(crate) expert_choices: u64,
    pub(crate) idle_experts: usize,
    pub(crate) rank: usize,
    pub(crate) rank_rows: u64,
}

impl Report<'_> {
    fn choices(&self) -> usize {
        self.batches.iter().map(|batch| batch.topk_idx.len()).sum()
    }

    fn dropped(&self) -> usize {
        self.batches.iter().flat_map(|batch| &batch.topk_idx).filter(|&&choice| choice < 0).count()
    }

    fn tokens(&self) -> u64 {
        self.batches.iter().map(|batch| u64::from(batch.tokens)).sum()
    }

    fn routing(&self) -> String {
        match &self.args.input {
            Some(file) => format!("read from {}", file.display()),
            None => self.args.routing.to_string(),
        }
    }

    /// The order in which things happened, where the backend sets it.
    fn schedule(&self) -> Option<Schedule> {
        (self.args.backend == Backend::Sim).then(|| self.args.schedule.unwrap_or(Schedule::Explore))
    }

    fn is_elided(&self) -> bool {
        self.timing.is_some_and(|timing| timing.elide_payload)
    }

    /// GB/s that a rank sends in virtual time, mean of the ranks.
    fn rate(&self, flow: Flow, time: Nanos) -> f64 {
        flow.bytes as f64 / f64::from(self.topology.ranks()) / time.0.max(1) as f64
    }

    /// One JSON object on one line.
    pub(crate) fn json(&self) -> String {
        format!("{}\n", self.object())
    }

    /// All that there is to report.
    pub(crate) fn object(&self) -> Value {
        let measured = self.measured.as_ref();
        let flow = |of: fn(&Traffic) -> Flow| measured.map(|m| (of(&m.dispatch), of(&m.combine)));
        let rows = |of| flow(of).map(|(there, back)| there.rows + back.rows);
        let bytes = |of| flow(of).map(|(there, back)| there.bytes + back.bytes);
        let rings = self.settings.rings();
        let compared = self.verdict.as_ref().ok();
        let mut object = json!({
            "verified": self.verdict.is_ok() && !self.is_elided(),
            "error": self.verdict.as_ref().err(),
            "backend": name_of(self.args.backend),
            "mode": name_of(self.args.mode),
            "results": self.args.results.map(name_of),
            "schedule": self.schedule().map(name_of),
            "far_lanes": self.args.far_lanes.map(name_of),
            "model": self.timing.map(|timing| name_of(timing.model)),
            "payload_elided": self.is_elided(),
            "seed": self.args.seed,
            "nodes": self.topology.nodes(),
            "ranks": self.topology.ranks(),
            "tokens": self.tokens(),
            "tokens_per_rank": self.batches.iter().map(|batch| batch.tokens).collect::<Vec<_>>(),
            "hidden": self.shape.hidden(),
            "experts": self.shape.experts(),
            "topk": self.shape.topk(),
            "dtype": name_of(self.args.layer.dtype),
            "routing": self.routing(),
            "choices": self.choices(),
            "dropped": self.dropped(),
            "placement": placement(&self.settings),
            "channels": rings.channels,
            "slots": rings.near.slots,
            "chunk": rings.near.chunk,
            "credit": rings.near.credit,
            "far_slots": rings.far.slots,
            "far_chunk": rings.far.chunk,
            "far_credit": rings.far.credit,
            "arena_bytes": self.settings.arena_bytes(),
            "rows_own": rows(|t| t.own),
            "rows_near": rows(|t| t.near),
            "rows_far": rows(|t| t.far),
            "bytes_own": bytes(|t| t.own),
            "bytes_near": bytes(|t| t.near),
            "bytes_far": bytes(|t| t.far),
            "dispatch_ns": measured.map(|m| m.dispatch_time.0),
            "combine_ns": measured.map(|m| m.combine_time.0),
            "clock": if self.timing.is_some() { "virtual" } else { "host" },
            "events": self.events,
        });
        let verified = |of: fn(&Compared) -> u64| json!(compared.map(of));
        for (key, count) in [
            ("verified_rows", verified(|c| c.rows)),
            ("verified_values", verified(|c| c.values)),
            ("verified_weights", verified(|c| c.weights)),
            ("verified_indices", verified(|c| c.indices)),
            ("memory_estimate_bytes", json!(self.memory)),
            ("memory_peak_bytes", json!(show::peak_memory().filter(|_| !self.args.processes))),
        ] {
            object[key] = count;
        }
        for (key, rate) in self.rates() {
            object[key] = json!(rate);
        }
        for (key, detail) in measured.map(|m| m.details.keys()).into_iter().flatten() {
            object[key] = detail;
        }
        object
    }

    /// GB/s that a rank sends in virtual time, mean of the ranks, by their keys.
    fn rates(&self) -> [(&'static str, Option<f64>); 4] {
        let measured = self.measured.as_ref().filter(|_| self.timing.is_some());
        let rate = |of: fn(&Measured) -> (Flow, Nanos)| measured.map(of).map(|(flow, time)| self.rate(flow, time));
        [
            ("dispatch_near_gb_s", rate(|m| (m.dispatch.near, m.dispatch_time))),
            ("dispatch_far_gb_s", rate(|m| (m.dispatch.far, m.dispatch_time))),
            ("combine_near_gb_s", rate(|m| (m.combine.near, m.combine_time))),
            ("combine_far_gb_s", rate(|m| (m.combine.far, m.combine_time))),
        ]
    }

    /// A table for people.
    pub(crate) fn text(&self) -> String {
        let mut out = String::new();
        self.describe(&mut out).expect("writing to a string does not fail");
        out
    }

    fn describe(&self, out: &mut String) -> std::fmt::Result {
        let ranks = u64::from(self.topology.ranks());
        writeln!(
            out,
            "{} on {}, {} ({}seed {}), {}",
            show::plural(ranks, "rank"),
            show::plural(u64::from(self.topology.nodes()), "node"),
            name_of(self.args.backend),
            self.describe_schedule(),
            self.args.seed,
            name_of(self.args.mode),
        )?;
        writeln!(
            out,
            "batch     {} of {} {} values, top-{} of {} experts, {}, {} of {} choices dropped",
            show::plural(self.tokens(), "token"),
            self.shape.hidden(),
            name_of(self.args.layer.dtype),
            self.shape.topk(),
            self.shape.experts(),
            self.routing(),
            show::count(self.dropped() as u64),
            show::count(self.choices() as u64),
        )?;
        self.describe_way(out)?;
        if let Some(measured) = &self.measured {
            self.describe_measured(out, measured)?;
        }
        match &self.verdict {
            Ok(compared) if self.is_elided() => writeln!(
                out,
                "\nPAYLOAD ELIDED: rows' values are NOT verified. Of each row {} of {} travelled, the rest took time only. What \
                 is left equals the oracle: {} ({} values), {} weights, {} indices and counts",
                self.seen.hidden(),
                show::plural(u64::from(self.shape.hidden()), "value"),
                show::plural(compared.rows, "row"),
                show::count(compared.values),
                show::count(compared.weights),
                show::count(compared.indices),
            ),
            Ok(compared) => writeln!(
                out,
                "\nVERIFIED  bit for bit against the oracle: {} ({} values), {} weights, {} indices and counts",
                show::plural(compared.rows, "row"),
                show::count(compared.values),
                show::count(compared.weights),
                show::count(compared.indices),
            ),
            Err(_) => writeln!(out, "\nNOT VERIFIED"),
        }
    }

    fn describe_schedule(&self) -> String {
        let model = self.timing.map_or(String::new(), |timing| format!(" on {}", name_of(timing.model)));
        self.schedule().map_or(String::new(), |schedule| format!("{}{model}, ", name_of(schedule)))
    }

    /// What rows travel through.
    fn describe_way(&self, out: &mut String) -> std::fmt::Result {
        if self.args.mode == Mode::LowLatency {
            let slots = show::plural(u64::from(self.shape.max_tokens()), "row");
            let results = name_of(self.args.results.unwrap_or(Results::PerChoice));
            return writeln!(out, "through   two banks of slots for {slots} of each rank; results {results}");
        }
        let (rings, geometry) = (self.settings.rings(), self.settings.rings().near);
        write!(
            out,
            "through   {} of {}, chunk {}, credit {}",
            show::plural(u64::from(rings.channels), "ring channel"),
            show::plural(u64::from(geometry.slots), "slot"),
            geometry.chunk,
            geometry.credit,
        )?;
        if self.topology.nodes() > 1 {
            let Geometry { slots, chunk, credit } = rings.far;
            let slots = show::plural(u64::from(slots), "slot");
            write!(out, "; between nodes {slots}, chunk {chunk}, credit {credit}")?;
        }
        if self.settings.placement() == Placement::Direct {
            write!(out, "; placed directly in arenas of {}", show::bytes(self.settings.arena_bytes()))?;
        }
        writeln!(out)
    }

    fn describe_measured(&self, out: &mut String, measured: &Measured) -> std::fmt::Result {
        let Measured { dispatch, combine, busiest, .. } = measured;
        writeln!(out, "\n{:<14}{:>26}{:>28}", "", "dispatch", "combine")?;
        writeln!(out, "{:<14}{:>12}{:>14}{:>14}{:>14}", "hop", "rows", "bytes", "rows", "bytes")?;
        for (name, there, back) in [
            ("within a rank", dispatch.own, combine.own),
            ("near", dispatch.near, combine.near),
            ("far", dispatch.far, combine.far),
        ] {
            writeln!(
                out,
                "{name:<14}{:>12}{:>14}{:>14}{:>14}",
                show::count(there.rows),
                show::bytes(there.bytes),
                show::count(back.rows),
                show::bytes(back.bytes)
            )?;
        }
        let clock = match self.timing {
            Some(_) => "virtual time of the slowest rank",
            None if self.args.processes => "host clock of the slowest rank",
            None => "host clock, first start to last end",
        };
        let (there, back) = (measured.dispatch_time, measured.combine_time);
        writeln!(out, "{:<14}{:>26}{:>28}   {clock}", "time", there.to_string(), back.to_string())?;
        for (name, of) in [("near rate", (|t| t.near) as fn(&Traffic) -> Flow), ("far rate", |t| t.far)] {
            let [a, b] = [(of(dispatch), there), (of(combine), back)]
                .map(|(flow, time)| format!("{:.1} GB/s", self.rate(flow, time)));
            if self.timing.is_some() {
                writeln!(out, "{name:<14}{a:>26}{b:>28}   sent by a rank in that time, mean of the ranks")?;
            }
        }
        let kept = (self.choices() - self.dropped()) as f64;
        let rows = (dispatch.own.rows + dispatch.near.rows + dispatch.far.rows) as f64;
        writeln!(
            out,
            "\nbusiest   expert {} with {} (mean {:.1}, {} idle); rank {} with {} (mean {:.1})",
            busiest.expert,
            show::plural(busiest.expert_choices, "choice"),
            kept / f64::from(self.shape.experts()),
            busiest.idle_experts,
            busiest.rank,
            show::plural(busiest.rank_rows, "row"),
            rows / f64::from(self.topology.ranks()),
        )?;
        let Some(events) = self.events else { return Ok(()) };
        let which = match self.timing {
            None => "that the backend let happen",
            Some(_) => "taken from the heap",
        };
        writeln!(out, "events    {} {which}", show::count(events))
    }
}

fn placement(settings: &Settings) -> &'static str {
    match settings.placement() {
        Placement::Ring => "ring",
        Placement::Direct => "direct",
        Placement::Pulled => "pulled",
    }
}
