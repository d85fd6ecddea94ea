//! `moexpress tune`.

use crate::{moexpress, moexpress_with_env};

const SMALL: &str = "tune --json --ranks-per-node 2 --tokens 16 --hidden 512 --experts 8 --topk 2";

fn together(row: &serde_json::Value) -> u64 {
    row["together_ns"].as_u64().expect("a time")
}

#[test]
fn the_proposal_is_the_best_that_was_tried_and_no_worse_than_the_automatic_settings() {
    let object = moexpress(SMALL).json();
    let tried = object["tried"].as_array().expect("a table");
    assert!(tried.len() > 10 && tried.is_sorted_by_key(together));
    let automatic: Vec<_> = tried.iter().filter(|row| row["automatic"] == true).collect();
    assert_eq!(automatic.len(), 1);
    let best = together(&object["proposal"]);
    assert!(best as f64 <= 1.02 * together(&tried[0]) as f64 && best as f64 <= 1.02 * together(automatic[0]) as f64);
    assert_eq!(object["budget_spent"], false);
}

#[test]
fn the_same_arguments_propose_the_same() {
    assert_eq!(moexpress(SMALL).success(), moexpress(SMALL).success());
}

#[test]
fn the_proposed_options_take_the_time_that_the_table_says() {
    let layer = "--nodes 2 --ranks-per-node 2 --tokens 24 --hidden 512 --experts 8 --topk 2";
    let object = moexpress(&format!("tune --json {layer} --budget 100000")).json();
    let options = object["options"].as_str().expect("options");
    assert!(options.contains("--far-chunk "), "{options}");
    let run = moexpress(&format!("run --json --schedule timed --elide-payload {layer} {options}")).json();
    assert_eq!(run["dispatch_ns"], object["proposal"]["dispatch_ns"]);
}

#[test]
fn the_budget_ends_the_search_and_a_window_limits_it() {
    let all = moexpress(SMALL).json();
    let half = all["events"].as_u64().unwrap() / 2;
    let some = moexpress(&format!("{SMALL} --budget {half}")).json();
    assert_eq!(some["budget_spent"], true);
    assert!(some["tried"].as_array().unwrap().len() < all["tried"].as_array().unwrap().len());
    let least = all["tried"].as_array().unwrap().iter().map(|row| row["window_bytes"].as_u64().unwrap()).min().unwrap();
    let small = moexpress(&format!("{SMALL} --max-window {least}")).json();
    assert_eq!(small["proposal"]["window_bytes"], least);
}

#[test]
fn the_table_ends_with_what_to_write() {
    let text = moexpress(&SMALL.replace(" --json", "")).success();
    let last: Vec<&str> = text.lines().rev().take(2).collect();
    assert!(last[0].starts_with("options   --placement "), "{text}");
    assert!(last[1].starts_with("in Rust   Settings::builder(&shape, &topology)"), "{text}");
    assert!(text.contains("  automatic") && text.contains("Nothing was verified"), "{text}");
}

/// Settings whose memory this machine does not have are left out: the others are still compared.
#[test]
fn settings_that_do_not_fit_into_memory_are_left_out() {
    let line = "tune --nodes 4 --ranks-per-node 8 --tokens 8 --topk 4";
    let tuned = |bytes| moexpress_with_env(line, &[("MOEXPRESS_MEMORY", bytes)]);
    assert!(tuned("15000000").success().contains("options "));
    let refusal = tuned("1000000").refusal();
    assert!(refusal.contains("memory of "), "{refusal}");
}

#[test]
fn limits_that_nothing_meets_are_refused() {
    assert!(moexpress(&format!("{SMALL} --budget 10")).refusal().contains("--budget is 10, allowed: more"));
    assert!(
        moexpress(&format!("{SMALL} --max-window 10")).refusal().contains("--max-window is 10, allowed: at least ")
    );
    assert!(
        moexpress("tune --ranks-per-node 7").refusal().contains("experts is 64, allowed: a multiple of the 7 ranks")
    );
}
