//! Rows of low latency that are consumed as they come, by a kernel beside the receiving half, and results that a combine reads as they are ready: held
//! against the oracle bit for bit; what ends badly; planted faults.
#![allow(unreachable_pub)] // The test targets that hold it are crates of their own.

use ep_conformance::drive::all_of;
use ep_conformance::low_latency::{self, Seen};
use ep_conformance::verify::bits_of;
use ep_conformance::workload::{Batch, Workload};
use ep_core::engine::low_latency::{LowCombined, LowOrder, LowReceived, LowRouting};
use ep_core::reference::{self, Weighing, World};
use ep_core::{Endpoint, Error, LowLatency, Nanos, Rank, RankSet, Settings, Shape, Topology};
use ep_cuda::checks::{Checks, Plant};
use ep_cuda::driver::Stream;
use ep_cuda::{Array, Cluster, Consumed, CudaEndpoint, Early, LowHandle, LowPlaces, Ready, Rows, Signals};
use libtest_mimic::Trial;
use std::sync::Arc;

const RANKS: u32 = 3;
const HIDDEN: u32 = 64;
const TOKENS: u32 = 20;
/// Rows of an expert that there is room for.
const ROOM: u32 = RANKS * TOKENS;
const LOCAL: u32 = 2;

fn text(error: Error) -> String {
    error.to_string()
}

fn shape() -> Result<Shape, Error> {
    Shape::builder().experts(LOCAL * RANKS).topk(3).hidden(HIDDEN).max_tokens(TOKENS).build()
}

/// Runs `user` on every rank, with kernels that do what `checks` say.
fn on_ranks<T: Send>(
    checks: Option<&Checks>,
    deadline: Nanos,
    user: impl AsyncFn(CudaEndpoint) -> Result<T, Error> + Send + Sync,
) -> Result<Vec<T>, String> {
    let topology = Topology::new(1, RANKS).map_err(text)?;
    let shape = shape().map_err(text)?;
    let settings = Settings::builder(&shape, &topology).low_latency(true).deadline(deadline).build().map_err(text)?;
    let builder = Cluster::builder(topology)
        .settings(settings)
        .multiprocessors(2)
        .specialise(false)
        .low_latency_multiprocessors(3);
    let builder = builder.wait_for_kernels(false);
    let builder = if let Some(checks) = checks { builder.checks(checks.clone()) } else { builder };
    let outcomes = builder.build(shape).and_then(|cluster| cluster.run(user)).map_err(text)?;
    all_of(outcomes)
}

/// How a round says that results are ready.
#[derive(Clone, Copy, Debug)]
enum Says {
    Counters,
    Blocks,
    Experts,
}

#[derive(Clone, Copy, Debug)]
struct Form {
    says: Says,
    how: Weighing,
    /// Rows of a block.
    rows: u32,
    multiprocessors: Option<u32>,
}

/// What a rank's rounds write to, the same in each.
struct Places {
    x: Rows,
    y: Rows,
    expert_counts: Array<i32>,
    segments: Array<i64>,
    source_token: Array<i32>,
    signals: Array<i32>,
    out: Array<i32>,
    early: Early,
    /// Of the consumer.
    stream: Arc<Stream>,
}

impl Places {
    fn new(ep: &mut CudaEndpoint, form: Form) -> Result<Self, Error> {
        ep.prepare_to_consume()?;
        let (local, row_bytes) = (LOCAL as usize, 2 * HIDDEN as usize);
        let signals = local * ROOM.div_ceil(form.rows) as usize;
        Ok(Self {
            x: ep.room(LOCAL * ROOM, row_bytes)?,
            y: ep.rows(&vec![0x55; (LOCAL * ROOM) as usize * row_bytes], LOCAL * ROOM)?,
            expert_counts: ep.array_room(local)?,
            segments: ep.array_room(local * RANKS as usize)?,
            source_token: ep.array_room(local * ROOM as usize)?,
            signals: ep.array(&vec![0; signals])?,
            out: ep.array(&[0; 2])?,
            early: ep.early(form.rows, form.multiprocessors)?,
            stream: Stream::new(ep.stream().device(), 0)?,
        })
    }

