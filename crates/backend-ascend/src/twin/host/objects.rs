//! What the twin's host has handed out, by handle.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::thread::{self, ThreadId};

use crate::driver::Detail;

/// Looks by which a copy is late at most.
const MOST_LATE: u64 = 40;

/// A block of device memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    pub(super) device: u32,
    pub(super) bytes: u64,
}

/// A place in a stream: behind so much work of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) stream: u64,
    pub(super) work: u64,
}

/// What a stream holds.
#[derive(Clone, Debug)]
pub(super) enum Work {
    /// A launch; its number among those of the device, once the machine has it.
    Launch { kernel: String, blocks: u32, at: u64, number: Option<u64> },
    /// A copy within the device, which is late by so many looks.
    Copy { to: u64, from: u64, bytes: u64, late: u64 },
    /// What comes behind waits for an event.
    Wait { event: u64, place: Place },
}

/// A stream: work, done in its order.
#[derive(Clone, Debug)]
pub(super) struct Stream {
    pub(super) device: u32,
    /// Whether nothing behind work that has failed is done: then who asks for an event hears of the failure. Otherwise it comes.
    pub(super) stops: bool,
    /// Work that has ended.
    pub(super) ended: u64,
    /// The number of the last launch that has.
    pub(super) launched: u64,
    pub(super) queue: VecDeque<Work>,
}

/// Parameters of a kernel.
#[derive(Clone, Debug)]
pub(super) struct Args {
    pub(super) function: u64,
    pub(super) bytes: Vec<u8>,
    pub(super) is_final: bool,
}

/// All of it. Handles are numbers that count up, from a place where nothing of the host lies.
#[derive(Debug)]
pub(super) struct Objects {
    pub(super) is_initialised: bool,
    /// Each thread's device.
    devices: HashMap<ThreadId, u32>,
    /// By address.
    pub(super) memory: BTreeMap<u64, Block>,
    /// By address: what the network left on devices.
    pub(super) contexts: BTreeMap<u64, Block>,
    /// By address: descriptors of memory that other processes may map.
    pub(super) shared: BTreeMap<u64, i32>,
    /// By key: which of it has one.
    pub(super) exported: BTreeMap<String, u64>,
    /// By key: where memory of other processes is mapped.
    pub(super) imported: BTreeMap<String, u64>,
    /// By device: the memory that its card knows, as a source and as a target of others.
    pub(super) sources: BTreeMap<u32, Detail>,
    pub(super) targets: BTreeMap<u32, Detail>,
    /// By address: memory of other processes that a card knows, and whose.
    pub(super) admitted: BTreeMap<u64, u32>,
    /// By handle.
    pub(super) streams: BTreeMap<u64, Stream>,
    /// By handle: the device, and where it was recorded.
    pub(super) events: BTreeMap<u64, (u32, Option<Place>)>,
    pub(super) binaries: Vec<u64>,
    /// By handle: the kernel's name.
    pub(super) functions: BTreeMap<u64, String>,
    pub(super) args: BTreeMap<u64, Args>,
    /// `[devices]`: launches so far.
    pub(super) launches: Vec<u64>,
    next: u64,
    /// Drawn from: how late copies are.
    lateness: u64,
}

impl Objects {
    pub(super) fn new(devices: u32) -> Self {
        Self {
            is_initialised: false,
            devices: HashMap::new(),
            memory: BTreeMap::new(),
            contexts: BTreeMap::new(),
            shared: BTreeMap::new(),
            exported: BTreeMap::new(),
            imported: BTreeMap::new(),
            sources: BTreeMap::new(),
            targets: BTreeMap::new(),
            admitted: BTreeMap::new(),
            streams: BTreeMap::new(),
            events: BTreeMap::new(),
            binaries: Vec::new(),
            functions: BTreeMap::new(),
            args: BTreeMap::new(),
            launches: vec![0; devices as usize],
            next: 0x7a00_0000_0000,
            lateness: 0,
        }
    }

    /// The thread's device.
    pub(super) fn device(&self) -> Option<u32> {
        self.devices.get(&thread::current().id()).copied()
    }

    pub(super) fn set_device(&mut self, device: u32) {
        self.devices.insert(thread::current().id(), device);
    }

    /// By how many looks a copy is late.
    pub(super) const fn lateness(&mut self) -> u64 {
        self.lateness = self.lateness.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (self.lateness >> 33) % MOST_LATE
    }

    /// A new handle.
    pub(super) const fn handle(&mut self) -> u64 {
        self.next += 64;
        self.next
    }

    /// The block that some bytes lie in.
    pub(super) fn block(&self, at: u64, bytes: u64) -> Option<Block> {
        let of = |blocks: &BTreeMap<u64, Block>| {
            let (start, block) = blocks.range(..=at).next_back()?;
            let offset = at - start;
            (offset <= block.bytes && bytes <= block.bytes - offset).then_some(*block)
        };
        of(&self.memory).or_else(|| of(&self.contexts))
    }

    pub(super) fn left(&self) -> [usize; 3] {
        let memory = self.memory.len() + self.exported.len() + self.imported.len() + self.admitted.len();
        [memory, self.streams.len(), self.events.len()]
    }
}
