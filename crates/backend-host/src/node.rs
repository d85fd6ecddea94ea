//! The windows of all ranks of a node, as one process sees them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use ep_bootstrap::Member;
use ep_core::{Error, Layout, Rank};

use crate::handoff;
use crate::memory::Mapping;
use crate::roll::Roll;
use crate::window;

/// The windows of all ranks, zeroed at first, and who is gone.
#[derive(Debug)]
pub(crate) struct Node {
    windows: Vec<Mapping>,
    roll: Roll,
}

impl Node {
    /// Of ranks that are threads of this process.
    pub(crate) fn here(layout: &Layout) -> Result<Arc<Self>, Error> {
        let windows = layout.topology().all().map(|rank| map(create(layout)?.as_fd(), layout, rank));
        Ok(Arc::new(Self::of(windows.collect::<Result<_, _>>()?)))
    }

    /// Of ranks that are processes of this host: each makes its own window and gives it to the others. Returns when all have
    /// mapped all.
    pub(crate) fn met(layout: &Layout, member: &Member, within: Duration) -> Result<Arc<Self>, Error> {
        let own = create(layout)?;
        let hash = layout.hash(&layout.settings().rings());
        let given = handoff::exchange(member, own.as_fd(), hash, within)?;
        let windows = layout.topology().all().zip(given).map(|(rank, given)| {
            if let Some(given) = &given {
                let refuse = |why| Error::unsupported("shared memory between processes", format!("rank {rank}: {why}"));
                window::check(given, layout.window_bytes()).map_err(refuse)?;
            }
            map(given.as_ref().unwrap_or(&own).as_fd(), layout, rank)
        });
        let node = Self::of(windows.collect::<Result<_, _>>()?);
        // Nobody begins before all reach all: a rank that cannot is told to the others by its absence here.
        member.barrier(within).map_err(|error| Error::unsupported("a meeting of all ranks", error))?;
        Ok(Arc::new(node))
    }

    fn of(windows: Vec<Mapping>) -> Self {
        let roll = Roll::new(windows.len() as u32);
        Self { windows, roll }
    }

    /// The window of a rank of this node.
    pub(crate) fn window(&self, rank: Rank) -> &Mapping {
        &self.windows[rank.index()]
    }

    pub(crate) const fn roll(&self) -> &Roll {
        &self.roll
    }
}

fn create(layout: &Layout) -> Result<OwnedFd, Error> {
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
