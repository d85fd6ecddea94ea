//! One rank of ranks that are processes, of one host or of several.

use std::slice::from_ref;
use std::sync::Arc;
use std::time::Duration;

use ep_bootstrap::{Member, Peers};
use ep_core::layout::KernelWindow;
use ep_core::{Error, Shape};

use super::{Builder, present, queues};
use crate::driver::Device;
use crate::endpoint::CudaEndpoint;
use crate::error::CudaError;
use crate::kernels::Kernels;
use crate::memory;
use crate::node::{Node, PATIENCE, number_here};
use crate::rank::{RankDevice, check_low};

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
        let (me, ranks) = (member.rank(), self.topology.ranks());
        if member.world() != ranks {
            let limit = format_args!("{}, the processes", member.world());
            return Err(Error::invalid("ranks of the topology", ranks, limit));
        }
        let layout = self.layout(&shape, self.multiprocessors)?;
        present()?;
        let deadline = Duration::from_nanos(layout.settings().deadline().0);
        let patience = deadline.max(PATIENCE);
        let number = number_here(&layout, member, patience)?;
        let gpus = self.chosen_gpus(number..number + 1)?;
        let device = Device::open(gpus[0])?;
        let options = self.options(from_ref(&device), 1)?;
        let layout = self.layout(&shape, Some(options.blocks))?;
        check_low(&device, &layout)?;
        memory::admit(from_ref(&device), &memory::of_window(&layout))?;
        let network = self.network.as_deref().filter(|_| self.topology.nodes() > 1);
        // Before the ranks wait for each other: it may take long.
        let window = options.specialises.then(|| KernelWindow::from(&layout));
        let lanes = network.map(|network| network.source());
        Kernels::of(&device, self.checks.is_some(), lanes.as_ref(), window.as_ref())?;
        let node = Node::met(&device, &layout, member, deadline, self.poisons())?;
        // Processes give their offers by the control plane.
        let unused = Arc::default();
        let network = network.map(|network| (network, &unused));
        let rank = RankDevice::new(&device, &layout, me, &node, options, self.checks.as_ref(), network)?;
        let peers = Peers::Processes(Arc::clone(member));
        let endpoint = CudaEndpoint::new(rank, me, peers, self.wait_for_kernels);
        // Processes that share a GPU have queues each.
        queues::check(1, endpoint.copies_between_nodes())?;
        if let Some(far) = endpoint.far() {
            let offer = far.lanes().offer()?;
            let offers = member.all_gather(&offer, patience).map_err(CudaError::meeting)?;
            far.lanes().connect(&offers)?;
            // Nobody posts before all are connected.
            member.barrier(patience).map_err(CudaError::meeting)?;
        }
        Ok(endpoint)
    }
}
