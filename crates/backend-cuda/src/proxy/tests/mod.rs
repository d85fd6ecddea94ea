//! The far verbs as g++ compiles them, run by CPU threads against the proxy, between two ranks over a network made of software.

mod device;
mod failing;
mod gpu;
mod pair;
mod roce;
mod staged;

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ep_core::device::FarStatus;
use ep_core::layout::Queues;
use ep_core::port::{LaneId, Offset, Scope, Span, Ticket};
use ep_core::transport::{DeviceLanes, DevicePlace, DeviceTransport, Lanes, Place, Transport, WindowMemory};
use ep_core::{Error, Fault, LaneCause, Layout, Rank, Settings, Shape, Topology};
use ep_loop::{Loop, LoopLanes};

use self::device::Device;
use self::pair::{A, B, End, Home, LONG, Pair, QUEUES, Traffic};
use super::command::Command;
use super::fifo::Taker;
use super::{HostMemory, Proxy};

/// Faults of the proxy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Plant {
    Nothing,
    /// Credit for commands that were not taken.
    CreditEarly,
    /// Puts are settled when they were posted.
    SettledEarly,
    /// A command is taken when its first word is there.
    Halves,
    /// Of staged rows: a row is posted before it is in the mirror.
    PostedEarly,
    /// A cell is raised before the rows before it are in the window.
    RaisedEarly,
    /// Records count as carried out that are not.
    ReadEarly,
}

/// How long a verb may take that is to end by its deadline.
const SHORT: Duration = Duration::from_millis(60);
const TRAFFIC: Traffic = Traffic { seed: 1, messages: 300, staged: 3, allowed: LONG };

fn network() -> Loop {
    Loop::new().queues(QUEUES)
}

fn late() -> Loop {
    network().latency(Duration::from_micros(300)).unwrap()
}

/// Writes the words of a command one after the other, with time between.
const IN_HALVES: device::Mutation = (
    "    ep_st_relaxed2(slot, first | phase, second | phase);",
    "    ep_st_release(slot, first | phase);\n    ep_nap(50000);\n    ep_st_release(slot + 1, second | phase);",
);

fn traffic<T: Transport<Lanes: 'static>>(of: Traffic, pair: &Pair<T>, device: &Device) -> String
where
    Pair<T>: Sync,
{
    let wrong: Vec<_> = of.run(pair, device).into_iter().filter_map(Result::err).collect();
    wrong.join("; ")
}

/// F1, F3, F5, F9: sizes of all kinds, FIFOs of one command to more than there are, a network that is fast, late, narrow.
#[test]
fn what_a_device_posts_arrives_intact() {
    let Some(device) = Device::usual() else { return };
    let narrow = network().bytes_per_second(200_000_000).unwrap().queue_depth(2).unwrap();
    for (seed, network, log_slots, staged) in
        [(1, network(), 0, 1), (2, network(), 2, 3), (3, late(), 1, 5), (4, late(), 9, 16), (5, narrow, 3, 2)]
    {
        let mut pair = Pair::new(network, log_slots);
        let wrong = traffic(Traffic { seed, staged, ..TRAFFIC }, &pair, device);
        assert_eq!(wrong, "", "seed {seed}");
        // Once more on new connections: tickets and rounds begin anew.
        while !pair.ends.iter_mut().all(|end| end.lanes.drain(Scope::All)) {}
        assert_eq!(pair.ends[0].lanes.broken(B), None);
    }
}

/// The same with windows in memory of devices, whose backend moves the bytes, and takes its time for it.
#[test]
fn what_a_device_posts_arrives_intact_in_memory_of_devices() {
    let Some(device) = Device::usual() else { return };
    for (seed, network, log_slots, staged) in [(21, network(), 0, 1), (22, network(), 9, 2), (23, late(), 3, 4)] {
        let pair = Pair::with(network, log_slots, Home::Device, HostMemory::new);
        let wrong = traffic(Traffic { seed, staged, ..TRAFFIC }, &pair, device);
        assert_eq!(wrong, "", "seed {seed}");
        assert_eq!(pair.ends[0].lanes.broken(B), None);
    }
}