    fn low(&self, ep: &CudaEndpoint) -> LowPlaces {
        LowPlaces {
            x: ep.address_of(&self.x),
            scales: None,
            expert_counts: self.expert_counts.address(),
            segments: self.segments.address(),
            source_token: self.source_token.address(),
            by_source: None,
            packed: None,
            most_rows: None,
            stats: 0,
            owner: None,
        }
    }

    /// Enqueues the consumer, behind what the endpoint's stream holds now.
    fn consume(&self, ep: &CudaEndpoint, form: Form, pause: Nanos) -> Result<(), Error> {
        self.stream.wait(&ep.stream().record(false)?)?;
        let signals = (!matches!(form.says, Says::Counters)).then_some(&self.signals);
        let Self { early, expert_counts, x, y, out, .. } = self;
        let consumed = Consumed { early, expert_counts, x, y, signals, out, pause };
        // SAFETY: these live until the endpoint's stream has waited for the consumer's.
        unsafe { ep.consume(&self.stream, 2, &consumed) }
    }

    /// What follows on the endpoint's stream comes behind the consumer.
    fn consumed(&self, ep: &CudaEndpoint) -> Result<(), Error> {
        Ok(ep.stream().wait(&self.stream.record(false)?)?)
    }

    fn ready(&self, form: Form) -> Ready {
        let signals = match form.says {
            Says::Counters => Signals::Early,
            Says::Blocks => Signals::Blocks { signals: self.signals.clone(), rows: form.rows },
            Says::Experts => Signals::Experts(self.signals.clone()),
        };
        Ready { signals, due: 1, multiprocessors: form.multiprocessors }
    }
}

/// The batches of all ranks in a turn. In some a rank has none.
fn batches(turn: u64) -> Result<Vec<Batch>, Error> {
    let tokens = match turn % 3 {
        0 => vec![TOKENS, 5, TOKENS - 1],
        1 => vec![3, 0, TOKENS],
        _ => vec![1, 1, 1],
    };
    Workload::new(shape()?, tokens).seed(turn).batches()
}

fn same(what: &str, turn: u64, got: &[u16], expected: &[u16]) -> Result<(), Error> {
    match got.iter().zip(expected).position(|(got, expected)| got != expected) {
        None if got.len() == expected.len() => Ok(()),
        None => Err(Error::invalid(format_args!("length of {what}"), got.len(), expected.len())),
        Some(at) => {
            let what = format_args!("{what}[{at}] in turn {turn}");
            Err(Error::invalid(what, got[at], format_args!("{}", expected[at])))
        }
    }
}

/// Holds a round against the oracle: results are the rows.
fn compare(
    world: &World,
    ep: &CudaEndpoint,
    turn: u64,
    (got, back): (&LowReceived<CudaEndpoint>, &LowCombined<CudaEndpoint>),
    batches: &[Batch],
    how: Weighing,
) -> Result<(), Error> {
    let (me, hidden) = (ep.rank().index(), HIDDEN as usize);
    let inputs: Vec<_> = batches.iter().map(Batch::reference).collect();
    let received = reference::low_latency_dispatch(world, &inputs);
    let row = |rank: usize, token: usize| &batches[rank].x[token * hidden..(token + 1) * hidden];
    let seen = Seen::of_dispatch(ep, got)?;
    for (expected, seen) in received[me].iter().zip(&seen.experts) {
        let sources = expected.source_rank.iter().zip(&expected.source_token);
        let rows: Vec<u16> = sources.flat_map(|(&rank, &token)| row(rank as usize, token as usize)).copied().collect();
        same("recv_x", turn, &bits_of(&seen.x), &rows)?;
    }
    let result = |rank: Rank, local: usize, at: usize| {
        let expert = &received[rank.index()][local];
        row(expert.source_rank[at] as usize, expert.source_token[at] as usize)
    };
    let combined = reference::low_latency_combine(world, &inputs, how, result);
    same("combined_x", turn, &bits_of(&ep.bytes(&back.x)?), &combined[me])
}

