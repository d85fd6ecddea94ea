//! What lanes must do, under a clock that the test sets.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::time::Duration;

use ep_core::port::{Cell, Counter, LaneId, LaneKind, Offset, Scope, Span};
use ep_core::transport::{Lanes, Place, Transport};
use ep_core::{Error, Fault, LaneCause, Layout, Rank, Settings, Shape, Topology};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use super::*;
use crate::memory::Memory;

mod devices;

/// Ranks of a network: node 0 has 0 and 1, node 1 has 2 and 3.
struct Job {
    network: Loop,
    layout: Layout,
    windows: Vec<OwnedFd>,
    ranks: Vec<LoopLanes>,
}

const A: Rank = Rank(0);
const B: Rank = Rank(2);
/// A latency, and a byte a nanosecond.
const LATENCY: u64 = 1000;

fn lane(peer: Rank) -> LaneId {
    LaneId { peer, kind: LaneKind::Control }
}

fn window(bytes: u64) -> OwnedFd {
    let file = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&file, bytes).unwrap();
    fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
    file
}

impl Job {
    /// Low latency: everybody has lanes to everybody of the other node.
    fn new() -> Self {
        let topology = Topology::new(2, 2).unwrap();
        let shape = Shape::builder().experts(4).topk(2).hidden(64).max_tokens(4).build().unwrap();
        let settings = Settings::builder(&shape, &topology).channels(1).low_latency(true).build().unwrap();
        let layout = Layout::new(&shape, &topology, &settings).unwrap();
        let network = Loop::with_set_clock().latency(Duration::from_nanos(LATENCY)).unwrap();
        let network = network.bytes_per_second(1_000_000_000).unwrap().queue_depth(4).unwrap();
        let windows: Vec<_> = topology.all().map(|_| window(layout.window_bytes())).collect();
        let open = |(me, window): (Rank, &OwnedFd)| {
            network.open(Place { me, layout: &layout, window: window.as_fd() }).unwrap()
        };
        let ranks = topology.all().zip(&windows).map(open).collect();
        let mut job = Self { network, layout, windows, ranks };
        job.meet();
        job
    }

    fn meet(&mut self) {
        let offers: Vec<_> = self.ranks.iter_mut().map(|lanes| Some(lanes.offer().unwrap())).collect();
        self.ranks.iter_mut().for_each(|lanes| lanes.connect(&offers).unwrap());
    }

    fn of(&mut self, rank: Rank) -> &mut LoopLanes {
        &mut self.ranks[rank.index()]
    }

    fn memory(&self, rank: Rank) -> Memory {
        Memory::of(self.windows[rank.index()].as_fd(), self.layout.window_bytes()).unwrap()
    }

    /// The cell of the lane from `from` to `to`.
    fn cell(&self, from: Rank) -> Offset {
        self.layout.cell(Cell { writer: from, lane: LaneKind::Control, counter: Counter::Counts }, 0)
    }

    /// Room for rows: after the cells.
    fn rows(&self) -> Offset {
        let cells = self.layout.regions().into_iter().find(|region| region.name == "cells").unwrap();
        Offset(cells.span.end().next_multiple_of(4096))
    }

    /// A word of rows, as atomics: tests look while others write.
    fn word(&self, rank: Rank, at: u64) -> u64 {
        self.memory(rank).cell(Offset(self.rows().0 + at)).unwrap().load(Ordering::Acquire)
    }

    fn set_word(&self, rank: Rank, at: u64, value: u64) {
        self.memory(rank).cell(Offset(self.rows().0 + at)).unwrap().store(value, Ordering::Release);
    }

    /// The cell at B that A raises.
    fn raised(&self) -> u64 {
        self.memory(B).cell(self.cell(A)).unwrap().load(Ordering::Acquire)
    }

    /// From `at` of the rows' room to the same place at B.
    fn put(&mut self, from: Rank, at: u64, len: u64) -> Result<bool, Fault> {
        let place = Offset(self.rows().0 + at);
        self.of(from).put(lane(B), place.span(len), place).map(|ticket| ticket.is_some())
    }

    fn raise(&mut self, value: u64) -> Result<bool, Fault> {
        let cell = self.cell(A);
        self.of(A).raise(lane(B), cell, value)
    }

