//! Ranks that meet over the loopback address: as threads, and as processes that die.

mod agreement;
mod collectives;
mod held;
mod joining;
mod processes;

use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ep_bootstrap::{Error, Identity, Member, Secret, Settings};
use ep_core::{Rank, RankSet};

/// Long enough for a slow machine; nothing that succeeds takes it.
const LONG: Duration = Duration::from_secs(20);
/// For those who are to wait in vain.
const SHORT: Duration = Duration::from_millis(300);
/// For those who are to wait in vain for some, where others must have come by then.
const WHILE: Duration = Duration::from_secs(3);

fn listener() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    (listener, address)
}

fn secret(text: &str) -> Option<Secret> {
    Some(Secret::from_text(text).unwrap())
}

fn settings(rank: u32, world: u32, address: &str) -> Settings {
    let identity = Identity::new().number("hidden", 7168).number("layout hash", 5);
    Settings::new(Rank(rank), world, address).secret(secret("test")).identity(identity).within(LONG)
}

/// Settings of one rank of a test.
type Adjust<'a> = &'a (dyn Fn(u32, Settings) -> Settings + Sync);

/// What each of `world` ranks, as threads, makes of joining with `adjust`ed settings and of `body`.
fn ranks_with<T: Send>(world: u32, adjust: Adjust<'_>, body: impl Fn(Member) -> T + Sync) -> Vec<Result<T, Error>> {
    let (listener, address) = listener();
    let settings = |rank| adjust(rank, settings(rank, world, &address));
    let body = &body;
    thread::scope(|scope| {
        let host = settings(0);
        let mut threads = vec![scope.spawn(move || Member::host(listener, host).map(body))];
        threads.extend((1..world).map(|rank| {
            let settings = settings(rank);
            scope.spawn(move || Member::join(settings).map(body))
        }));
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// What each of `world` ranks, as threads, makes of `body`.
fn ranks<T: Send>(world: u32, body: impl Fn(Member) -> T + Sync) -> Vec<T> {
    ranks_with(world, &|_, settings| settings, body).into_iter().map(Result::unwrap).collect()
}

fn set(ranks: &[u32]) -> RankSet {
    ranks.iter().copied().map(Rank).collect()
}

/// Waits until `member` has been told that `rank` is gone.
fn until_lost(member: &Member, rank: u32) {
    let start = Instant::now();
    while !member.lost().contains(Rank(rank)) {
        assert!(start.elapsed() < LONG, "nobody said that rank {rank} is gone");
        thread::sleep(Duration::from_millis(2));
    }
}

/// Waits until so many have counted themselves.
fn until_counted(count: &AtomicU32, many: u32) {
    let start = Instant::now();
    while count.load(Ordering::SeqCst) < many {
        assert!(start.elapsed() < LONG, "{many} do not come");
        thread::sleep(Duration::from_millis(2));
    }
}
