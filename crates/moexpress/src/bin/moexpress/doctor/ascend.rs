//! Ascend NPUs, what drives them, and what their twin needs.

use super::{Finding, System};

pub(super) fn look(system: &System) -> Vec<Finding> {
    let is_npu = |name: &String| name.strip_prefix("davinci").is_some_and(|number| number.parse::<u32>().is_ok());
    let npus = system.names("/dev").iter().filter(|name| is_npu(name)).count();
    let mut findings = vec![match npus {
        0 => Finding::missing("NPUs", "no /dev/davinci*", "--backend ascend, but with --twin"),
        npus => Finding::good("NPUs", format!("{npus}")),
    }];
    findings.extend(software());
    findings
}

#[cfg(not(feature = "ascend"))]
fn software() -> Vec<Finding> {
    vec![Finding::missing("backend", "this program was built without the feature ascend", "--backend ascend")]
}

#[cfg(feature = "ascend")]
fn software() -> Vec<Finding> {
    use ep_ascend::driver::{Device, LIBRARIES, Table, is_present};
    use ep_ascend::twin::Library;

    let mut findings = Vec::new();
    match Table::open() {
        Err(error) => findings.push(Finding::missing("ACL", error.to_string(), "--backend ascend, but with --twin")),
        Ok(table) => {
            let functions = table.functions();
            let lacking: Vec<_> = functions.iter().filter(|(_, there)| !there).map(|(name, _)| *name).collect();
            findings.push(if lacking.is_empty() {
                Finding::good("ACL", format!("{} functions", functions.len()))
            } else {
                Finding::limited("ACL", format!("without {}", lacking.join(", ")), "calls that need them")
            });
            match Device::count(&table) {
                Err(error) => findings.push(Finding::missing("devices", error.to_string(), "--backend ascend")),
                Ok(count) => findings.extend((0..count).map(|ordinal| device(&table, ordinal))),
            }
        }
    }
    let (hccl, needed_for) = LIBRARIES[1];
    findings.push(match is_present(hccl) {
        true => Finding::good("HCCL", hccl),
        false => Finding::missing("HCCL", format!("no {hccl}"), format!("{needed_for}; nothing else")),
    });
    findings.push(match std::env::var_os("EP_ASCEND_KERNELS") {
        Some(file) if std::path::Path::new(&file).is_file() => Finding::good("kernels", file.to_string_lossy()),
        Some(file) => {
            let seen = format!("EP_ASCEND_KERNELS is {}, which is no file", file.to_string_lossy());
            Finding::missing("kernels", seen, "--backend ascend, but with --twin")
        }
        None => Finding::missing("kernels", "EP_ASCEND_KERNELS is not set", "--backend ascend, but with --twin"),
    });
    findings.push(match Library::compiler() {
        Ok(compiler) => Finding::good("twin", compiler),
        Err(error) => Finding::missing("twin", error.to_string(), "--backend ascend --twin"),
    });
    findings
}

/// One device.
#[cfg(feature = "ascend")]
fn device(table: &ep_ascend::driver::Table, ordinal: u32) -> Finding {
    let what = format!("NPU {ordinal}");
    match ep_ascend::driver::Device::open(table, ordinal).and_then(|device| device.soc()) {
        Err(error) => Finding::missing(what, error.to_string(), "a rank on this NPU"),
        Ok(soc) => match ep_ascend::Roles::of_soc(&soc) {
            Some(roles) => Finding::good(what, format!("{soc}, {} vector cores", roles.cores())),
            None => Finding::limited(what, soc, "a rank on this NPU: the kernels are for Ascend 910B"),
        },
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn npus_are_counted_and_their_manager_is_not() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("dev")).unwrap();
        let system = System { root: folder.path().to_owned() };
        assert_eq!(look(&system)[0].seen, "no /dev/davinci*");
        for name in ["davinci0", "davinci1", "davinci_manager"] {
            fs::write(folder.path().join("dev").join(name), "").unwrap();
        }
        assert_eq!(look(&system)[0].seen, "2");
    }
}
