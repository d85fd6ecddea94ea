//! What the README shows is what the commands print, and the examples that it names are those that there are.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::{Command, Done};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn readme() -> String {
    std::fs::read_to_string(root().join("README.md")).expect("the README")
}

/// Fenced blocks: the language, and the text.
fn blocks(document: &str) -> Vec<(&str, &str)> {
    // Every second piece lies between fences.
    let fenced = document.split("```").skip(1).step_by(2);
    fenced.filter_map(|block| block.split_once('\n')).collect()
}

/// A line with what a clock said taken out.
fn without_times(line: &str) -> String {
    if !line.starts_with("time ") {
        return line.to_owned();
    }
    let words: Vec<_> = line.split_whitespace().collect();
    let is_time = |at: usize| {
        words[at].parse::<f64>().is_ok() && words.get(at + 1).is_some_and(|unit| ["ns", "us", "ms", "s"].contains(unit))
    };
    let masked = (0..words.len()).filter(|&at| at == 0 || !is_time(at - 1));
    masked.map(|at| if is_time(at) { "#" } else { words[at] }).collect::<Vec<_>>().join(" ")
}

/// What is printed when a command of the README is run in the folder of a clone.
fn printed(arguments: &str) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_moexpress"));
    command.args(arguments.split_whitespace()).current_dir(root()).env_remove("RUST_LOG");
    Done(command.output().expect("the binary runs")).success()
}

#[test]
fn quoted_outputs_are_what_the_commands_print() {
    let readme = readme();
    let blocks = blocks(&readme);
    let mut compared = 0;
    for pair in blocks.windows(2) {
        let [("sh", command), ("text", quoted)] = pair else { continue };
        let Some(arguments) = command.trim().strip_prefix("cargo run --release -- ") else { continue };
        assert!(!arguments.contains('\n'), "a command whose output is quoted stands alone: {command}");
        let lines = |text: &str| text.trim_end().lines().map(without_times).collect::<Vec<_>>();
        let (printed, quoted) = (lines(&printed(arguments)), lines(quoted));
        for (printed, quoted) in printed.iter().zip(&quoted) {
            assert_eq!(
                quoted, printed,
                "left: what README.md quotes of `moexpress {arguments}`; right: what it prints"
            );
        }
        assert_eq!(quoted.len(), printed.len(), "lines that README.md quotes of `moexpress {arguments}`");
        compared += 1;
    }
    let reports = blocks.iter().filter(|(_, text)| text.contains("\nVERIFIED ")).count();
    assert!(
        compared >= 2 && compared == reports,
        "{compared} of {reports} quoted reports have their command before them"
    );
}

#[test]
fn named_examples_are_those_that_there_are() {
    let readme = readme();
    let mut named = BTreeSet::new();
    for line in readme.lines().filter(|line| line.contains("--example ")) {
        let after = |flag: &str| line.split_once(flag).and_then(|(_, rest)| rest.split_whitespace().next());
        let (package, example) = (after(" -p "), after("--example "));
        named.insert((package.expect("-p").to_owned(), example.expect("a name").trim_matches('`').to_owned()));
    }
    // All of these are run by .ci/run.
    let mut there = BTreeSet::new();
    for folder in std::fs::read_dir(root().join("crates")).expect("crates").flatten() {
        let Ok(examples) = std::fs::read_dir(folder.path().join("examples")) else { continue };
        let manifest = std::fs::read_to_string(folder.path().join("Cargo.toml")).expect("a manifest");
        let name = manifest.lines().find_map(|line| line.strip_prefix("name = ")).expect("a name").trim_matches('"');
        for example in examples.flatten() {
            let path = example.path();
            there.insert((name.to_owned(), path.file_stem().expect("a name").to_string_lossy().into_owned()));
        }
    }
    assert_eq!(named, there, "left: in README.md; right: in crates/*/examples");
}

#[test]
fn times_do_not_count() {
    let [early, late] = ["time    73.9 ms      40.7 ms   host clock", "time   1.2 s    940 us   host clock"];
    assert_eq!(without_times(early), without_times(late));
    assert_eq!(without_times(early), "time # # host clock");
    assert_eq!(without_times("near  12,281  6.6 MiB"), "near  12,281  6.6 MiB");
}
