//! Ranks on the GPUs of this host, in one process.

mod join;
mod queues;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::thread;

use ep_bootstrap::{LocalMeeting, Peers, joined};
use ep_core::memory::Estimate;
use ep_core::settings::SettingsBuilder;
use ep_core::transport::{DeviceSource, DeviceTransport, Transport};
use ep_core::{Element, Error, Layout, Rank, Settings, Shape, Topology};

use crate::args::RING_WARPS;
use crate::build;
use crate::checks::Checks;
use crate::driver::{self, Device};
use crate::endpoint::{CudaEndpoint, poll};
use crate::far::{ByProxy, Network, Offers, Posted, Staging};
use crate::memory;
use crate::node::{Growth, Moving, Node, PATIENCE};
use crate::posting::PostingGpu;
#[cfg(feature = "workshop")]
use crate::probe;
use crate::rank::{LOTS, Options, RankDevice, check_low, layout_of};

/// Multiprocessors of a GPU that kernels occupy, where nobody says.
const MULTIPROCESSORS: u32 = 24;

/// Collects what a [`Cluster`] needs to know.
#[derive(Clone, Debug)]
#[must_use]
pub struct Builder {
    topology: Topology,
    settings: Option<Settings>,
    arena_at_first: Option<u64>,
    gpus: Option<Vec<usize>>,
    multiprocessors: Option<u32>,
    left: u32,
    far_movers: u32,
    low_latency_multiprocessors: Option<u32>,
    low_latency_waves: u32,
    priority: i32,
    launches: Option<u32>,
    specialises: Option<bool>,
    wait_for_kernels: bool,
    checks: Option<Checks>,
    network: Option<Arc<dyn Network>>,
}

impl Builder {
    /// How ranks reach those of other nodes: a thread of the host for each rank posts to `network` what kernels ask for. Needed for topologies of
    /// several nodes, and opened for those only. Where the network does not reach a GPU's memory, or the GPU does not order what an adapter writes
    /// there, rows travel by way of pinned memory of the host.
    pub fn far<T>(mut self, network: T) -> Self
    where
        T: Transport<Lanes: 'static> + Clone + fmt::Debug + Send + Sync + 'static,
    {
        self.network = Some(Arc::new(ByProxy(network, Staging::Automatic)));
        self
    }

    /// The same with all rows by way of pinned memory of the host, whatever the network reaches. All ranks of a job are given the same, and where one of
    /// them stages its rows, all must.
    pub fn far_staged<T>(mut self, network: T) -> Self
    where
        T: Transport<Lanes: 'static> + Clone + fmt::Debug + Send + Sync + 'static,
    {
        self.network = Some(Arc::new(ByProxy(network, Staging::Always)));
        self
    }

    /// The same without the host: kernels post themselves. `source` is the text that they are compiled with, `network` makes the transport of a
    /// rank whose GPU it is given; all of it has that text, and a queue for each role.
    pub fn posted<T>(
        mut self,
        source: DeviceSource,
        network: impl Fn(Rank, PostingGpu) -> T + Send + Sync + 'static,
    ) -> Self
    where
        T: DeviceTransport<Lanes: 'static> + 'static,
    {
        self.network = Some(Arc::new(Posted { source, make: network }));
        self
    }

    /// How the windows are cut. Automatic: those of [`Cluster::settings`].
    pub const fn settings(mut self, settings: Settings) -> Self {
        self.settings = Some(settings);
        self
    }

    /// Bytes of its arena that a rank has at first. The rest of what the settings say comes as batches, and results that are kept, need it, while a sixteenth
    /// of the GPU's memory is left free; and goes some seconds after nobody has it, when calls ([or](CudaEndpoint::trim)) tell that what had read it has ended. So
    /// what was given back may be read by what was enqueued before to the endpoint's stream, or to one that this one waits for at its next call, and by nothing
    /// else. On one node. Automatic: all of it, from the beginning to the end.
    pub const fn arena_at_first(mut self, bytes: u64) -> Self {
        self.arena_at_first = Some(bytes);
        self
    }

