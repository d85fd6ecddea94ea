//! Two threads with a ring between them: ours, on the machine contract of the host backend, and `rtrb`'s. Messages lie ready, and are
//! copied into the ring and out of it.

use std::hint::black_box;
use std::thread;

use ep_conformance::ring::{Receiver, SENDER, Sender};
use ep_core::machine::Machine as _;
use ep_core::shape::MAX_HIDDEN;
use ep_core::{Settings, Shape, Topology};
use ep_host::{Cluster, Machine};

/// Messages that a ring holds.
pub const SLOTS: usize = 256;
/// Messages that are published, and returned, at a time; and different ones, sent in turn.
pub const BATCH: usize = 64;
/// Two ranks of one node.
///
/// # Panics
/// Never: there are such topologies.
pub fn topology() -> Topology {
    Topology::new(1, 2).expect("a valid topology")
}

/// Runs `work` on two threads, which it tells apart by a number.
///
/// # Panics
/// When `work` does.
pub fn both(work: impl Fn(usize) + Sync) {
    thread::scope(|scope| {
        let other = scope.spawn(|| work(1));
        work(0);
        other.join().expect("a thread that ends");
    });
}

/// Two ranks and a ring of `slots` slots of `bytes` bytes or a little more, of which `chunk` are published at a time.
///
/// # Panics
/// When there are no such rings.
pub fn machines(slots: u32, chunk: u32, bytes: usize) -> [Option<Machine>; 2] {
    let shape = Shape::builder().experts(2).topk(1).hidden((bytes / 2) as u32).build().expect("a valid shape");
    let settings = Settings::builder(&shape, &topology()).channels(1).slots(slots).chunk(chunk).credit(chunk);
    let cluster = Cluster::builder(topology()).settings(settings.build().expect("valid settings")).build(shape);
    let machines: [Machine; 2] = cluster.expect("a cluster").into_machines().try_into().expect("two ranks");
    machines.map(Some)
}

/// Messages of a batch that a slot holds: all of it, if rows may be that long.
pub const fn per_slot(bytes: usize) -> usize {
    let most = MAX_HIDDEN as usize * 2 / bytes;
    if most >= BATCH { BATCH } else { 1 << most.ilog2() }
}

/// What the rings carry: message `number` begins with a byte of that value.
pub fn messages(count: usize, bytes: usize) -> Vec<u8> {
    (0..count).flat_map(|number| vec![number as u8; bytes]).collect()
}

/// Looks at what has come: `first` is the number of the first message.
fn check(came: &[u8], bytes: usize, first: usize) {
    for (number, message) in (first..).zip(came.chunks_exact(bytes)) {
        assert_eq!(usize::from(message[0]), number % BATCH, "message {number} is another");
    }
    black_box(came);
}

/// One end of a ring whose slots hold `slot` messages each.
#[derive(Debug)]
pub enum End<'m> {
    /// Rank 0's.
    Sender {
        /// The ring's end.
        end: Sender<'m, Machine>,
        /// Whether messages are written to the window first.
        staged: bool,
    },
    /// Rank 1's.
    Receiver {
        /// The ring's end.
        end: Receiver<'m, Machine>,
        /// Where a slot is copied to.
        into: Vec<u8>,
    },
}

impl<'m> End<'m> {
    /// Opens the end of a machine.
    ///
    /// # Panics
    /// When its window has no room for a batch.
    pub fn new(machine: &'m Machine, slot: usize, bytes: usize, staged: bool) -> Self {
        if machine.rank() != SENDER {
            return Self::Receiver { end: Receiver::new(machine), into: vec![0; slot * bytes] };
        }
        let mut end = Sender::new(machine);
        let ready = messages(BATCH, bytes);
        for (at, message) in ready.chunks_exact(slot * bytes).enumerate() {
            end.stage(at, message).expect("a slot of the staging memory");
        }
        Self::Sender { end, staged }
    }

    /// Sends or receives `count` messages; they are batches, and begin with message 0.
    ///
    /// # Panics
    /// When a verb fails, or another message comes.
    pub async fn run(&mut self, count: usize, slot: usize, bytes: usize, ready: &[u8]) {
        // A loop for each, so that nothing is decided for each message.
        let (messages, places) = ((0..count).step_by(slot), BATCH / slot);
        match self {
            Self::Sender { end, staged: false } => {
                for number in 0..messages.len() {
                    end.send_staged(number % places, slot * bytes).await.expect("a put");
                }
            }
            Self::Sender { end, staged: true } => {
                for number in 0..messages.len() {
                    end.send(&ready[number % places * bytes..][..bytes]).await.expect("a put");
                }
            }
            Self::Receiver { end, into } => {
                for first in messages {
                    end.receive(into).await.expect("a message");
                    check(into, bytes, first);
                }
            }
        }
    }
}

/// Sends `count` messages.
pub fn fill<const BYTES: usize>(producer: &mut rtrb::Producer<[u8; BYTES]>, count: usize, ready: &[u8]) {
    let (messages, _) = ready.as_chunks::<BYTES>();
    let mut sent = 0;
    while sent < count {
        let Ok(chunk) = producer.write_chunk_uninit(BATCH) else {
            std::hint::spin_loop();
            continue;
        };
        sent += chunk.fill_from_iter((sent..).map(|number| messages[number % BATCH]));
    }
}

/// Receives `count` messages.
///
/// # Panics
/// When another one comes.
pub fn drain<const BYTES: usize>(consumer: &mut rtrb::Consumer<[u8; BYTES]>, count: usize) {
    let mut got = 0;
    while got < count {
        let Ok(chunk) = consumer.read_chunk(BATCH) else {
            std::hint::spin_loop();
            continue;
        };
        let (first, second) = chunk.as_slices();
        for from in first.iter().chain(second) {
            let message: [u8; BYTES] = *from;
            check(&message, BYTES, got);
            got += 1;
        }
        chunk.commit_all();
    }
}
