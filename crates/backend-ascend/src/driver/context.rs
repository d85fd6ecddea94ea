//! HCCL's context: what the library leaves in device memory for kernels that post to queues themselves, and how it is read.
//!
//! Structs are those of HCCL's consumers (`HcclA2CombineOpParam` and what it points to) for Atlas A2. They are read by the steps that the
//! context names, so fields that a later version appends do no harm. What the context lacks is an error that says so; nothing is guessed.

use std::mem::offset_of;

use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::{AscendError, QueueView};

/// Ranks of a server whose windows the context names, at most.
const MOST_NEAR: usize = 32;
/// `dataplaneModeBitmap`: vector cores may post.
pub(crate) const VECTOR_CORES: u64 = 4;
/// `HW_DB` of `DBMode`: a doorbell is one word of 8 bytes.
pub(crate) const DOORBELL_OF_CARD: i32 = 0;
/// Bytes of an element, with room for one more source.
pub(crate) const ELEMENT: u32 = 64;
/// `REMOTE_INPUT` and `LOCAL_OUTPUT` of `HcclAiRMAMemType`: what elements name as target and source.
pub(crate) const REMOTE_INPUT: usize = 1;
pub(crate) const LOCAL_OUTPUT: usize = 2;
/// `MAX_NUM` of it.
pub(crate) const MEMORIES: usize = 4;

/// `HcclA2CombineOpParam`.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct Context {
    pub(crate) work_space: u64,
    pub(crate) work_space_bytes: u64,
    pub(crate) rank: u32,
    pub(crate) ranks: u32,
    pub(crate) window_bytes: u64,
    pub(crate) windows_in: [u64; MOST_NEAR],
    pub(crate) windows_out: [u64; MOST_NEAR],
    pub(crate) reserved: [u8; 8328],
    pub(crate) is_multi: u8,
    pub(crate) pad: [u8; 7],
    pub(crate) data: u64,
    pub(crate) data_bytes: u64,
    pub(crate) info_bytes: u64,
    pub(crate) info: u64,
    pub(crate) capability: u64,
    pub(crate) capability_bytes: u64,
}

/// `HcclAiRMAInfo`.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct Info {
    pub(crate) rank: u32,
    pub(crate) ranks: u32,
    /// Queues to each rank.
    pub(crate) queues: u32,
    pub(crate) queue_bytes: u32,
    pub(crate) completions_bytes: u32,
    pub(crate) memory_bytes: u32,
    pub(crate) send_queues: u64,
    pub(crate) send_completions: u64,
    pub(crate) receive_queues: u64,
    pub(crate) receive_completions: u64,
    pub(crate) memories: u64,
}

/// `HcclAiRMAMemInfo`: the memory that elements to a rank may name.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct Memories {
    pub(crate) most: u32,
    pub(crate) detail_bytes: u32,
    pub(crate) details: u64,
}

/// `MemDetails`.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct Detail {
    pub(crate) bytes: u64,
    pub(crate) address: u64,
    pub(crate) key: u32,
    pub(crate) pad: u32,
}

/// `HcclAiRMAWQ`: a queue.
#[derive(Clone, Copy, Default, Debug, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct WorkQueue {
    pub(crate) number: u32,
    pub(crate) pad: u32,
    pub(crate) elements: u64,
    pub(crate) element_bytes: u32,
    pub(crate) depth: u32,
    /// u32: elements posted, ever.
    pub(crate) head: u64,
    /// u32: elements done, ever.
    pub(crate) tail: u64,
    pub(crate) doorbell_mode: i32,
    pub(crate) pad2: u32,
    pub(crate) doorbell: u64,
    pub(crate) level: u32,
    pub(crate) pad3: u32,
}

/// `HcclAiRMACQ`: its completions. All zero where the card's firmware polls.
#[derive(Clone, Copy, Default, Debug, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct Completions {
    pub(crate) number: u32,
    pub(crate) pad: u32,
    pub(crate) entries: u64,
    pub(crate) entry_bytes: u32,
    pub(crate) depth: u32,
    pub(crate) head: u64,
    /// u32: completions taken, ever.
    pub(crate) tail: u64,
    pub(crate) doorbell_mode: i32,
    pub(crate) pad2: u32,
    pub(crate) doorbell: u64,
}

const _: () = {
    assert!(offset_of!(Context, is_multi) == 8872 && offset_of!(Context, info) == 8904 && size_of::<Context>() == 8928);
    assert!(size_of::<Info>() == 64 && size_of::<Memories>() == 16 && size_of::<Detail>() == 24);
    assert!(offset_of!(WorkQueue, doorbell) == 48 && size_of::<WorkQueue>() == 64 && size_of::<Completions>() == 56);
};