    /// The GPU of each rank. Automatic: one after the other, from the first again when there are more ranks.
    pub fn gpus(mut self, gpus: Vec<usize>) -> Self {
        self.gpus = Some(gpus);
        self
    }

    /// Multiprocessors of its GPU that a rank's kernels occupy, 1 or more. Automatic: 24, or less where ranks share a GPU.
    pub const fn multiprocessors(mut self, count: u32) -> Self {
        self.multiprocessors = Some(count);
        self
    }

    /// Multiprocessors of each GPU that the ranks' kernels leave to others, which run at the same time. Automatic: 0.
    pub const fn leaves(mut self, count: u32) -> Self {
        self.left = count;
        self
    }

    /// Multiprocessors of its GPU on which a kernel moves what a network made of software carries to a rank, or among processes from it, in place of the
    /// driver's copy engines: many copies by one launch. The rank's own kernels leave them. Staged rows the driver copies all the same. Automatic: 0, the copy engines.
    pub const fn far_movers(mut self, count: u32) -> Self {
        self.far_movers = count;
        self
    }

    /// Multiprocessors that a rank's kernels of low latency occupy. Automatic: all of its GPU, or its share where ranks share one; over several nodes a
    /// sixteenth less, and 24 where a driver copies what goes between them: kernels that fill a GPU hold that up ten times and more.
    pub const fn low_latency_multiprocessors(mut self, count: u32) -> Self {
        self.low_latency_multiprocessors = Some(count);
        self
    }

    /// Blocks of its kernels of low latency for each multiprocessor that these occupy: with more than one they do not all run at a time, on
    /// GPUs that no other rank shares. For tests. Automatic: 1.
    #[cfg(feature = "workshop")]
    pub const fn low_latency_waves(mut self, count: u32) -> Self {
        self.low_latency_waves = count;
        self
    }

    /// Priority of the ranks' streams: 0, or a negative number for a higher one. Automatic: 0.
    pub const fn priority(mut self, priority: i32) -> Self {
        self.priority = priority;
        self
    }

    /// Launches that place the rows of a dispatch by expert, 4 at most: while one brings rows, those of the one before are copied to their experts. Other
    /// dispatches have one, and so have captured calls, rows that come through rings, and ranks that share a GPU. Automatic: by the size of the batch.
    pub const fn launches_by_expert(mut self, count: u32) -> Self {
        self.launches = Some(count);
        self
    }

    /// Whether kernels are compiled for this shape and topology alone, which takes some seconds the first time, and NVRTC: without it they are those for
    /// all. Automatic: yes, unless the environment has `EP_CUDA_SPECIALISE=0`.
    pub const fn specialise(mut self, on: bool) -> Self {
        self.specialises = Some(on);
        self
    }

    /// Whether a call's future ends when its kernels have ended, so that their failures are its own. Automatic: no, it ends when
    /// they are enqueued and the sizes of its results are known; a failure is then told by the next call.
    pub const fn wait_for_kernels(mut self, on: bool) -> Self {
        self.wait_for_kernels = on;
        self
    }

    /// With kernels that are built for tests and do what `checks` say. Automatic: none.
    #[cfg(feature = "workshop")]
    pub fn checks(mut self, checks: Checks) -> Self {
        self.checks = Some(checks);
        self
    }

    fn poisons(&self) -> bool {
        self.checks.as_ref().is_some_and(Checks::poisons)
    }

