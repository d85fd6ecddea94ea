//! Cards of other processes: what each of them shows of its own, by a [`Post`], and where their memory lies for this process's GPU.
//!
//! So nothing is written to a process behind a queue pair that it has destroyed. A player of a process that is stopped ends meanwhile, and none is launched
//! there before what came was heard; one that was stopped in the middle of a launch may carry out what it had been told. Cards of processes that have
//! ended do not answer.
//!
//! Locks are taken in this order: the fabric's, the players', that of what was said, that of what is mapped.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ep_bootstrap::Member;
use ep_core::Error;
use soft_hca::{Fabric, Face, Region, Work};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::post::{Post, Seen};
use crate::driver::{Block, Device, DeviceMemory, Imported, MemoryHandle, Stream};
use crate::error::CudaError;
use crate::node::PATIENCE as MEETING;

type U32 = zerocopy::little_endian::U32;
type U64 = zerocopy::little_endian::U64;

#[derive(Debug)]
pub(super) struct Others {
    pub(super) post: Post,
    device: Arc<Device>,
    mapped: Mutex<Mapped>,
}

/// Memory of other processes.
#[derive(Debug)]
struct Mapped {
    /// Where it lies in theirs, `[cards]`.
    blocks: Vec<Vec<Block>>,
    here: HashMap<MemoryHandle, Imported>,
}

impl Others {
    /// Of all processes of `member`, each of which plays its rank's card on its `device`.
    ///
    /// # Errors
    /// Those of [`Post::met`]; [`Error::Unsupported`] with the rank whose GPU this one does not reach.
    pub(super) fn met(device: &Arc<Device>, member: &Member) -> Result<Self, Error> {
        let post = Post::met(member)?;
        try_memory(device, member)?;
        let blocks = (0..member.world()).map(|_| Vec::new()).collect();
        let mapped = Mutex::new(Mapped { blocks, here: HashMap::new() });
        Ok(Self { post, device: Arc::clone(device), mapped })
    }

    /// Keeps memory of other processes mapped for good: a kernel may use it that nobody could end.
    pub(super) fn keep_mapped(&self) {
        std::mem::forget(std::mem::take(&mut self.mapped().here));
    }

    fn mapped(&self) -> MutexGuard<'_, Mapped> {
        self.mapped.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Shows the own card where it is not shown, and sees who has ended.
    pub(super) fn tell(&self, fabric: &Fabric) {
        if self.post.is_due() {
            // Under the fabric's lock: it is withdrawn before anything of it changes. It may have changed before that was to be had.
            let held = fabric.show(self.post.me(), |face| self.post.is_due().then(|| (face, self.post.hold())));
            let problem =
                |error| CudaError::Meeting { problem: format!("a file for what an adapter is like: {error}") };
            let show = |(face, number)| self.post.show(number, &self.shown(face)?.to_bytes()).map_err(problem);
            if let Err(error) = held.map_or(Ok(()), show) {
                tracing::warn!(%error, "other processes cannot be told what an adapter is like");
                self.post.let_go();
            }
        }
        self.post.tell();
    }

    fn shown(&self, face: Face) -> Result<Shown, CudaError> {
        let mut blocks: Vec<Block> = Vec::new();
        for region in face.regions() {
            if !blocks.iter().any(|block| block.holds(region.base, region.bytes)) {
                blocks.push(self.device.block(region.base)?);
            }
        }
        Ok(Shown { face, blocks })
    }

    /// Tells the fabric what others have shown, and maps their memory. How often it has changed what they show. A card of which nothing can be made does
    /// not answer.
    pub(super) fn learn(&self, fabric: &Fabric) -> u64 {
        let (news, seen) = self.post.seen();
        for (card, seen) in seen.into_iter().enumerate().filter(|(card, _)| *card != self.post.me()) {
            let shown = match seen {
                Seen::Hidden => None,
                Seen::Shown(bytes) => Some(self.map(card, &bytes).unwrap_or_else(|error| {
                    tracing::warn!(rank = card, %error, "an adapter of another process is out of reach");
                    Shown::default()
                })),
                // Nothing answers there any more.
                Seen::Ended => Some(Shown::default()),
            };
            self.mapped().blocks[card] = shown.as_ref().map(|shown| shown.blocks.clone()).unwrap_or_default();
            fabric.see(card, shown.map(|shown| shown.face));
        }
        news
    }

    /// What a process shows, whose memory is mapped here.
    fn map(&self, card: usize, told: &[u8]) -> Result<Shown, CudaError> {
        let shown = Shown::from_bytes(card, told).ok_or_else(|| CudaError::Meeting {
            problem: format!("what it shows has {} bytes, and cannot be read", told.len()),
        })?;
        let mut mapped = self.mapped();
        for block in &shown.blocks {
            if let Entry::Vacant(place) = mapped.here.entry(block.handle) {
                place.insert(Imported::open(&self.device, block.handle)?);
            }
        }
        Ok(shown)
    }

