//! What dispatches brought, until Python asks for it.

use std::sync::{Mutex, PoisonError};

use moexpress::{Rank, Topology};
use pyo3::prelude::*;

use crate::calls::{self, Experts};
use crate::dlpack::Tensor;
use crate::handle::Handle;
use crate::room::LowRoom;

/// Tensors of a dispatch, each to be taken once, as a DLPack capsule: None where there is none, and after that. Making a capsule takes
/// longer than keeping what it would be made of, and most callers want few of them.
#[pyclass(frozen, module = "moexpress._native")]
pub(crate) struct Dispatched {
    parts: Mutex<Parts>,
    /// Rows received; with counts in the machine's memory the bound.
    #[pyo3(get)]
    rows: u32,
    /// Of each local expert. Empty where the dispatch was cached, or counts stay in the machine's memory.
    #[pyo3(get)]
    expert_counts: Vec<u32>,
    /// First slot of each local expert, and last all slots; then rows of each expert. None where rows are by source, or these stay in the machine's
    /// memory.
    #[pyo3(get)]
    by_expert: Option<(Vec<u32>, Vec<u32>)>,
    handle: Handle,
}

#[derive(Default)]
struct Parts {
    x: Option<Tensor>,
    scales: Option<Tensor>,
    topk_idx: Option<Tensor>,
    topk_weights: Option<Tensor>,
    source_token: Option<Tensor>,
    source_rank: Option<Tensor>,
    device_rows: Option<Tensor>,
    device_counts: Option<Tensor>,
    first_slots: Option<Tensor>,
    slot_counts: Option<Tensor>,
    slots: Option<Tensor>,
    offsets: Option<Tensor>,
    slot_weights: Option<Tensor>,
}

impl Dispatched {
    /// Of rank `me`.
    pub(crate) fn new(dispatched: calls::Dispatched, me: Rank, topology: Topology) -> Self {
        let calls::Dispatched { x, scales, rows, choices, source_token, source_rank, .. } = dispatched;
        let calls::Dispatched { expert_counts, counts, by_expert, handle, .. } = dispatched;
        let ((topk_idx, topk_weights), (device_rows, device_counts)) = (choices.unzip(), counts.unzip());
        let (experts, places) = by_expert.map(|told| (told.experts, (told.slots, told.offsets, told.weights))).unzip();
        let (slots, offsets, slot_weights) =
            places.map_or((None, None, None), |(slots, offsets, weights)| (Some(slots), Some(offsets), weights));
        let (by_expert, on_device) = match experts {
            Some(Experts::OnHost(first, counts)) => (Some((first, counts)), None),
            Some(Experts::OnDevice(first, counts)) => (None, Some((first, counts))),
            None => (None, None),
        };
        let (first_slots, slot_counts) = on_device.unzip();
        let parts = Parts {
            x: Some(x),
            scales,
            topk_idx,
            topk_weights,
            source_token: Some(source_token),
            source_rank: Some(source_rank),
            device_rows,
            device_counts,
            first_slots,
            slot_counts,
            slots,
            offsets,
            slot_weights,
        };
        let handle = Handle { inner: handle, me, topology };
        Self { parts: Mutex::new(parts), rows, expert_counts, by_expert, handle }
    }

    fn take<'py>(
        &self,
        py: Python<'py>,
        part: fn(&mut Parts) -> &mut Option<Tensor>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let tensor = part(&mut self.parts.lock().unwrap_or_else(PoisonError::into_inner)).take();
        tensor.map(|tensor| tensor.into_capsule(py)).transpose()
    }
}

#[pymethods]
impl Dispatched {
    /// Rows, or their codes: as FP8 where the reader knows it by name, else as bytes.
    fn x<'py>(&self, py: Python<'py>, knows_fp8: bool) -> PyResult<Option<Bound<'py, PyAny>>> {
        let tensor = self.parts.lock().unwrap_or_else(PoisonError::into_inner).x.take();
        tensor.map(|tensor| tensor.named(knows_fp8).into_capsule(py)).transpose()
    }

    /// Scales of FP8 rows.
    fn scales<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.take(py, |parts| &mut parts.scales)
    }

    /// Choices, where they travelled.
    fn topk_idx<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.take(py, |parts| &mut parts.topk_idx)
    }

    /// Their weights.
    fn topk_weights<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.take(py, |parts| &mut parts.topk_weights)
    }

    /// Token of each row in its rank's batch.
    fn source_token<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.take(py, |parts| &mut parts.source_token)
    }

    /// Rank of each row.
    fn source_rank<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.take(py, |parts| &mut parts.source_rank)
    }

    /// Rows received, in the machine's memory.
    fn device_rows<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.take(py, |parts| &mut parts.device_rows)
    }

    /// Counts of each local expert, in the machine's memory.
    fn device_counts<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.take(py, |parts| &mut parts.device_counts)
    }

    /// First slot of each local expert, and last behind all, in the machine's memory.
    fn first_slots<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.take(py, |parts| &mut parts.first_slots)
    }

    /// Rows of each local expert, padding not counted, in the machine's memory.
    fn slot_counts<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.take(py, |parts| &mut parts.slot_counts)
    }

    /// Slot of each choice, of rows by expert.
    fn slots<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.take(py, |parts| &mut parts.slots)
    }

    /// First slot of each source at each local expert, of rows by expert.
    fn offsets<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.take(py, |parts| &mut parts.offsets)
    }

    /// The weight of each slot's choice, where it is told.
    fn slot_weights<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.take(py, |parts| &mut parts.slot_weights)
    }

    /// For combine and cached dispatches.
    #[getter]
    fn handle(&self) -> Handle {
        self.handle.clone()
    }
}