    /// Opens the GPUs, compiles the kernels where they are not kept from an earlier time, and takes the windows.
    ///
    /// # Errors
    /// [`Error::Invalid`] for sizes, and for windows that exceed what a GPU has left; [`Error::Unsupported`] with what is missing: driver, NVRTC, GPU, peer access. [`Error::Broken`] with what
    /// the driver or the system refuses, as memory.
    pub fn build(self, shape: Shape) -> Result<Cluster, Error> {
        let ranks = self.topology.ranks();
        // Bad input is told of before the GPUs are looked at.
        self.layout(&shape, self.multiprocessors)?;
        let (devices, sharing) = self.devices()?;
        let network = self.network();
        queues::check(sharing, network.is_some_and(Network::copies))?;
        let options = self.options(&devices, sharing)?;
        let layout = self.layout(&shape, Some(options.blocks))?;
        devices.iter().try_for_each(|device| check_low(device, &layout))?;
        memory::admit(&devices, &self.window_footprint(&layout))?;
        let (node, growths) = self.node(&devices, &layout)?;
        let peers = Peers::Threads(Arc::new(LocalMeeting::new(ranks)));
        let offers = Arc::new(Offers::new(ranks));
        let endpoints = (0..ranks).map(Rank).zip(&devices).map(|(me, device)| {
            let network = network.map(|network| (network, &offers));
            let device = RankDevice::new(device, &layout, me, &node, options, self.checks.as_ref(), network)?;
            Ok(CudaEndpoint::new(device, me, peers.clone(), self.wait_for_kernels))
        });
        let mut endpoints = endpoints.collect::<Result<Vec<_>, Error>>()?;
        endpoints.iter_mut().zip(growths).try_for_each(|(endpoint, growth)| endpoint.grow(growth, PATIENCE))?;
        let far = || endpoints.iter().filter_map(CudaEndpoint::far);
        let offers = far().map(|far| far.lanes().offer().map(Some)).collect::<Result<Vec<_>, _>>()?;
        far().try_for_each(|far| far.lanes().connect(&offers))?;
        Ok(Cluster { endpoints })
    }

    /// About what one rank takes of its GPU before its first call, whether it has as much or not. No GPU is needed.
    ///
    /// # Errors
    /// [`Error::Invalid`] for sizes.
    pub fn footprint(&self, shape: &Shape) -> Result<Estimate, Error> {
        Ok(self.window_footprint(&self.layout(shape, self.multiprocessors)?))
    }

    /// The GPU of each rank of this process, and how many ranks share one at most.
    fn devices(&self) -> Result<(Vec<Arc<Device>>, u32), Error> {
        let gpus = self.chosen_gpus(0..self.topology.ranks())?;
        let devices = gpus.iter().map(|&gpu| Device::open(gpu)).collect::<Result<Vec<_>, _>>()?;
        let shared_by = |gpu| gpus.iter().filter(|other| *other == gpu).count() as u32;
        Ok((devices, gpus.iter().map(shared_by).max().unwrap_or(1)))
    }

    /// How windows are cut where a rank's kernels occupy so many multiprocessors.
    fn layout(&self, shape: &Shape, multiprocessors: Option<u32>) -> Result<Layout, Error> {
        if shape.element() == Element::Int8 {
            return Err(Error::invalid("element of the rows", shape.element(), "bf16 or fp8 on GPUs"));
        }
        let settings = match self.settings {
            Some(settings) => settings,
            None => Cluster::settings(shape, &self.topology, multiprocessors).build()?,
        };
        if self.topology.nodes() > 1 {
            self.check_nodes()?;
        }
        let layout = layout_of(shape, &self.topology, &settings)?;
        if let Some(at_first) = self.arena_at_first.filter(|&at_first| at_first > settings.arena_bytes()) {
            let limit = format_args!("at most {}, those of the arena", settings.arena_bytes());
            return Err(Error::invalid("bytes of the arena at first", at_first, limit));
        }
        Ok(layout)
    }

    fn window_footprint(&self, layout: &Layout) -> Estimate {
        self.arena_at_first.map_or_else(|| memory::of_window(layout), |bytes| memory::of_growing(layout, bytes))
    }

    /// The windows of all ranks, which are threads; and what grows of them.
    fn node(&self, devices: &[Arc<Device>], layout: &Layout) -> Result<(Arc<Node>, Vec<Growth>), Error> {
        let Some(at_first) = self.arena_at_first else {
            return Ok((Node::here(devices, layout, self.poisons())?, Vec::new()));
        };
        Node::growing_here(devices, layout, at_first, self.poisons())
    }

    /// Ranks of several nodes reach each other over a network.
    fn check_nodes(&self) -> Result<(), Error> {
        if self.arena_at_first.is_some() {
            return Err(Error::unsupported("an arena that grows, over several nodes", "one that is there at first"));
        }
        if self.network.is_none() {
            return Err(Error::unsupported(
                "several nodes on GPUs",
                "a network between them: Builder::far, Builder::posted",
            ));
        }
        Ok(())
    }