/// Reads device memory.
pub(crate) type Reader<'a> = dyn Fn(u64, &mut [u8]) -> Result<(), AscendError> + 'a;

fn read<T: FromBytes + IntoBytes>(reader: &Reader<'_>, at: u64) -> Result<T, AscendError> {
    let mut value = T::new_zeroed();
    reader(at, value.as_mut_bytes())?;
    Ok(value)
}

const fn lack(what: &'static str, seen: u64, needed: u64) -> AscendError {
    AscendError::Context { what, seen, needed }
}

/// At least so much.
const fn at_least(what: &'static str, seen: u64, needed: u64) -> Result<(), AscendError> {
    if seen >= needed { Ok(()) } else { Err(lack(what, seen, needed)) }
}

fn exactly(what: &'static str, seen: u64, needed: u64) -> Result<(), AscendError> {
    if seen == needed { Ok(()) } else { Err(lack(what, seen, needed)) }
}

/// A queue to a rank of another server, and what elements on it may name.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Route {
    pub(crate) view: QueueView,
    /// Own memory.
    pub(crate) source: Detail,
    /// The peer's.
    pub(crate) target: Detail,
}

/// A context that was read.
pub(crate) struct Routes<'a> {
    reader: &'a Reader<'a>,
    info: Info,
}

impl<'a> Routes<'a> {
    /// Reads the context of rank `me` of `ranks` at a device address.
    pub(crate) fn read(reader: &'a Reader<'a>, at: u64, me: u32, ranks: u32) -> Result<Self, AscendError> {
        let context: Context = read(reader, at)?;
        exactly("rankId", context.rank.into(), me.into())?;
        exactly("rankNum", context.ranks.into(), ranks.into())?;
        at_least("capabilitySize", context.capability_bytes, 8)?;
        let modes: u64 = read(reader, context.capability)?;
        exactly("dataplaneModeBitmap & 4, queues that vector cores post to", modes & VECTOR_CORES, VECTOR_CORES)?;
        at_least("sizeOfAiRMAInfo", context.info_bytes, size_of::<Info>() as u64)?;
        let info: Info = read(reader, context.info)?;
        exactly("rankNum of the queues", info.ranks.into(), ranks.into())?;
        at_least("qpNum", info.queues.into(), 1)?;
        at_least("sizeOfAiRMAWQ", info.queue_bytes.into(), size_of::<WorkQueue>() as u64)?;
        at_least("sizeOfAiRMACQ", info.completions_bytes.into(), size_of::<Completions>() as u64)?;
        at_least("sizeOfAiRMAMem", info.memory_bytes.into(), size_of::<Memories>() as u64)?;
        Ok(Self { reader, info })
    }

    /// The first queue to a rank.
    pub(crate) fn to(&self, peer: u32) -> Result<Route, AscendError> {
        let Info { queues, queue_bytes, completions_bytes, memory_bytes, .. } = self.info;
        let nth = u64::from(peer) * u64::from(queues);
        let queue: WorkQueue = read(self.reader, self.info.send_queues + nth * u64::from(queue_bytes))?;
        exactly("wqeSize", queue.element_bytes.into(), ELEMENT.into())?;
        if !queue.depth.is_power_of_two() || queue.depth < 2 {
            return Err(lack("depth of a queue, a power of 2", queue.depth.into(), 2));
        }
        exactly("dbMode", queue.doorbell_mode as u64, DOORBELL_OF_CARD as u64)?;
        // Only where kernels poll there is something.
        let completions: Completions = match self.info.send_completions {
            0 => Completions::default(),
            first => read(self.reader, first + nth * u64::from(completions_bytes))?,
        };
        let memories: Memories = read(self.reader, self.info.memories + u64::from(peer) * u64::from(memory_bytes))?;
        at_least("memMaxNum", memories.most.into(), LOCAL_OUTPUT as u64 + 1)?;
        at_least("sizeOfMemDetails", memories.detail_bytes.into(), size_of::<Detail>() as u64)?;
        let detail =
            |which: usize| read(self.reader, memories.details + which as u64 * u64::from(memories.detail_bytes));
        let view = QueueView {
            number: queue.number,
            depth: queue.depth,
            level: queue.level,
            completion_depth: completions.depth,
            elements: queue.elements,
            doorbell: queue.doorbell,
            tail: queue.tail,
            completions: completions.entries,
            completions_taken: completions.tail,
            posted: read(self.reader, queue.head)?,
            reserved: 0,
        };
        Ok(Route { view, source: detail(LOCAL_OUTPUT)?, target: detail(REMOTE_INPUT)? })
    }
}
