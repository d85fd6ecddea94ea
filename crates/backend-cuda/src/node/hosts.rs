//! Which ranks run on this host, and that all were started alike: what ranks that are processes tell each other first.

use std::time::Duration;

use ep_bootstrap::{Host, Member};
use ep_core::topology::Reach;
use ep_core::{Error, Layout, Rank};

use crate::error::CudaError;

/// What a rank tells.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Told {
    /// Of its layout.
    hash: u64,
    host: Host,
}

impl Told {
    const BYTES: usize = 8 + Host::BYTES;

    fn to_bytes(self) -> Vec<u8> {
        [&self.hash.to_le_bytes()[..], &self.host.to_bytes()].concat()
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (hash, host) = bytes.split_first_chunk::<8>()?;
        Some(Self { hash: u64::from_le_bytes(*hash), host: Host::from_bytes(host.try_into().ok()?) })
    }
}

/// The number of this rank among those of its host, whatever their nodes. Ranks of a node must run on one host.
///
/// # Errors
/// [`Error::Unsupported`] naming a rank of this node that runs elsewhere; what [`CudaError::Meeting`] says of ranks that did not come, or
/// have another layout; `before`, what this rank has failed with before, and of other ranks.
pub(crate) fn number_here<T>(
    layout: &Layout,
    member: &Member,
    before: Result<T, Error>,
    within: Duration,
) -> Result<u32, Error> {
    let (me, own) = (member.rank(), Told { hash: layout.hash_at_start(), host: Host::this() });
    let (_, all) = member.try_all_gather(before, |_| own.to_bytes(), within, CudaError::meeting)?;
    let near = |rank| layout.topology().reach(me, rank) == Reach::Near;
    let here = (0..).map(Rank).zip(&all).map(|(rank, told)| is_here(rank, told.as_deref(), &own, near(rank)));
    let here = here.collect::<Result<Vec<_>, _>>()?;
    Ok(here[..me.index()].iter().filter(|here| **here).count() as u32)
}

/// Whether `rank`, which told this, runs on the host of `own`.
fn is_here(rank: Rank, told: Option<&[u8]>, own: &Told, near: bool) -> Result<bool, Error> {
    let problem = |problem: String| Error::from(CudaError::Meeting { problem });
    let told = told.ok_or_else(|| problem(format!("rank {rank} was given up")))?;
    let theirs = Told::from_bytes(told)
        .ok_or_else(|| problem(format!("rank {rank} told {} bytes, expected {}", told.len(), Told::BYTES)))?;
    if theirs.hash != own.hash {
        let (what, theirs, own) = ("shape, topology or settings differ", theirs.hash, own.hash);
        return Err(problem(format!("{what}: the hash of rank {rank} is {theirs:016x}, the own {own:016x}")));
    }
    if near && theirs.host != own.host {
        let needs = format_args!("a topology with a node for each; rank {rank} runs on another host than this one");
        return Err(Error::unsupported("a node on several hosts", needs));
    }
    Ok(theirs.host == own.host)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_tell_is_checked() {
        let host = |byte| Host::from_bytes([byte; 16]);
        let own = Told { hash: 7, host: host(1) };
        let told = |told: Told, near| is_here(Rank(1), Some(&told.to_bytes()), &own, near).map_err(|e| e.to_string());
        assert_eq!(told(own, true), Ok(true));
        let elsewhere = Told { host: host(2), ..own };
        assert_eq!(told(elsewhere, false), Ok(false), "of another node");
        assert!(told(elsewhere, true).unwrap_err().contains("rank 1 runs on another host than this one"));
        let other = told(Told { hash: 8, ..own }, false).unwrap_err();
        assert!(other.contains("rank 1 is 0000000000000008, the own 0000000000000007"), "{other}");
        let complaint = |bytes: Option<&[u8]>| is_here(Rank(1), bytes, &own, false).unwrap_err().to_string();
        assert!(complaint(Some(&own.to_bytes()[1..])).contains("23 bytes, expected 24"));
        assert!(complaint(None).contains("rank 1 was given up"));
    }
}
