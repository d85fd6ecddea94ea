//! What `--far ibgda` needs: adapters that take commands of a process, and registers of theirs that GPUs reach.

use ep_ibgda::{Adapter, Library, survey};

use super::{Finding, System};

const POSTED: &str = "--far ibgda";

pub(super) fn look(system: &System) -> Vec<Finding> {
    let surveyed = Library::open().and_then(|library| survey(&library));
    let mut findings = match surveyed {
        Ok(adapters) => adapters.into_iter().map(adapter).collect(),
        Err(error) => vec![Finding::missing("adapters", error.to_string(), POSTED)],
    };
    findings.push(register(system));
    findings
}

fn adapter(found: Result<Adapter, ep_ibgda::Error>) -> Finding {
    match found {
        Ok(Adapter { name, relaxed_ordering: true }) => Finding::good(name, "DEVX, atomics, relaxed ordering"),
        Ok(Adapter { name, .. }) => Finding::limited(
            name,
            "DEVX, atomics, no relaxed ordering",
            "rows that pass one another on PCIe: slower with some hosts",
        ),
        Err(error) => Finding::missing("adapter", error.to_string(), POSTED),
    }
}

/// Whether NVIDIA's driver lets kernels store to registers of other devices.
fn register(system: &System) -> Finding {
    const WHAT: &str = "doorbells for GPUs";
    const HELP: &str = "--far ibgda: load NVIDIA's driver with NVreg_RegistryDwords=\"PeerMappingOverride=1;\"";
    let Some(parameters) = system.text("/proc/driver/nvidia/params") else {
        return Finding::missing(WHAT, "no /proc/driver/nvidia/params", "--far ibgda, which needs NVIDIA's driver");
    };
    let words = parameters.lines().find_map(|line| line.strip_prefix("RegistryDwords:")).unwrap_or_default().trim();
    match words.split(['"', ';', ' ']).any(|word| word == "PeerMappingOverride=1") {
        true => Finding::good(WHAT, "PeerMappingOverride=1"),
        false => Finding::missing(WHAT, format!("RegistryDwords: {words}"), HELP),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::Standing;
    use super::*;

    #[test]
    fn the_drivers_key_for_doorbells_is_looked_for() {
        let folder = tempfile::tempdir().unwrap();
        let system = System { root: folder.path().to_owned() };
        assert!(register(&system).seen.contains("no /proc/driver/nvidia/params"));
        fs::create_dir_all(folder.path().join("proc/driver/nvidia")).unwrap();
        let standing = |words: &str| {
            let text = format!("ModifyDeviceFiles: 1\nRegistryDwords: {words}\nRmMsg: \"\"\n");
            fs::write(folder.path().join("proc/driver/nvidia/params"), text).unwrap();
            register(&system).standing
        };
        assert_eq!(standing("\"PeerMappingOverride=1;\""), Standing::Good);
        assert_eq!(standing("\"RMx=2;PeerMappingOverride=1\""), Standing::Good);
        assert_eq!(standing("\"\""), Standing::Missing);
        assert_eq!(standing("\"PeerMappingOverride=10;\""), Standing::Missing);
    }

    #[test]
    fn what_an_adapter_lacks_is_told() {
        let there = |relaxed_ordering| adapter(Ok(Adapter { name: "mlx5_0".into(), relaxed_ordering })).standing;
        assert_eq!([there(true), there(false)], [Standing::Good, Standing::Limited]);
        let lacks = ep_ibgda::Error::NoDevx { device: "mlx5_0".into(), why: "denied".into() };
        assert!(adapter(Err(lacks)).seen.contains("mlx5_0 takes no DEVX commands (denied)"));
    }
}
