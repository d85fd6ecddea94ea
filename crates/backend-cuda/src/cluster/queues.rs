//! The driver's queues on a GPU: what one process does on more streams than these waits for each other, and ranks that wait for each other
//! would wait for ever.

use ep_core::Error;

const VARIABLE: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
/// Streams by which copies go to a window at most.
const WAYS: u32 = 4;

/// What the driver makes of the variable.
fn connections() -> u32 {
    std::env::var(VARIABLE).ok().and_then(|value| value.parse().ok()).map_or(8, |queues: u32| queues.clamp(1, 32))
}

/// Refuses more ranks on a GPU than it has queues for. A rank has a stream, and another one where a driver copies between nodes.
pub(super) fn check(sharing: u32, copies: bool) -> Result<(), Error> {
    check_of(sharing, copies, connections())
}

/// Streams by which copies go to the window of each of the ranks that share a GPU.
pub(super) fn ways(sharing: u32) -> usize {
    ways_of(sharing, connections()) as usize
}

fn check_of(sharing: u32, copies: bool, connections: u32) -> Result<(), Error> {
    let (each, why) = if copies { (2, ", as each has a stream for copies between nodes, too") } else { (1, "") };
    if connections < each {
        let limit =
            format_args!("{each} to 32: kernels wait for copies between nodes, which have a queue of their own");
        return Err(Error::invalid(VARIABLE, connections, limit));
    }
    let most = connections / each;
    if sharing > most {
        let limit = format_args!("{most}{why}; {VARIABLE} sets it, at most 32");
        return Err(Error::invalid("ranks on one GPU", sharing, limit));
    }
    Ok(())
}

/// One queue is left for what is done aside while kernels wait, unless ranks with one way each take them all: then that waits, too, as long as kernels
/// do.
fn ways_of(sharing: u32, connections: u32) -> u32 {
    (connections.saturating_sub(1) / sharing.max(1)).saturating_sub(1).clamp(1, WAYS)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// More streams than queues made 15 ranks of three nodes on one H200 wait for ever, about every other time.
    #[test]
    fn ranks_that_share_a_gpu_have_no_more_streams_than_it_has_queues() {
        for connections in 1..=32 {
            for sharing in 1..=32 {
                let streams = sharing * (1 + ways_of(sharing, connections));
                let is_allowed = check_of(sharing, true, connections).is_ok();
                assert_eq!(
                    is_allowed,
                    streams <= connections,
                    "{sharing} ranks with {streams} streams, {connections} queues"
                );
            }
        }
        assert_eq!(
            [(1, 8), (2, 8), (4, 8), (4, 32), (15, 32)].map(|(ranks, queues)| ways_of(ranks, queues)),
            [4, 2, 1, 4, 1]
        );
    }

    #[test]
    fn too_many_ranks_are_refused_with_the_limit() {
        let said = |copies| check_of(9, copies, 8).expect_err("it is refused").to_string();
        assert_eq!(said(false), "ranks on one GPU is 9, allowed: 8; CUDA_DEVICE_MAX_CONNECTIONS sets it, at most 32");
        assert_eq!(
            said(true),
            "ranks on one GPU is 9, allowed: 4, as each has a stream for copies between nodes, too; CUDA_DEVICE_MAX_CONNECTIONS sets it, at most 32"
        );
        assert!(check_of(8, false, 8).is_ok());
        let said = check_of(1, true, 1).expect_err("copies wait for the kernel that waits for them").to_string();
        assert_eq!(
            said,
            "CUDA_DEVICE_MAX_CONNECTIONS is 1, allowed: 2 to 32: kernels wait for copies between nodes, which have a queue of their own"
        );
    }
}
