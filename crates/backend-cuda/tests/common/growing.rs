//! Arenas that grow while results are kept, and give back what nobody has: of ranks that share their windows' mappings, and of ranks that have their own.
#![allow(unreachable_pub)] // The test targets that hold it are crates of their own.

use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ep_bootstrap::{Identity, Member, Settings as Meeting};
use ep_conformance::arrival::Arrival;
use ep_conformance::drive::{Round, all_of, round, upload};
use ep_conformance::verify::{self, Observed};
use ep_conformance::workload::{Batch, Workload};
use ep_core::engine::{Combine, Dispatch, Received};
use ep_core::reference::World;
use ep_core::{Endpoint as _, Error, Nanos, Placement, Rank, RankSet, Settings, Shape, Topology};
use ep_cuda::driver::Stream;
use ep_cuda::{Builder, Cluster, CudaEndpoint};
use libtest_mimic::Trial;

const RANKS: u32 = 2;
/// Results that are kept: more than two pieces have room for, so that the third holds some, too. A piece that nothing ever lay in goes at any time.
const KEPT: usize = 24;
/// Longer than all of it takes, on a busy machine, too.
const LONG: Duration = Duration::from_secs(100);

/// Bytes of an arena that does not grow.
const FIXED: u64 = 1 << 24;

/// Longer than what waits for nobody.
const WHILE: Duration = Duration::from_secs(9);

/// Bytes of a rank's window that have memory, whether the rank lives or not.
type Mapped = Arc<AtomicU64>;

/// Batches of some 2 MB of rows, and windows whose arenas have nothing at first.
fn setup(deadline: Duration) -> Result<(Shape, Builder, World, Vec<Batch>), Error> {
    let topology = Topology::new(1, RANKS)?;
    let shape = Shape::builder().experts(8).topk(4).hidden(2048).max_tokens(256).build()?;
    let settings = Settings::builder(&shape, &topology).placement(Placement::Direct).arena_bytes(1 << 32).outboxes(2);
    let settings = settings.deadline(Nanos(deadline.as_nanos() as u64)).build()?;
    let builder = Cluster::builder(topology).settings(settings).multiprocessors(2).specialise(false).arena_at_first(0);
    let batches = Workload::new(shape, vec![256; RANKS as usize]).seed(5).batches()?;
    Ok((shape, builder, World::new(shape, topology, RankSet::new())?, batches))
}