/// A tensor to be taken once.
pub(crate) struct Taken(Mutex<Option<Tensor>>);

impl Taken {
    pub(crate) const fn new(tensor: Tensor) -> Self {
        Self(Mutex::new(Some(tensor)))
    }

    /// As a DLPack capsule; None after that.
    pub(crate) fn take<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let tensor = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        tensor.map(|tensor| tensor.into_capsule(py)).transpose()
    }
}

/// Tensors of a low-latency dispatch, as [`Dispatched`] has them. Defined once it was received.
#[pyclass(frozen, module = "moexpress._native")]
pub(crate) struct LowDispatched(Mutex<LowParts>);

struct LowParts {
    x: Option<Tensor>,
    scales: Option<Tensor>,
    expert_counts: Option<Tensor>,
    segments: Option<Tensor>,
    source_token: Option<Tensor>,
    first_of: Option<Tensor>,
    topk_idx: Option<Tensor>,
    topk_idx_too: Option<Tensor>,
    topk_weights: Option<Tensor>,
    source_rank: Option<Tensor>,
    first_slots: Option<Tensor>,
    slots: Option<Tensor>,
    slot_weights: Option<Tensor>,
}

impl LowDispatched {
    pub(crate) fn new(room: LowRoom) -> Self {
        let LowRoom { x, scales, expert_counts, segments, source_token, by_source, packed, .. } = room;
        let told = by_source.map(|told| {
            [told.first_of, told.topk_idx, told.topk_idx_too, told.topk_weights, told.source_rank].map(Some)
        });
        let [first_of, topk_idx, topk_idx_too, topk_weights, source_rank] = told.unwrap_or_default();
        let packed = packed.map(|told| [told.first, told.slots, told.weights].map(Some));
        let [first_slots, slots, slot_weights] = packed.unwrap_or_default();
        let [x, expert_counts, segments, source_token] = [x, expert_counts, segments, source_token].map(Some);
        let parts = LowParts {
            x,
            scales,
            expert_counts,
            segments,
            source_token,
            first_of,
            topk_idx,
            topk_idx_too,
            topk_weights,
            source_rank,
            first_slots,
            slots,
            slot_weights,
        };
        Self(Mutex::new(parts))
    }

    fn take<'py>(
        &self,
        py: Python<'py>,
        part: fn(&mut LowParts) -> &mut Option<Tensor>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let tensor = part(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner)).take();
        tensor.map(|tensor| tensor.into_capsule(py)).transpose()
    }
}

#[pymethods]
impl LowDispatched {
    /// Rows, or their codes: as FP8 where the reader knows it by name, else as bytes.
    fn x<'py>(&self, py: Python<'py>, knows_fp8: bool) -> PyResult<Option<Bound<'py, PyAny>>> {
        let tensor = self.0.lock().unwrap_or_else(PoisonError::into_inner).x.take();
        tensor.map(|tensor| tensor.named(knows_fp8).into_capsule(py)).transpose()
    }

    /// Scales of FP8 rows.
    fn scales<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.take(py, |parts| &mut parts.scales)
    }

    /// Rows of each local expert.
    fn expert_counts<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.take(py, |parts| &mut parts.expert_counts)
    }

    /// By source, and packed: the first row of each rank, and how many there are.
    fn first_of<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.take(py, |parts| &mut parts.first_of)
    }

    /// By source, and packed: choices.
    fn topk_idx<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.take(py, |parts| &mut parts.topk_idx)
    }

    /// By source, and packed: the same once more.
    fn topk_idx_too<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.take(py, |parts| &mut parts.topk_idx_too)
    }

    /// By source, and packed: their weights.
    fn topk_weights<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.take(py, |parts| &mut parts.topk_weights)
    }

    /// By source, and packed: rank of each row.
    fn source_rank<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.take(py, |parts| &mut parts.source_rank)
    }

    /// Packed: the first slot of each expert, and how many slots are taken.
    fn first_slots<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.take(py, |parts| &mut parts.first_slots)
    }

    /// Packed: the slot of each choice.
    fn slots<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.take(py, |parts| &mut parts.slots)
    }

    /// Packed: the weight of each slot's choice.
    fn slot_weights<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.take(py, |parts| &mut parts.slot_weights)
    }

    /// Rows of each source.
    fn segments<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.take(py, |parts| &mut parts.segments)
    }

    /// Token of each row at its source.
    fn source_token<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.take(py, |parts| &mut parts.source_token)
    }
}
