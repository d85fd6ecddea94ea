//! Windows of devices, which move bytes when they come to it.

use std::any::Any;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use ep_core::layout::Queues;
use ep_core::port::{LaneId, LaneKind, Offset, Span};
use ep_core::transport::{DevicePlace, Lanes, Transport, WindowCopies, WindowMemory};
use ep_core::{Error, Layout, Rank, Settings, Shape, Topology};

use crate::{Loop, LoopLanes};

/// What was asked of a way, in its order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Asked {
    Copy,
    Raise(u64),
    Mark(u64),
}

#[derive(Debug, Default)]
struct Way {
    queue: VecDeque<Asked>,
    mark: u64,
    reached: u64,
}

/// It does nothing before it is told to.
#[derive(Debug)]
struct Slow {
    bytes: u64,
    ways: Vec<Mutex<Way>>,
}

impl Slow {
    fn way(&self, way: usize) -> MutexGuard<'_, Way> {
        self.ways[way].lock().unwrap()
    }

    /// Carries out the next things that were asked of each way, and says what they were.
    fn carry_out(&self, most: usize) -> Vec<Asked> {
        let mut done = Vec::new();
        for way in 0..self.ways.len() {
            let mut way = self.way(way);
            let some = most.min(way.queue.len());
            for asked in way.queue.drain(..some).collect::<Vec<_>>() {
                if let Asked::Mark(mark) = asked {
                    way.reached = mark;
                }
                done.push(asked);
            }
        }
        done
    }

    fn ask(&self, way: usize, asked: Asked) -> Result<(), Error> {
        self.way(way).queue.push_back(asked);
        Ok(())
    }

    fn waiting(&self) -> usize {
        (0..self.ways.len()).map(|way| self.way(way).queue.len()).sum()
    }
}

impl WindowCopies for Slow {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn ways(&self) -> usize {
        self.ways.len()
    }

    fn pull(&self, way: usize, source: &dyn WindowCopies, _: Span, _: Offset) -> Result<(), Error> {
        assert!((source as &dyn Any).is::<Self>());
        self.ask(way, Asked::Copy)
    }

    fn raise(&self, way: usize, _: Offset, bits: u64) -> Result<(), Error> {
        self.ask(way, Asked::Raise(bits))
    }

    fn mark(&self, way: usize) -> Result<u64, Error> {
        let mut state = self.way(way);
        state.mark += 1;
        let mark = state.mark;
        state.queue.push_back(Asked::Mark(mark));
        Ok(mark)
    }

    fn reached(&self, way: usize) -> u64 {
        self.way(way).reached
    }

    fn finish(&self) -> Result<(), Error> {
        self.carry_out(usize::MAX);
        Ok(())
    }
}

const A: Rank = Rank(0);
const B: Rank = Rank(1);

/// Two nodes of a rank each.
struct Pair {
    layout: Layout,
    windows: Vec<Arc<Slow>>,
    ranks: Vec<LoopLanes>,
}

impl Pair {
    fn new(ways: usize) -> Self {
        let topology = Topology::new(2, 1).unwrap();
        let shape = Shape::builder().experts(4).topk(2).hidden(64).max_tokens(4).build().unwrap();
        let settings = Settings::builder(&shape, &topology).channels(2).build().unwrap();
        let layout = Layout::new(&shape, &topology, &settings).unwrap();
        let network = Loop::new().queues(Queues::PER_ROLE).queue_depth(512).unwrap();
        let slow = || Slow { bytes: layout.window_bytes(), ways: (0..ways).map(|_| Mutex::default()).collect() };
        let windows: Vec<_> = topology.all().map(|_| Arc::new(slow())).collect();
        let open = |(me, window): (Rank, &Arc<Slow>)| {
            let copies = Arc::clone(window) as Arc<dyn WindowCopies>;
            let window = WindowMemory::Device { address: 0, keeper: None, dmabuf: None, copies: Some(&copies) };
            network.open_for_device(DevicePlace { me, layout: &layout, window }).unwrap()
        };
        let ranks = topology.all().zip(&windows).map(open).collect();
        let mut pair = Self { layout, windows, ranks };
        pair.meet();
        pair
    }

