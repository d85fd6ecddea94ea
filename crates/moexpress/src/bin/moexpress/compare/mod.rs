//! `moexpress compare`: the timed scheduler beside published figures. One set of parameters serves all rows.

mod low_latency;
mod normal;
pub(crate) mod published;

use std::fmt::Write;
use std::num::NonZeroUsize;

use ep_core::Nanos;
use serde_json::{Value, json};

use self::published::Figure;
use crate::args::{CompareArgs, ModelName, Part, Published, name_of};
use crate::failure::Failure;
use crate::layer::Stopped;
use crate::{page, show};

const EXPERTS: u32 = 256;
const TOPK: u32 = 8;
const HIDDEN: u32 = 7168;

/// What each operation of DeepEP takes on every rank besides what the machine's model knows: synchronisation of all
/// multiprocessors between its phases, and ranks that do not begin at one time. The only value that was fitted: to the two
/// figures of low latency over 8 ranks, where NVLink carries everything.
const BEFORE: Nanos = Nanos(26_000);
/// The ranks of that row.
const CALIBRATED_ON: u32 = 8;

const MODEL: ModelName = ModelName::H800Cx7;

/// One row of the comparison: dispatch and combine.
struct Row {
    figure: Figure,
    /// Means of the ranks, in the published unit.
    simulated: [f64; 2],
    /// Microseconds.
    slowest: [f64; 2],
    calibrated: bool,
}

impl Row {
    /// In percent of what was published.
    fn error(&self, at: usize) -> f64 {
        100.0 * (self.simulated[at] / self.figure.published[at] - 1.0)
    }
}

/// One table.
struct Table {
    part: Part,
    what: String,
    unit: &'static str,
    rows: Vec<Row>,
}

pub(crate) fn compare(args: &CompareArgs) -> Result<String, Failure> {
    let Published::Deepep = args.published;
    let html = args.html.create()?;
    let progress = show::progress_bar();
    let wanted = |part: Part| args.only.is_none_or(|only| only == part);
    let mut tables = Vec::new();
    for (part, table) in [(Part::LowLatency, low_latency_table as TableOf), (Part::Normal, normal_table)] {
        let figures = if part == Part::LowLatency { &published::LOW_LATENCY[..] } else { &published::NORMAL };
        let rows = figures.iter().filter(|figure| figure.ranks <= args.up_to);
        let mut told = rows.copied().inspect(|figure| progress.set_message(format!("{} ranks", figure.ranks)));
        if wanted(part) {
            tables.push(table(&mut told, args.threads.get()).map_err(|stopped| match stopped {
                Stopped::Events => Failure::failed("a run did not end"),
                Stopped::Memory(error) => Failure::bad_input(error),
                Stopped::Failed(error) => Failure::failed(error),
            })?);
        }
    }
    progress.finish_and_clear();
    let object = object(&tables);
    if let Some(file) = html {
        file.write(page::compare(&object).as_bytes())?;
    }
    Ok(if args.json { format!("{object}\n") } else { text(&tables) })
}

fn micros(time: Nanos) -> f64 {
    time.0 as f64 / 1e3
}

/// Makes the table of some figures.
type TableOf = fn(&mut dyn Iterator<Item = Figure>, NonZeroUsize) -> Result<Table, Stopped>;

fn low_latency_table(figures: &mut dyn Iterator<Item = Figure>, threads: NonZeroUsize) -> Result<Table, Stopped> {
    let form = low_latency::Form { tokens: 128, experts: EXPERTS, topk: TOPK, hidden: HIDDEN };
    let what = format!(
        "{} tokens a rank, hidden {HIDDEN}, top-{TOPK} of {EXPERTS} experts; for each token and expert a row of {} bytes there \
         (fp8) and of {} back (bf16)",
        form.tokens,
        show::count(form.dispatch_bytes()),
        show::count(form.combine_bytes()),
    );
    let mut rows = Vec::new();
    for figure in figures {
        let times = low_latency::run(form, figure.topology()?, MODEL.model(), BEFORE, threads)?;
        let calibrated = figure.ranks == CALIBRATED_ON;
        rows.push(Row { figure, simulated: times.mean.map(micros), slowest: times.slowest.map(micros), calibrated });
    }
    Ok(Table { part: Part::LowLatency, what, unit: "us", rows })
}