    /// The GPU of each of some ranks.
    fn chosen_gpus(&self, ranks: Range<u32>) -> Result<Vec<usize>, Error> {
        let present = present()?;
        let wanted = ranks.len();
        let gpus = self.gpus.clone().unwrap_or_else(|| ranks.map(|rank| rank as usize % present).collect());
        if gpus.len() != wanted {
            return Err(Error::invalid("GPUs named", gpus.len(), format_args!("{wanted}, one for each rank")));
        }
        Ok(gpus)
    }

    /// What kernels of a rank take of its GPU, which `sharing` ranks share.
    fn options(&self, devices: &[Arc<Device>], sharing: u32) -> Result<Options, Error> {
        let present = devices.iter().map(|device| device.multiprocessors()).min().unwrap_or(1);
        let share = present.saturating_sub(self.left) / sharing;
        let movers = if self.network().is_some_and(Network::has_moves) { self.far_movers } else { 0 };
        let most = share.saturating_sub(movers);
        if most == 0 && movers > 0 {
            let limit = format_args!("0 to {}, with {sharing} ranks on a GPU", share.saturating_sub(1));
            return Err(Error::invalid("multiprocessors that move rows between nodes", movers, limit));
        }
        let blocks = self.multiprocessors.unwrap_or(MULTIPROCESSORS.min(most));
        // A driver may copy within a GPU by a kernel, and kernels wait for what it brings.
        let spared = if self.topology.nodes() > 1 { most.div_ceil(16) } else { 0 };
        let low_blocks = self.low_latency_multiprocessors.unwrap_or((most - spared).max(1).min(most));
        let low_beside_copies = self.low_latency_multiprocessors.unwrap_or(MULTIPROCESSORS.min(low_blocks));
        for (what, blocks) in [("multiprocessors of a rank", blocks), ("multiprocessors of low latency", low_blocks)] {
            if blocks < 1 || blocks > most {
                let limit = format_args!("1 to {most}, with {sharing} ranks on a GPU");
                return Err(Error::invalid(what, blocks, limit));
            }
        }
        if let Some(launches) = self.launches.filter(|launches| !(1..=LOTS).contains(launches)) {
            return Err(Error::invalid("launches of a dispatch by expert", launches, format_args!("1 to {LOTS}")));
        }
        let specialises = self.specialises.unwrap_or_else(build::specialises);
        let [low_blocks, low_beside_copies] =
            [low_blocks, low_beside_copies].map(|blocks| blocks * self.low_latency_waves);
        let (priority, launches, is_alone) = (self.priority, self.launches, sharing == 1);
        let moving = Moving { ways: queues::ways(sharing), movers };
        Ok(Options { blocks, most, low_blocks, low_beside_copies, priority, moving, launches, specialises, is_alone })
    }
}

/// GPUs that are visible; none is refused.
fn present() -> Result<usize, Error> {
    match driver::devices()? {
        0 => Err(Error::unsupported("the CUDA backend", "a GPU; none is visible (CUDA_VISIBLE_DEVICES limits them)")),
        present => Ok(present),
    }
}

/// Ranks on the GPUs of this host, as threads of one process.
#[derive(Debug)]
pub struct Cluster {
    endpoints: Vec<CudaEndpoint>,
}

impl Cluster {
    /// Starts a cluster of `topology`. One of several nodes needs [`Builder::far`] or [`Builder::posted`].
    pub const fn builder(topology: Topology) -> Builder {
        Builder {
            topology,
            settings: None,
            arena_at_first: None,
            gpus: None,
            multiprocessors: None,
            left: 0,
            far_movers: 0,
            low_latency_multiprocessors: None,
            low_latency_waves: 1,
            priority: 0,
            launches: None,
            specialises: None,
            wait_for_kernels: false,
            checks: None,
            network: None,
        }
    }