/// What the consumer says in the end: blocks that did not come, and that were waited for in vain.
fn nothing_missed(ep: &CudaEndpoint, places: &Places) -> Result<(), Error> {
    match &ep.values(&places.out)?[..] {
        [0, 0] => Ok(()),
        other => Err(Error::invalid("blocks that a consumer missed", format_args!("{other:?}"), "none")),
    }
}

/// Rounds with the same counters, a consumer in each.
fn rounds(checks: Option<&Checks>, form: Form, turns: u64, pause: Nanos, deadline: Nanos) -> Result<(), String> {
    let topology = Topology::new(1, RANKS).map_err(text)?;
    let world = shape().and_then(|shape| World::new(shape, topology, RankSet::new())).map_err(text)?;
    on_ranks(checks, deadline, async |mut ep| {
        let places = Places::new(&mut ep, form)?;
        for turn in 0..turns {
            let all = batches(turn)?;
            let batch = &all[ep.rank().index()];
            let (x, routing) = low_latency::upload(&mut ep, batch, form.how)?;
            let weights = low_latency::weights(&mut ep, batch, form.how)?;
            places.signals.write(&vec![0; places.signals.len()])?;
            let sent = ep.send_dispatch_early(&x, &routing, &places.early).await?;
            // Before what it waits for.
            places.consume(&ep, form, pause)?;
            // SAFETY: the places live as long as the endpoint, and have the shapes of what comes.
            let got = unsafe { ep.receive_dispatch_into(&sent, &places.low(&ep)).await }?;
            let ready = places.ready(form);
            let sums = ep.send_combine_ready(&places.y, &got.handle, weights.as_ref(), &ready).await?;
            let back = ep.receive_combine(&sums).await?;
            places.consumed(&ep)?;
            compare(&world, &ep, turn, (&got, &back), &all, form.how)?;
            nothing_missed(&ep, &places)?;
        }
        Ok(())
    })
    .map(drop)
}

const FORMS: [Form; 4] = [
    Form { says: Says::Counters, how: Weighing::AtSource, rows: 4, multiprocessors: None },
    Form { says: Says::Counters, how: Weighing::AtExperts, rows: 1, multiprocessors: Some(1) },
    Form { says: Says::Blocks, how: Weighing::AtExperts, rows: 7, multiprocessors: Some(2) },
    Form { says: Says::Experts, how: Weighing::AtSource, rows: ROOM, multiprocessors: None },
];

/// Time allowed to operations: a busy processor plays all ranks.
const DEADLINE: Nanos = Nanos::from_secs(6);

/// Rows arrive while a consumer waits for them, and results are read as it makes them.
fn rows_are_consumed_as_they_come() -> Result<(), String> {
    FORMS
        .iter()
        .try_for_each(|&form| rounds(None, form, 4, Nanos(0), DEADLINE).map_err(|error| format!("{form:?}: {error}")))
}

/// The same with seeded delays and poisoned memory, and consumers that are faster or slower than everything else.
fn nothing_is_read_too_early() -> Result<(), String> {
    disturbed(None, Nanos(0))?;
    disturbed(None, SLOWLY)
}

/// What a slow consumer waits before each block of results.
const SLOWLY: Nanos = Nanos(3_000_000);

fn disturbed(plant: Option<Plant>, pause: Nanos) -> Result<(), String> {
    let checks = Checks { seed: 1, longest: Nanos(20_000), poison: true, plant, ..Checks::default() };
    rounds(Some(&checks), FORMS[0], 3, pause, DEADLINE)
}

/// A planted fault is caught by what it brings.
fn is_caught(plant: Plant, pause: Nanos, sign: &str) -> Result<(), String> {
    match disturbed(Some(plant), pause) {
        Ok(()) => Err(format!("{plant:?} went unnoticed")),
        Err(error) if error.contains(sign) => Ok(()),
        Err(error) => Err(format!("caught by `{error}`, expected {sign}")),
    }
}