fn normal_table(figures: &mut dyn Iterator<Item = Figure>, threads: NonZeroUsize) -> Result<Table, Stopped> {
    let [there, back] = normal::row_bytes()?;
    let what = format!(
        "{} tokens a rank, hidden {HIDDEN}, top-{TOPK} of {EXPERTS} experts on at most 4 nodes, {} channels; rows of {} bytes there \
         (fp8) and of {} back (bf16), counted once for each node, on 8 ranks once for each rank, own ones too",
        show::count(normal::TOKENS.into()),
        normal::CHANNELS,
        show::count(there),
        show::count(back),
    );
    let mut rows = Vec::new();
    for figure in figures {
        let normal::Ran { times, rows: sent } = normal::run(figure.topology()?, MODEL.model(), threads)?;
        let rate = |bytes: u64, time: Nanos| sent * bytes as f64 / time.0 as f64;
        let simulated = [rate(there, times.mean[0]), rate(back, times.mean[1])];
        rows.push(Row { figure, simulated, slowest: times.slowest.map(micros), calibrated: false });
    }
    Ok(Table { part: Part::Normal, what, unit: "GB/s", rows })
}

fn object(tables: &[Table]) -> Value {
    let row = |row: &Row| {
        let operation = |at: usize| {
            json!({
                "published": row.figure.published[at],
                "simulated": row.simulated[at],
                "error_percent": row.error(at),
                "slowest_rank_us": row.slowest[at],
            })
        };
        json!({
            "ranks": row.figure.ranks,
            "nvlink": row.figure.nvlink,
            "calibrated_on": row.calibrated,
            "dispatch": operation(0),
            "combine": operation(1),
        })
    };
    let table = |table: &Table| -> Value {
        json!({
            "part": name_of(table.part),
            "unit": table.unit,
            "what": table.what,
            "rows": table.rows.iter().map(row).collect::<Vec<_>>(),
        })
    };
    let model: serde_json::Map<String, Value> =
        MODEL.model().parameters().into_iter().map(|(name, value)| (name.to_owned(), value.into())).collect();
    json!({
        "model": name_of(MODEL),
        "parameters": model,
        "before_each_operation_ns": BEFORE.0,
        "tables": tables.iter().map(table).collect::<Vec<_>>(),
    })
}

fn text(tables: &[Table]) -> String {
    let mut out = String::new();
    describe(&mut out, tables).expect("writing to a string does not fail");
    out
}

fn describe(out: &mut String, tables: &[Table]) -> std::fmt::Result {
    writeln!(
        out,
        "DeepEP V1 as published for H800s, and the timed scheduler. Nothing here was measured on such machines.\n"
    )?;
    let parameters = MODEL.model().parameters().into_iter().map(|(name, value)| format!("{name} {value}"));
    writeln!(out, "model {}: {}.", name_of(MODEL), parameters.collect::<Vec<_>>().join(", "))?;
    writeln!(
        out,
        "Every operation takes {BEFORE} more, the only value that was fitted: to the row marked *. One set serves all rows.\n\
         Simulated are means of the ranks."
    )?;
    for table in tables {
        writeln!(out, "\n{}: {}", name_of(table.part), table.what)?;
        let [dispatch, combine] = ["dispatch", "combine"].map(|name| format!("{name}, {}", table.unit));
        writeln!(out, "\n{:>7}{dispatch:>31}{combine:>36}", "")?;
        let columns = format!("{:>12}{:>12}{:>10}", "published", "simulated", "error");
        writeln!(out, "{:>7}{columns}  {columns}", "ranks")?;
        for row in &table.rows {
            let mark = if row.calibrated { "*" } else { " " };
            write!(out, "{:>6}{mark}", row.figure.ranks)?;
            for at in [0, 1] {
                let gap = if at == 0 { "" } else { "  " };
                let (published, simulated) = (row.figure.published[at], row.simulated[at]);
                write!(out, "{gap}{published:>12.0}{simulated:>12.1}{:>+8.1} %", row.error(at))?;
            }
            writeln!(out, "{}", if row.figure.nvlink { "" } else { "  all over the network" })?;
        }
    }
    Ok(())
}