    /// The same work with memory of other cards where this process sees it. What they have not shown is left out.
    pub(super) fn placed(&self, work: &Work) -> Work {
        let mapped = self.mapped();
        let placed = |region: &Region| {
            if region.card == self.post.me() {
                return Some(*region);
            }
            let block = mapped.blocks[region.card].iter().find(|block| block.holds(region.base, region.bytes))?;
            let base = mapped.here.get(&block.handle)?.address() + (region.base - block.base);
            Some(Region { base, ..*region })
        };
        Work { regions: work.regions.iter().filter_map(placed).collect(), ..work.clone() }
    }
}

impl Block {
    fn holds(&self, base: u64, bytes: u64) -> bool {
        base.checked_sub(self.base).and_then(|at| at.checked_add(bytes)).is_some_and(|end| end <= self.bytes)
    }
}

/// Maps a block of each of the others, and lets go of it: so a GPU that is out of reach is found before there is something to lose.
fn try_memory(device: &Arc<Device>, member: &Member) -> Result<(), Error> {
    let made = || {
        let stream = Stream::new(device, 0)?;
        let block = DeviceMemory::zeroed(&stream, 8)?;
        stream.synchronize()?;
        Ok((block.handle()?, block))
    };
    let own = made().map_err(|error: CudaError| error.into());
    let told = |own: &(MemoryHandle, DeviceMemory)| own.0.to_bytes().to_vec();
    let (own, told) = member.try_all_gather(own, told, MEETING, CudaError::meeting)?;
    let open = |(rank, told): (u32, Option<Vec<u8>>)| {
        let handle = told.and_then(|told| told.try_into().ok()).filter(|_| rank != member.rank().0);
        handle.map_or(Ok(()), |handle| match Imported::open(device, MemoryHandle::from_bytes(handle)) {
            Ok(_) => Ok(()),
            Err(error) => {
                let what = format_args!("an adapter beside that of rank {rank} ({error})");
                Err(Error::unsupported(what, "GPUs that reach each other, all visible to each process of one user"))
            }
        })
    };
    let reached = (0..).zip(told).try_for_each(open);
    // Nobody's block goes before all have tried.
    member.try_all_gather(reached, |()| Vec::new(), MEETING, CudaError::meeting)?;
    drop(own);
    Ok(())
}

/// What a process shows.
#[derive(PartialEq, Eq, Debug, Default)]
struct Shown {
    face: Face,
    /// In which the memory lies that the card's peers may name.
    blocks: Vec<Block>,
}

/// A block as it is told.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, Unaligned, KnownLayout)]
#[repr(C)]
struct ToldBlock {
    base: U64,
    bytes: U64,
    handle: [u8; MemoryHandle::BYTES],
}

impl Shown {
    fn to_bytes(&self) -> Vec<u8> {
        let told = |block: &Block| ToldBlock {
            base: U64::new(block.base),
            bytes: U64::new(block.bytes),
            handle: block.handle.to_bytes(),
        };
        let mut bytes = U32::new(self.blocks.len() as u32).as_bytes().to_vec();
        self.blocks.iter().for_each(|block| bytes.extend(told(block).as_bytes()));
        bytes.extend(self.face.to_bytes());
        bytes
    }

    fn from_bytes(card: usize, told: &[u8]) -> Option<Self> {
        let (count, told) = U32::read_from_prefix(told).ok()?;
        let (blocks, told) = <[ToldBlock]>::ref_from_prefix_with_elems(told, count.get() as usize).ok()?;
        let block = |told: &ToldBlock| Block {
            base: told.base.get(),
            bytes: told.bytes.get(),
            handle: MemoryHandle::from_bytes(told.handle),
        };
        Some(Self { face: Face::from_bytes(card, told)?, blocks: blocks.iter().map(block).collect() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_is_read_as_it_was_told() {
        let block = |base| Block { base, bytes: 1 << 20, handle: MemoryHandle::from_bytes([base as u8; 72]) };
        let shown = Shown { face: Face::default(), blocks: vec![block(7), block(9)] };
        let bytes = shown.to_bytes();
        assert_eq!(Shown::from_bytes(1, &bytes), Some(shown));
        for len in 0..bytes.len() {
            assert_eq!(Shown::from_bytes(1, &bytes[..len]), None, "{len} bytes");
        }
    }

    #[test]
    fn a_block_holds_what_lies_in_it_whole() {
        let block = Block { base: 100, bytes: 10, handle: MemoryHandle::from_bytes([0; 72]) };
        assert!(block.holds(100, 10) && block.holds(109, 1));
        assert!(
            !block.holds(99, 1) && !block.holds(109, 2) && !block.holds(u64::MAX, 1) && !block.holds(101, u64::MAX)
        );
    }
}
