//! Cards of other processes: what each of them shows of its own, by a [`Post`], and where their memory lies for this process's GPU.
//!
//! So nothing is written to a process behind a queue pair that it has destroyed. A player of a process that is stopped ends meanwhile, and none is launched
//! there before what came was heard; one that was stopped in the middle of a launch may carry out what it had been told. Cards of processes that have
//! ended do not answer.
//!
//! Locks are taken in this order: the fabric's, the players', that of what was said.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ep_bootstrap::Member;
use ep_core::Error;
use soft_hca::{Fabric, Face};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::post::{Post, Seen};
use crate::driver::{Block, Device, Imported, MemoryHandle};
use crate::error::CudaError;

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
    /// Those of [`Post::met`].
    pub(super) fn met(device: &Arc<Device>, member: &Member) -> Result<Self, Error> {
        let blocks = (0..member.world()).map(|_| Vec::new()).collect();
        let mapped = Mutex::new(Mapped { blocks, here: HashMap::new() });
        Ok(Self { post: Post::met(member)?, device: Arc::clone(device), mapped })
    }

    fn mapped(&self) -> MutexGuard<'_, Mapped> {
        self.mapped.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Shows the own card where it is not shown, and sees who has ended.
    ///
    /// # Errors
    /// Where memory that peers may name cannot be named to them, or the system has no file for it.
    pub(super) fn tell(&self, fabric: &Fabric) -> Result<(), CudaError> {
        if self.post.is_due() {
            // Under the fabric's lock: it is withdrawn before anything of it changes.
            let (face, number) = fabric.show(self.post.me(), |face| (face, self.post.hold()));
            let problem =
                |error| CudaError::Meeting { problem: format!("a file for what an adapter is like: {error}") };
            self.post.show(number, &self.shown(face)?.to_bytes()).map_err(problem)?;
        }
        self.post.tell();
        Ok(())
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

    /// Tells the fabric what others have shown, and maps their memory. How often it has changed what they show.
    ///
    /// # Errors
    /// [`CudaError::Driver`], where a block cannot be mapped; [`CudaError::Meeting`] with the rank that shows what cannot be read.
    pub(super) fn learn(&self, fabric: &Fabric) -> Result<u64, CudaError> {
        let (news, seen) = self.post.seen();
        for (card, seen) in seen.into_iter().enumerate().filter(|(card, _)| *card != self.post.me()) {
            let shown = match seen {
                Seen::Hidden => None,
                Seen::Shown(bytes) => Some(Shown::from_bytes(card, &bytes).ok_or_else(|| CudaError::Meeting {
                    problem: format!("rank {card} shows an adapter of {} bytes, which cannot be read", bytes.len()),
                })?),
                // Nothing answers there any more.
                Seen::Ended => Some(Shown::default()),
            };
            let mut mapped = self.mapped();
            for block in shown.iter().flat_map(|shown| &shown.blocks) {
                if let Entry::Vacant(place) = mapped.here.entry(block.handle) {
                    place.insert(Imported::open(&self.device, block.handle)?);
                }
            }
            mapped.blocks[card] = shown.as_ref().map(|shown| shown.blocks.clone()).unwrap_or_default();
            fabric.see(card, shown.map(|shown| shown.face));
        }
        Ok(news)
    }

    /// Where this process sees memory that lies at `base` in the process of a card; none where that was not shown.
    pub(super) fn place(&self, card: usize, base: u64, bytes: u64) -> Option<u64> {
        if card == self.post.me() {
            return Some(base);
        }
        let mapped = self.mapped();
        let block = mapped.blocks[card].iter().find(|block| block.holds(base, bytes))?;
        Some(mapped.here.get(&block.handle)?.address() + (base - block.base))
    }
}

impl Block {
    fn holds(&self, base: u64, bytes: u64) -> bool {
        base.checked_sub(self.base).and_then(|at| at.checked_add(bytes)).is_some_and(|end| end <= self.bytes)
    }
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