/// A dispatch with counters, received; the consumer has not run.
async fn dispatched(
    ep: &mut CudaEndpoint,
    early: &Early,
    turn: u64,
) -> Result<(LowReceived<CudaEndpoint>, Batch), Error> {
    let batch = batches(turn)?.swap_remove(ep.rank().index());
    let (x, routing) = low_latency::upload(ep, &batch, Weighing::AtExperts)?;
    let sent = ep.send_dispatch_early(&x, &routing, early).await?;
    Ok((ep.receive_dispatch(&sent).await?, batch))
}

const OWN: Ready = Ready { signals: Signals::Early, due: 1, multiprocessors: None };

/// What a combine says that is not to succeed.
async fn refused(ep: &mut CudaEndpoint, y: &Rows, handle: &LowHandle, ready: &Ready) -> String {
    match ep.send_combine_ready(y, handle, None, ready).await {
        Ok(_) => "nothing was refused".into(),
        Err(error) => error.to_string(),
    }
}

fn ensure(said: &str, expected: &str) -> Result<(), String> {
    if said.contains(expected) { Ok(()) } else { Err(format!("said `{said}`, expected `{expected}`")) }
}

/// Nobody makes results: every rank ends by its deadline, says so, and goes on in a new generation.
fn results_that_are_never_ready_end_by_the_deadline() -> Result<(), String> {
    let said = on_ranks(None, DEADLINE, async |mut ep| {
        ep.wait_for_kernels(true);
        let early = ep.early(4, None)?;
        let (got, _) = dispatched(&mut ep, &early, 0).await?;
        let said = refused(&mut ep, &got.x, &got.handle, &OWN).await;
        let again = refused(&mut ep, &got.x, &got.handle, &OWN).await;
        ep.recover(&RankSet::new()).await?;
        // The counters serve on.
        dispatched(&mut ep, &early, 1).await?;
        Ok((said, again))
    })?;
    for (rank, (said, again)) in said.iter().enumerate() {
        ensure(said, &format!("for ready results of its own experts from rank {rank}"))?;
        ensure(again, "poisoned")?;
    }
    Ok(())
}

/// Counters that count another batch by now say nothing about this one.
fn readiness_of_another_batch_is_refused() -> Result<(), String> {
    let said = on_ranks(None, DEADLINE, async |mut ep| {
        ep.wait_for_kernels(true);
        let early = ep.early(4, None)?;
        let (first, _) = dispatched(&mut ep, &early, 0).await?;
        dispatched(&mut ep, &early, 0).await?;
        Ok(refused(&mut ep, &first.x, &first.handle, &OWN).await)
    })?;
    said.iter().enumerate().try_for_each(|(rank, said)| {
        ensure(said, &format!("batch that the readiness of results is of is 1 here and 2 on rank {rank}"))
    })
}

/// A launch that fails says to consumers that its rows do not come.
fn rows_that_do_not_come_are_said_not_to() -> Result<(), String> {
    let form = FORMS[0];
    let missed = on_ranks(None, DEADLINE, async |mut ep| {
        let places = Places::new(&mut ep, form)?;
        if ep.rank() == Rank(1) {
            // It is there, and sends nothing.
            std::thread::sleep(std::time::Duration::from_nanos(2 * DEADLINE.0));
            return Ok(None);
        }
        let batch = batches(0)?.swap_remove(ep.rank().index());
        let (x, routing) = low_latency::upload(&mut ep, &batch, form.how)?;
        let sent = ep.send_dispatch_early(&x, &routing, &places.early).await?;
        places.consume(&ep, form, Nanos(0))?;
        // SAFETY: as in a round.
        let _got = unsafe { ep.receive_dispatch_into(&sent, &places.low(&ep)).await }?;
        places.consumed(&ep)?;
        ep.stream().synchronize()?;
        // It tells of the failure; then what lies in memory may be read.
        let told = ep.send_dispatch(&x, &routing).await.err().map_or_else(String::new, text);
        Ok(Some((told, ep.values(&places.out)?)))
    })?;
    for (told, out) in missed.into_iter().flatten() {
        ensure(&told, "for rows from rank 1")?;
        let (stopped, vain) = (out[0], out[1]);
        if stopped == 0 || vain != 0 {
            return Err(format!("{stopped} blocks were said not to come, {vain} waited for in vain"));
        }
    }
    Ok(())
}

