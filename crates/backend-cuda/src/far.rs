//! Networks between nodes, as ranks on GPUs take them: over a proxy, or posted to by kernels.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ep_core::layout::Queues;
use ep_core::port::{LaneId, LaneKind, Scope};
use ep_core::transport::{DeviceLanes, DevicePlace, DeviceSource, DeviceTransport, Transport, WindowMemory};
use ep_core::{Error, Layout, Rank, RankSet};

use crate::driver::{DeviceMemory, Stream};
use crate::posting::PostingGpu;
use crate::proxy::{PinnedFifos, Proxy, Staged, source};

/// Tells kernels that were compiled with one text from those of another, or of the same with other constants.
pub(crate) fn key(source: &DeviceSource) -> String {
    let DeviceSource { text, defines, .. } = source;
    defines.iter().fold(text.clone(), |key, (name, value)| format!("{key}\n{name}={value}"))
}

/// A network, whatever kind it is of.
pub(crate) trait Network: fmt::Debug + Send + Sync {
    /// What kernels are compiled with.
    fn source(&self) -> DeviceSource;

    /// Whether it may ask for copies of windows.
    fn copies(&self) -> bool;

    /// Whether [movers](crate::Builder::far_movers) may have something to move. What is staged the driver copies; whether rows are, though nobody asked for it, is
    /// known when the lanes are open.
    fn has_moves(&self) -> bool;

    /// The lanes of a rank whose work is on `stream`.
    fn open(&self, place: DevicePlace<'_>, stream: &Arc<Stream>) -> Result<Box<dyn DeviceLanes>, Error>;
}

/// When rows travel by way of pinned memory of the host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Staging {
    /// Where the network does not reach a GPU's memory, or kernels would see what it writes there out of order.
    Automatic,
    Always,
}

/// One that a thread of the host posts to, for each rank.
#[derive(Debug)]
pub(crate) struct ByProxy<T>(pub(crate) T, pub(crate) Staging);

impl<T> Network for ByProxy<T>
where
    T: Transport<Lanes: 'static> + Clone + fmt::Debug + Send + Sync,
{
    fn source(&self) -> DeviceSource {
        source()
    }

    fn copies(&self) -> bool {
        true
    }

    fn has_moves(&self) -> bool {
        self.1 != Staging::Always
    }

    fn open(&self, place: DevicePlace<'_>, stream: &Arc<Stream>) -> Result<Box<dyn DeviceLanes>, Error> {
        let Self(transport, staging) = self;
        let why = match staging {
            Staging::Always => "asked for".to_owned(),
            Staging::Automatic => match opened(transport.clone(), place, stream) {
                Err(error @ Error::Unsupported { .. }) => error.to_string(),
                Err(error) => return Err(error),
                Ok(lanes) => {
                    let device = stream.device();
                    let Some(why) = disorder(device.ordinal(), lanes.is_copied(), device.orders_writes()?) else {
                        return Ok(lanes);
                    };
                    why
                }
            },
        };
        let staged = opened(Staged(transport.clone()), place, stream).map_err(|error| {
            if error.to_string() == why {
                // Nothing that staging would change.
                return error;
            }
            let what = format_args!("rows of rank {} staged through memory of the host ({why})", place.me);
            Error::unsupported(what, format_args!("a network that carries them: {error}"))
        })?;
        tracing::warn!(rank = place.me.0, "rows are staged through pinned memory of the host: {why}");
        Ok(staged)
    }
}

/// Why an adapter may not write to memory of this GPU itself, if it may not: kernels that see a signal must see the rows before it. Where the driver copies, its
/// streams order that.
fn disorder(gpu: usize, is_copied: bool, orders_writes: bool) -> Option<String> {
    (!is_copied && !orders_writes).then(|| {
        format!("GPU {gpu} does not order what an adapter writes to its memory (GPU_DIRECT_RDMA_WRITES_ORDERING)")
    })
}

fn opened<T: Transport<Lanes: 'static>>(
    transport: T,
    place: DevicePlace<'_>,
    stream: &Arc<Stream>,
) -> Result<Box<dyn DeviceLanes>, Error> {
    let proxy = Proxy::new(transport, |bytes| PinnedFifos::new(stream, bytes));
    let proxy = proxy.beside(stream.device().pci().unwrap_or_default());
    Ok(Box::new(proxy.open(place)?))
}