    /// The clock says so, and B, which waits, lets the network go on. A does nothing.
    fn at(&mut self, now: u64) {
        self.network.set_clock(now);
        self.of(B).progress();
    }
}

const BROKEN: fn(LaneCause) -> Fault =
    |cause| Fault::LaneBroken { lane: LaneId { peer: B, kind: LaneKind::Control }, cause };

/// F3, and time: bytes leave one after the other, a publish is eight of them, and arrives with what it announces before it.
#[test]
fn rows_and_their_publish_arrive_when_rate_and_latency_say() {
    let mut job = Job::new();
    job.set_word(A, 0, 7);
    job.set_word(A, 4000 - 8, 8);
    assert_eq!((job.put(A, 0, 4000), job.raise(1)), (Ok(true), Ok(true)));
    job.at(LATENCY + 3999);
    assert_eq!((job.word(B, 0), job.raised()), (0, 0), "not before its last byte");
    job.at(LATENCY + 4000);
    assert_eq!((job.word(B, 0), job.word(B, 3992), job.raised()), (7, 8, 0));
    job.at(LATENCY + 4007);
    assert_eq!(job.raised(), 0);
    job.at(LATENCY + 4008);
    assert_eq!(job.raised(), 1, "though A did nothing more");
}

#[test]
fn a_card_serves_what_is_posted_one_after_the_other() {
    let mut job = Job::new();
    let at = job.rows();
    job.set_word(A, 8000, 6);
    // What others send elsewhere takes none of the time of A and B.
    assert!(job.of(Rank(1)).put(lane(Rank(3)), at.span(1000), at).unwrap().is_some());
    job.put(A, 8000, 1000).unwrap();
    job.at(LATENCY + 1000);
    assert_eq!(job.word(B, 8000), 6);
    // Two puts of A share its way out.
    job.put(A, 0, 500).unwrap();
    job.put(A, 8000, 500).unwrap();
    job.set_word(A, 8000, 9);
    job.at(LATENCY * 2 + 1000 + 500 + 499);
    assert_eq!(job.word(B, 8000), 6);
    job.at(LATENCY * 2 + 1000 + 1000);
    assert_eq!(job.word(B, 8000), 9, "sources are read when it is time, as late as F5 permits");
}

#[test]
fn a_flush_is_through_when_the_source_was_read_and_a_full_lane_says_so() {
    let mut job = Job::new();
    let at = job.rows();
    let ticket = job.of(A).put(lane(B), at.span(100), at).unwrap().unwrap();
    assert_eq!(job.of(A).put(lane(B), at.span(0), at).unwrap(), Some(ticket), "no bytes: the last ticket");
    assert!(!job.of(A).flush(lane(B), ticket).unwrap());
    for more in 1..4 {
        assert_eq!(job.put(A, 0, 100), Ok(true), "{more}");
    }
    assert_eq!((job.put(A, 0, 100), job.raise(1)), (Ok(false), Ok(false)), "four are held");
    job.at(LATENCY + 100);
    assert!(job.of(A).flush(lane(B), ticket).unwrap());
    assert_eq!(job.raise(1), Ok(true));
    assert!(!job.of(A).drain(Scope::Peer(B)));
    job.at(u64::MAX);
    assert!(job.of(A).drain(Scope::All));
    assert_eq!(job.raised(), 1);
}

/// F3 where the way becomes faster: nothing overtakes on a lane.
#[test]
fn what_comes_after_a_delay_does_not_overtake_what_was_delayed() {
    let mut job = Job::new();
    job.set_word(A, 0, 7);
    job.network.delay(A, B, Duration::from_micros(50)).unwrap();
    job.put(A, 0, 100).unwrap();
    job.network.delay(A, B, Duration::ZERO).unwrap();
    job.raise(1).unwrap();
    job.at(40_000);
    assert_eq!((job.word(B, 0), job.raised()), (0, 0));
    job.at(LATENCY + 100 + 50_000);
    assert_eq!((job.word(B, 0), job.raised()), (7, 1));
}