/// One rank's window on the host, the other's on a device: refused by both, by name.
#[test]
fn windows_of_two_homes_do_not_meet() {
    let network = network();
    let mut ends =
        [(A, Home::Host), (B, Home::Device)].map(|(me, home)| End::new(me, network.clone(), 1, home, HostMemory::new));
    let offers: Vec<_> = ends.iter_mut().map(|end| Some(end.lanes.offer().unwrap())).collect();
    let refused = ends.each_mut().map(|end| end.lanes.connect(&offers).unwrap_err().to_string());
    assert!(refused[0].contains("rank 1 over the loop"), "{refused:?}");
    assert!(refused[0].contains("its window lies in memory of a device, this one of the host"), "{refused:?}");
    assert!(refused[1].contains("its window lies in memory of the host, this one of a device"), "{refused:?}");
}

/// Lanes that share a queue of the transport have a FIFO each: the thread is the poster of the queue.
#[test]
fn lanes_that_share_a_queue_are_posted_to_by_one_thread() {
    let Some(device) = Device::usual() else { return };
    for queues in Queues::NAMED {
        let pair = Pair::new(late().queues(queues), 2);
        let wrong = traffic(Traffic { seed: 9, messages: 100, ..TRAFFIC }, &pair, device);
        assert_eq!(wrong, "", "{queues:?}");
    }
}

/// Both readings of a command are the same: what the header writes is what Rust takes, in every round.
#[test]
fn commands_are_taken_as_they_were_written() {
    let Some(device) = Device::usual() else { return };
    let log_slots = 2;
    let memory = HostMemory::new(Taker::bytes(log_slots)).unwrap();
    let mut fifo = Taker::new(0, log_slots);
    fifo.reset(&memory).unwrap();
    let (most, long) = ((1 << 42) - 1, (1 << 38) - 1);
    // SAFETY: this thread alone posts, and the memory lives.
    let lane = unsafe { device.poster(fifo.state(&memory)) };
    let mut taken = 0;
    for (from, to, len) in
        [(0, 0, 1), (most, 0, 1), (0, most, long), (0x155_5555_5555, 0x2aa_aaaa_aaaa, 0x15_5555_5555)]
    {
        for bits in [0, u64::MAX, 0x8000_0000_0000_0001, 0x5555_aaaa_3333_cccc] {
            let ticket = lane.put([from, to, len], LONG);
            assert_eq!(ticket, Ok(taken + 1));
            assert_eq!(lane.put([from, to, 0], LONG), ticket, "no bytes: the last ticket");
            assert_eq!(lane.publish(from, bits, LONG), FarStatus::Ok);
            let mut next = || fifo.take(&memory).and_then(Command::of);
            assert_eq!(next(), Some(Command::Put { from: Offset(from).span(len), to: Offset(to) }));
            assert_eq!(next(), Some(Command::Publish { at: Offset(from), bits }));
            assert_eq!(next(), None);
            taken += 2;
            fifo.credit(&memory, taken);
        }
    }
    // What cannot be said is refused, and nothing is written.
    for [from, to, len] in [[most + 1, 0, 1], [0, most + 1, 1], [0, 0, long + 1]] {
        assert_eq!(lane.put([from, to, len], LONG), Err(FarStatus::Refused));
    }
    assert_eq!(lane.publish(most + 1, 0, LONG), FarStatus::Refused);
    assert_eq!(fifo.take(&memory), None);
}

