//! The page of `moexpress tune`: what was tried, best first.

use serde_json::Value;

use super::bars::{Bar, Bars};
use super::{Page, legend, nanos, text};
use crate::show;

/// Settings that a page shows.
const MOST: usize = 40;

/// The page of the object of `--json`.
pub(crate) fn page(report: &Value) -> String {
    let number = |value: &Value| value.as_u64().unwrap_or(0);
    let tried: Vec<&Value> = report["tried"].as_array().into_iter().flatten().collect();
    let lead = format!(
        "{} on {}, {} each, timed on {}; {} settings tried in {} events",
        show::plural(number(&report["ranks"]), "rank"),
        show::plural(number(&report["nodes"]), "node"),
        show::plural(number(&report["tokens_per_rank"]), "token"),
        text(&report["model"]),
        tried.len(),
        show::count(number(&report["events"])),
    );
    let mut page = Page::new("Settings, by timed runs", None, lead);
    let best = &report["proposal"];
    let time = |row: &Value, key: &str| row[key].as_f64().unwrap_or(0.0);
    let automatic = tried.iter().find(|row| row["automatic"] == true).map_or(0.0, |row| time(row, "together_ns"));
    let faster = automatic / time(best, "together_ns").max(1.0);
    page.tiles(&[
        ("dispatch", nanos(time(best, "dispatch_ns"))),
        ("combine", nanos(time(best, "combine_ns"))),
        ("of the automatic settings' speed", format!("{faster:.2} x")),
        ("window of a rank", show::bytes(number(&best["window_bytes"]))),
    ]);
    page.code("Proposed", &format!("{}\n\n{}", text(&report["calls"]), text(&report["options"])));
    let bar = |row: &&Value| {
        let mark = match (*row == best, row["automatic"] == true) {
            (true, _) => " (proposed)",
            (_, true) => " (automatic)",
            _ => "",
        };
        Bar {
            name: format!("{}{mark}", knobs(row)),
            parts: vec![("there", time(row, "dispatch_ns")), ("back", time(row, "combine_ns"))],
            ceiling: None,
            value: format!("{}, {}", nanos(time(row, "together_ns")), show::bytes(number(&row["window_bytes"]))),
        }
    };
    let mut bars = Bars { long: true, ..Bars::default() };
    bars.group("", tried.iter().take(MOST).map(bar));
    let note = format!(
        "Best first{}: placement, channels, slots / chunk / credit within a node and between nodes. Times are virtual, of the slowest \
         rank; bytes are those of a rank's window. Of times that are equal within 0.5 % the smaller window is proposed.",
        if tried.len() > MOST { format!(", {MOST} of {}", tried.len()) } else { String::new() }
    );
    page.section("Tried", note, legend(&[("there", "dispatch"), ("back", "combine")]) + &bars.html());
    page.finish(report)
}

fn knobs(row: &Value) -> String {
    let near =
        format!("{} {}, {}/{}/{}", text(&row["placement"]), row["channels"], row["slots"], row["chunk"], row["credit"]);
    match &row["far_slots"] {
        Value::Null => near,
        slots => format!("{near}, {slots}/{}/{}", row["far_chunk"], row["far_credit"]),
    }
}