/// F7: what is lost breaks the lanes there, after the timeout, and no others.
#[test]
fn a_lost_lane_breaks_when_no_answer_has_come_and_the_way_back_goes_on() {
    let mut job = Job::new();
    let (timeout, at) = (100_000_000, job.rows());
    job.set_word(B, 0, 4);
    job.put(A, 0, 92).unwrap();
    job.network.lose(A, B);
    job.raise(1).unwrap();
    job.of(B).put(lane(A), at.span(8), at).unwrap();
    job.at(LATENCY + 92 + timeout - 1);
    assert_eq!((job.of(A).broken(B), job.raised(), job.word(A, 0)), (None, 0, 4), "the way back goes on");
    job.at(LATENCY + 92 + timeout);
    job.of(A).progress();
    assert_eq!(job.of(A).broken(B), Some(BROKEN(LaneCause::NoAnswer)));
    assert_eq!(job.raise(2), Err(BROKEN(LaneCause::NoAnswer)));
    assert!(job.of(A).drain(Scope::All), "it never arrives");
    assert_eq!((job.of(A).broken(Rank(3)), job.of(B).broken(A)), (None, None));
    // Mended and connected anew, it carries again; nothing of before comes back.
    job.network.mend(A, B);
    job.meet();
    job.set_word(A, 0, 9);
    job.put(A, 0, 8).unwrap();
    job.at(u64::MAX);
    assert_eq!((job.word(B, 0), job.raised()), (9, 0));
}

/// Who asks for a put again only where the number is another one misses nothing: neither puts that have landed nor lanes that were lost, cut or connected anew.
#[test]
fn what_has_landed_or_failed_shows_by_another_number() {
    let mut job = Job::new();
    let mut seen = job.of(A).landed(B);
    let mut is_new = |job: &mut Job| std::mem::replace(&mut seen, job.of(A).landed(B)) != job.of(A).landed(B);
    job.put(A, 0, 100).unwrap();
    job.at(100);
    assert!(!is_new(&mut job), "it is on its way");
    job.at(u64::MAX / 4);
    assert!(is_new(&mut job) && !is_new(&mut job));
    job.network.lose(A, B);
    job.put(A, 0, 100).unwrap();
    job.at(u64::MAX / 2);
    assert!(is_new(&mut job), "lost");
    job.network.mend(A, B);
    job.meet();
    assert!(is_new(&mut job), "connected anew");
    job.put(A, 0, 100).unwrap();
    job.of(A).cut(Scope::Peer(B));
    assert!(is_new(&mut job), "cut");
    assert_eq!(job.of(A).landed(Rank(1)), None, "no lane leads there");
}

#[test]
fn whoever_only_waits_finds_out_by_a_probe() {
    let mut job = Job::new();
    job.network.lose(A, B);
    job.of(A).probe(B);
    job.of(A).probe(B);
    job.at(u64::MAX);
    assert!(job.of(A).broken(B).is_some());
    job.of(B).probe(A);
    job.at(u64::MAX);
    assert!(job.of(B).drain(Scope::All) && job.of(B).broken(A).is_none(), "the other way answers");
}

#[test]
fn what_a_cut_lane_holds_never_arrives() {
    let mut job = Job::new();
    job.put(A, 0, 100).unwrap();
    job.of(A).cut(Scope::Peer(Rank(3)));
    assert_eq!(job.of(A).broken(B), None);
    job.set_word(A, 0, 3);
    job.of(A).cut(Scope::All);
    assert!(job.of(A).drain(Scope::All));
    job.at(u64::MAX);
    assert_eq!((job.word(B, 0), job.put(A, 0, 8)), (0, Err(BROKEN(LaneCause::Cut))));
}

/// Low latency is done with a rank; throughput mode's lanes to it go on.
#[test]
fn a_scope_of_low_latency_neither_waits_for_other_lanes_nor_cuts_them() {
    let mut job = Job::new();
    job.put(A, 0, 100).unwrap();
    let at = job.rows();
    let low = LaneId { peer: B, kind: LaneKind::LowRows };
    assert!(job.of(A).drain(Scope::LowLatency(B)), "only another lane is busy");
    job.of(A).put(low, at.span(8), at).unwrap();
    assert!(!job.of(A).drain(Scope::LowLatency(B)));
    job.of(A).cut(Scope::LowLatency(B));
    let cut = Fault::LaneBroken { lane: low, cause: LaneCause::Cut };
    assert_eq!(job.of(A).put(low, at.span(8), at), Err(cut));
    job.set_word(A, 0, 3);
    job.at(u64::MAX);
    assert_eq!((job.word(B, 0), job.put(A, 0, 8)), (3, Ok(true)));
}

