//! Windows whose arenas grow: what they have from the beginning, and where memory comes and goes.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use ep_bootstrap::{Door, DoorAddress, Member, Parts as PeersTold};
use ep_core::port::{Offset, Span};
use ep_core::{Error, Layout, Rank};

use super::keeper::{Fixed, Kept};
use super::{Node, POISON, Window};
use crate::driver::{Device, PIECE, Pages, Stream, Stretch};
use crate::error::CudaError;

/// The parts of a window.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Parts {
    /// That have memory from the beginning to the end.
    fixed: Vec<Span>,
    /// Between them, of the arena.
    between: Range<u64>,
}

impl Parts {
    /// Of a window whose arena has at least so many bytes at first.
    fn of(layout: &Layout, at_first: u64) -> Self {
        let (arena, window) = (layout.arena(), layout.window_bytes());
        let head = arena.offset.0.saturating_add(at_first.min(arena.len)).next_multiple_of(PIECE);
        let tail = arena.end() / PIECE * PIECE;
        let end = window.next_multiple_of(PIECE);
        if head >= tail {
            return Self { fixed: vec![Offset(0).span(end)], between: end..end };
        }
        let behind = (window > arena.end()).then_some(Offset(tail).span(end - tail));
        Self { fixed: [Offset(0).span(head)].into_iter().chain(behind).collect(), between: head..tail }
    }
}

/// A new window: it is freed when this is dropped, unless somebody else has it by then.
#[derive(Debug)]
struct Fresh(Arc<Stretch>);

impl Drop for Fresh {
    fn drop(&mut self) {
        if Arc::strong_count(&self.0) == 1 {
            // SAFETY: nobody but its maker has used it, whose work has ended or did not begin; and nobody can any more.
            unsafe { self.0.free() };
        }
    }
}

/// What grows of a rank's window, until its [`Keeper`](super::Keeper) starts.
#[derive(Debug)]
pub(crate) struct Growth {
    pub(super) door: Door,
    pub(super) kept: Kept,
    /// Pieces of the others that are to be mapped here before the first call, and who says which of them have ended.
    pub(super) awaited: usize,
    pub(super) member: Option<Arc<Member>>,
}

impl Growth {
    /// The first byte of the window that has no memory at first.
    pub(crate) const fn from(&self) -> u64 {
        self.kept.between.start
    }
}

/// What a rank that is a process brings to a meeting where windows grow.
#[derive(Debug)]
pub(crate) struct Brought {
    door: Door,
    own: Fresh,
    fixed: Vec<Fixed>,
    between: Range<u64>,
}

impl Brought {
    /// Of a rank on `device`.
    pub(crate) fn new(device: &Arc<Device>, layout: &Layout, at_first: u64, poison: bool) -> Result<Self, Error> {
        let parts = Parts::of(layout, at_first);
        let (own, fixed) = window(device, layout, &parts, &[device], (poison, true))?;
        Ok(Self { door: door()?, own, fixed, between: parts.between })
    }

    /// What it tells the others.
    pub(crate) fn told(&self) -> Vec<u8> {
        self.door.address().to_bytes().to_vec()
    }
}

impl Node {
    /// Of ranks that are threads of this process, with windows that grow.
    pub(crate) fn growing_here(
        devices: &[Arc<Device>],
        layout: &Layout,
        at_first: u64,
        poison: bool,
    ) -> Result<(Arc<Self>, Vec<Growth>), Error> {
        let parts = Parts::of(layout, at_first);
        let mut reach: Vec<Arc<Device>> = Vec::new();
        for device in devices {
            devices.iter().try_for_each(|other| device.reach(other))?;
            if reach.iter().all(|other| other.ordinal() != device.ordinal()) {
                reach.push(Arc::clone(device));
            }
        }
        let all: Vec<&Device> = reach.iter().map(|device| &**device).collect();
        let made = devices.iter().map(|device| Ok((window(device, layout, &parts, &all, (poison, false))?, door()?)));
        let made = made.collect::<Result<Vec<_>, CudaError>>()?;
        let (mut windows, mut growths) = (Vec::new(), Vec::new());
        for (me, ((fresh, fixed), door)) in (0..).map(Rank).zip(made) {
            windows.push(Some(Window::Growing(Arc::clone(&fresh.0))));
            let (own, reach, between) = (Arc::clone(&fresh.0), reach.clone(), parts.between.clone());
            let kept = Kept { me, own, fixed, between, reach, theirs: Vec::new() };
            growths.push(Growth { door, kept, awaited: 0, member: None });
        }
        Ok((Arc::new(Self::of(windows, devices.len(), None)), growths))
    }

