//! The windows that one process reaches: of the ranks of a node, or of all ranks where they are threads.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use ep_bootstrap::Member;
use ep_core::{Error, Layout, Rank};

use crate::handoff;
use crate::memory::Mapping;
use crate::pace;
use crate::roll::Roll;
use crate::window;

/// The windows of near ranks, zeroed at first, and who is gone.
#[derive(Debug)]
pub(crate) struct Node {
    /// `[ranks]`: none for ranks of other nodes, where ranks are processes.
    windows: Vec<Option<Mapping>>,
    roll: Roll,
}

impl Node {
    /// Of ranks that are threads of this process: `own` are the windows of all, by rank.
    pub(crate) fn here(layout: &Layout, own: &[OwnedFd]) -> Result<Arc<Self>, Error> {
        let windows = layout.topology().all().zip(own);
        let windows = windows.map(|(rank, own)| map(own.as_fd(), layout, rank).map(Some));
        Ok(Arc::new(Self::of(windows.collect::<Result<_, _>>()?)))
    }

    /// Of ranks that are processes: the ranks of a node give each other their windows; that of this rank is `own`.
    pub(crate) fn met(layout: &Layout, own: &OwnedFd, member: &Member, within: Duration) -> Result<Arc<Self>, Error> {
        let hash = layout.hash(&layout.settings().rings());
        let handoff::Exchanged { given, here } =
            handoff::exchange(member, layout.topology(), own.as_fd(), hash, within)?;
        pace::expect(here);
        let windows = layout.topology().all().zip(given).map(|(rank, given)| match given {
            Some(given) => {
                let refuse = |why| Error::unsupported("shared memory between processes", format!("rank {rank}: {why}"));
                window::check(&given, layout.window_bytes()).map_err(refuse)?;
                map(given.as_fd(), layout, rank).map(Some)
            }
            None if rank == member.rank() => map(own.as_fd(), layout, rank).map(Some),
            None => Ok(None),
        });
        Ok(Arc::new(Self::of(windows.collect::<Result<_, _>>()?)))
    }

    fn of(windows: Vec<Option<Mapping>>) -> Self {
        let roll = Roll::new(windows.len() as u32);
        Self { windows, roll }
    }

    /// The window of a near rank.
    #[inline]
    pub(crate) fn window(&self, rank: Rank) -> Option<&Mapping> {
        self.windows.get(rank.index())?.as_ref()
    }

    /// The window of a rank of this process.
    #[inline]
    pub(crate) fn own(&self, me: Rank) -> &Mapping {
        self.window(me).expect("a rank's own window is mapped when its node is made")
    }

    pub(crate) const fn roll(&self) -> &Roll {
        &self.roll
    }
}

/// A window as `layout` cuts it.
pub(crate) fn create(layout: &Layout) -> Result<OwnedFd, Error> {
    let bytes = layout.window_bytes();
    window::create(bytes).map_err(|error| {
        Error::unsupported(format_args!("a window of {bytes} bytes"), format_args!("a file in memory: {error}"))
    })
}

fn map(window: BorrowedFd<'_>, layout: &Layout, rank: Rank) -> Result<Mapping, Error> {
    let bytes = layout.window_bytes();
    Mapping::of(window, bytes).map_err(|error| {
        let needs = format_args!("room in the address space for the window of rank {rank}: {error}");
        Error::unsupported(format_args!("a window of {bytes} bytes"), needs)
    })
}
