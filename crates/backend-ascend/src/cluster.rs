//! Ranks on NPUs, in one process.

use std::future::Future;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use ep_bootstrap::{LocalMeeting, Member, Peers};
use ep_core::device::probe::{Saw, Script};
use ep_core::{Error, Layout, Rank, RankSet, Settings, Shape, Topology};

use crate::Roles;
use crate::driver::{AscendError, Device, Table};
use crate::endpoint::AscendEndpoint;
use crate::limits::check;
use crate::node::{Node, estimate, met};
use crate::probe;
use crate::rank::{Options, RankDevice};

/// Collects what a [`Cluster`] needs to know.
#[derive(Clone, Debug)]
#[must_use]
pub struct Builder {
    topology: Topology,
    kernels: PathBuf,
    settings: Option<Settings>,
    devices: Option<Vec<u32>>,
    roles: Option<Roles>,
    plant: u32,
}

impl Builder {
    /// How the windows are cut. Automatic: [`Settings::auto`].
    pub const fn settings(mut self, settings: Settings) -> Self {
        self.settings = Some(settings);
        self
    }

    /// The device of each rank, each another one: launches of two ranks would wait for each other on one. Automatic: from the first on.
    pub fn devices(mut self, devices: Vec<u32>) -> Self {
        self.devices = Some(devices);
        self
    }

    /// How the cores are divided. Automatic: as the SoC's number of cores says ([`Roles::of_soc`]).
    pub const fn roles(mut self, roles: Roles) -> Self {
        self.roles = Some(roles);
        self
    }

    /// With a fault planted ([`crate::args::Plant`]), in kernels that are built for tests. Automatic: 0, none.
    pub const fn plant(mut self, plant: u32) -> Self {
        self.plant = plant;
        self
    }

    /// Opens the devices, loads the kernels, and takes the windows.
    ///
    /// # Errors
    /// [`Error::Invalid`] for sizes, and for windows that exceed what a device has left; [`Error::Unsupported`] with what is missing: a library,
    /// a function, a device, HCCS between two. [`Error::Broken`] with what the libraries refuse.
    pub fn build(self, table: &Table, shape: Shape) -> Result<Cluster, Error> {
        let ranks = self.topology.ranks();
        let settings = self.settings.unwrap_or_else(|| Settings::auto(&shape, &self.topology));
        let layout = Layout::new(&shape, &self.topology, &settings)?;
        check(&layout)?;
        let ordinals = self.devices.clone().unwrap_or_else(|| (0..ranks).collect());
        if ordinals.len() != ranks as usize {
            return Err(Error::invalid("NPUs named", ordinals.len(), format_args!("{ranks}, one for each rank")));
        }
        if let Some(twice) = (1..ordinals.len()).find(|&at| ordinals[..at].contains(&ordinals[at])) {
            return Err(Error::invalid("NPU of a rank", ordinals[twice], "one that no other rank has"));
        }
        let devices = ordinals.iter().map(|&ordinal| Device::open(table, ordinal)).collect::<Result<Vec<_>, _>>()?;
        let options = self.admitted(&devices, &layout)?;
        let node = Node::new(&devices, &layout)?;
        let meeting = Arc::new(LocalMeeting::by_clock(ranks, table.clock));
        let peers = Peers::Threads(Arc::clone(&meeting));
        let endpoints = (0..ranks).map(Rank).zip(&devices).map(|(me, device)| {
            let device = RankDevice::new(device, &layout, me, &node, &self.kernels, options)?;
            Ok(AscendEndpoint::new(device, me, peers.clone()))
        });
        Ok(Cluster { endpoints: endpoints.collect::<Result<_, AscendError>>()?, meeting })
    }

    /// How devices are used, once it is known that they have room for the windows.
    fn admitted(&self, devices: &[Arc<Device>], layout: &Layout) -> Result<Options, Error> {
        let options = Options { roles: self.divided(devices)?.over(self.topology.nodes())?, plant: self.plant };
        for device in devices {
            let remedy = "a smaller arena, fewer tokens, shorter rows, or more NPUs for as many ranks";
            let place = (format_args!("NPU {}", device.ordinal()), device.left()?);
            estimate(layout, device.table()).within(place, "1 rank".to_owned(), remedy)?;
        }
        Ok(options)
    }