/// One that kernels post to themselves: what its text is, and how it is made for a rank and its GPU.
pub(crate) struct Posted<F> {
    pub(crate) source: DeviceSource,
    pub(crate) make: F,
}

impl<F> fmt::Debug for Posted<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Posted").finish_non_exhaustive()
    }
}

impl<T, F> Network for Posted<F>
where
    T: DeviceTransport<Lanes: 'static>,
    F: Fn(Rank, PostingGpu) -> T + Send + Sync,
{
    fn source(&self) -> DeviceSource {
        self.source.clone()
    }

    fn copies(&self) -> bool {
        false
    }

    fn has_moves(&self) -> bool {
        false
    }

    fn open(&self, place: DevicePlace<'_>, stream: &Arc<Stream>) -> Result<Box<dyn DeviceLanes>, Error> {
        let device = stream.device();
        let WindowMemory::Device { address, .. } = place.window else {
            return Err(Error::unsupported("kernels that post for a window in memory of the host", "one on a GPU"));
        };
        let bytes = place.layout.window_bytes();
        let network = (self.make)(place.me, PostingGpu::new(device, address, bytes)?);
        if network.far_lanes() != Queues::PER_ROLE {
            let what = "lanes of GPUs between nodes that share a queue";
            return Err(Error::unsupported(what, "a queue for each role: no kernel collects what several roles post"));
        }
        if network.source() != self.source {
            return Err(Error::unsupported("kernels that post by another text", "the settings that the text is of"));
        }
        Ok(Box::new(network.open(place)?))
    }
}

/// What ranks give, `[ranks]`.
pub(crate) type Given = Vec<Option<Vec<u8>>>;

/// Where ranks that are threads of this process leave what they give to the others after an agreement.
///
/// A rank gives in two steps behind each agreement, and has a place for each. It gives again only after the next agreement: then nobody waits for
/// what it gave before. So a rank that is a step ahead, or fails and tries again, hides nothing that another has yet to take; and what was given
/// behind an earlier agreement is taken by nobody.
#[derive(Debug)]
pub(crate) struct Offers(Mutex<Vec<[Offer; 2]>>);

/// What a rank gave, and behind which agreement ([`LocalMeeting::last_agreement`](ep_bootstrap::LocalMeeting::last_agreement)); none is number 0.
#[derive(Clone, Debug, Default)]
struct Offer {
    agreement: u32,
    bytes: Vec<u8>,
}

/// What all ranks do before any goes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Step {
    Offer,
    Connect,
}

impl Offers {
    pub(crate) fn new(ranks: u32) -> Self {
        Self(Mutex::new((0..ranks).map(|_| Default::default()).collect()))
    }

    fn all(&self) -> MutexGuard<'_, Vec<[Offer; 2]>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What `me` gives in a step behind an agreement.
    pub(crate) fn give(&self, agreement: u32, step: Step, me: Rank, bytes: Vec<u8>) {
        self.all()[me.index()][step as usize] = Offer { agreement, bytes };
    }

    /// What all but `mask` gave, or one who has not yet.
    pub(crate) fn taken(&self, agreement: u32, step: Step, mask: &RankSet) -> Result<Given, Rank> {
        let of_rank = |(rank, steps): (Rank, &[Offer; 2])| {
            let offer = &steps[step as usize];
            match offer.agreement == agreement {
                _ if mask.contains(rank) => Ok(None),
                true => Ok(Some(offer.bytes.clone())),
                false => Err(rank),
            }
        };
        (0..).map(Rank).zip(self.all().iter()).map(of_rank).collect()
    }
}

/// A rank's lanes, and the table by which kernels find them: u64 `[ranks, lanes]`, where each one's state lies, 0 where there is none.
#[derive(Debug)]
pub(crate) struct Far {
    lanes: Mutex<Box<dyn DeviceLanes>>,
    table: DeviceMemory,
    source: DeviceSource,
    pub(crate) offers: Arc<Offers>,
    /// How long the lanes may take to get rid of what they hold.
    pub(crate) drains: Duration,
}

