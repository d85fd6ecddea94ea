//! Ascend NPUs.

use super::{Finding, System};

pub(super) fn look(system: &System) -> Vec<Finding> {
    let is_npu = |name: &String| name.strip_prefix("davinci").is_some_and(|number| number.parse::<u32>().is_ok());
    let npus = system.names("/dev").iter().filter(|name| is_npu(name)).count();
    vec![match npus {
        0 => Finding::missing("NPUs", "no /dev/davinci*", "ranks on NPUs, for which moexpress has no backend yet"),
        npus => {
            Finding::limited("NPUs", format!("{npus}"), "nothing by itself, but moexpress has no backend for them yet")
        }
    }]
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
