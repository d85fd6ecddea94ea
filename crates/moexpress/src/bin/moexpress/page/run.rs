//! The page of `moexpress run`: who sent what to whom, how uneven the experts' load was, and when each rank did it.

use serde_json::Value;

use super::matrix::matrix;
use super::timeline::{Spans, timeline};
use super::{Page, Tone, bars, legend, nanos, table, text};
use crate::show;

/// The page of a report, `report` being the object of `--json`.
pub(crate) fn page(report: &Value) -> String {
    let number = |key: &str| report[key].as_u64().unwrap_or(0);
    let title = format!("{} on {}", show::plural(number("ranks"), "rank"), show::plural(number("nodes"), "node"));
    let mut page = Page::new(title, Some(verdict(report)), lead(report));
    if let Some(error) = report["error"].as_str() {
        page.code("What went wrong", error);
    }
    if report["dispatch_ns"].is_null() {
        return page.finish(report);
    }
    let bytes = |hop: &str| show::bytes(number(&format!("bytes_{hop}")));
    page.tiles(&[
        ("dispatch", nanos(number("dispatch_ns") as f64)),
        ("combine", nanos(number("combine_ns") as f64)),
        ("tokens", show::count(number("tokens"))),
        ("within nodes", bytes("near")),
        ("between nodes", bytes("far")),
        ("values compared", show::count(number("verified_values"))),
    ]);
    traffic(&mut page, report);
    load(&mut page, report);
    times(&mut page, report);
    hops(&mut page, report);
    page.finish(report)
}

fn verdict(report: &Value) -> (Tone, &'static str) {
    match (report["verified"].as_bool(), report["error"].is_null()) {
        (Some(true), _) => (Tone::Good, "verified, bit for bit"),
        (_, true) => (Tone::Partly, "payload elided: values not verified"),
        _ => (Tone::Bad, "not verified"),
    }
}

fn lead(report: &Value) -> String {
    let schedule = match (&report["schedule"], &report["model"]) {
        (Value::Null, _) => String::new(),
        (schedule, Value::Null) => format!(" ({})", text(schedule)),
        (schedule, model) => format!(" ({} on {})", text(schedule), text(model)),
    };
    format!(
        "{}{schedule}, {}, seed {}; rows of {} {} values, top-{} of {} experts, {}",
        text(&report["backend"]),
        text(&report["mode"]),
        report["seed"],
        report["hidden"],
        text(&report["dtype"]),
        report["topk"],
        report["experts"],
        text(&report["routing"]),
    )
}

fn traffic(page: &mut Page, report: &Value) {
    let traffic = &report["traffic"];
    let Ok(rows) = serde_json::from_value::<Vec<Vec<u64>>>(traffic["dispatch_rows"].clone()) else { return };
    let of = text(&traffic["of"]);
    let nodes = report["nodes"].as_u64().unwrap_or(1) as usize;
    let node = if of == "rank" { rows.len() / nodes.max(1) } else { rows.len() };
    let note = format!(
        "Rows that each {of} (line) sent to each {of} (column) in the dispatch; darker is more.{}",
        if nodes > 1 && of == "rank" {
            " Outlined: nodes. Rows for another node go along the rail, and are fanned out there."
        } else {
            ""
        }
    );
    page.section("Traffic", note, matrix(&rows, node.max(1), &of, "rows"));
}

fn load(page: &mut Page, report: &Value) {
    let Ok(choices) = serde_json::from_value::<Vec<f64>>(report["expert_choices"].clone()) else { return };
    let (experts, ranks) = (choices.len(), report["ranks"].as_u64().unwrap_or(1) as usize);
    let (busiest, most) = choices.iter().copied().enumerate().fold((0, 0.0), |a, b| if b.1 > a.1 { b } else { a });
    let mean = choices.iter().sum::<f64>() / experts.max(1) as f64;
    let note = format!(
        "Choices that each expert received. The busiest, expert {busiest}, has {}, {:.1} times the mean of {mean:.1} (dashed). Each \
         rank's experts have one shade.",
        show::count(most as u64),
        most / mean.max(f64::MIN_POSITIVE),
    );
    let figure = bars::columns(&choices, experts / ranks.max(1), |expert| {
        format!("expert {expert}: {} choices", choices[expert])
    });
    let ends = bars::axis(&["expert 0".to_owned(), format!("{}", experts.saturating_sub(1))]);
    page.section("Load of experts", note, figure + &ends);
}

fn times(page: &mut Page, report: &Value) {
    let Ok(spans) = serde_json::from_value::<Vec<Spans>>(report["rank_spans_ns"].clone()) else { return };
    let (figure, note) = timeline(&spans);
    let from = text(&report["rank_spans_from"]);
    let clock = text(&report["clock"]);
    let note = format!(
        "{note}Dispatch and combine of each rank by the {clock} clock, from the {from}; the experts work in between."
    );
    let colours = legend(&[("there", "dispatch"), ("back", "combine")]);
    page.section("Time lines", note, colours + &figure);
}

fn hops(page: &mut Page, report: &Value) {
    let line = |(name, hop): (&str, &str)| {
        let number = |what: &str| report[format!("{what}_{hop}")].as_u64().unwrap_or(0);
        vec![name.to_owned(), show::count(number("rows")), show::bytes(number("bytes"))]
    };
    let lines = [("within a rank", "own"), ("within a node", "near"), ("between nodes", "far")].map(line);
    let note =
        "Rows of dispatch and combine together, each counted once, at its sender; bytes with headers and padding.";
    page.section("Hops", note, table(&["hop", "rows", "bytes"], &lines));
}