    /// Of ranks that are processes of one node, with windows that grow: those of the others have memory when their keepers have told. `told`: what all have.
    pub(crate) fn growing_met(
        device: &Arc<Device>,
        brought: Brought,
        layout: &Layout,
        member: &Arc<Member>,
        within: Duration,
        told: &PeersTold,
    ) -> (Arc<Self>, Result<Growth, Error>) {
        let Brought { door, own: fresh, fixed, between } = brought;
        let own = Arc::clone(&fresh.0);
        let (me, mut windows, mut theirs, mut reached) = (member.rank(), Vec::new(), Vec::new(), Ok(()));
        for (rank, told) in layout.topology().all().zip(told) {
            let window = if rank == me { Ok(None) } else { of_rank(device, layout, rank, told.as_deref()).map(Some) };
            windows.push(match window {
                Ok(None) => Some(Window::Growing(Arc::clone(&own))),
                Ok(Some((stretch, door))) => {
                    theirs.push((rank, Arc::clone(&stretch), door));
                    Some(Window::Growing(stretch))
                }
                Err(error) => {
                    reached = Err(error);
                    None
                }
            });
        }
        let node = Self::of(windows, 0, Some((Arc::clone(member), within)));
        let awaited = fixed.len() * theirs.len();
        let kept = Kept { me, own, fixed, between, reach: vec![Arc::clone(device)], theirs };
        (Arc::new(node), reached.map(|()| Growth { door, kept, awaited, member: Some(Arc::clone(member)) }))
    }
}

fn door() -> Result<Door, CudaError> {
    Door::open().map_err(|error| CudaError::NoGrowth { problem: format!("a Unix socket: {error}") })
}

/// A window with what it has from the beginning, zeroed, or filled with a pattern where it is poisoned; as all of `reach` see it. `shares`: for other processes,
/// too.
fn window(
    device: &Arc<Device>,
    layout: &Layout,
    parts: &Parts,
    reach: &[&Device],
    (poison, shares): (bool, bool),
) -> Result<(Fresh, Vec<Fixed>), CudaError> {
    let stream = Stream::new(device, 0)?;
    let fresh = Fresh(Arc::new(Stretch::reserve(device, layout.window_bytes())?));
    let window = &fresh.0;
    let fixed = parts.fixed.iter().map(|span| {
        let (at, len) = (span.offset.0, span.len);
        let pages = Pages::new(device, len).map_err(CudaError::unless_for_memory)?;
        let descriptor = shares.then(|| pages.descriptor().map(Arc::new)).transpose();
        let descriptor = descriptor.map_err(CudaError::into_no_growth)?;
        window.back(at, pages, reach).map_err(CudaError::into_no_growth)?;
        window.fill(&stream, at, len, if poison { POISON } else { 0 })?;
        Ok(Fixed { at, len, descriptor })
    });
    let fixed = fixed.collect::<Result<_, CudaError>>();
    // Also where one failed: what was enqueued before fills what would be freed.
    stream.synchronize()?;
    Ok((fresh, fixed?))
}

/// The window of `rank` as this process will see it, and where its keeper hears, by what it told.
fn of_rank(
    device: &Arc<Device>,
    layout: &Layout,
    rank: Rank,
    told: Option<&[u8]>,
) -> Result<(Arc<Stretch>, DoorAddress), Error> {
    let problem = |problem: String| CudaError::Meeting { problem };
    let told = told.ok_or_else(|| problem(format!("rank {rank} was given up")))?;
    let wrong = || problem(format!("rank {rank} told {} bytes, expected {}", told.len(), DoorAddress::BYTES));
    let door = DoorAddress::from_bytes(told).ok_or_else(wrong)?;
    Ok((Arc::new(Stretch::reserve(device, layout.window_bytes())?), door))
}

#[cfg(test)]
mod tests {
    use ep_core::{Placement, Settings, Shape, Topology};

    use super::*;
    use crate::rank::layout_of;

    #[test]
    fn what_is_no_arena_has_memory_from_the_beginning() {
        let shape = Shape::builder().experts(4).topk(2).hidden(64).max_tokens(8).build().unwrap();
        let topology = Topology::new(1, 2).unwrap();
        for arena in [0, 1, PIECE - 1, 4 * PIECE, 1 << 40] {
            let settings = Settings::builder(&shape, &topology).placement(Placement::Direct).arena_bytes(arena);
            let layout = layout_of(&shape, &topology, &settings.build().unwrap()).unwrap();
            for at_first in [0, 1, PIECE, 3 * PIECE, arena] {
                let Parts { fixed, between } = Parts::of(&layout, at_first);
                let has = |at: u64| fixed.iter().any(|span| (span.offset.0..span.end()).contains(&at));
                let (first, window) = (layout.arena().offset.0, layout.window_bytes());
                for at in [0, first.saturating_sub(1), layout.arena().end(), window - 1] {
                    assert!(at >= window || has(at), "byte {at} of {window} has none: {fixed:?}");
                }
                let last = (first + at_first.min(arena)).saturating_sub(1);
                assert!(has(last), "byte {last} of the arena has none at first: {fixed:?}");
                assert!(
                    between.is_empty()
                        || (layout.arena().offset.0 <= between.start && between.end <= layout.arena().end())
                );
                let all = fixed.iter().map(|span| span.len).sum::<u64>() + between.end - between.start;
                assert!(between.is_empty() || all >= window / PIECE * PIECE, "{fixed:?} and {between:?} of {window}");
                for at in fixed.iter().flat_map(|span| [span.offset.0, span.end()]).chain([between.start, between.end])
                {
                    assert!(at.is_multiple_of(PIECE), "{fixed:?} and {between:?}");
                }
            }
        }
    }
}
