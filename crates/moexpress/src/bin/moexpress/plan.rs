//! `moexpress plan`: how much memory a layer takes.

use std::fmt::Write;
use std::num::NonZeroUsize;

use ep_core::memory::Estimate;
use ep_core::{Layout, Settings, Shape, Topology};
use serde_json::json;

use crate::args::{Backend, ModelName, PlanArgs, name_of};
use crate::backend::{self, Timing};
use crate::deepep::{self, Needs};
use crate::failure::Failure;
use crate::{memory, show};

pub(crate) fn plan(args: &PlanArgs) -> Result<String, Failure> {
    let sizes = Sizes::of(args).map_err(Failure::bad_input)?;
    Ok(if args.json { sizes.json(args) } else { sizes.text(args) })
}

struct Sizes {
    shape: Shape,
    topology: Topology,
    settings: Settings,
    layout: Layout,
    memory: Memory,
    deepep: Needs,
}

/// Bytes of memory.
struct Memory {
    /// Windows of the ranks of a node.
    node: u64,
    /// Of `moexpress run` with all ranks on one machine, by what they run on; the last without payload. None where that
    /// does not take windows so large.
    run: [(&'static str, Option<u64>); 3],
    /// What this machine has left, where it tells.
    left: Option<u64>,
}

impl Memory {
    fn of(shape: &Shape, topology: &Topology, settings: &Settings) -> Result<Self, ep_core::Error> {
        let layout = Layout::new(shape, topology, settings)?;
        let tokens = u64::from(shape.max_tokens()) * u64::from(topology.ranks());
        let elided = Timing { model: ModelName::H800Cx7, elide_payload: true, threads: NonZeroUsize::MIN };
        let bytes = |backend, timing: Option<Timing>| {
            let seen = &backend::seen_shape(shape, topology, settings, timing)?;
            let needs = memory::Needs { backend, shape, seen, topology, settings, timing, tokens, processes: 1 };
            Ok::<_, ep_core::Error>(needs.estimate()?.bytes())
        };
        Ok(Self {
            node: Estimate::of_windows(&layout, topology.ranks_per_node()).bytes(),
            run: [
                ("host", bytes(Backend::Host, None).ok()),
                ("sim", bytes(Backend::Sim, None).ok()),
                ("timed, payload elided", bytes(Backend::Sim, Some(elided)).ok()),
            ],
            left: ep_memory::left()?,
        })
    }
}

impl Sizes {
    fn of(args: &PlanArgs) -> Result<Self, ep_core::Error> {
        let topology = args.topology.topology()?;
        let shape = args.layer.shape(args.max_tokens)?;
        let settings = args.settings.settings(Settings::builder(&shape, &topology), args.low_latency)?;
        let layout = Layout::new(&shape, &topology, &settings)?;
        let memory = Memory::of(&shape, &topology, &settings)?;
        let deepep = deepep::needs(topology.ranks(), shape.experts(), shape.hidden(), shape.max_tokens());
        Ok(Self { shape, topology, settings, layout, memory, deepep })
    }

    fn text(&self, args: &PlanArgs) -> String {
        let mut out = String::new();
        self.describe(args, &mut out).expect("writing to a string does not fail");
        out
    }

    fn describe(&self, args: &PlanArgs, out: &mut String) -> std::fmt::Result {
        let (shape, row, rings) = (&self.shape, self.layout.row(), self.settings.rings());
        let ranks = show::plural(u64::from(self.topology.ranks()), "rank");
        writeln!(
            out,
            "plan for {ranks}, hidden {} {}, top-{} of {} experts ({} a rank), at most {} a rank",
            shape.hidden(),
            name_of(args.layer.dtype),
            shape.topk(),
            shape.experts(),
            self.layout.local_experts(),
            show::plural(u64::from(shape.max_tokens()), "token"),
        )?;
        writeln!(out, "\nrow                    bytes")?;
        for (name, bytes) in [
            ("header and choices", row.header_bytes()),
            ("payload", row.payload_bytes()),
            ("on the wire", row.wire_bytes()),
            ("ring slot", row.slot_bytes()),
        ] {
            writeln!(out, "{name:<18} {:>9}", show::count(bytes))?;
        }
        writeln!(
            out,
            "\nrings from each rank to each other: {}, {} each; tail every {}, credit every {}; {} a writer",
            show::plural(u64::from(rings.channels), "channel"),
            show::plural(u64::from(rings.near.slots), "slot"),
            show::plural(u64::from(rings.near.chunk), "row"),
            rings.near.credit,
            show::bytes(self.near_part_bytes()),
        )?;
        if self.topology.nodes() > 1 {
            writeln!(
                out,
                "rings between nodes, along each rail: {} each; tail every {}, credit every {}",
                show::plural(u64::from(rings.far.slots), "slot"),
                show::plural(u64::from(rings.far.chunk), "row"),
                rings.far.credit,
            )?;
        }
        writeln!(out, "\nwindow of each rank           offset            bytes")?;
        for region in self.layout.regions() {
            let (offset, len) = (region.span.offset.0, region.span.len);
            writeln!(
                out,
                "{:<16} {:>19} {:>16}  {:>10}",
                region.name,
                show::count(offset),
                show::count(len),
                show::bytes(len)
            )?;
        }
        let total = self.layout.window_bytes();
        writeln!(out, "{:<16} {:>19} {:>16}  {:>10}", "in all", "", show::count(total), show::bytes(total))?;
        self.describe_memory(out)?;
        self.describe_deepep(out)
    }

    fn describe_memory(&self, out: &mut String) -> std::fmt::Result {
        let Memory { node, run, left } = &self.memory;
        writeln!(out, "\nmemory, about")?;
        writeln!(out, "{:<52} {:>10}", "windows of the ranks of a node", show::bytes(*node))?;
        for (on, bytes) in run {
            let what = format!("moexpress run, all ranks here: {on}");
            writeln!(out, "{what:<52} {:>10}", bytes.map_or("cannot".to_owned(), show::bytes))?;
        }
        match left {
            Some(left) => writeln!(out, "{:<52} {:>10}", "left on this machine", show::bytes(*left)),
            None => Ok(()),
        }
    }

    fn describe_deepep(&self, out: &mut String) -> std::fmt::Result {
        writeln!(out, "\nDeepEP V1 by its size hints, bytes of each rank (20 SMs, default chunks, bf16)")?;
        let ranks = show::plural(u64::from(self.topology.ranks()), "rank");
        let needs = &self.deepep;
        for (name, bytes) in [
            ("normal, NVLink", needs.normal_nvl_bytes),
            ("normal, RDMA", needs.normal_rdma_bytes),
            ("low latency, RDMA", Some(needs.low_latency_rdma_bytes)),
        ] {
            match bytes {
                Some(bytes) => writeln!(out, "{name:<36} {:>16}  {:>10}", show::count(bytes), show::bytes(bytes))?,
                None => writeln!(out, "{name:<36} it has no default configuration for {ranks}")?,
            }
        }
        Ok(())
    }

    /// Bytes of all rings from one rank of a node to another.
    fn near_part_bytes(&self) -> u64 {
        let rings = self.settings.rings();
        let slots = u64::from(rings.channels) * u64::from(rings.near.slots) * u64::from(self.topology.nodes());
        slots * self.layout.row().slot_bytes()
    }

    fn json(&self, args: &PlanArgs) -> String {
        let (shape, row, rings) = (&self.shape, self.layout.row(), self.settings.rings());
        let region = |region: &ep_core::layout::Region| json!({ "name": region.name, "offset": region.span.offset.0, "bytes": region.span.len });
        let object = json!({
            "nodes": self.topology.nodes(),
            "ranks": self.topology.ranks(),
            "hidden": shape.hidden(),
            "experts": shape.experts(),
            "local_experts": self.layout.local_experts(),
            "topk": shape.topk(),
            "max_tokens": shape.max_tokens(),
            "dtype": name_of(args.layer.dtype),
            "low_latency": self.settings.low_latency(),
            "row": {
                "header_bytes": row.header_bytes(),
                "payload_bytes": row.payload_bytes(),
                "wire_bytes": row.wire_bytes(),
                "slot_bytes": row.slot_bytes(),
            },
            "rings": {
                "channels": rings.channels,
                "slots": rings.near.slots,
                "chunk": rings.near.chunk,
                "credit": rings.near.credit,
                "far_slots": rings.far.slots,
                "far_chunk": rings.far.chunk,
                "far_credit": rings.far.credit,
                "bytes_per_writer": self.near_part_bytes(),
            },
            "arena_bytes": self.settings.arena_bytes(),
            "window_bytes": self.layout.window_bytes(),
            "memory": {
                "node_windows_bytes": self.memory.node,
                "run_bytes": {
                    "host": self.memory.run[0].1,
                    "sim": self.memory.run[1].1,
                    "timed_payload_elided": self.memory.run[2].1,
                },
                "left_bytes": self.memory.left,
            },
            "regions": self.layout.regions().iter().map(region).collect::<Vec<_>>(),
            "deepep_v1": self.deepep,
        });
        format!("{object}\n")
    }
}
