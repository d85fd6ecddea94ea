//! Ranks of several nodes on the twin whose kernels post to adapters themselves (`ep-ibgda`), and these are made of software (`soft-hca`) and as
//! hostile as real ones may be.

use ep_conformance::script::{Script, Seen};
use ep_conformance::{Backend, Requirement, Setup, Travels};
use ep_core::incident::Incident;
use ep_core::{Error, Layout};
use ep_cuda::{Cluster, CudaEndpoint};
use ep_ibgda::{Ibgda, Library, Settings};
use soft_hca::{Fabric, Link, Model, Mood};

use crate::common::{self, probe_on, run_on};

/// An adapter for each rank.
pub(crate) struct OnAdapters {
    pub(crate) absent: Option<&'static str>,
    pub(crate) all: bool,
}

/// Settings of jobs that are over soon: short queues, and adapters that give up after milliseconds.
pub(crate) fn settings() -> Settings {
    let settings = Settings::new().relaxed_ordering(true).log_depth(6);
    settings.and_then(|settings| settings.ack_timeout(12)?.retries(3)).expect("settings")
}

/// Adapters that lack nothing, or what some lack: descriptors of a GPU's memory.
pub(crate) fn fabric(ranks: u32, seed: u64) -> Fabric {
    let link = if seed.is_multiple_of(2) { Link::Ethernet } else { Link::InfiniBand };
    let model = Model { dmabuf: !seed.is_multiple_of(3), ..Model::new(link) };
    Fabric::builder(ranks as u8, link).model(model).mood(Mood::hostile()).seed(seed).running()
}

/// A cluster over `fabric`, of which each rank has a card.
pub(crate) fn cluster(setup: &Setup, fabric: &Fabric) -> Result<Cluster, String> {
    // SAFETY: the cards' functions are those of the interface.
    let library = unsafe { Library::from(soft_hca::symbol) }.expect("it has all functions");
    let names: Vec<String> = setup.topology.all().map(|rank| fabric.card(rank.index()).name()).collect();
    let network = move |me: ep_core::Rank, gpu| {
        Ibgda::new(library.clone(), gpu, settings().devices([names[me.index()].as_str()]))
    };
    let builder = common::builder(setup, None, None).map_err(|error| error.to_string())?;
    let builder = builder.posted(ep_ibgda::source(&settings()), network);
    builder.build(setup.shape).map_err(|error| error.to_string())
}

impl OnAdapters {
    /// What `work` gives, unless adapters complain, or have not been given back what they were asked for.
    fn over<R>(setup: &Setup, work: impl FnOnce(Cluster) -> Result<R, String>) -> Result<R, String> {
        let fabric = fabric(setup.topology.ranks(), setup.seed);
        let result = work(cluster(setup, &fabric)?);
        let complaints = fabric.complaints();
        // What befell ranks may have torn lanes, or kept them for ever.
        if setup.incidents.iter().all(|incident| matches!(incident, Incident::Exit { .. } | Incident::Starve { .. })) {
            let held = setup.topology.all().find(|rank| fabric.card(rank.index()).objects() > 0);
            if let Some(rank) = held {
                return Err(format!(
                    "the adapter of rank {rank} has {} objects left",
                    fabric.card(rank.index()).objects()
                ));
            }
        }
        if complaints.is_empty() { result } else { Err(format!("{complaints:?}; {:?}", result.err())) }
    }
}

impl Backend for OnAdapters {
    type Endpoint = CudaEndpoint;

    fn absent(&self) -> Option<&'static str> {
        self.absent
    }

    fn lacks(&self, what: Requirement) -> Option<&'static str> {
        match what {
            Requirement::Incidents if !self.all => {
                Some("lost and late messages are told from a busy processor by time alone: EP_TWIN_ALL=1 runs them")
            }
            Requirement::LowLatency if !self.all => {
                Some("its cases allow an operation a second, too little on a busy processor: EP_TWIN_ALL=1 runs them")
            }
            Requirement::ManyNodes => Some("one thread drives the adapters of all ranks"),
            _ => common::lacks(what),
        }
    }

    fn window(&self, layout: Layout) -> Result<Layout, Error> {
        layout.with_kernels()
    }

    fn seeds(&self, most: u64) -> u64 {
        if std::env::var_os("EP_SEEDS").is_some() { common::seeds(most) } else { 1 }
    }

    fn run<T, F>(&self, setup: &Setup, user: F) -> Result<Vec<Option<T>>, String>
    where
        T: Travels,
        F: AsyncFn(CudaEndpoint) -> T + Send + Sync,
    {
        Self::over(setup, |cluster| run_on(cluster, setup, user))
    }

    fn probe(&self, setup: &Setup, scripts: &[Script]) -> Result<Vec<Option<Vec<Seen>>>, String> {
        Self::over(setup, |cluster| probe_on(&cluster, setup, scripts))
    }
}