/// A batch whose choices are refused where they are read is none that came before: consumers are told that its rows do not come.
fn a_batch_that_is_refused_is_said_not_to_come() -> Result<(), String> {
    let form = FORMS[0];
    let all = on_ranks(None, DEADLINE, async |mut ep| {
        let places = Places::new(&mut ep, form)?;
        let mut batch = batches(0)?.swap_remove(ep.rank().index());
        batch.topk_idx[0] = 99;
        let (x, routing) = low_latency::upload(&mut ep, &batch, form.how)?;
        let sent = ep.send_dispatch_early(&x, &routing, &places.early).await?;
        places.consume(&ep, form, Nanos(0))?;
        // The host may know by now.
        // SAFETY: as in a round.
        let _refused = unsafe { ep.receive_dispatch_into(&sent, &places.low(&ep)).await };
        places.consumed(&ep)?;
        ep.stream().synchronize()?;
        // A call is told of the refusal; then what lies in memory may be read.
        let _told = ep.send_dispatch(&x, &routing).await;
        let out = ep.values(&places.out)?;
        // The counters are free again, though what was sent is still there.
        ep.recover(&RankSet::new()).await?;
        let batch = batches(1)?.swap_remove(ep.rank().index());
        let (x, routing) = low_latency::upload(&mut ep, &batch, form.how)?;
        let again = ep.send_dispatch_early(&x, &routing, &places.early).await?;
        ep.receive_dispatch(&again).await?;
        drop(sent);
        Ok(out)
    })?;
    for out in all {
        let (stopped, vain) = (out[0], out[1]);
        if stopped == 0 || vain != 0 {
            return Err(format!("{stopped} blocks were said not to come, {vain} waited for in vain"));
        }
    }
    Ok(())
}

/// What was sent and is dropped cannot be received: consumers are told. Not those of the next batch, whenever one of before a recovery is dropped.
fn a_batch_that_is_dropped_is_said_not_to_come() -> Result<(), String> {
    let form = FORMS[0];
    let all = on_ranks(None, DEADLINE, async |mut ep| {
        let places = Places::new(&mut ep, form)?;
        let batch = batches(0)?.swap_remove(ep.rank().index());
        let (x, routing) = low_latency::upload(&mut ep, &batch, form.how)?;
        let sent = ep.send_dispatch_early(&x, &routing, &places.early).await?;
        places.consume(&ep, form, Nanos(0))?;
        drop(sent);
        places.consumed(&ep)?;
        ep.stream().synchronize()?;
        let told = ep.values(&places.out)?;
        let before = ep.send_dispatch_early(&x, &routing, &places.early).await?;
        ep.recover(&RankSet::new()).await?;
        let sent = ep.send_dispatch_early(&x, &routing, &places.early).await?;
        drop(before);
        places.consume(&ep, form, Nanos(0))?;
        // SAFETY: as in a round.
        let _got = unsafe { ep.receive_dispatch_into(&sent, &places.low(&ep)).await }?;
        places.consumed(&ep)?;
        ep.stream().synchronize()?;
        Ok((told, ep.values(&places.out)?))
    })?;
    for (told, after) in all {
        let ([stopped, vain], beside) = ([told[0], told[1]], after[0] - told[0]);
        if stopped == 0 || vain != 0 || beside != 0 || after[1] != 0 {
            return Err(format!(
                "{stopped} blocks were said not to come, {vain} waited for in vain; of the next {beside}, {}",
                after[1]
            ));
        }
    }
    Ok(())
}

