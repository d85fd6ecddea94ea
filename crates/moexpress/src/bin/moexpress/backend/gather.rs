//! What each process saw, brought together: in pieces, since a message of the control plane is small.

use ep_bootstrap::{MAX_CONTRIBUTION, Member};
use ep_conformance::low_latency::Seen;
use ep_conformance::verify::Observed;
use ep_core::engine::stats::{PeerStats, Stats, Ways};
use ep_core::{Nanos, Rank};
use serde::{Deserialize, Serialize};

use super::budget::Budget;
use crate::failure::Failure;
use crate::rank::{Account, Interval, Saw};

/// The accounts of all ranks, by rank; at rank 0, which reports. The others send theirs, and hold no one else's.
pub(super) fn accounts(
    member: &Member,
    own: Result<Account, String>,
    budget: &Budget,
) -> Result<Option<Vec<Result<Account, String>>>, Failure> {
    let own = postcard::to_stdvec(&own.map(Sent::from)).map_err(Failure::failed)?;
    let all = pieces(member, &own, budget)?;
    let read = |bytes: Vec<u8>| {
        let sent: Result<Sent, String> = postcard::from_bytes(&bytes).map_err(Failure::failed)?;
        Ok(sent.map(Account::from))
    };
    if member.rank() != Rank(0) {
        return Ok(None);
    }
    all.into_iter().map(read).collect::<Result<_, _>>().map(Some)
}

/// The bytes of all ranks, by rank; at rank 0 alone, nothing at the others.
fn pieces(member: &Member, own: &[u8], budget: &Budget) -> Result<Vec<Vec<u8>>, Failure> {
    let missing = || Failure::failed("a rank was given up while results were gathered");
    let piece = MAX_CONTRIBUTION / member.world() as usize / 2;
    let gather = |part: &[u8]| {
        let parts = member.all_gather(part, budget.left()).map_err(Failure::failed)?;
        budget.renew();
        Ok::<_, Failure>(parts)
    };
    let lengths = gather(&(own.len() as u64).to_le_bytes())?;
    let mut longest = 0;
    for length in lengths {
        let length = length.ok_or_else(missing)?;
        let length =
            length.try_into().map(u64::from_le_bytes).map_err(|_| Failure::failed("a length of other size"))?;
        longest = longest.max(usize::try_from(length).unwrap_or(usize::MAX));
    }
    let mut all = vec![Vec::new(); member.world() as usize];
    for begin in (0..longest).step_by(piece.max(1)) {
        let part = own.get(begin..own.len().min(begin + piece)).unwrap_or_default();
        for (all, part) in all.iter_mut().zip(gather(part)?) {
            let part = part.ok_or_else(missing)?;
            if member.rank() == Rank(0) {
                all.extend(part);
            }
        }
    }
    Ok(all)
}

/// An [`Account`] as it is sent.
#[derive(Serialize, Deserialize)]
struct Sent {
    saw: SentSaw,
    /// Start and end, in nanoseconds.
    dispatch: (u64, u64),
    combine: (u64, u64),
    after_dispatch: SentStats,
    after_combine: SentStats,
}

#[derive(Serialize, Deserialize)]
enum SentSaw {
    Throughput(Observed),
    LowLatency(Seen),
}

/// Of each peer: rows and bytes sent, rows and bytes received, nanoseconds waited; choices of the own experts; operations; rows by
/// the way they took.
#[derive(Serialize, Deserialize)]
struct SentStats(Vec<[u64; 5]>, Vec<u64>, u64, ([u64; 4], [u32; 2]));

impl From<Account> for Sent {
    fn from(account: Account) -> Self {
        let interval = |Interval { start, end }| (start.0, end.0);
        Self {
            saw: match account.saw {
                Saw::Throughput(observed) => SentSaw::Throughput(observed),
                Saw::LowLatency(seen) => SentSaw::LowLatency(seen),
            },
            dispatch: interval(account.dispatch),
            combine: interval(account.combine),
            after_dispatch: account.after_dispatch.into(),
            after_combine: account.after_combine.into(),
        }
    }
}