/// From an offer to the next connection nothing arrives, nor anything of the connection before.
#[test]
fn nothing_arrives_at_a_rank_that_connects_anew() {
    let mut job = Job::new();
    job.set_word(A, 0, 3);
    job.put(A, 0, 8).unwrap();
    let offer = job.of(B).offer().unwrap();
    job.at(u64::MAX - 1);
    assert_eq!(job.word(B, 0), 0);
    let mine = job.of(A).my_offer();
    job.of(B).connect(&[Some(zerocopy::IntoBytes::as_bytes(&mine).to_vec()), None, Some(offer), None]).unwrap();
    job.at(u64::MAX);
    assert_eq!(job.word(B, 0), 0, "A has not connected to that one");
    job.of(A).progress();
    assert_eq!(job.of(A).broken(B), Some(BROKEN(LaneCause::NoAnswer)));
}

#[test]
fn a_rank_that_has_left_answers_nothing() {
    let mut job = Job::new();
    job.put(A, 0, 8).unwrap();
    job.ranks.truncate(2);
    job.network.set_clock(u64::MAX);
    job.of(A).progress();
    assert_eq!(job.of(A).broken(B), Some(BROKEN(LaneCause::NoAnswer)));
}

/// F8.
#[test]
fn ranges_outside_cells_that_are_none_and_lanes_that_are_not_there_are_refused() {
    let mut job = Job::new();
    let (bytes, rows) = (job.layout.window_bytes(), job.rows());
    let outside = |result| matches!(result, Err(Fault::OutOfRange { .. }));
    assert!(outside(job.of(A).put(lane(B), Offset(bytes - 7).span(8), rows).map(drop)));
    assert!(outside(job.of(A).put(lane(B), rows.span(8), Offset(u64::MAX)).map(drop)));
    assert!(outside(job.of(A).raise(lane(B), Offset(bytes), 1).map(drop)));
    let refused = |result| matches!(result, Err(Fault::NotOffered { .. }));
    let cell = job.cell(A);
    assert!(refused(job.of(A).raise(lane(B), Offset(cell.0 + 4), 1).map(drop)));
    assert!(refused(job.of(A).raise(lane(B), rows, 1).map(drop)), "no cell");
    assert!(refused(job.of(A).put(lane(Rank(3)), rows.span(8), rows).map(drop)), "not of the rail");
    assert!(refused(job.of(A).put(lane(Rank(1)), rows.span(8), rows).map(drop)), "near");
    let nothing = Span { offset: Offset(u64::MAX), len: 0 };
    assert!(job.of(A).put(lane(B), nothing, rows).unwrap().is_some());
}