/// Bad input is named with its limit, before anything moves.
fn bad_input_is_named_with_its_limit() -> Result<(), String> {
    let all = on_ranks(None, DEADLINE, async |mut ep| {
        let said = |result: Result<Early, Error>| result.err().map_or_else(String::new, text);
        let mut told = vec![said(ep.early(0, None)), said(ep.early(4, Some(0)))];
        // More than an expert has room for: one block.
        ep.early(ROOM + 1, None)?;
        let early = ep.early(4, None)?;
        let batch = batches(0)?.swap_remove(ep.rank().index());
        let (x, routing) = low_latency::upload(&mut ep, &batch, Weighing::AtExperts)?;
        let sent = ep.send_dispatch_early(&x, &routing, &early).await?;
        told.push(ep.send_dispatch_early(&x, &routing, &early).await.err().map_or_else(String::new, text));
        let got = ep.receive_dispatch(&sent).await?;
        let plain = ep.low_latency_dispatch(&x, &routing).await?;
        let (few, y) = (ep.array(&[0i32; 9])?, &got.x);
        let blocks = |signals: &Array<i32>, rows| Signals::Blocks { signals: signals.clone(), rows };
        for (handle, signals, due) in [
            (&plain.handle, Signals::Early, 1),
            (&got.handle, Signals::Early, 0),
            (&got.handle, blocks(&few, 0), 1),
            (&got.handle, blocks(&few, 12), 1),
        ] {
            told.push(refused(&mut ep, y, handle, &Ready { signals, due, multiprocessors: None }).await);
        }
        // Rows by source are of no one expert.
        let by_source = LowRouting { order: LowOrder::BySource, ..routing.clone() };
        told.push(ep.send_dispatch_early(&x, &by_source, &early).await.err().map_or_else(String::new, text));
        let other = ep.low_latency_dispatch(&x, &by_source).await?;
        let each = ep.array(&[0i32; 2])?;
        let ready = Ready { signals: Signals::Experts(each), due: 1, multiprocessors: None };
        told.push(refused(&mut ep, &other.x, &other.handle, &ready).await);
        ep.low_latency_combine(&other.x, &other.handle, None).await?;
        // Nothing moved.
        ep.low_latency_combine(&got.x, &got.handle, None).await?;
        Ok(told)
    })?;
    let expected = [
        "rows of a block is 0, allowed: at least 1",
        "multiprocessors is 0, allowed: at least 1",
        "early is of a dispatch that is still to be received, allowed: those of a dispatch that was received",
        "handle is of a dispatch without early counters, allowed: one with them",
        "value of a ready signal is 0, allowed: at least 1",
        "rows of a block is 0, allowed: at least 1",
        "number of ready signals is 9, allowed: at least 10, 5 for each of 2 local experts",
        "early consumers of rows by source",
        "early consumers of rows by source",
    ];
    for told in all {
        told.iter().zip(expected).try_for_each(|(said, expected)| ensure(said, expected))?;
    }
    Ok(())
}

/// A case's name, after the rule that it proves, and what it does.
type Case = (&'static str, fn() -> Result<(), String>);

const CASES: [Case; 10] = [
    ("rows_are_consumed_as_they_come", rows_are_consumed_as_they_come),
    ("nothing_is_read_too_early", nothing_is_read_too_early),
    ("results_that_are_never_ready_end_by_the_deadline", results_that_are_never_ready_end_by_the_deadline),
    ("readiness_of_another_batch_is_refused", readiness_of_another_batch_is_refused),
    ("rows_that_do_not_come_are_said_not_to", rows_that_do_not_come_are_said_not_to),
    ("a_batch_that_is_refused_is_said_not_to_come", a_batch_that_is_refused_is_said_not_to_come),
    ("a_batch_that_is_dropped_is_said_not_to_come", a_batch_that_is_dropped_is_said_not_to_come),
    ("bad_input_is_named_with_its_limit", bad_input_is_named_with_its_limit),
    ("planted_rows_counted_before_they_are_stored_are_caught", || {
        is_caught(Plant::LowCountedEarly, Nanos(0), "combined_x")
    }),
    ("planted_results_read_before_they_are_ready_are_caught", || {
        is_caught(Plant::LowResultsUnawaited, SLOWLY, "combined_x")
    }),
];

/// `absent`: why nothing runs here.
pub fn trials(absent: Option<&'static str>) -> Vec<Trial> {
    let trial = |&(name, body): &Case| match absent {
        Some(reason) => Trial::test(format!("early::{name}"), move || Err(reason.into())).with_ignored_flag(true),
        None => Trial::test(format!("early::{name}"), move || body().map_err(Into::into)),
    };
    CASES.iter().map(trial).collect()
}
