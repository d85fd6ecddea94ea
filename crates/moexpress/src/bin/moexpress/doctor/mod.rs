//! `moexpress doctor`: what this machine has, and what each missing thing prevents.
//!
//! Nothing is started or changed: files of the system are read, and drivers are asked what they have.

mod ascend;
mod host;
mod launcher;
#[cfg(feature = "cuda")]
mod nvidia;
#[cfg(all(feature = "ibgda", target_os = "linux"))]
mod posted;
mod rdma;

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::args::DoctorArgs;
use crate::failure::Failure;

/// How something stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Standing {
    /// There, and enough.
    Good,
    /// There, but less than somebody will want.
    Limited,
    /// Not there.
    Missing,
}

impl Standing {
    const fn name(self) -> &'static str {
        match self {
            Self::Good => "ok",
            Self::Limited => "limited",
            Self::Missing => "missing",
        }
    }
}

/// One thing that was looked at.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Finding {
    standing: Standing,
    /// What was looked at.
    what: String,
    /// What was seen.
    seen: String,
    /// What does not work so, and what helps. None where all is well.
    prevents: Option<String>,
}

impl Finding {
    fn good(what: impl Into<String>, seen: impl Into<String>) -> Self {
        Self { standing: Standing::Good, what: what.into(), seen: seen.into(), prevents: None }
    }

    fn limited(what: impl Into<String>, seen: impl Into<String>, prevents: impl Into<String>) -> Self {
        Self { standing: Standing::Limited, what: what.into(), seen: seen.into(), prevents: Some(prevents.into()) }
    }

    fn missing(what: impl Into<String>, seen: impl Into<String>, prevents: impl Into<String>) -> Self {
        Self { standing: Standing::Missing, ..Self::limited(what, seen, prevents) }
    }
}

/// The system's files, below a folder: `/`, or one that tests have made.
#[derive(Clone, Debug)]
struct System {
    root: PathBuf,
}

impl System {
    /// A path of the system, given from its root.
    fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// The text of a small file without the space around it; none where there is no such file.
    fn text(&self, path: &str) -> Option<String> {
        text(&self.path(path))
    }

    /// Names of what lies in a folder, in order; none of a folder that is not there.
    fn names(&self, folder: &str) -> Vec<String> {
        names(&self.path(folder))
    }

    /// Where a library lies, of the folders that a loader usually looks in.
    fn library(&self, name: &str) -> Option<PathBuf> {
        const FOLDERS: [&str; 6] = [
            "/lib/x86_64-linux-gnu",
            "/usr/lib/x86_64-linux-gnu",
            "/lib/aarch64-linux-gnu",
            "/usr/lib/aarch64-linux-gnu",
            "/usr/lib64",
            "/usr/lib",
        ];
        let named = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        let named: Vec<PathBuf> = std::env::split_paths(&named).collect();
        let usual = FOLDERS.iter().map(|folder| self.path(folder));
        named.into_iter().chain(usual).map(|folder| folder.join(name)).find(|library| library.exists())
    }
}

fn text(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

/// Says what is there.
///
/// # Errors
/// None so far.
pub(crate) fn doctor(args: &DoctorArgs) -> Result<String, Failure> {
    let system = System { root: PathBuf::from("/") };
    let parts = [
        ("host", host::look(&system)),
        ("processes", launcher::look()),
        ("RDMA", rdma::look(&system)),
        #[cfg(feature = "cuda")]
        ("NVIDIA", nvidia::look(&system)),
        #[cfg(all(feature = "ibgda", target_os = "linux"))]
        ("RDMA that GPUs post", posted::look(&system)),
        ("Ascend", ascend::look(&system)),
    ];
    Ok(if args.json { format!("{}\n", as_json(&parts)) } else { as_text(&parts) })
}

fn as_json(parts: &[(&str, Vec<Finding>)]) -> Value {
    let findings = parts.iter().flat_map(|(part, findings)| findings.iter().map(move |finding| (part, finding)));
    findings
        .map(|(part, Finding { standing, what, seen, prevents })| {
            json!({ "part": part, "standing": standing.name(), "what": what, "seen": seen, "prevents": prevents })
        })
        .collect()
}

fn as_text(parts: &[(&str, Vec<Finding>)]) -> String {
    let mut text = String::new();
    let what = |finding: &Finding| finding.what.chars().count();
    let width = parts.iter().flat_map(|(_, findings)| findings).map(what).max().unwrap_or(0);
    for (part, findings) in parts {
        let _ = writeln!(text, "{part}");
        for Finding { standing, what, seen, prevents } in findings {
            let _ = writeln!(text, "  {:<8} {what:<width$}  {seen}", standing.name());
            if let Some(prevents) = prevents {
                let _ = writeln!(text, "  {:<8} {:<width$}  prevents {prevents}", "", "");
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_comes_with_what_it_prevents() {
        let findings = vec![Finding::good("cores", "2"), Finding::missing("devices", "none", "--far roce")];
        let parts = [("host", findings)];
        assert_eq!(
            as_text(&parts),
            "host\n  ok       cores    2\n  missing  devices  none\n                    prevents --far roce\n"
        );
        let json = as_json(&parts);
        assert_eq!(json[1]["standing"], "missing");
        assert_eq!(json[0]["prevents"], Value::Null);
    }
}
