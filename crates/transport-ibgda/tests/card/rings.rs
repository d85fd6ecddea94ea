//! Rings between ranks, driven step by step: each step of a rank and of a card is drawn, so that a seed replays all.
//!
//! A producer puts rows into a ring at its peer and publishes its tail; a consumer there looks at every row that it was told of, overwrites it, and
//! publishes its head. So whatever a lane does wrong shows: bytes that are not there when they were announced (F3), announced before they
//! were read (F9), sources or slots that are used again too early (F5), counters that fall (F4).

use std::time::Duration;

use ep_core::device::FarStatus;
use ep_core::layout::Queues;
use ep_core::port::{Cell, Counter, LaneKind, Offset, Span};
use ep_core::{Layout, Rank};
use ep_ibgda::Settings;
use soft_hca::{Fabric, Link, Mood};

use crate::rank::{Meantime, Member, Verbs, connected, layout};

/// Slots of the longest ring, and staging slots of its producer.
const MOST: u64 = 16;
/// Bytes of the longest row.
const LONGEST: u64 = 200;
const STRIDE: u64 = 256;
const AT_ONCE: Duration = Duration::ZERO;

/// Draws, by a seed.
#[derive(Debug)]
pub(crate) struct Draw(u64);

impl Draw {
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ z >> 31) % limit
    }
}

/// What is done wrong on purpose, where no change of the text can.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Plant {
    #[default]
    Nothing,
    /// A tail is published on the queue pair of the credit.
    SignalElsewhere,
    /// All rows have one source, which is overwritten without a flush.
    SourceReused,
}

/// A ring from one rank to another.
#[derive(Debug)]
struct Ring {
    from: u32,
    to: u32,
    track: u16,
    rows: u64,
    /// Of the producer.
    put: u64,
    tail: u64,
    slots: u64,
    /// Of what lies in each staging slot, of which there are [`staged`].
    tickets: Vec<u64>,
    flushed: bool,
    /// Of the consumer.
    taken: u64,
    head: u64,
    last_tail: u64,
    last_head: u64,
}

/// The row's length and bytes.
fn row(seed: u64, from: u32, track: u16, number: u64) -> Vec<u8> {
    let mut draw = Draw(seed ^ u64::from(from) << 40 ^ u64::from(track) << 32 ^ number);
    // Mostly whole words; now and then a length that is none.
    let bytes = 1 + draw.below(LONGEST);
    (0..bytes).map(|_| draw.below(256) as u8).collect()
}

/// Staging slots of a ring: fewer than its slots, so that they are used again before their rows were read.
const fn staged(slots: u64) -> u64 {
    1 + slots / 2
}

/// What one step came to.
enum Step {
    Moved,
    Waits,
}

struct Job<'a> {
    verbs: &'a Verbs,
    layout: &'a Layout,
    plant: Plant,
    seed: u64,
    /// Where rows may lie in a window.
    free: Offset,
}

