//! Links of the documents lead to files and headings that there are.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The folder of the clone, and in it those that hold documents of the project.
const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
const FOLDERS: [&str; 5] = ["docs", "crates", "ci", "examples", "benches"];

fn add_documents(folder: &Path, deep: bool, into: &mut BTreeSet<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a folder").flatten() {
        let path = entry.path();
        if entry.file_name().as_encoded_bytes().starts_with(b".") {
            continue; // tools' own
        }
        if path.extension().is_some_and(|ending| ending == "md") {
            into.insert(path);
        } else if deep && path.is_dir() {
            add_documents(&path, true, into);
        }
    }
}

fn documents() -> BTreeSet<PathBuf> {
    let root = Path::new(ROOT).canonicalize().expect("the clone");
    let mut found = BTreeSet::new();
    add_documents(&root, false, &mut found);
    for folder in FOLDERS {
        add_documents(&root.join(folder), true, &mut found);
    }
    found
}

/// What stands outside of fenced blocks.
fn prose(document: &str) -> String {
    document.split("\n```").step_by(2).collect()
}

/// What a heading is linked by: small letters, digits, `-` and `_`, and `-` for a space.
fn anchor(heading: &str) -> String {
    let kept = heading.trim().chars().filter(|letter| letter.is_alphanumeric() || " -_".contains(*letter));
    kept.flat_map(char::to_lowercase).map(|letter| if letter == ' ' { '-' } else { letter }).collect()
}

fn anchors(document: &str) -> BTreeSet<String> {
    let prose = prose(document);
    let headings = prose.lines().filter(|line| line.starts_with('#'));
    headings.map(|line| anchor(line.trim_start_matches('#'))).collect()
}

/// Where the links of a document lead, but for those to other machines.
fn targets(document: &str) -> Vec<String> {
    let prose = prose(document);
    let ends = prose.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
    ends.map(|(target, _)| target.to_owned()).filter(|target| !target.contains("://")).collect()
}

#[test]
fn links_lead_to_files_and_headings() {
    let documents: BTreeMap<PathBuf, String> =
        documents().into_iter().map(|path| (path.clone(), std::fs::read_to_string(&path).expect("text"))).collect();
    let (mut followed, mut broken) = (0, Vec::new());
    for (path, document) in &documents {
        for target in targets(document) {
            let (file, heading) = target.split_once('#').unwrap_or((&target, ""));
            let there = if file.is_empty() { Ok(path.clone()) } else { path.with_file_name(file).canonicalize() };
            let leads = there.is_ok_and(|there| {
                heading.is_empty() || documents.get(&there).is_some_and(|document| anchors(document).contains(heading))
            });
            followed += 1;
            if !leads {
                broken.push(format!("{}: {target}", path.display()));
            }
        }
    }
    assert!(broken.is_empty(), "links that lead nowhere:\n{}", broken.join("\n"));
    assert!(followed > 100, "{followed} links were found in {} documents", documents.len());
}

#[test]
fn a_link_is_its_headings_words() {
    assert_eq!(anchor(" 2. Houses, and who may look at whom"), "2-houses-and-who-may-look-at-whom");
    assert_eq!(anchor(" `deep_ep` from Python"), "deep_ep-from-python");
    let document = "# A\n\n[b](#b) [c](c.md#d) [e](https://f)\n\n```text\n# no heading, [no link](g)\n```\n\n## B\n";
    assert_eq!(targets(document), ["#b", "c.md#d"]);
    assert_eq!(anchors(document), ["a", "b"].map(str::to_owned).into());
}