    /// Multiprocessors that a rank's kernels occupy by themselves, where the GPUs of this host have all ranks of `topology`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] without a driver or a GPU.
    pub fn multiprocessors_of_a_rank(topology: Topology) -> Result<u32, Error> {
        let builder = Self::builder(topology);
        let (devices, sharing) = builder.devices()?;
        Ok(builder.options(&devices, sharing)?.blocks)
    }

    /// Starts from the automatic choice for GPUs, of which a rank's kernels occupy so many multiprocessors (none: 24). Where rows go through rings there are
    /// as many channels as the kernels' warps carry: `docs/cuda-tried.md` has what fewer and more of them take.
    pub fn settings(shape: &Shape, topology: &Topology, multiprocessors: Option<u32>) -> SettingsBuilder {
        let warps = multiprocessors.unwrap_or(MULTIPROCESSORS).saturating_mul(RING_WARPS);
        Settings::builder(shape, topology).role_warps(warps)
    }

    /// The endpoints, one a rank, for threads of the caller's own.
    pub fn into_endpoints(self) -> Vec<CudaEndpoint> {
        self.endpoints
    }

    /// Runs scripts of verbs on the devices, all at the same time: `[scripts][steps]`.
    ///
    /// # Errors
    /// [`Error::Invalid`] for ranks that there are not; [`Error::Broken`] where a device fails.
    #[cfg(feature = "workshop")]
    pub fn probe(&self, scripts: &[probe::Script]) -> Result<Vec<Vec<probe::Saw>>, Error> {
        let ranks: Vec<_> = self.endpoints.iter().map(CudaEndpoint::device).collect();
        probe::run(&ranks, scripts)
    }

    /// Runs `user` on a thread for each rank and gives what each returned.
    ///
    /// # Errors
    /// [`Error::Broken`] with the ranks whose threads panicked.
    pub fn run<T, F>(self, user: F) -> Result<Vec<T>, Error>
    where
        T: Send,
        F: AsyncFn(CudaEndpoint) -> T + Send + Sync,
    {
        let user = &user;
        thread::scope(|scope| {
            let threads: Vec<_> =
                self.endpoints.into_iter().map(|endpoint| scope.spawn(move || poll::finish(user(endpoint)))).collect();
            joined(threads.into_iter().map(thread::ScopedJoinHandle::join))
        })
    }
}

#[cfg(test)]
mod tests {
    use ep_core::device::ring_roles_of;
    use ep_core::layout::Kind;

    use super::*;

    #[test]
    fn int8_rows_are_refused_before_a_gpu_is_looked_for() {
        let shape = Shape::builder().experts(4).topk(2).hidden(64).max_tokens(4).element(Element::Int8);
        let shape = shape.build().expect("a shape");
        let builder = Cluster::builder(Topology::new(1, 2).expect("two ranks"));
        let refused = [builder.footprint(&shape).map(drop), builder.build(shape).map(drop)];
        for refused in refused {
            let said = refused.expect_err("it is refused").to_string();
            assert_eq!(said, "element of the rows is int8 with a scale a row, allowed: bf16 or fp8 on GPUs");
        }
    }

    /// Eight ranks of two nodes on a GPU of 132 multiprocessors waited for each other: each took as many channels as 24 multiprocessors carry, and had 16.
    #[test]
    fn ranks_that_share_a_gpu_take_no_more_channels_than_their_multiprocessors_carry() {
        let shape = Shape::builder().experts(64).topk(4).hidden(64).max_tokens(64).build().expect("a shape");
        for (nodes, local) in [(2, 1), (2, 2), (2, 4), (2, 8), (4, 2), (1, 8), (8, 1)] {
            let topology = Topology::new(nodes, local).expect("a topology");
            let builder = Cluster::builder(topology).far(ep_loop::Loop::new());
            let blocks = MULTIPROCESSORS.min(132 / topology.ranks());
            let layout = builder.layout(&shape, Some(blocks)).expect("a layout");
            let roles = |kind| ring_roles_of(&layout, kind, layout.settings().rings().channels);
            let roles = roles(Kind::Dispatch).max(roles(Kind::Combine));
            assert!(roles <= blocks * RING_WARPS, "{nodes} nodes of {local}: {roles} roles on {blocks}");
        }
    }
}