impl Job<'_> {
    fn part(&self, number: u64) -> Offset {
        self.free.plus(number * STRIDE)
    }

    /// Where slot `slot` of the ring from `from` lies at its consumer.
    fn slot(&self, ring: &Ring, slot: u64) -> Offset {
        let ranks = u64::from(self.layout.topology().ranks());
        self.part((u64::from(ring.track % 2) * ranks + u64::from(ring.from)) * MOST + slot % ring.slots)
    }

    /// Where the producer stages row `row`.
    fn staging(&self, ring: &Ring, row: u64) -> Offset {
        let row = if self.plant == Plant::SourceReused { 0 } else { row };
        let ranks = u64::from(self.layout.topology().ranks());
        self.part(
            2 * ranks * MOST
                + (u64::from(ring.track % 2) * ranks + u64::from(ring.to)) * MOST
                + row % staged(ring.slots),
        )
    }

    fn cell(&self, writer: u32, lane: LaneKind, counter: Counter) -> Offset {
        self.layout.cell(Cell::new(Rank(writer), lane, counter), 1)
    }

    fn produce(&self, ring: &mut Ring, members: &[Member], draw: &mut Draw) -> Result<Step, String> {
        let own = &members[ring.from as usize];
        let (data, credit) = (LaneKind::Data(ring.track), LaneKind::Credit(ring.track));
        let lane = own.state(ring.to, data);
        let posted = |what: &str, status: FarStatus| match status {
            FarStatus::Ok => Ok(true),
            FarStatus::Timeout => Ok(false),
            other => Err(format!("{what} of {} to {}: {other:?}", ring.from, ring.to)),
        };
        let head = own.cell(self.cell(ring.to, credit, Counter::Head));
        if head < ring.last_head || head > ring.put {
            return Err(format!("F4: the head of {} at {} is {head} after {}", ring.from, ring.to, ring.last_head));
        }
        ring.last_head = head;
        let full = ring.put - head >= ring.slots;
        if ring.tail < ring.put && (full || ring.put == ring.rows || draw.below(3) == 0) {
            let at = self.cell(ring.from, data, Counter::Tail);
            let on = if self.plant == Plant::SignalElsewhere { own.state(ring.to, credit) } else { lane };
            if !posted("publish", self.verbs.publish(on, at, ring.put, AT_ONCE))? {
                return Ok(Step::Waits);
            }
            ring.tail = ring.put;
            return Ok(Step::Moved);
        }
        if ring.put == ring.rows {
            let last = ring.tickets.iter().copied().max().unwrap_or(0);
            ring.flushed = ring.flushed || posted("flush", self.verbs.flush(lane, last, AT_ONCE))?;
            return Ok(Step::Waits);
        }
        if full {
            return Ok(Step::Waits);
        }
        let place = (ring.put % staged(ring.slots)) as usize;
        let reused = self.plant == Plant::SourceReused;
        if !reused && !posted("flush", self.verbs.flush(lane, ring.tickets[place], AT_ONCE))? {
            return Ok(Step::Waits);
        }
        let bytes = row(self.seed, ring.from, ring.track, ring.put);
        let source = self.staging(ring, ring.put);
        own.write(source, &bytes);
        let (status, ticket) =
            self.verbs.put(lane, source.span(bytes.len() as u64), self.slot(ring, ring.put), AT_ONCE);
        if posted("put", status)? {
            ring.tickets[place] = ticket;
            ring.put += 1;
            return Ok(Step::Moved);
        }
        Ok(Step::Waits)
    }

    fn consume(&self, ring: &mut Ring, members: &[Member], draw: &mut Draw) -> Result<Step, String> {
        let own = &members[ring.to as usize];
        let (data, credit) = (LaneKind::Data(ring.track), LaneKind::Credit(ring.track));
        let tail = own.cell(self.cell(ring.from, data, Counter::Tail));
        if tail < ring.last_tail || tail > ring.put {
            return Err(format!("F4: the tail of {} at {} is {tail} after {}", ring.from, ring.to, ring.last_tail));
        }
        ring.last_tail = tail;
        if ring.taken < tail {
            let expected = row(self.seed, ring.from, ring.track, ring.taken);
            let span: Span = self.slot(ring, ring.taken).span(expected.len() as u64);
            let seen = own.read(span);
            if seen != expected {
                let (from, taken, track) = (ring.from, ring.taken, ring.track);
                return Err(format!("F3: row {taken} of {from} on track {track} is not what was put"));
            }
            own.write(span.offset, &vec![0xdd; expected.len()]);
            ring.taken += 1;
            return Ok(Step::Moved);
        }
        if ring.head < ring.taken && draw.below(2) == 0 {
            let at = self.cell(ring.to, credit, Counter::Head);
            return match self.verbs.publish(own.state(ring.from, credit), at, ring.taken, AT_ONCE) {
                FarStatus::Ok => {
                    ring.head = ring.taken;
                    Ok(Step::Moved)
                }
                FarStatus::Timeout => Ok(Step::Waits),
                other => Err(format!("credit of {} to {}: {other:?}", ring.to, ring.from)),
            };
        }
        Ok(Step::Waits)
    }
}

