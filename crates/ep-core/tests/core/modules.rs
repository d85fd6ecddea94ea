//! Modules look only at modules below them, in the order that the crate's first page says.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src");

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Modules by their place in the table of the first page: the first word of a line is a heading's, up to two spaces.
fn order(page: &str) -> BTreeMap<String, usize> {
    let table = page.split("```text").nth(2).and_then(|rest| rest.split("```").next()).expect("the second table");
    let lines = table.lines().filter_map(|line| line.strip_prefix("//! ")?.trim().split_once("  "));
    let names = lines.flat_map(|(_, names)| names.split_whitespace());
    names.enumerate().map(|(place, name)| (name.to_owned(), place)).collect()
}

/// What the crate publishes at its root, and the module that it comes from; macros come from `declare`.
fn published(page: &str) -> BTreeMap<String, String> {
    let mut homes = BTreeMap::from(["c_struct", "c_enum"].map(|name| (name.to_owned(), "declare".to_owned())));
    for path in page.lines().filter_map(|line| line.strip_prefix("pub use ")) {
        let mut names = words(path);
        let home = names.next().expect("a module");
        homes.extend(names.map(|name| (name.to_owned(), home.to_owned())));
    }
    homes
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

/// The first names of all paths that begin at the crate's root, outside of comments and of the tests at a file's end.
fn looks_at(source: &str) -> Vec<String> {
    let code = source.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    let code: String =
        code.lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join(" ");
    let paths = code.split("crate::").skip(1);
    paths
        .flat_map(|path| match path.strip_prefix('{') {
            Some(group) => words(group.split('}').next().unwrap_or_default()).map(str::to_owned).collect::<Vec<_>>(),
            None => words(path).next().map(str::to_owned).into_iter().collect(),
        })
        .collect()
}

/// All source files, each with its module.
fn files() -> Vec<(String, PathBuf)> {
    let mut found = Vec::new();
    let mut folders = vec![PathBuf::from(SOURCES)];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).expect("a folder").flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|ending| ending == "rs") {
                let inside = path.strip_prefix(SOURCES).expect("a source file").with_extension("");
                let module = inside.iter().next().expect("a name").to_string_lossy().into_owned();
                found.push((module, path));
            }
        }
    }
    found.retain(|(module, _)| module != "lib");
    found
}

#[test]
fn modules_look_downwards_only() {
    let page = read(&Path::new(SOURCES).join("lib.rs"));
    let (order, published) = (order(&page), published(&page));
    let mut wrong = Vec::new();
    let mut seen = 0;
    for (module, path) in files() {
        let place = order.get(&module).unwrap_or_else(|| panic!("the first page does not place the module {module}"));
        for name in looks_at(&read(&path)) {
            let other = published.get(&name).unwrap_or(&name);
            let Some(below) = order.get(other) else { continue }; // a name inside of braces that is no module's
            seen += 1;
            if other != &module && below >= place {
                wrong.push(format!("{} ({module}) looks up at {other}", path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(order.len() > 20 && seen > 100, "{} modules, {seen} looks: the test reads nothing", order.len());
}
