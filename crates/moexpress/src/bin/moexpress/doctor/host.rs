//! What CPU ranks need: cores, memory, and the limits of a process.

use std::{env, thread};

use ep_core::Error;
use ep_memory::VARIABLE;
use rustix::process::{Resource, getrlimit};

use super::{Finding, System};
use crate::show;

/// Open files that a job of some hundred ranks needs: a window and a socket for each.
const FILES: u64 = 1024;
/// What automatic settings take for windows of a large layer.
const WINDOW: u64 = 1 << 30;
/// What less memory prevents.
const LARGE: &str = "large windows of CPU ranks, which are memory: `moexpress plan` says how much a layer takes";

pub(super) fn look(system: &System) -> Vec<Finding> {
    let memory = if env::var_os(VARIABLE).is_some() { said(ep_memory::left()) } else { memory(system) };
    let mut findings = vec![cores(), memory];
    findings.extend(group(system));
    findings.extend([files(), locked()]);
    findings
}

fn cores() -> Finding {
    match thread::available_parallelism() {
        Ok(cores) => Finding::good("cores", format!("{cores}: so many CPU ranks run at once, more take turns")),
        Err(error) => {
            Finding::missing("cores", error.to_string(), "knowing when to yield: CPU ranks take turns as on one core")
        }
    }
}

/// What there is as the variable says it, which all commands go by where it is set.
fn said(left: Result<Option<u64>, Error>) -> Finding {
    match left {
        Ok(left) => {
            let bytes = left.unwrap_or(0);
            enough(bytes, format!("{}, as {VARIABLE} says", show::bytes(bytes)))
        }
        Err(error) => Finding::missing("memory", error.to_string(), "all runs: each is refused with this error"),
    }
}

fn enough(bytes: u64, seen: String) -> Finding {
    if bytes < WINDOW { Finding::limited("memory", seen, LARGE) } else { Finding::good("memory", seen) }
}

/// Windows of CPU ranks are files in memory without a name: they count as memory, and nothing is needed in `/dev/shm`.
fn memory(system: &System) -> Finding {
    let info = system.text("/proc/meminfo").unwrap_or_default();
    let kib = |key: &str| {
        let line = info.lines().find_map(|line| line.strip_prefix(key))?;
        line.trim_end_matches("kB").trim().parse::<u64>().ok()
    };
    let (Some(all), Some(free)) = (kib("MemTotal:"), kib("MemAvailable:")) else {
        return Finding::missing("memory", "/proc/meminfo does not say", LARGE);
    };
    let seen = format!("{} of {} available", show::bytes(free << 10), show::bytes(all << 10));
    enough(free << 10, seen)
}

/// The limit of the control group, which a container has.
fn group(system: &System) -> Option<Finding> {
    let limit: u64 = system.text("/sys/fs/cgroup/memory.max")?.parse().ok()?;
    Some(Finding::limited(
        "memory of the group",
        show::bytes(limit),
        "windows beyond it: the process would be ended without a message",
    ))
}

fn files() -> Finding {
    let limit = getrlimit(Resource::Nofile).current;
    let seen = limit.map_or_else(|| "no limit".to_owned(), |limit| limit.to_string());
    match limit {
        Some(limit) if limit < FILES => Finding::limited(
            "open files",
            seen,
            "jobs of many processes: each needs a window and a socket a rank (`ulimit -n`)",
        ),
        _ => Finding::good("open files", seen),
    }
}

fn locked() -> Finding {
    match getrlimit(Resource::Memlock).current {
        None => Finding::good("locked memory", "no limit"),
        Some(limit) => {
            let prevents = "RDMA with windows larger than this (`ulimit -l unlimited`, or LimitMEMLOCK of the service)";
            Finding::limited("locked memory", show::bytes(limit), prevents)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::Standing;
    use super::*;

    #[test]
    fn memory_is_judged_by_what_is_available() {
        let folder = tempfile::tempdir().unwrap();
        let system = System { root: folder.path().to_owned() };
        assert_eq!(memory(&system).standing, Standing::Missing);
        fs::create_dir(folder.path().join("proc")).unwrap();
        let info = |free: u64| format!("MemTotal:       24000000 kB\nMemFree: 1 kB\nMemAvailable:   {free} kB\n");
        fs::write(folder.path().join("proc/meminfo"), info(20_000_000)).unwrap();
        assert_eq!(memory(&system).standing, Standing::Good);
        fs::write(folder.path().join("proc/meminfo"), info(20_000)).unwrap();
        assert_eq!(memory(&system).standing, Standing::Limited);
    }

    #[test]
    fn a_group_without_limit_is_not_told() {
        let folder = tempfile::tempdir().unwrap();
        let system = System { root: folder.path().to_owned() };
        assert_eq!(group(&system), None);
        fs::create_dir_all(folder.path().join("sys/fs/cgroup")).unwrap();
        fs::write(folder.path().join("sys/fs/cgroup/memory.max"), "max\n").unwrap();
        assert_eq!(group(&system), None);
        fs::write(folder.path().join("sys/fs/cgroup/memory.max"), "1073741824\n").unwrap();
        assert!(group(&system).unwrap().seen.starts_with("1.0"), "{:?}", group(&system));
    }
}