/// What is taken, by `take`, after each of: three puts, the put that fills a quarter, a put, a publish, a put, its flush, its flush again.
fn taken(device: &Device, take: fn(&mut Taker, &HostMemory) -> Option<[u64; 2]>) -> Vec<Vec<Command>> {
    let memory = HostMemory::new(Taker::bytes(4)).unwrap();
    let mut fifo = Taker::new(0, 4);
    fifo.reset(&memory).unwrap();
    // SAFETY: this thread alone posts, and the memory lives.
    let lane = unsafe { device.poster(fifo.state(&memory)) };
    let put = |from| assert_eq!(lane.put([from, 0, 1], LONG), Ok(from + 1));
    let flush = || assert_eq!(lane.flush(7, Duration::ZERO), FarStatus::Stalled, "nobody answers");
    let steps: [&dyn Fn(); 7] = [
        &|| (0..3).for_each(put),
        &|| put(3),
        &|| put(4),
        &|| assert_eq!(lane.publish(0, 7, LONG), FarStatus::Ok),
        &|| put(6),
        &flush,
        &flush,
    ];
    let mut all = || std::iter::from_fn(|| take(&mut fifo, &memory).and_then(Command::of)).collect();
    steps.map(|step| (step(), all()).1).into()
}

/// F3: a put is taken when what was done before it is known to be visible: behind the bell of a publish, of a flush, of a quarter of the FIFO.
#[test]
fn puts_wait_for_a_bell() {
    let Some(device) = Device::usual() else { return };
    let put = |from| Command::Put { from: Offset(from).span(1), to: Offset(0) };
    let behind_bells = [
        vec![],
        vec![put(0), put(1), put(2), put(3)],
        vec![],
        vec![put(4), Command::Publish { at: Offset(0), bits: 7 }],
        vec![],
        vec![put(6)],
        vec![],
    ];
    assert_eq!(taken(device, Taker::take), behind_bells);
    assert_ne!(taken(device, Taker::take_unheard), behind_bells, "a planted fault: no bell is heard");
}

/// Where no quarter rings, a FIFO full of puts is never taken.
#[test]
fn planted_silence_of_quarters_is_caught() {
    let Some(device) = Device::with(Some(("bell || (4 * (index + 1) & (slots - 1)) == 0", "bell"))) else { return };
    let puts = |device: &Device, allowed: Duration| {
        let pair = Pair::new(network(), 4);
        let ([lane, _], at) = (pair.posters(device), pair.ends[0].arena().0);
        (0..40).find_map(|_| lane.put([at, at, 8], allowed).err())
    };
    assert_eq!(puts(&device, Duration::from_millis(300)), Some(FarStatus::Stalled));
    assert_eq!(puts(Device::usual().expect("g++ was there"), LONG), None);
}

/// F5: caught by bytes that changed on their way.
#[test]
fn planted_settlement_before_the_put_landed_is_caught() {
    let Some(device) = Device::usual() else { return };
    // So late that the sender changes the bytes first on a busy machine, too.
    let pair = Pair::new(network().latency(Duration::from_millis(50)).unwrap(), 4);
    let of = Traffic { messages: 50, staged: 1, allowed: Duration::from_secs(5), ..TRAFFIC };
    pair.plant(Plant::SettledEarly);
    let wrong = traffic(of, &pair, device);
    assert!(wrong.contains("has other bytes"), "{wrong}");
}

/// Commands are overwritten before they were taken: some never come.
#[test]
fn planted_credit_that_comes_early_is_caught() {
    let Some(device) = Device::usual() else { return };
    let pair = Pair::new(network(), 1);
    pair.plant(Plant::CreditEarly);
    let wrong = traffic(Traffic { allowed: Duration::from_millis(300), ..TRAFFIC }, &pair, device);
    assert!(wrong.contains("did not come") || wrong.contains("other bytes"), "{wrong}");
}

#[test]
fn planted_phase_that_is_not_flipped_is_caught() {
    let flipped = ("(~(index >> fifo->log_slots) & 1) << EP_FIFO_PHASE", "1ull << EP_FIFO_PHASE");
    let Some(device) = Device::with(Some(flipped)) else { return };
    let pair = Pair::new(network(), 2);
    let of = Traffic { allowed: Duration::from_millis(300), ..TRAFFIC };
    let wrong = traffic(of, &pair, &device);
    assert!(wrong.contains(FarStatus::Stalled.name()), "{wrong}");
}