    /// One rank of ranks that are processes, all of which call this with the same shape and settings: that of `member`. The rank's device is the one
    /// named in [`devices`](Self::devices), automatically that with its number within the node. Returns when all ranks have met; may take the
    /// settings' deadline, and a minute at least.
    ///
    /// # Errors
    /// Those of [`build`](Self::build); [`Error::Invalid`] with a rank whose settings or cores are others; what became of the meeting.
    pub fn join(self, table: &Table, shape: Shape, member: &Arc<Member>) -> Result<AscendEndpoint, Error> {
        let (me, ranks) = (member.rank(), self.topology.ranks());
        if member.world() != ranks {
            return Err(Error::invalid(
                "ranks of the topology",
                ranks,
                format_args!("{}, the processes", member.world()),
            ));
        }
        // What is wrong with sizes all ranks find alike; of what one lacks the others hear.
        let settings = self.settings.unwrap_or_else(|| Settings::auto(&shape, &self.topology));
        let layout = Layout::new(&shape, &self.topology, &settings)?;
        check(&layout)?;
        let within = Duration::from_nanos(layout.settings().deadline().0);
        let opened = self.opened(table, me, &layout);
        let (device, options) = opened.inspect_err(|error| met::tell_failed(member, error, within))?;
        let node = Node::met(&device, &layout, options.roles.cores(), member, within)?;
        let rank = RankDevice::new(&device, &layout, me, &node, &self.kernels, options);
        let rank = met::together(member, rank.map_err(Into::into), within)?;
        Ok(AscendEndpoint::new(rank, me, Peers::Processes(Arc::clone(member))))
    }

    /// The device of a rank that is a process.
    fn opened(&self, table: &Table, me: Rank, layout: &Layout) -> Result<(Arc<Device>, Options), Error> {
        let named = self.devices.as_ref().and_then(|devices| devices.first().copied());
        let device = Device::open(table, named.unwrap_or_else(|| self.topology.local_of(me)))?;
        let options = self.admitted(std::slice::from_ref(&device), layout)?;
        Ok((device, options))
    }

    /// How the cores of the devices are divided.
    fn divided(&self, devices: &[Arc<Device>]) -> Result<Roles, Error> {
        let mut least: Option<Roles> = None;
        for device in devices {
            let soc = device.soc()?;
            let other = || AscendError::OtherSoc { ordinal: device.ordinal(), soc: soc.clone() };
            let roles = Roles::of_soc(&soc).ok_or_else(other)?;
            least = Some(least.filter(|least| least.cores() <= roles.cores()).unwrap_or(roles));
        }
        match (self.roles, least) {
            (Some(roles), Some(least)) if roles.cores() > least.cores() => Err(Error::invalid(
                "cores of all roles",
                roles.cores(),
                format_args!("up to the {} of the NPU", least.cores()),
            )),
            (Some(roles), _) => roles.checked(),
            (None, Some(least)) => Ok(least),
            (None, None) => Roles::of_cores(40),
        }
    }
}

/// Ranks on the NPUs of this server.
#[derive(Debug)]
pub struct Cluster {
    endpoints: Vec<AscendEndpoint>,
    meeting: Arc<LocalMeeting>,
}

impl Cluster {
    /// Starts a cluster of `topology`, which has one node. `kernels`: the file of the compiled kernels.
    pub const fn builder(topology: Topology, kernels: PathBuf) -> Builder {
        Builder { topology, kernels, settings: None, devices: None, roles: None, plant: 0 }
    }

    /// Says, whenever it is asked, which ranks the others have agreed to go on without.
    pub fn given_up(&self) -> impl Fn() -> RankSet + 'static {
        let meeting = Arc::clone(&self.meeting);
        move || meeting.given_up()
    }

    /// Runs scripts of verbs, at the same time, with a kernel that only builds for tests have ([`probe::source`]): `[scripts][steps]`, none for those
    /// of ranks that crashed.
    ///
    /// # Errors
    /// [`Error::Invalid`] for ranks that there are not; what the libraries refuse.
    pub fn probe(&self, scripts: &[Script]) -> Result<Vec<Option<Vec<Saw>>>, Error> {
        let ranks: Vec<_> = self.endpoints.iter().map(AscendEndpoint::device).collect();
        probe::run(&ranks, scripts)
    }

    /// The endpoints, one a rank, for a caller that runs them by itself.
    pub fn into_endpoints(self) -> Vec<AscendEndpoint> {
        self.endpoints
    }

    /// Runs `user` for each rank, by turns on the calling thread, and gives what each returned.
    pub fn run<T, F>(self, user: F) -> Vec<T>
    where
        F: AsyncFn(AscendEndpoint) -> T,
    {
        by_turns(self.endpoints.into_iter().map(|endpoint| user(endpoint)))
    }
}

/// Polls a future until it has ended: the work of a rank that is a process.
pub fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = Box::pin(future);
    let mut context = Context::from_waker(Waker::noop());
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(value) => return value,
            Poll::Pending => std::thread::yield_now(),
        }
    }
}

/// Polls futures by turns until all have ended.
fn by_turns<F: Future>(futures: impl Iterator<Item = F>) -> Vec<F::Output> {
    let mut running: Vec<Option<Pin<Box<F>>>> = futures.map(|future| Some(Box::pin(future))).collect();
    let mut results: Vec<Option<F::Output>> = running.iter().map(|_| None).collect();
    let mut context = Context::from_waker(Waker::noop());
    while running.iter().any(Option::is_some) {
        for (slot, result) in running.iter_mut().zip(&mut results) {
            if let Some(Poll::Ready(value)) = slot.as_mut().map(|future| future.as_mut().poll(&mut context)) {
                *result = Some(value);
                *slot = None;
            }
        }
    }
    results.into_iter().flatten().collect()
}