#[test]
fn offers_of_other_networks_and_windows_are_refused_by_rank() {
    let (mut job, mut other) = (Job::new(), Job::new());
    let told = |offer: Vec<u8>| vec![None, None, Some(offer), None];
    let mut refusal = |offer| match job.of(A).connect(&told(offer)) {
        Err(error @ Error::Unsupported { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    };
    assert!(refusal(vec![1]).contains("rank 2 over the loop is not supported: its offer has 1 bytes, expected 40"));
    let theirs = other.of(B).offer().unwrap();
    assert!(refusal(theirs).contains("rank 2 over the loop is not supported: it joins threads of one process"));
    let mut offer = other.of(B).my_offer();
    offer.network = job.of(A).my_offer().network;
    offer.bytes = 5.into();
    let smaller = zerocopy::IntoBytes::as_bytes(&offer).to_vec();
    let refusal = job.of(A).connect(&told(smaller)).unwrap_err().to_string();
    assert!(refusal.contains("rank 2") && refusal.contains("its window has 5 bytes"), "{refusal}");
}

#[test]
fn settings_outside_their_limits_are_refused() {
    let said = |result: Result<Loop, Error>| result.unwrap_err().to_string();
    assert_eq!(said(Loop::new().bytes_per_second(0)), "the loop's bytes a second is 0, allowed: 1 or more");
    assert_eq!(said(Loop::new().queue_depth(0)), "the loop's queue depth is 0, allowed: 1 to 65536");
    let long = Duration::from_secs(61);
    assert_eq!(said(Loop::new().latency(long)), "the loop's latency is 61s, allowed: at most 60s");
    assert!(Loop::new().answer_timeout(long).is_err() && Loop::new().delay(A, B, long).is_err());
}

/// Two ranks of two nodes, each with a loop of its own, as processes have.
struct Apart {
    layout: Layout,
    windows: [OwnedFd; 2],
    ranks: [LoopLanes; 2],
}

impl Apart {
    fn new(network: impl Fn() -> Loop) -> Self {
        let topology = Topology::new(2, 1).unwrap();
        let shape = Shape::builder().experts(2).topk(1).hidden(64).max_tokens(4).build().unwrap();
        let settings = Settings::builder(&shape, &topology).channels(1).low_latency(true).build().unwrap();
        let layout = Layout::new(&shape, &topology, &settings).unwrap();
        let windows = [0, 1].map(|_| window(layout.window_bytes()));
        let ranks = [0, 1].map(|rank: usize| {
            let place = Place { me: Rank(rank as u32), layout: &layout, window: windows[rank].as_fd() };
            network().between_processes().open(place).unwrap()
        });
        Self { layout, windows, ranks }
    }

    fn offers(&mut self) -> Vec<Option<Vec<u8>>> {
        self.ranks.iter_mut().map(|lanes| Some(lanes.offer().unwrap())).collect()
    }

    fn meet(&mut self) {
        let offers = self.offers();
        self.ranks.iter_mut().for_each(|lanes| lanes.connect(&offers).unwrap());
    }

    /// Rank 0 raises its cell at rank 1, and does nothing more; what the cell holds within that time.
    fn raises(&mut self, within: Duration) -> u64 {
        let cell = Cell { writer: Rank(0), lane: LaneKind::Control, counter: Counter::Counts };
        let at = self.layout.cell(cell, 0);
        assert!(self.ranks[0].raise(lane(Rank(1)), at, 5).unwrap());
        let memory = Memory::of(self.windows[1].as_fd(), self.layout.window_bytes()).unwrap();
        let until = std::time::Instant::now() + within;
        loop {
            let seen = memory.cell(at).unwrap().load(Ordering::Acquire);
            if seen > 0 || std::time::Instant::now() > until {
                return seen;
            }
            std::thread::yield_now();
        }
    }
}

/// What a raise promises: it arrives though the rank should do nothing more, and nobody else of its process does.
#[test]
fn between_processes_what_was_raised_arrives_though_nobody_makes_progress() {
    for latency in [Duration::ZERO, Duration::from_millis(5)] {
        let mut apart = Apart::new(|| Loop::new().latency(latency).unwrap());
        apart.meet();
        assert_eq!(apart.raises(Duration::from_secs(30)), 5, "{latency:?}");
        assert!(apart.ranks[0].drain(Scope::All));
        assert!(!apart.ranks[1].own.gate.is_held_by(Rank(0)), "or rank 1 waits for nothing when it connects anew");
    }
}

#[test]
fn between_processes_a_rank_that_connects_anew_is_reached_again_and_not_before() {
    let mut apart = Apart::new(Loop::new);
    apart.meet();
    let offers = apart.offers();
    apart.ranks[0].connect(&offers).unwrap();
    assert_eq!(apart.raises(Duration::from_millis(50)), 0, "rank 1 has not connected");
    assert!(apart.ranks[0].broken(Rank(1)).is_some());
    apart.meet();
    assert_eq!(apart.raises(Duration::from_secs(30)), 5);
}

#[test]
fn between_processes_windows_that_are_none_are_refused_by_rank() {
    let mut apart = Apart::new(Loop::new);
    let offers = apart.offers();
    let mut refusal = |change: fn(&mut Vec<u8>)| {
        let mut offers = offers.clone();
        change(offers[1].as_mut().unwrap());
        apart.ranks[0].connect(&offers).unwrap_err().to_string()
    };
    let length = offers[1].as_ref().unwrap().len();
    let short = refusal(|offer| offer.truncate(offer.len() - 1));
    assert!(short.contains("its window's name has 3 bytes, expected 4"), "{short}");
    // Descriptor 0 is no file in memory of that size.
    let other = refusal(|offer| offer.splice(offer.len() - 4.., [0; 4]).for_each(drop));
    assert!(other.contains("the window of process") && other.contains("over the loop"), "{other}");
    assert_eq!(length, 44);
}
