//! Networks between nodes, as ranks on GPUs take them: over a proxy.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ep_core::port::{LaneId, LaneKind};
use ep_core::transport::{DeviceLanes, DevicePlace, DeviceSource, DeviceTransport as _, Transport};
use ep_core::{Error, Layout, Rank};

use crate::driver::{DeviceMemory, Stream};
use crate::proxy::{PinnedFifos, Proxy, source};

/// A network, whatever kind it is of.
pub(crate) trait Network: fmt::Debug + Send + Sync {
    /// What kernels are compiled with.
    fn source(&self) -> DeviceSource;

    /// The lanes of a rank whose work is on `stream`.
    fn open(&self, place: DevicePlace<'_>, stream: &Arc<Stream>) -> Result<Box<dyn DeviceLanes>, Error>;
}

/// One that a thread of the host posts to, for each rank.
#[derive(Debug)]
pub(crate) struct ByProxy<T>(pub(crate) T);

impl<T> Network for ByProxy<T>
where
    T: Transport<Lanes: 'static> + Clone + fmt::Debug + Send + Sync,
{
    fn source(&self) -> DeviceSource {
        source()
    }

    fn open(&self, place: DevicePlace<'_>, stream: &Arc<Stream>) -> Result<Box<dyn DeviceLanes>, Error> {
        Ok(Box::new(Proxy::new(self.0.clone(), |bytes| PinnedFifos::new(stream, bytes)).open(place)?))
    }
}

/// A rank's lanes, and the table by which kernels find them: u64 `[ranks, lanes]`, where each one's state lies, 0 where there is none.
#[derive(Debug)]
pub(crate) struct Far {
    lanes: Mutex<Box<dyn DeviceLanes>>,
    table: DeviceMemory,
}

impl Far {
    pub(crate) fn new(lanes: Box<dyn DeviceLanes>, layout: &Layout, stream: &Stream) -> Result<Self, Error> {
        let kinds = LaneKind::count(layout.tracks());
        let of_peer = |peer: Rank| (0..kinds).map(move |index| LaneId { peer, kind: LaneKind::from_index(index) });
        let states = layout.topology().all().flat_map(of_peer).map(|lane| lanes.state(lane).unwrap_or(0));
        let bytes: Vec<u8> = states.flat_map(u64::to_le_bytes).collect();
        let table = DeviceMemory::zeroed(stream, bytes.len())?;
        table.write(stream, 0, &bytes)?;
        Ok(Self { lanes: Mutex::new(lanes), table })
    }

    /// What the host does with them: no kernel posts meanwhile where that must not be.
    pub(crate) fn lanes(&self) -> MutexGuard<'_, Box<dyn DeviceLanes>> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where the table lies.
    pub(crate) const fn address(&self) -> u64 {
        self.table.address()
    }
}
