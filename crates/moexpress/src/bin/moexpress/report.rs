//! What `moexpress run` prints.

use std::fmt::Write;

use ep_conformance::verify::Compared;
use ep_conformance::workload::Batch;
use ep_core::ring::Geometry;
use ep_core::{Nanos, Placement, Settings, Shape, Topology};
use serde_json::json;

use crate::args::{RunArgs, name_of};
use crate::show;
use crate::traffic::{Flow, Traffic};

/// What a run was, and what came of it as far as it came.
pub(crate) struct Report<'a> {
    pub(crate) args: &'a RunArgs,
    pub(crate) shape: Shape,
    pub(crate) topology: Topology,
    pub(crate) settings: Settings,
    pub(crate) batches: &'a [Batch],
    /// Things that the backend let happen.
    pub(crate) events: u64,
    /// None when a rank failed.
    pub(crate) measured: Option<Measured>,
    /// What was verified, or what went wrong.
    pub(crate) verdict: Result<Compared, String>,
}

/// What was measured, over all ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Measured {
    pub(crate) dispatch: Traffic,
    pub(crate) combine: Traffic,
    /// From the first rank's start to the last one's end, on the host's clock.
    pub(crate) dispatch_time: Nanos,
    /// Likewise.
    pub(crate) combine_time: Nanos,
    pub(crate) busiest: Busiest,
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

    /// One JSON object on one line.
    pub(crate) fn json(&self) -> String {
        let measured = self.measured.as_ref();
        let flow = |of: fn(&Traffic) -> Flow| measured.map(|m| (of(&m.dispatch), of(&m.combine)));
        let rows = |of| flow(of).map(|(there, back)| there.rows + back.rows);
        let bytes = |of| flow(of).map(|(there, back)| there.bytes + back.bytes);
        let rings = self.settings.rings();
        let compared = self.verdict.as_ref().ok();
        let object = json!({
            "verified": self.verdict.is_ok(),
            "error": self.verdict.as_ref().err(),
            "backend": name_of(self.args.backend),
            "mode": name_of(self.args.mode),
            "schedule": name_of(self.args.schedule),
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
            "clock": "host",
            "events": self.events,
            "verified_rows": compared.map(|c| c.rows),
            "verified_values": compared.map(|c| c.values),
            "verified_weights": compared.map(|c| c.weights),
            "verified_indices": compared.map(|c| c.indices),
        });
        format!("{object}\n")
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
            "{} on {}, {} ({}, seed {}), {}",
            show::plural(ranks, "rank"),
            show::plural(u64::from(self.topology.nodes()), "node"),
            name_of(self.args.backend),
            name_of(self.args.schedule),
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
        writeln!(out)?;
        if let Some(measured) = &self.measured {
            self.describe_measured(out, measured)?;
        }
        match &self.verdict {
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
        writeln!(
            out,
            "{:<14}{:>26}{:>28}   host clock, first start to last end",
            "time",
            measured.dispatch_time.to_string(),
            measured.combine_time.to_string()
        )?;
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
        writeln!(out, "events    {} that the backend let happen", show::count(self.events))
    }
}

fn placement(settings: &Settings) -> &'static str {
    match settings.placement() {
        Placement::Ring => "ring",
        Placement::Direct => "direct",
    }
}
