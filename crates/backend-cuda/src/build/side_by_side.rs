//! Several compilations at the same time.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use super::Target;
use crate::error::CudaError;

/// The compiler's stack: as large as that of a program's first thread, on which it is mostly run.
const STACK: usize = 8 << 20;

/// What `make` makes of each target, in their order. As many threads as there are cores work on them, this one among them.
///
/// # Errors
/// One of those of `make`; no more is begun after it.
pub(super) fn each<T: Send>(
    targets: &[Target],
    make: impl Fn(&Target) -> Result<T, CudaError> + Sync,
) -> Result<Vec<T>, CudaError> {
    let cores = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let next = AtomicUsize::new(0);
    let work = || {
        let mut made = Vec::new();
        while let Some((at, target)) = take(&next, targets) {
            // Whoever fails leaves nothing to the others.
            made.push((at, make(target).inspect_err(|_| next.store(targets.len(), Ordering::Relaxed))?));
        }
        Ok::<_, CudaError>(made)
    };
    let parts = thread::scope(|scope| {
        let help = || thread::Builder::new().stack_size(STACK).spawn_scoped(scope, work);
        // Where the system has no thread to give, the others do its work.
        let helpers: Vec<_> = (1..cores.min(targets.len())).map_while(|_| help().ok()).collect();
        let own = work();
        let theirs = helpers.into_iter().map(|helper| helper.join().expect("the compiler's thread does not panic"));
        theirs.chain([own]).collect::<Result<Vec<_>, _>>()
    })?;
    let mut all: Vec<(usize, T)> = parts.into_iter().flatten().collect();
    all.sort_unstable_by_key(|(at, _)| *at);
    Ok(all.into_iter().map(|(_, made)| made).collect())
}

/// The next target, and its place.
fn take<'a>(next: &AtomicUsize, targets: &'a [Target]) -> Option<(usize, &'a Target)> {
    let at = next.fetch_add(1, Ordering::Relaxed);
    targets.get(at).map(|target| (at, target))
}

#[cfg(test)]
mod tests {
    use std::sync::{Barrier, Mutex};
    use std::thread::ThreadId;

    use super::*;
    use crate::build::targets;

    #[test]
    fn all_are_made_in_their_order_by_several_threads() {
        let targets = targets("sm_90a");
        let cores = thread::available_parallelism().map_or(1, NonZeroUsize::get).min(targets.len());
        let (all_there, threads) = (Barrier::new(cores), Mutex::new(Vec::<ThreadId>::new()));
        let made = each(&targets, |target| {
            let me = thread::current().id();
            let first = {
                let mut threads = threads.lock().unwrap();
                let first = !threads.contains(&me);
                threads.push(me);
                first
            };
            if first {
                // Ends only if each of them works on one at the same time.
                all_there.wait();
            }
            Ok(target.clone())
        });
        assert_eq!(made.unwrap(), targets);
    }

    #[test]
    fn the_first_failure_is_told_and_nothing_is_begun_after_it() {
        let targets = targets("sm_90a");
        let begun = AtomicUsize::new(0);
        let failed = each(&targets, |target| {
            begun.fetch_add(1, Ordering::Relaxed);
            Err::<(), _>(CudaError::Driver { call: target.source.name(), code: "no".into() })
        });
        let cores = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        assert!(failed.is_err() && (1..=cores).contains(&begun.into_inner()));
    }
}
