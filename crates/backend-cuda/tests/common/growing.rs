//! Arenas that grow while results are kept, and give back what nobody has: of ranks that share their windows' mappings, and of ranks that have their own.
#![allow(unreachable_pub)] // The test targets that hold it are crates of their own.

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ep_bootstrap::{Identity, Member, Settings as Meeting};
use ep_conformance::arrival::Arrival;
use ep_conformance::drive::{Round, all_of, round, upload};
use ep_conformance::verify::{self, Observed};
use ep_conformance::workload::{Batch, Workload};
use ep_core::engine::{Dispatch, Received};
use ep_core::reference::World;
use ep_core::{Endpoint as _, Error, Nanos, Placement, Rank, RankSet, Settings, Shape, Topology};
use ep_cuda::{Builder, Cluster, CudaEndpoint};
use libtest_mimic::Trial;

const RANKS: u32 = 2;
/// Results that are kept: more than three pieces have room for.
const KEPT: usize = 14;
/// Longer than all of it takes, on a busy machine, too.
const LONG: Duration = Duration::from_secs(100);

/// Bytes of a rank's window that have memory, whether the rank lives or not.
type Mapped = Arc<AtomicU64>;

/// Batches of some 2 MB of rows, and windows whose arenas have nothing at first.
fn setup() -> Result<(Shape, Builder, World, Vec<Batch>), Error> {
    let topology = Topology::new(1, RANKS)?;
    let shape = Shape::builder().experts(8).topk(4).hidden(2048).max_tokens(256).build()?;
    let settings = Settings::builder(&shape, &topology).placement(Placement::Direct).arena_bytes(1 << 32).outboxes(2);
    let settings = settings.deadline(Nanos(LONG.as_nanos() as u64)).build()?;
    let builder = Cluster::builder(topology).settings(settings).multiprocessors(2).specialise(false).arena_at_first(0);
    let batches = Workload::new(shape, vec![256; RANKS as usize]).seed(5).batches()?;
    Ok((shape, builder, World::new(shape, topology, RankSet::new())?, batches))
}

/// Waits until `has_come`, with a small dispatch before each look.
async fn until(ep: &mut CudaEndpoint, small: &Batch, has_come: impl Fn(&CudaEndpoint) -> bool) -> Result<(), Error> {
    let began = Instant::now();
    // All ranks dispatch as often: what one waits for may come earlier for the other.
    for _ in 0..45 {
        let (x, routing) = upload(ep, small)?;
        drop(ep.dispatch(&x, &routing).await?);
        thread::sleep(Duration::from_millis(75));
    }
    if has_come(ep) {
        Ok(())
    } else {
        Err(Error::broken("an arena", format_args!("{} bytes after {:?}", ep.arena_bytes(), began.elapsed()), ""))
    }
}

/// Keeps the results of many dispatches, which are then looked at together.
async fn keep(ep: &mut CudaEndpoint, batch: &Batch) -> Result<Vec<Observed>, Error> {
    let mut kept: Vec<Received<CudaEndpoint>> = Vec::new();
    for _ in 0..KEPT {
        let (x, routing) = upload(ep, batch)?;
        kept.push(ep.dispatch_with(&x, &routing, &Dispatch::default()).await?);
        thread::sleep(Duration::from_millis(20));
    }
    kept.iter().map(|got| Observed::of_dispatch(ep, got)).collect()
}

/// What a rank saw: rounds and kept results, of two times.
async fn rank(
    mut ep: CudaEndpoint,
    world: &World,
    batches: &[Batch],
    small: &[Batch],
) -> Result<(Vec<Observed>, Mapped), Error> {
    let wrong = |what: String| Error::broken("an arena that grows", what, "");
    let (me, before) = (ep.rank().index(), ep.arena_bytes());
    let mut seen = Vec::new();
    let mapped = ep.mapped().ok_or_else(|| wrong("does not grow".to_owned()))?;
    for time in 0..2 {
        let placed = ep.stats().ways.placed;
        seen.extend(keep(&mut ep, &batches[me]).await?);
        let most = ep.arena_bytes();
        if most < before + (24 << 20) {
            return Err(wrong(format!("time {time}: {most} bytes for {KEPT} results")));
        }
        if ep.stats().ways.placed == placed {
            return Err(wrong(format!("time {time}: no row was placed")));
        }
        seen.push(round(&mut ep, world, &batches[me], &Round::PULLING).await?.0);
        until(&mut ep, &small[me], |ep| ep.arena_bytes() < before + (20 << 20)).await?;
    }
    Ok((seen, mapped))
}

