//! One rank of ranks that are processes, of one host or of several.

use std::slice::from_ref;
use std::sync::Arc;
use std::time::Duration;

use ep_bootstrap::{Member, Peers};
use ep_core::layout::KernelWindow;
use ep_core::{Error, Layout, Shape};

use super::{Builder, present, queues};
use crate::driver::{Device, DeviceMemory, MemoryHandle};
use crate::endpoint::CudaEndpoint;
use crate::error::CudaError;
use crate::far::{Network, Offers};
use crate::kernels::Kernels;
use crate::memory;
use crate::node::{Brought, Node, PATIENCE, number_here, window};
use crate::rank::{Options, RankDevice, check_low};

impl Builder {
    /// One rank of ranks that are processes, all of which call this with the same shape and settings: that of
    /// `member`. Ranks of a node run on one host, and all GPUs of the node must be visible to each of them. The rank's GPU is the one
    /// named in [`gpus`](Self::gpus), automatically that with its number among the ranks of its host. Returns when all ranks have met; may
    /// take the settings' deadline, and a minute at least: ranks may have to compile kernels first.
    ///
    /// Processes that share a GPU take turns on it, milliseconds each: for tests only.
    ///
    /// # Errors
    /// Those of [`build`](Self::build); [`Error::Unsupported`] with the rank that did not come, has other settings, runs on another host
    /// than its node, or cannot be reached by the network.
    pub fn join(self, shape: Shape, member: &Arc<Member>) -> Result<CudaEndpoint, Error> {
        let ranks = self.topology.ranks();
        if member.world() != ranks {
            let limit = format_args!("{}, the processes", member.world());
            return Err(Error::invalid("ranks of the topology", ranks, limit));
        }
        // What is wrong with sizes all ranks find alike; of what one lacks the others hear.
        let layout = self.layout(&shape, self.multiprocessors)?;
        let deadline = Duration::from_nanos(layout.settings().deadline().0);
        let patience = deadline.max(PATIENCE);
        let number = number_here(&layout, member, present(), patience)?;
        let told = |own: &Own| own.window.told();
        let own = member.try_all_gather(self.own(&shape, number), told, patience, CudaError::meeting)?;
        let (Own { device, layout, options, window }, told) = own;
        let (node, growth) = match window {
            OwnWindow::Fixed(window, _) => {
                let (node, reached) = Node::met(&device, window, &layout, member, deadline, &told);
                (node, reached.map(|()| None))
            }
            OwnWindow::Growing(brought) => {
                let (node, growth) = Node::growing_met(&device, brought, &layout, member, deadline, &told);
                (node, growth.map(Some))
            }
        };
        let endpoint = growth.and_then(|growth| Ok((self.endpoint(&device, &layout, member, &node, options)?, growth)));
        let (mut endpoint, growth) = match endpoint {
            Ok(made) => made,
            Err(error) => {
                member.tell_failed(&error, patience);
                // As the others do when they hear it.
                node.part(false);
                return Err(error);
            }
        };
        // Nobody begins before all reach all.
        let told = |offer: &Option<Vec<u8>>| offer.clone().unwrap_or_default();
        let (_, offers) = member.try_all_gather(offer(&endpoint), told, patience, CudaError::meeting)?;
        if let Some(growth) = growth {
            let grown = endpoint.grow(growth, patience);
            // Who has waited in vain comes later than others by as much.
            member.try_all_gather(grown, |()| Vec::new(), patience * 2, CudaError::meeting)?;
        }
        if let Some(far) = endpoint.far() {
            // Nobody posts before all are connected.
            let connected = far.lanes().connect(&offers);
            member.try_all_gather(connected, |()| Vec::new(), patience, CudaError::meeting)?;
        }
        Ok(endpoint)
    }

    /// What the rank that has this number on its host brings to the meeting.
    fn own(&self, shape: &Shape, number: u32) -> Result<Own, Error> {
        let gpus = self.chosen_gpus(number..number + 1)?;
        let device = Device::open(gpus[0])?;
        let options = self.options(from_ref(&device), 1)?;
        let layout = self.layout(shape, Some(options.blocks))?;
        check_low(&device, &layout)?;
        memory::admit(from_ref(&device), &self.window_footprint(&layout))?;
        // Before the ranks wait for each other: it may take long.
        let shape = options.specialises.then(|| KernelWindow::from(&layout));
        let lanes = self.network().map(|network| network.source());
        Kernels::of(&device, self.checks.is_some(), lanes.as_ref(), shape.as_ref())?;
        let window = match self.arena_at_first {
            Some(at_first) => OwnWindow::Growing(Brought::new(&device, &layout, at_first, self.poisons())?),
            None => {
                let window = window(&device, &layout, self.poisons())?;
                let handle = window.handle()?;
                OwnWindow::Fixed(window, handle)
            }
        };
        Ok(Own { device, layout, options, window })
    }

    /// The rank itself, which reaches the windows of its node.
    fn endpoint(
        &self,
        device: &Arc<Device>,
        layout: &Layout,
        member: &Arc<Member>,
        node: &Arc<Node>,
        options: Options,
    ) -> Result<CudaEndpoint, Error> {
        let me = member.rank();
        // Processes give their offers by the control plane.
        let unused = Arc::new(Offers::new(0));
        let network = self.network().map(|network| (network, &unused));
        let rank = RankDevice::new(device, layout, me, node, options, self.checks.as_ref(), network)?;
        Ok(CudaEndpoint::new(rank, me, Peers::Processes(Arc::clone(member)), self.wait_for_kernels))
    }

    /// How ranks reach other nodes, where there are any.
    pub(super) fn network(&self) -> Option<&dyn Network> {
        self.network.as_deref().filter(|_| self.topology.nodes() > 1)
    }
}

/// How other nodes reach a rank, where there are any.
fn offer(endpoint: &CudaEndpoint) -> Result<Option<Vec<u8>>, Error> {
    // Processes that share a GPU have queues each.
    queues::check(1, endpoint.copies_between_nodes())?;
    endpoint.far().map(|far| far.lanes().offer()).transpose()
}

/// What a rank brings to the meeting.
struct Own {
    device: Arc<Device>,
    /// With kernels of so many blocks as its GPU has.
    layout: Layout,
    options: Options,
    window: OwnWindow,
}

/// The rank's window.
enum OwnWindow {
    /// And what others open it by.
    Fixed(DeviceMemory, MemoryHandle),
    Growing(Brought),
}

impl OwnWindow {
    /// What the others are told of it.
    fn told(&self) -> Vec<u8> {
        match self {
            Self::Fixed(_, handle) => handle.to_bytes().to_vec(),
            Self::Growing(brought) => brought.told(),
        }
    }
}