    fn meet(&mut self) {
        let offers: Vec<_> = self.ranks.iter_mut().map(|lanes| Some(lanes.offer().unwrap())).collect();
        self.ranks.iter_mut().for_each(|lanes| lanes.connect(&offers).unwrap());
    }

    /// A puts some rows to B on a lane; the last ticket.
    fn puts(&mut self, channel: u32, rows: u32) -> ep_core::port::Ticket {
        let (lane, from) = (self.data(channel), Offset(self.layout.window_bytes() - 64).span(64));
        (0..rows).map(|_| self.ranks[A.index()].put(lane, from, from.offset).unwrap().unwrap()).last().unwrap()
    }

    /// The lane to B by which a channel's rows go.
    fn data(&self, channel: u32) -> LaneId {
        LaneId { peer: B, kind: LaneKind::Data(self.layout.far_track(channel)) }
    }

    fn b(&self) -> &Slow {
        &self.windows[B.index()]
    }
}

/// F5: what a driver was asked for is not done yet.
#[test]
fn a_flush_is_through_when_the_device_has_come_so_far() {
    let mut pair = Pair::new(1);
    let (lane, ticket) = (pair.data(0), pair.puts(0, 2));
    pair.ranks[A.index()].progress();
    assert_eq!(pair.ranks[A.index()].flush(lane, ticket), Ok(false));
    assert_eq!(pair.b().carry_out(2), [Asked::Copy, Asked::Copy]);
    pair.ranks[A.index()].progress();
    assert_eq!(pair.ranks[A.index()].flush(lane, ticket), Ok(false), "copied, and nobody knows");
    assert_eq!(pair.b().carry_out(1), [Asked::Mark(1)]);
    pair.ranks[A.index()].progress();
    assert_eq!(pair.ranks[A.index()].flush(lane, ticket), Ok(true));
}

#[test]
fn lanes_go_by_several_ways_and_each_by_one() {
    let mut pair = Pair::new(2);
    let cells = pair.layout.regions().into_iter().find(|region| region.name == "cells").unwrap().span;
    for channel in 0..2 {
        pair.puts(channel, 1);
        let lane = pair.data(channel);
        assert_eq!(pair.ranks[A.index()].raise(lane, cells.offset, 7), Ok(true));
    }
    pair.ranks[A.index()].progress();
    for way in 0..2 {
        let asked: Vec<_> = pair.b().way(way).queue.iter().copied().collect();
        assert_eq!(asked, [Asked::Copy, Asked::Raise(7), Asked::Mark(1)], "way {way}");
    }
}

/// A driver whose queue is full waits in the middle of a call.
#[test]
fn a_driver_is_asked_for_no_more_than_it_takes() {
    let mut pair = Pair::new(1);
    let (lane, ticket) = (pair.data(0), pair.puts(0, 300));
    let mut turns = 0;
    while pair.ranks[A.index()].flush(lane, ticket) == Ok(false) {
        pair.ranks[A.index()].progress();
        assert!(pair.b().waiting() <= 2 * 64, "{} wait", pair.b().waiting());
        pair.b().carry_out(10);
        turns += 1;
        assert!(turns < 1000, "it comes to an end");
    }
}

#[test]
fn who_connects_anew_has_nothing_of_before_in_the_air() {
    let mut pair = Pair::new(2);
    for rank in [A, B] {
        pair.puts(0, 3);
        pair.ranks[A.index()].progress();
        assert!(pair.b().waiting() > 0);
        pair.ranks[rank.index()].offer().unwrap();
        assert_eq!(pair.b().waiting(), 0, "rank {rank} has closed");
        pair.meet();
    }
}