/// Of an operation's deadline.
const DRAIN: u64 = 32;

impl Far {
    pub(crate) fn new(
        lanes: Box<dyn DeviceLanes>,
        source: DeviceSource,
        offers: Arc<Offers>,
        layout: &Layout,
        stream: &Stream,
    ) -> Result<Self, Error> {
        let kinds = LaneKind::count(layout.tracks());
        let of_peer = |peer: Rank| (0..kinds).map(move |index| LaneId { peer, kind: LaneKind::from_index(index) });
        let states = layout.topology().all().flat_map(of_peer).map(|lane| lanes.state(lane).unwrap_or(0));
        let bytes: Vec<u8> = states.flat_map(u64::to_le_bytes).collect();
        let table = DeviceMemory::zeroed(stream, bytes.len())?;
        table.write(stream, 0, &bytes)?;
        let drains = Duration::from_nanos(layout.settings().deadline().0 / DRAIN);
        Ok(Self { lanes: Mutex::new(lanes), table, source, offers, drains })
    }

    /// What the host does with them: no kernel posts meanwhile where that must not be.
    pub(crate) fn lanes(&self) -> MutexGuard<'_, Box<dyn DeviceLanes>> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets what kernels posted arrive, for as long as lanes may hold on to it. No kernel of this rank runs.
    pub(crate) fn settle(&self) {
        let began = Instant::now();
        while !self.lanes().drain(Scope::All) && began.elapsed() < self.drains {
            std::thread::yield_now();
        }
    }

    /// What kernels are compiled with.
    pub(crate) const fn source(&self) -> &DeviceSource {
        &self.source
    }

    /// Where the table lies.
    pub(crate) const fn address(&self) -> u64 {
        self.table.address()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A recovery that failed behind its agreement is tried again, on the same generation, with lanes that are offered anew.
    #[test]
    fn what_was_given_before_an_agreement_is_taken_by_nobody_behind_it() {
        let (offers, all) = (Offers::new(2), RankSet::new());
        [0, 1].into_iter().for_each(|rank| offers.give(1, Step::Offer, Rank(rank), b"old".to_vec()));
        assert!(offers.taken(1, Step::Offer, &all).is_ok());
        offers.give(2, Step::Offer, Rank(0), b"new".to_vec());
        assert_eq!(offers.taken(2, Step::Offer, &all), Err(Rank(1)));
        offers.give(2, Step::Offer, Rank(1), b"new".to_vec());
        assert_eq!(offers.taken(2, Step::Offer, &all), Ok(vec![Some(b"new".to_vec()); 2]));
    }

    #[test]
    fn a_rank_that_is_ahead_does_not_hide_what_it_gave_before() {
        let (offers, out) = (Offers::new(3), [Rank(2)].into_iter().collect());
        for (rank, bytes) in [(0, b"a"), (1, b"b")] {
            offers.give(4, Step::Offer, Rank(rank), bytes.to_vec());
        }
        offers.give(4, Step::Connect, Rank(0), Vec::new());
        let both = Ok(vec![Some(b"a".to_vec()), Some(b"b".to_vec()), None]);
        assert_eq!(offers.taken(4, Step::Offer, &out), both);
        assert_eq!(offers.taken(4, Step::Connect, &out), Err(Rank(1)));
    }

    #[test]
    fn rows_are_staged_where_an_adapter_writes_to_memory_that_the_gpu_does_not_order() {
        assert!(disorder(3, false, false).is_some_and(|why| why.contains("GPU 3 does not order")));
        assert_eq!(disorder(3, false, true), None);
        assert_eq!(disorder(3, true, false), None, "the driver copies");
    }

    #[test]
    fn kernels_of_one_text_with_other_constants_are_others() {
        let source = |batch: &str| DeviceSource {
            text: "text".into(),
            defines: vec![("BATCH", batch.to_owned())],
            state_bytes: 64,
        };
        assert_eq!(key(&source("1")), key(&source("1")));
        assert_ne!(key(&source("1")), key(&source("2")));
    }
}
