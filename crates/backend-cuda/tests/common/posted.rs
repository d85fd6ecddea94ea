//! Ranks of several nodes whose kernels post to adapters themselves (`ep-ibgda`): to such as are made of software (`soft-hca`), as hostile as real ones
//! may be, or to such as the ranks' own GPUs play (`ep_cuda::hca`).
#![allow(unreachable_pub)] // The test targets that hold it are crates of their own.

use std::sync::Arc;

use ep_conformance::script::{Script, Seen};
use ep_conformance::{Backend, Requirement, Setup, Travels};
use ep_core::incident::Incident;
use ep_core::{Error, Layout, Rank};
use ep_cuda::hca::{Hca, Pace};
use ep_cuda::{Cluster, CudaEndpoint, PostingGpu};
use ep_ibgda::{Ibgda, Library};
use soft_hca::{Fabric, Link, Model, Mood};

use crate::common::{self, probe_on, run_on};
use crate::played::settings;

/// Which adapters.
#[derive(Clone, Copy, Debug)]
pub enum Cards {
    /// Of software: threads of the processor.
    #[allow(dead_code)] // Not on GPUs, whose memory no thread reads.
    Soft,
    /// Of GPUs.
    Played(Pace),
}

/// An adapter for each rank.
pub enum Adapters {
    Soft(Fabric),
    Played(Arc<Hca>),
}

impl Adapters {
    /// Those of software lack nothing, or what some lack: descriptors of a GPU's memory.
    pub fn new(setup: &Setup, cards: Cards) -> Result<Self, String> {
        let (ranks, seed) = (setup.topology.ranks(), setup.seed);
        let Cards::Played(pace) = cards else {
            let link = if seed.is_multiple_of(2) { Link::Ethernet } else { Link::InfiniBand };
            let model = Model { dmabuf: !seed.is_multiple_of(3), ..Model::new(link) };
            let fabric = Fabric::builder(ranks as u8, link).model(model).mood(Mood::hostile()).seed(seed).running();
            return Ok(Self::Soft(fabric));
        };
        let present = ep_cuda::driver::devices().map_err(|error| error.to_string())?;
        let gpus: Vec<usize> = (0..ranks as usize).map(|rank| rank % present).collect();
        Hca::new(&gpus, pace).map(Self::Played).map_err(|error| error.to_string())
    }

    /// The cards.
    pub fn fabric(&self) -> &Fabric {
        match self {
            Self::Soft(fabric) => fabric,
            Self::Played(hca) => hca.fabric(),
        }
    }

    /// A cluster over them.
    pub fn cluster(&self, setup: &Setup) -> Result<Cluster, String> {
        // SAFETY: the cards' functions are those of the interface.
        let library = unsafe { Library::from(soft_hca::symbol) }.expect("it has all functions");
        let names: Vec<String> = setup.topology.all().map(|rank| self.fabric().card(rank.index()).name()).collect();
        let hca = if let Self::Played(hca) = self { Some(Arc::clone(hca)) } else { None };
        let network = move |me: Rank, gpu: PostingGpu| {
            let gpu = if let Some(hca) = &hca { gpu.beside(hca) } else { gpu };
            Ibgda::new(library.clone(), gpu, settings().devices([names[me.index()].as_str()]))
        };
        let builder = common::builder(setup, None, None).map_err(|error| error.to_string())?;
        builder.posted(ep_ibgda::source(&settings()), network).build(setup.shape).map_err(|error| error.to_string())
    }
}

/// The suite's ranks over them.
pub struct Posted {
    pub absent: Option<&'static str>,
    pub cards: Cards,
    /// Whether messages may come late, or never, and cases run whose limits a busy processor does not keep.
    pub incidents: bool,
}

impl Posted {
    /// What `work` gives, unless adapters complain, or have not been given back what they were asked for.
    fn over<R>(&self, setup: &Setup, work: impl FnOnce(Cluster) -> Result<R, String>) -> Result<R, String> {
        let adapters = Adapters::new(setup, self.cards)?;
        let result = work(adapters.cluster(setup)?);
        let complaints = adapters.fabric().complaints();
        // What befell ranks may have torn lanes, or kept them for ever.
        if setup.incidents.iter().all(|incident| matches!(incident, Incident::Exit { .. } | Incident::Starve { .. })) {
            let objects = |rank: &Rank| adapters.fabric().card(rank.index()).objects();
            if let Some(rank) = setup.topology.all().find(|rank| objects(rank) > 0) {
                return Err(format!("the adapter of rank {rank} has {} objects left", objects(&rank)));
            }
        }
        if complaints.is_empty() { result } else { Err(format!("{complaints:?}; {:?}", result.err())) }
    }
}

impl Backend for Posted {
    type Endpoint = CudaEndpoint;

    fn absent(&self) -> Option<&'static str> {
        self.absent
    }

    fn lacks(&self, what: Requirement) -> Option<&'static str> {
        match what {
            Requirement::Incidents if !self.incidents => {
                Some("lost and late messages are told from a busy processor by time alone: EP_TWIN_ALL=1 runs them")
            }
            Requirement::LowLatency if !self.incidents => {
                Some("its cases allow an operation a second, too little on a busy processor: EP_TWIN_ALL=1 runs them")
            }
            Requirement::ManyNodes => Some("one thread drives, or one GPU plays, the adapters of many ranks"),
            _ => common::lacks(what),
        }
    }

    fn window(&self, layout: Layout) -> Result<Layout, Error> {
        layout.with_kernels()
    }

    fn seeds(&self, most: u64) -> u64 {
        if std::env::var_os("EP_SEEDS").is_some() { common::seeds(most) } else { 1 }
    }

    fn largest(&self) -> (u32, u32) {
        (2, 4)
    }

    fn run<T, F>(&self, setup: &Setup, user: F) -> Result<Vec<Option<T>>, String>
    where
        T: Travels,
        F: AsyncFn(CudaEndpoint) -> T + Send + Sync,
    {
        self.over(setup, |cluster| run_on(cluster, setup, user))
    }

    fn probe(&self, setup: &Setup, scripts: &[Script]) -> Result<Vec<Option<Vec<Seen>>>, String> {
        self.over(setup, |cluster| probe_on(&cluster, setup, scripts))
    }
}
