//! Cores for the proxy's thread: those beside the GPU, whose memory and FIFOs it reads without a way over other sockets.

use std::path::Path;

/// Cores, ascending.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Cores(Vec<usize>);

impl Cores {
    /// Any.
    pub(crate) const fn none() -> Self {
        Self(Vec::new())
    }

    /// Those that the system says are beside the device with this place on the PCI bus; none where it does not say.
    pub(crate) fn beside(pci: &str) -> Self {
        Self::of_file(&Path::new("/sys/bus/pci/devices").join(pci).join("local_cpulist"))
    }

    fn of_file(path: &Path) -> Self {
        std::fs::read_to_string(path).ok().and_then(|text| Self::parse(text.trim())).unwrap_or_default()
    }

    /// As the system writes them: `0-3,8,10-11`.
    fn parse(text: &str) -> Option<Self> {
        let mut cores = Vec::new();
        for part in text.split(',').filter(|part| !part.is_empty()) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            cores.extend(first.parse().ok()?..=last.parse::<usize>().ok()?.min(MOST - 1));
        }
        Some(Self(cores))
    }

    /// Keeps the calling thread on those of them that it may use now. Where there is none, or the system refuses, it stays as it is.
    pub(crate) fn keep(&self) {
        if let Err(error) = self.try_keep() {
            tracing::debug!(%error, "the proxy's thread runs on any core");
        }
    }

    #[cfg(target_os = "linux")]
    fn try_keep(&self) -> std::io::Result<()> {
        use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
        let allowed = sched_getaffinity(None)?;
        let mut kept = CpuSet::new();
        self.0.iter().filter(|&&core| allowed.is_set(core)).for_each(|&core| kept.set(core));
        if kept.count() > 0 {
            sched_setaffinity(None, &kept)?;
        }
        Ok(())
    }

    #[cfg(not(target_os = "linux"))]
    fn try_keep(&self) -> std::io::Result<()> {
        Ok(())
    }
}

/// The most cores that a set has.
#[cfg(target_os = "linux")]
const MOST: usize = rustix::thread::CpuSet::MAX_CPU;
#[cfg(not(target_os = "linux"))]
const MOST: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_cores_are_read_as_the_system_writes_them() {
        let cores = |text| Cores::parse(text).map(|cores| cores.0);
        assert_eq!(cores("0-3,8,10-11"), Some(vec![0, 1, 2, 3, 8, 10, 11]));
        assert_eq!(cores(""), Some(vec![]));
        assert_eq!(cores("0-x"), None);
        assert_eq!(cores("7-18446744073709551615").unwrap().len(), MOST - 7, "no more than there can be");
        assert_eq!(Cores::beside("no such device"), Cores::default());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_thread_is_kept_on_cores_that_it_may_use_and_stays_where_there_are_none() {
        use rustix::thread::sched_getaffinity;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let allowed = sched_getaffinity(None).unwrap();
                let all: Vec<usize> = (0..MOST).filter(|&core| allowed.is_set(core)).collect();
                Cores((0..MOST).filter(|core| !all.contains(core)).collect()).keep();
                assert_eq!(sched_getaffinity(None).unwrap(), allowed, "none that it may use");
                Cores(vec![all[0], MOST - 1]).keep();
                let kept = sched_getaffinity(None).unwrap();
                assert!(kept.is_set(all[0]) && kept.count() == 1);
            });
        });
    }
}