fn wrong(what: String) -> Error {
    Error::broken("an arena that grows", what, "")
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where ranks wait for each other, though not for ever.
#[derive(Default)]
struct Meet(AtomicU64);

impl Meet {
    /// For the `time`th time.
    fn all(&self, time: u64) {
        let began = Instant::now();
        self.0.fetch_add(1, Ordering::Relaxed);
        while self.0.load(Ordering::Relaxed) < time * u64::from(RANKS) && began.elapsed() < LONG {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Dispatches small batches for some three seconds, as often on all ranks, and then sees whether `has_come`.
async fn after_small_dispatches(
    ep: &mut CudaEndpoint,
    small: &Batch,
    has_come: impl Fn(&CudaEndpoint) -> bool,
) -> Result<(), Error> {
    let began = Instant::now();
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
    let (me, before) = (ep.rank().index(), ep.arena_bytes());
    let mut seen = Vec::new();
    let mapped = ep.mapped(ep.rank()).ok_or_else(|| wrong("does not grow".to_owned()))?;
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
        after_small_dispatches(&mut ep, &small[me], |ep| ep.arena_bytes() < before + (20 << 20)).await?;
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
    let (shape, builder, world, batches) = setup(LONG).map_err(text)?;
    let small = Workload::new(shape, vec![1; RANKS as usize]).seed(6).batches().map_err(text)?;
    let cluster = builder.build(shape).map_err(text)?;
    let seen = cluster.run(async |ep| rank(ep, &world, &batches, &small).await).map_err(text)?;
    compare(&world, &batches, &all_of(seen)?)
}

/// Lets ranks join as processes do, here threads, so that each has mappings of its own, and plays each. A rank that ends is seen as gone.
fn apart<T: Send>(
    shape: Shape,
    builder: &Builder,
    play: impl Fn(CudaEndpoint) -> Result<T, Error> + Sync,
) -> Result<Vec<Result<T, Error>>, String> {
    let listener = TcpListener::bind("127.0.0.1:0").map_err(|error| error.to_string())?;
    let address = listener.local_addr().map_err(|error| error.to_string())?.to_string();
    let join = |me: Rank, listener: Option<TcpListener>| {
        let meeting = Meeting::new(me, RANKS, &address).identity(Identity::new()).within(LONG);
        let member = match listener {
            Some(listener) => Member::host(listener, meeting),
            None => Member::join(meeting),
        };
        let member = Arc::new(member.expect("all have joined"));
        let seen = builder.clone().join(shape, &member).and_then(&play);
        drop(member);
        seen
    };
    Ok(thread::scope(|scope| {
        let join = &join;
        let others: Vec<_> = (1..RANKS).map(|me| scope.spawn(move || join(Rank(me), None))).collect();
        let first = join(Rank(0), Some(listener));
        [first].into_iter().chain(others.into_iter().map(|other| other.join().expect("no panic"))).collect()
    }))
}

/// Ranks that have mappings of their own.
fn own() -> Result<(), String> {
    let text = |error: Error| error.to_string();
    let (shape, builder, world, batches) = setup(LONG).map_err(text)?;
    let small = Workload::new(shape, vec![1; RANKS as usize]).seed(6).batches().map_err(text)?;
    let play = |ep| futures_executor::block_on(rank(ep, &world, &batches, &small));
    compare(&world, &batches, &all_of(apart(shape, &builder, play)?)?)
}

/// Nobody keeps the memory of a rank that was given up: whoever takes its place has it.
fn left() -> Result<(), String> {
    let (shape, builder, world, batches) = setup(Duration::from_secs(12)).map_err(|error| error.to_string())?;
    let play = |mut ep: CudaEndpoint| {
        futures_executor::block_on(async {
            let me = ep.rank().index();
            keep(&mut ep, &batches[me]).await?;
            let other = ep.mapped(Rank(1)).ok_or_else(|| wrong("does not grow".to_owned()))?;
            let before = other.load(Ordering::Relaxed);
            if me == 1 {
                let began = Instant::now();
                drop(ep);
                let took = began.elapsed();
                return if took < 2 * WHILE / 3 { Ok(()) } else { Err(wrong(format!("an end takes {took:?}"))) };
            }
            // Who ends waits for nobody.
            thread::sleep(WHILE);
            let (x, routing) = upload(&mut ep, &batches[me])?;
            if before == 0 || ep.dispatch(&x, &routing).await.is_ok() {
                return Err(wrong(format!("{before} bytes of rank 1 at first, which does not end")));
            }
            let mask: RankSet = [Rank(1)].into_iter().collect();
            ep.recover(&mask).await?;
            let began = Instant::now();
            while other.load(Ordering::Relaxed) > 0 && began.elapsed() < LONG / 4 {
                thread::sleep(Duration::from_millis(10));
            }
            let left = other.load(Ordering::Relaxed);
            // What is left works on.
            let alone = World::new(shape, *world.topology(), mask)?;
            round(&mut ep, &alone, &batches[me], &Round::PULLING).await?;
            if left > 0 { Err(wrong(format!("{left} of {before} bytes of rank 1 are mapped"))) } else { Ok(()) }
        })
    };
    all_of(apart(shape, &builder, play)?).map(|_| ())
}

/// Memory goes without a further call, once that was asked for: not while the endpoint's stream holds something by then, which for rank 1 is a call that rank 0 does not
/// make yet.
fn trimmed() -> Result<(), String> {
    let text = |error: Error| error.to_string();
    let (shape, builder, _, batches) = setup(LONG).map_err(text)?;
    let small = Workload::new(shape, vec![1; RANKS as usize]).seed(6).batches().map_err(text)?;
    let met = Meet::default();
    let seen = builder.build(shape).map_err(text)?.run(async |mut ep| {
        let (me, before) = (ep.rank().index(), ep.arena_bytes());
        keep(&mut ep, &batches[me]).await?;
        let (x, routing) = upload(&mut ep, &small[me])?;
        let got = ep.dispatch(&x, &routing).await?;
        let (most, limit) = (ep.arena_bytes(), before + (20 << 20));
        let early = if me == 1 { Some(ep.redispatch(&x, &got.handle).await?) } else { None };
        ep.trim()?;
        let gone = |ep: &CudaEndpoint, within: Duration| {
            let began = Instant::now();
            while ep.arena_bytes() >= limit && began.elapsed() < within {
                thread::sleep(Duration::from_millis(10));
            }
            ep.arena_bytes() < limit
        };
        let at_once = gone(&ep, if me == 1 { Duration::from_secs(6) } else { LONG / 4 });
        met.all(1);
        let late = if me == 0 { Some(ep.redispatch(&x, &got.handle).await?) } else { None };
        let then = gone(&ep, LONG / 4);
        met.all(2);
        drop((early, late));
        match (most > limit, at_once == (me == 0), then) {
            (true, true, true) => Ok(()),
            all => {
                Err(wrong(format!("rank {me}: {most} bytes at first; has grown, goes when it is to, is gone: {all:?}")))
            }
        }
    });
    all_of(seen.map_err(text)?).map(|_| ())
}

/// What an operation that has failed told peers of stays: rank 1 comes to it after rank 0 has failed for want of it, and reads from there.
fn failed() -> Result<(), String> {
    let text = |error: Error| error.to_string();
    // Rank 0 has failed after a quarter more, at most.
    let (shape, builder, world, batches) = setup(Duration::from_secs(12)).map_err(text)?;
    let met = Meet::default();
    let seen = builder.build(shape).map_err(text)?.run(async |mut ep| {
        let me = ep.rank().index();
        keep(&mut ep, &batches[me]).await?;
        let (x, routing) = upload(&mut ep, &batches[me])?;
        let got = ep.dispatch(&x, &routing).await?;
        let most = ep.arena_bytes();
        met.all(1);
        if me == 1 {
            thread::sleep(Duration::from_secs(18));
        }
        let back = ep.combine(&got.x, &got.handle, Combine::default()).await;
        drop(got);
        ep.trim()?;
        let held = if me == 0 {
            thread::sleep(Duration::from_secs(12));
            ep.arena_bytes()
        } else {
            most
        };
        met.all(2);
        drop(back);
        ep.recover(&RankSet::new()).await?;
        let seen = round(&mut ep, &world, &batches[me], &Round::PULLING).await?.0;
        met.all(3);
        if held < most { Err(wrong(format!("{held} of {most} bytes are left"))) } else { Ok(seen) }
    });
    verify::run(&world, &batches, &all_of(seen.map_err(text)?)?).map(|_| ()).map_err(|mismatch| mismatch.to_string())
}

/// Endpoints end though a stream that may read their results holds something that takes long, a call of other ranks; their memory goes when that has ended, without a
/// further call.
fn read_on() -> Result<(), String> {
    let text = |error: Error| error.to_string();
    let (shape, builder, _, batches) = setup(LONG).map_err(text)?;
    let of = |ended: &[Ended]| ended.iter().flat_map(|ended| &ended.mapped).map(|m| m.load(Ordering::Relaxed)).sum();
    let while_read = |ended: &[Ended]| -> Result<(), String> {
        let mapped: u64 = of(ended);
        if mapped > 0 { Ok(()) } else { Err("memory goes while it is read".to_owned()) }
    };
    let ended = end_beside([&builder; 2], shape, &batches, while_read)?;
    wait(|| of(&ended) == 0);
    let left = of(&ended);
    if left == 0 { Ok(()) } else { Err(format!("{left} bytes are left behind what read them")) }
}

/// The same of windows that have all of their memory from the beginning: others get it behind that.
fn read_on_in_fixed_windows() -> Result<(), String> {
    let text = |error: Error| error.to_string();
    let (shape, slow, _, batches) = setup(LONG).map_err(text)?;
    let topology = Topology::new(1, RANKS).map_err(text)?;
    let settings = Settings::builder(&shape, &topology).placement(Placement::Direct).arena_bytes(FIXED).outboxes(2);
    let settings = settings.deadline(Nanos(LONG.as_nanos() as u64)).build().map_err(text)?;
    let builder = Cluster::builder(topology).settings(settings).multiprocessors(2).specialise(false);
    let place = async |mut ep: CudaEndpoint| {
        let me = ep.rank().index();
        let (x, routing) = upload(&mut ep, &batches[me])?;
        let got = ep.dispatch(&x, &routing).await?;
        Ok(ep.address_of(&got.x))
    };
    let while_read = |ended: &[Ended]| {
        let cluster = builder.clone().build(shape).map_err(text)?;
        let places = all_of(cluster.run(place).map_err(text)?)?;
        match places.iter().find(|place| ended.iter().any(|ended| ended.place == **place)) {
            Some(place) => Err(format!("results at {place:#x} are read, and others lie there")),
            None => Ok(()),
        }
    };
    let ended = end_beside([&slow, &builder], shape, &batches, while_read)?;
    if ended.iter().all(|ended| ended.mapped.is_none()) { Ok(()) } else { Err("windows grow".to_owned()) }
}

/// A rank that has ended.
struct Ended {
    /// Of its window, where that grows.
    mapped: Option<Mapped>,
    /// Where its results lay.
    place: u64,
    /// Lent, so a new rank would take it for its own if it were gone.
    _reader: Arc<Stream>,
}

fn wait(has_come: impl Fn() -> bool) {
    let began = Instant::now();
    while !has_come() && began.elapsed() < LONG / 2 {
        thread::sleep(Duration::from_millis(10));
    }
}

/// Ranks end while a stream may read their results, behind a call of other ranks that takes long, those of `slow`; `while_read` comes between.
fn end_beside(
    [slow, builder]: [&Builder; 2],
    shape: Shape,
    batches: &[Batch],
    while_read: impl FnOnce(&[Ended]) -> Result<(), String>,
) -> Result<Vec<Ended>, String> {
    let text = |error: Error| error.to_string();
    let slow = slow.clone().build(shape).map_err(text)?;
    let (held, met, ended) = (Mutex::new(None), Meet::default(), AtomicBool::new(false));
    let hold = async |mut ep: CudaEndpoint| {
        let me = ep.rank().index();
        let (x, routing) = upload(&mut ep, &batches[me])?;
        let got = ep.dispatch(&x, &routing).await?;
        if me == 0 {
            wait(|| ended.load(Ordering::Relaxed));
        }
        let again = ep.redispatch(&x, &got.handle).await?;
        if me == 1 {
            *locked(&held) = Some(ep.stream().record(false)?);
        }
        met.all(1);
        drop(again);
        Ok(())
    };
    let read = async |mut ep: CudaEndpoint| {
        let me = ep.rank().index();
        let (x, routing) = upload(&mut ep, &batches[me])?;
        let got = ep.dispatch(&x, &routing).await?;
        ep.read_beside(true);
        let reader = Stream::new(ep.stream().device(), 0)?;
        let raw = reader.lend() as usize;
        // SAFETY: a stream that was lent lives as long as the process.
        unsafe { ep.lasts(raw) };
        // SAFETY: as above.
        unsafe { ep.follow(raw) }?;
        let seen = Ended { mapped: ep.mapped(ep.rank()), place: ep.address_of(&got.x), _reader: reader };
        wait(|| locked(&held).is_some());
        if let Some(call) = &*locked(&held) {
            // SAFETY: as above.
            unsafe { call.precede(raw) }?;
        }
        drop(got);
        let began = Instant::now();
        // SAFETY: as above.
        unsafe { ep.ends_behind(raw) }?;
        drop(ep);
        let waited = began.elapsed();
        if waited < LONG / 4 { Ok(seen) } else { Err(wrong(format!("an end takes {waited:?}"))) }
    };
    let (slow, seen) = thread::scope(|scope| {
        let slow = scope.spawn(|| slow.run(hold));
        let seen = builder.clone().build(shape).and_then(|cluster| all_of(cluster.run(read)?).map_err(wrong));
        let seen = seen.map_err(text).and_then(|seen| while_read(&seen).map(|()| seen));
        ended.store(true, Ordering::Relaxed);
        (slow.join().expect("no panic"), seen)
    });
    all_of(slow.map_err(text)?)?;
    seen
}

/// Results that are there when all ranks have ended; when they are gone, their memory goes.
fn outliving() -> Result<(), String> {
    let text = |error: Error| error.to_string();
    let (shape, builder, _, batches) = setup(LONG).map_err(text)?;
    let cluster = builder.build(shape).map_err(text)?;
    let kept = cluster.run(async |mut ep| {
        let me = ep.rank().index();
        let (x, routing) = upload(&mut ep, &batches[me])?;
        // The second one is placed, in what the first one has asked for.
        drop(ep.dispatch(&x, &routing).await?);
        thread::sleep(Duration::from_millis(500));
        Ok((ep.dispatch(&x, &routing).await?, ep.mapped(ep.rank())))
    });
    let kept = all_of(kept.map_err(text)?)?;
    let mapped: Vec<Mapped> = kept.iter().filter_map(|(_, mapped)| mapped.clone()).collect();
    let left = || mapped.iter().map(|mapped| mapped.load(Ordering::Relaxed)).sum::<u64>();
    if mapped.len() != RANKS as usize || left() == 0 {
        return Err(format!("{} bytes are mapped for {} results that live", left(), mapped.len()));
    }
    drop(kept);
    let began = Instant::now();
    while left() > 0 && began.elapsed() < LONG / 2 {
        thread::sleep(Duration::from_millis(10));
    }
    if left() > 0 { Err(format!("{} bytes are mapped though nobody has them", left())) } else { Ok(()) }
}

type Named = (&'static str, fn() -> Result<(), String>);

/// All of it. `absent`: why nothing runs here.
pub fn trials(absent: Option<&'static str>) -> Vec<Trial> {
    let all: [Named; 8] = [
        ("growing::results_that_are_kept_are_placed_and_their_memory_comes_back", shared),
        ("growing::so_do_ranks_that_have_mappings_of_their_own", own),
        ("growing::memory_of_a_rank_that_was_given_up_is_let_go_of", left),
        ("growing::memory_goes_without_a_call_once_that_is_asked_for", trimmed),
        ("growing::what_a_failed_operation_told_of_stays", failed),
        ("growing::memory_goes_behind_what_reads_it_when_its_rank_has_ended", read_on),
        ("growing::so_does_that_of_windows_which_do_not_grow", read_on_in_fixed_windows),
        ("growing::results_outlive_their_ranks_and_then_their_memory_goes", outliving),
    ];
    let trial = |(name, body): Named| match absent {
        Some(reason) => Trial::test(name, move || Err(reason.into())).with_ignored_flag(true),
        None => Trial::test(name, move || body().map_err(Into::into)),
    };
    all.map(trial).into()
}