impl From<Sent> for Account {
    fn from(sent: Sent) -> Self {
        let interval = |(start, end)| Interval { start: Nanos(start), end: Nanos(end) };
        Self {
            saw: match sent.saw {
                SentSaw::Throughput(observed) => Saw::Throughput(observed),
                SentSaw::LowLatency(seen) => Saw::LowLatency(seen),
            },
            dispatch: interval(sent.dispatch),
            combine: interval(sent.combine),
            after_dispatch: sent.after_dispatch.into(),
            after_combine: sent.after_combine.into(),
        }
    }
}

impl From<Stats> for SentStats {
    fn from(stats: Stats) -> Self {
        let peer = |peer: &PeerStats| {
            [peer.rows_sent, peer.bytes_sent, peer.rows_received, peer.bytes_received, peer.waited.0]
        };
        let Ways { placed, ringed, pulled, returned, outbox_piece, outbox_slots } = stats.ways;
        let ways = ([placed, ringed, pulled, returned], [outbox_piece, outbox_slots]);
        Self(stats.peers.iter().map(peer).collect(), stats.expert_rows, stats.operations, ways)
    }
}

impl From<SentStats> for Stats {
    fn from(SentStats(peers, expert_rows, operations, ways): SentStats) -> Self {
        let peer = |[rows_sent, bytes_sent, rows_received, bytes_received, waited]: [u64; 5]| PeerStats {
            rows_sent,
            rows_received,
            bytes_sent,
            bytes_received,
            waited: Nanos(waited),
        };
        let ([placed, ringed, pulled, returned], [outbox_piece, outbox_slots]) = ways;
        let ways = Ways { placed, ringed, pulled, returned, outbox_piece, outbox_slots };
        Self { peers: peers.into_iter().map(peer).collect(), expert_rows, operations, ways }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ep_bootstrap::Settings;

    use super::*;

    #[test]
    fn long_and_short_accounts_arrive_whole() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let within = Duration::from_secs(20);
        let account = |rank: u64| {
            let stats = Stats {
                peers: vec![PeerStats { rows_sent: rank, waited: Nanos(7), ..PeerStats::default() }; 2],
                expert_rows: vec![rank, 9],
                operations: 3,
                ways: Ways { placed: 1, ringed: 2, pulled: 3, returned: rank, outbox_piece: 5, outbox_slots: 6 },
            };
            let bytes = if rank == 0 { 20 << 20 } else { 3 };
            Account {
                saw: Saw::Throughput(Observed { recv_x: vec![rank as u8 + 1; bytes], ..Observed::default() }),
                dispatch: Interval { start: Nanos(1), end: Nanos(2 + rank) },
                combine: Interval { start: Nanos(3), end: Nanos(4) },
                after_dispatch: stats.clone(),
                after_combine: stats,
            }
        };
        let settings = |rank| Settings::new(Rank(rank), 3, &address).within(within);
        let of = |member: &Member| {
            let own =
                if member.rank() == Rank(2) { Err("it broke".into()) } else { Ok(account(member.rank().0.into())) };
            accounts(member, own, &Budget::new(within)).map_err(|failure| failure.text)
        };
        std::thread::scope(|scope| {
            let others = [1, 2].map(|rank| {
                let settings = settings(rank);
                scope.spawn(move || of(&Member::join(settings).unwrap()))
            });
            let own = of(&Member::host(listener, settings(0)).unwrap());
            for other in others {
                assert!(other.join().unwrap().unwrap().is_none(), "a rank that does not report holds what others saw");
            }
            let accounts = own.unwrap().unwrap();
            for (rank, got) in accounts[..2].iter().enumerate() {
                assert_eq!(format!("{:?}", got.as_ref().unwrap()), format!("{:?}", account(rank as u64)));
            }
            assert_eq!(accounts[2].as_ref().unwrap_err(), "it broke");
        });
    }
}
