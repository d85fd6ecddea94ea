//! The page of `moexpress bench`: rates under their ceiling, times beside each other.

use serde_json::Value;

use super::bars::{Bar, Bars};
use super::{Page, legend, nanos, text};
use crate::compare::published;
use crate::show;

/// The page of the rows of `--json` that were measured on `backend`.
pub(crate) fn page(backend: &str, rows: &Value) -> String {
    let all: Vec<&Value> = rows.as_array().into_iter().flatten().collect();
    let of = |mode: &str| all.iter().copied().filter(|row| row["mode"] == mode).collect::<Vec<_>>();
    let lead = all.first().map_or_else(String::new, |row| {
        format!(
            "{}, hidden {}, top-{} of {} experts chosen at random; medians of the slowest rank",
            show::plural(row["ranks"].as_u64().unwrap_or(0), "rank"),
            row["hidden"],
            row["topk"],
            row["experts"]
        )
    });
    let mut page = Page::new(format!("moexpress on {backend}"), None, lead);
    let (fast, low) = (of("throughput"), of("low-latency"));
    if !fast.is_empty() {
        let note = match backend {
            "cuda" if fast.iter().any(|row| row["nodes"].is_number()) => {
                "GB/s of rows between nodes, out of or into the rank with most of them. The mark is what the network carries."
            }
            "cuda" => {
                "GB/s on the link. The mark is what plain stores of as many multiprocessors carry in the same run."
            }
            _ => {
                "GB/s of the bytes that verbs copied. The mark is what as many threads copy in the same run that do nothing else."
            }
        };
        let colours = legend(&[("there", "dispatch"), ("back", "combine"), ("mark", "ceiling")]);
        page.section("Throughput", note, colours + &rates(backend, &fast));
    }
    if !low.is_empty() {
        let colours = legend(&[("there", "dispatch"), ("back", "combine")]);
        page.section(
            "Low latency",
            "Times, each batch to a scale of its own; less is better.",
            colours + &times(backend, &low),
        );
    }
    page.finish(rows)
}

fn heading(row: &Value) -> String {
    format!("{}, {}", text(&row["dtype"]), show::plural(row["tokens"].as_u64().unwrap_or(0), "token"))
}

fn rates(backend: &str, rows: &[&Value]) -> String {
    let mut all = Bars::default();
    for row in rows {
        let (how, rate, ceiling) = match row["placement"].as_str() {
            Some(placement) if row["nodes"].is_number() => {
                let how = format!("{placement}, {} SMs, {} channels", row["multiprocessors"], row["channels"]);
                (how, "far_gb_s", &row["far_rate_gb_s"])
            }
            Some(placement) => (placement.to_owned(), "copied_gb_s", &row["copying_gb_s"]),
            None => (format!("{} SMs", row["multiprocessors"]), "gb_s", &row["ceiling_gb_s"]),
        };
        let ceiling = ceiling.as_f64().filter(|ceiling| *ceiling > 0.0);
        let bar = |(class, operation): (&'static str, &str)| {
            let value = row[format!("{operation}_{rate}")].as_f64().unwrap_or(0.0);
            let share = ceiling.map_or_else(String::new, |ceiling| format!(", {:.0} %", 100.0 * value / ceiling));
            Bar { name: how.clone(), parts: vec![(class, value)], ceiling, value: format!("{value:.1}{share}") }
        };
        all.group(heading(row), [("there", "dispatch"), ("back", "combine")].map(bar));
    }
    if backend == "cuda" && !rows.iter().any(|row| row["nodes"].is_number()) {
        let (heading, bars) = peer(&published::NORMAL, "GB/s");
        all.group(heading, bars);
    }
    all.html()
}

fn times(backend: &str, rows: &[&Value]) -> String {
    let mut all = Bars { scaled_apart: true, ..Bars::default() };
    for row in rows {
        let bars = [
            ("there", "dispatch", "dispatch_us"),
            ("back", "per choice", "combine_per_choice_us"),
            ("back", "per rank", "combine_per_rank_us"),
        ];
        let bar = |(class, name, key): (&'static str, &str, &str)| {
            let value = row[key].as_f64().or_else(|| row[key]["one_launch"].as_f64()).unwrap_or(0.0);
            Bar { name: name.to_owned(), parts: vec![(class, value)], ceiling: None, value: nanos(1e3 * value) }
        };
        all.group(heading(row), bars.map(bar));
    }
    if backend == "cuda" {
        let (heading, bars) = peer(&published::LOW_LATENCY, "us");
        all.group(heading, bars);
    }
    all.html()
}

/// What DeepEP V1 publishes for one node.
fn peer(figures: &[published::Figure], unit: &str) -> (String, Vec<Bar>) {
    let heading = "not measured here: DeepEP V1 as published, 8 H800s, hidden 7168, top-8 of 256".to_owned();
    let bar = |(class, value): (&'static str, f64)| Bar {
        name: "published".to_owned(),
        parts: vec![(class, value)],
        ceiling: None,
        value: format!("{value:.0} {unit}"),
    };
    let bars = figures.first().map(|figure| {
        let [there, back] = figure.published;
        [("there pale", there), ("back pale", back)].map(bar)
    });
    (heading, bars.into_iter().flatten().collect())
}