/// Compares what all ranks saw, whose windows have ended.
fn compare(world: &World, batches: &[Batch], seen: &[(Vec<Observed>, Mapped)]) -> Result<(), String> {
    for (_, mapped) in seen {
        let left = mapped.load(Ordering::Relaxed);
        if left > 0 {
            return Err(format!("{left} bytes of a window are mapped when its rank has ended"));
        }
    }
    let expected = Arrival::expected(world, batches);
    for at in 0..seen[0].0.len() {
        let of_all: Vec<Observed> = seen.iter().map(|(seen, _)| seen[at].clone()).collect();
        let compared = match of_all[0].combined_x.is_empty() {
            true => verify::dispatched(world, &expected, &of_all),
            false => verify::run(world, batches, &of_all),
        };
        compared.map_err(|mismatch| format!("result {at}: {mismatch}"))?;
    }
    Ok(())
}

/// Ranks that are threads share one mapping of each window.
fn shared() -> Result<(), String> {
    let text = |error: Error| error.to_string();
    let (shape, builder, world, batches) = setup().map_err(text)?;
    let small = Workload::new(shape, vec![1; RANKS as usize]).seed(6).batches().map_err(text)?;
    let cluster = builder.build(shape).map_err(text)?;
    let seen = cluster.run(async |ep| rank(ep, &world, &batches, &small).await).map_err(text)?;
    compare(&world, &batches, &all_of(seen)?)
}

/// Ranks that join as processes do, here threads, have mappings of their own.
fn own() -> Result<(), String> {
    let text = |error: Error| error.to_string();
    let (shape, builder, world, batches) = setup().map_err(text)?;
    let small = Workload::new(shape, vec![1; RANKS as usize]).seed(6).batches().map_err(text)?;
    let listener = TcpListener::bind("127.0.0.1:0").map_err(|error| error.to_string())?;
    let address = listener.local_addr().map_err(|error| error.to_string())?.to_string();
    let join = |me: Rank, listener: Option<TcpListener>| {
        let meeting = Meeting::new(me, RANKS, &address).identity(Identity::new()).within(LONG);
        let member = match listener {
            Some(listener) => Member::host(listener, meeting),
            None => Member::join(meeting),
        };
        let member = Arc::new(member.expect("all have joined"));
        let ep = builder.clone().join(shape, &member)?;
        let seen = futures_executor::block_on(rank(ep, &world, &batches, &small));
        drop(member);
        seen
    };
    let seen = thread::scope(|scope| {
        let others: Vec<_> = (1..RANKS).map(|me| scope.spawn(move || join(Rank(me), None))).collect();
        let first = join(Rank(0), Some(listener));
        [first].into_iter().chain(others.into_iter().map(|other| other.join().expect("no panic"))).collect()
    });
    compare(&world, &batches, &all_of(seen)?)
}

/// Results that are there when all ranks have ended; when they are gone, a later call lets their memory go.
fn outliving() -> Result<(), String> {
    let text = |error: Error| error.to_string();
    let (shape, builder, _, batches) = setup().map_err(text)?;
    let small = Workload::new(shape, vec![1; RANKS as usize]).seed(6).batches().map_err(text)?;
    let cluster = builder.clone().build(shape).map_err(text)?;
    let kept = cluster.run(async |mut ep| {
        let me = ep.rank().index();
        let (x, routing) = upload(&mut ep, &batches[me])?;
        // The second one is placed, in what the first one has asked for.
        drop(ep.dispatch(&x, &routing).await?);
        thread::sleep(Duration::from_millis(500));
        Ok((ep.dispatch(&x, &routing).await?, ep.mapped()))
    });
    let kept = all_of(kept.map_err(text)?)?;
    let mapped: Vec<Mapped> = kept.iter().filter_map(|(_, mapped)| mapped.clone()).collect();
    let left = || mapped.iter().map(|mapped| mapped.load(Ordering::Relaxed)).sum::<u64>();
    if mapped.len() != RANKS as usize || left() == 0 {
        return Err(format!("{} bytes are mapped for {} results that live", left(), mapped.len()));
    }
    drop(kept);
    let cluster = builder.build(shape).map_err(text)?;
    let later = cluster.run(async |mut ep| {
        let me = ep.rank().index();
        until(&mut ep, &small[me], |_| true).await?;
        // Before these ranks end, whose windows go then.
        Ok(left())
    });
    match all_of(later.map_err(text)?)?.into_iter().min() {
        Some(0) => Ok(()),
        left => Err(format!("{left:?} bytes are mapped though nobody has them")),
    }
}

type Named = (&'static str, fn() -> Result<(), String>);

/// All of it. `absent`: why nothing runs here.
pub fn trials(absent: Option<&'static str>) -> Vec<Trial> {
    let all: [Named; 3] = [
        ("growing::results_that_are_kept_are_placed_and_their_memory_comes_back", shared),
        ("growing::so_do_ranks_that_have_mappings_of_their_own", own),
        ("growing::results_outlive_their_ranks_and_then_their_memory_goes", outliving),
    ];
    let trial = |(name, body): Named| match absent {
        Some(reason) => Trial::test(name, move || Err(reason.into())).with_ignored_flag(true),
        None => Trial::test(name, move || body().map_err(Into::into)),
    };
    all.map(trial).into()
}
