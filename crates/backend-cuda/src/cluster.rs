//! Ranks on the GPUs of this host, in one process.

use std::sync::Arc;
use std::thread;

use ep_core::{Error, Layout, Rank, Settings, Shape, Topology};

use crate::driver::{self, Device};
use crate::endpoint::{CudaEndpoint, poll};
use crate::meeting::Meeting;
use crate::rank::{Options, RankDevice, check_low, windows};

/// Collects what a [`Cluster`] needs to know.
#[derive(Clone, Debug)]
#[must_use]
pub struct Builder {
    topology: Topology,
    settings: Option<Settings>,
    gpus: Option<Vec<usize>>,
    multiprocessors: Option<u32>,
    low_latency_multiprocessors: Option<u32>,
    priority: i32,
    wait_for_kernels: bool,
}

impl Builder {
    /// How the windows are cut. Automatic: [`Settings::auto`].
    pub const fn settings(mut self, settings: Settings) -> Self {
        self.settings = Some(settings);
        self
    }

    /// The GPU of each rank. Automatic: one after the other, from the first again when there are more ranks.
    pub fn gpus(mut self, gpus: Vec<usize>) -> Self {
        self.gpus = Some(gpus);
        self
    }

    /// Multiprocessors of its GPU that a rank's kernels occupy, 2 or more. Automatic: 24, or less where ranks share a GPU.
    pub const fn multiprocessors(mut self, count: u32) -> Self {
        self.multiprocessors = Some(count);
        self
    }

    /// Multiprocessors that a rank's kernels of low latency occupy. Automatic: all of its GPU, or its share where ranks share one.
    pub const fn low_latency_multiprocessors(mut self, count: u32) -> Self {
        self.low_latency_multiprocessors = Some(count);
        self
    }

    /// Priority of the ranks' streams: 0, or a negative number for a higher one. Automatic: 0.
    pub const fn priority(mut self, priority: i32) -> Self {
        self.priority = priority;
        self
    }

    /// Whether a call's future ends when its kernels have ended, so that their failures are its own. Automatic: no, it ends when
    /// they are enqueued and the sizes of its results are known; a failure is then told by the next call.
    pub const fn wait_for_kernels(mut self, on: bool) -> Self {
        self.wait_for_kernels = on;
        self
    }

    /// Opens the GPUs, compiles the kernels where they are not kept from an earlier time, and takes the windows.
    ///
    /// # Errors
    /// [`Error::Invalid`] for sizes; [`Error::Unsupported`] with what is missing: driver, NVRTC, GPU, peer access, memory.
    pub fn build(self, shape: Shape) -> Result<Cluster, Error> {
        let topology = self.topology;
        if topology.nodes() != 1 {
            return Err(Error::unsupported("more than one node", "a transport between nodes; use one node"));
        }
        let settings = self.settings.unwrap_or_else(|| Settings::auto(&shape, &topology));
        let layout = Layout::new(&shape, &topology, &settings)?;
        let present = driver::devices()?;
        if present == 0 {
            let needs = "a GPU; none is visible (CUDA_VISIBLE_DEVICES limits them)";
            return Err(Error::unsupported("the CUDA backend", needs));
        }
        let ranks = topology.ranks();
        let gpus = self.gpus.unwrap_or_else(|| (0..ranks as usize).map(|rank| rank % present).collect());
        if gpus.len() != ranks as usize {
            return Err(Error::invalid("GPUs named", gpus.len(), format_args!("{ranks}, one for each rank")));
        }
        let devices = gpus.iter().map(|&gpu| Device::open(gpu)).collect::<Result<Vec<_>, _>>()?;
        let sharing =
            gpus.iter().map(|gpu| gpus.iter().filter(|other| *other == gpu).count() as u32).max().unwrap_or(1);
        let most = devices.iter().map(|device| device.multiprocessors()).min().unwrap_or(1) / sharing;
        let blocks = self.multiprocessors.unwrap_or(24.min(most));
        let low_blocks = self.low_latency_multiprocessors.unwrap_or(most);
        for (what, blocks) in [("multiprocessors of a rank", blocks), ("multiprocessors of low latency", low_blocks)] {
            if blocks < 1 || blocks > most {
                let limit = format_args!("1 to {most}, with {sharing} ranks on a GPU");
                return Err(Error::invalid(what, blocks, limit));
            }
        }
        devices.iter().try_for_each(|device| check_low(device, &layout))?;
        let node = windows(&devices, &layout)?;
        let meeting = Arc::new(Meeting::new(ranks));
        let options = Options { blocks, low_blocks, priority: self.priority };
        let endpoints = (0..ranks).map(Rank).zip(&devices).map(|(me, device)| {
            let device = RankDevice::new(device, &layout, me, &node, options)?;
            Ok(CudaEndpoint::new(device, me, Arc::clone(&meeting), self.wait_for_kernels))
        });
        Ok(Cluster { endpoints: endpoints.collect::<Result<_, Error>>()? })
    }
}

/// Ranks on the GPUs of this host, as threads of one process.
#[derive(Debug)]
pub struct Cluster {
    endpoints: Vec<CudaEndpoint>,
}

impl Cluster {
    /// Starts a cluster of `topology`, which has one node.
    pub const fn builder(topology: Topology) -> Builder {
        Builder {
            topology,
            settings: None,
            gpus: None,
            multiprocessors: None,
            low_latency_multiprocessors: None,
            priority: 0,
            wait_for_kernels: false,
        }
    }

    /// The endpoints, one a rank, for threads of the caller's own.
    pub fn into_endpoints(self) -> Vec<CudaEndpoint> {
        self.endpoints
    }

    /// Runs `user` on a thread for each rank and gives what each returned.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when a rank's thread panicked.
    pub fn run<T, F>(self, user: F) -> Result<Vec<T>, Error>
    where
        T: Send,
        F: AsyncFn(CudaEndpoint) -> T + Send + Sync,
    {
        let user = &user;
        thread::scope(|scope| {
            let threads: Vec<_> =
                self.endpoints.into_iter().map(|endpoint| scope.spawn(move || poll::finish(user(endpoint)))).collect();
            threads
                .into_iter()
                .map(|thread| thread.join().map_err(|_| Error::unsupported("a panic in a rank's thread", "none")))
                .collect()
        })
    }
}