/// A command that is written in halves is taken whole; a proxy that looks at one half only takes what lay there before.
#[test]
fn a_command_in_halves_is_not_taken_and_planted_taking_of_halves_is_caught() {
    let Some(device) = Device::with(Some(IN_HALVES)) else { return };
    let of = Traffic { messages: 20, ..TRAFFIC };
    assert_eq!(traffic(of, &Pair::new(network(), 1), &device), "");
    let pair = Pair::new(network(), 1);
    pair.plant(Plant::Halves);
    let wrong = traffic(Traffic { allowed: Duration::from_millis(300), ..of }, &pair, &device);
    assert_ne!(wrong, "");
}

#[test]
fn windows_of_devices_are_refused_by_name() {
    let topology = Topology::new(2, 1).unwrap();
    let shape = Shape::builder().experts(2).topk(1).hidden(64).max_tokens(4).build().unwrap();
    let layout = Layout::new(&shape, &topology, &Settings::auto(&shape, &topology)).unwrap();
    let window = WindowMemory::Device { address: 4096, keeper: None, dmabuf: None, copies: None };
    let refused = Proxy::new(network(), HostMemory::new).open(DevicePlace { me: A, layout: &layout, window });
    let refused = refused.map(drop).unwrap_err().to_string();
    assert!(refused.starts_with("a window in device memory over the loop is not supported"), "{refused}");
    let deep = Proxy::new(network(), HostMemory::new).log_slots(17).map(drop).unwrap_err().to_string();
    assert!(deep.contains("is 17, allowed: 0 to 16"), "{deep}");
}

/// `cargo test --release -p ep-cuda --lib proxy::tests::speed -- --ignored --nocapture`: what one thread takes, and what it adds to a put
/// that is waited for.
#[test]
#[ignore = "a measurement"]
fn speed() {
    let Some(device) = Device::usual() else { return };
    let pair = Pair::new(network(), 9);
    let ([lane, _], [tail, _], at) = (pair.posters(device), pair.ends[0].cells(), pair.ends[0].arena().0);
    let mut published = 0;
    // The other rank's proxy has nothing to do, and would take a core.
    let _rests = pair.ends[1].lanes.shared.between_turns();
    for (bytes, every) in [(16, 1_000_000), (16, 8), (16, 1), (7168, 8)] {
        let (puts, mut best) = (400_000, f64::MAX);
        for _ in 0..5 {
            let began = Instant::now();
            let status = lane.stream([at, bytes, tail.0], [published, puts, every]);
            best = best.min(began.elapsed().as_secs_f64());
            assert_eq!(status, FarStatus::Ok);
            published += puts;
        }
        let commands = (puts + puts / every) as f64;
        println!(
            "{bytes} bytes a put, a publish behind each {every}: {:.2} million commands a second",
            commands / best / 1e6
        );
    }
    let times = |put: &mut dyn FnMut()| {
        let mut times: Vec<_> = (0..20_000).map(|_| (Instant::now(), put()).0.elapsed()).collect();
        times.sort_unstable();
        [10, 50, 99].map(|percent| times[times.len() * percent / 100])
    };
    let told = times(&mut || {
        let ticket = lane.put([at, at, 64], LONG).unwrap();
        assert_eq!(lane.flush(ticket, LONG), FarStatus::Ok);
    });
    println!("a put of 64 bytes that is waited for, percentiles 10, 50, 99: {told:?}");
    let mut work = pair.ends[0].lanes.shared.between_turns();
    let (transport, rows) = (&mut work.transport, pair.ends[0].rows());
    let told = times(&mut || {
        let ticket = transport.put(rows, Offset(at).span(64), Offset(at)).unwrap().unwrap();
        while !transport.flush(rows, ticket).unwrap() {
            transport.progress();
        }
    });
    println!("the same by the host itself: {told:?}");
}