/// What a scenario is made of.
#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    pub(crate) seed: u64,
    pub(crate) ranks: u32,
    pub(crate) link: Link,
    pub(crate) mood: Mood,
    pub(crate) settings: Settings,
    pub(crate) rows: u64,
    /// Of each ring, 2 to 16.
    pub(crate) slots: u64,
    pub(crate) plant: Plant,
}

impl Scenario {
    /// Of everything a little, by the seed.
    pub(crate) fn of(seed: u64) -> Self {
        let mut draw = Draw(seed);
        let link = if draw.below(4) == 0 { Link::InfiniBand } else { Link::Ethernet };
        let mood = if draw.below(8) == 0 { Mood::mild() } else { Mood::hostile() };
        let tables = Queues::NAMED;
        let settings = Settings::new().relaxed_ordering(draw.below(4) > 0).far_lanes(tables[draw.below(4) as usize]);
        let settings = settings.log_depth(6).expect("a depth");
        Self {
            seed,
            ranks: 2 + draw.below(2) as u32,
            link,
            mood,
            settings,
            rows: 5 + draw.below(60),
            slots: 2 + draw.below(MOST - 1),
            plant: Plant::Nothing,
        }
    }
}

/// Steps without any that moved after which a scenario hangs.
const STUCK: u32 = 20_000;

/// Runs a scenario to its end: `Err` says what went wrong first.
pub(crate) fn run(verbs: &Verbs, scenario: &Scenario) -> Result<(), String> {
    let Scenario { seed, ranks, link, ref mood, ref settings, rows, slots, plant } = *scenario;
    let fabric = Fabric::builder(ranks as u8, link).seed(seed).mood(mood.clone()).stepped();
    let layout = layout(ranks);
    let members = connected(&fabric, &layout, settings).map_err(|error| error.to_string())?;
    let cells = layout.regions()[0].span;
    let job = Job { verbs, layout: &layout, plant, seed, free: Offset(cells.end().next_multiple_of(STRIDE)) };
    let end = job.part(u64::from(2 * ranks) * 2 * MOST);
    assert!(end.0 <= layout.window_bytes(), "rows end at {end:?} of {}", layout.window_bytes());
    let mut draw = Draw(!seed);
    let _meantime = Meantime::new(verbs, &fabric);
    let mut rings = Vec::new();
    for (from, to) in (0..ranks).flat_map(|from| (0..ranks).map(move |to| (from, to))).filter(|(from, to)| from != to) {
        for channel in 0..2 {
            let track = layout.far_track(channel);
            let ring = Ring {
                from,
                to,
                track,
                rows,
                put: 0,
                tail: 0,
                slots,
                tickets: vec![0; staged(slots) as usize],
                flushed: false,
                taken: 0,
                head: 0,
                last_tail: 0,
                last_head: 0,
            };
            rings.push(ring);
        }
    }
    let done = |ring: &Ring| ring.taken == rows && ring.head == rows && ring.last_head == rows && ring.flushed;
    let mut quiet = 0;
    while !rings.iter().all(done) {
        let at = draw.below(rings.len() as u64) as usize;
        let ring = &mut rings[at];
        let step = if draw.below(2) == 0 {
            job.produce(ring, &members, &mut draw)
        } else {
            job.consume(ring, &members, &mut draw)
        };
        let moved = matches!(step.map_err(|wrong| with_complaints(&fabric, wrong))?, Step::Moved);
        let stepped = (0..draw.below(6)).fold(false, |moved, _| fabric.step() || moved);
        quiet = if moved || stepped { 0 } else { quiet + 1 };
        if quiet > STUCK {
            return Err(with_complaints(
                &fabric,
                format!("nothing moves any more: {:?}", rings.iter().find(|ring| !done(ring))),
            ));
        }
    }
    drop(members);
    match fabric.complaints().first() {
        Some(complaint) => Err(format!("the card: {complaint}")),
        None if (0..ranks).any(|rank| fabric.card(rank as usize).objects() > 0) => Err("objects are left".into()),
        None => Ok(()),
    }
}

fn with_complaints(fabric: &Fabric, wrong: String) -> String {
    match fabric.complaints().first() {
        Some(complaint) => format!("{wrong} (the card: {complaint})"),
        None => wrong,
    }
}
