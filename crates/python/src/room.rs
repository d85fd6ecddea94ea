//! Memory for what a low-latency dispatch brings: one block, cut into tensors.

use std::any::Any;
use std::sync::Arc;

use moexpress::{Element as Travels, Error, Layout, Scaling};

use crate::backend::LowInto;
use crate::dlpack::{Device, Element, Tensor};

/// Tensors begin at multiples of this.
const ALIGN: usize = 256;

/// Keeps a block of memory.
pub(crate) type Owner = Arc<dyn Any + Send + Sync>;

/// Where the scales of coded rows lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Scales {
    ByColumn,
    ByRow,
    /// Each row's behind its codes, as it travels.
    BehindCodes,
}

/// Tensors with the shapes of [`LowReceived`](moexpress::engine::low_latency::LowReceived), and where they lie.
pub(crate) struct LowRoom {
    pub(crate) into: LowInto,
    pub(crate) x: Tensor,
    pub(crate) scales: Option<Tensor>,
    pub(crate) expert_counts: Tensor,
    pub(crate) segments: Tensor,
    pub(crate) source_token: Tensor,
}

impl LowRoom {
    /// Of a block that `take` takes: its address and what keeps it.
    pub(crate) fn new(
        layout: &Layout,
        device: &Device,
        scales: Scales,
        take: impl FnOnce(usize) -> Result<(usize, Owner), Error>,
    ) -> Result<Self, Error> {
        let [experts, ranks] = [layout.local_experts(), layout.topology().ranks()].map(i64::from);
        let [most, hidden] = [layout.shape().max_tokens(), layout.shape().hidden()].map(i64::from);
        let rows = ranks * most;
        let columns = layout.row().scales_bytes().div_ceil(4) as i64;
        let (codes, scale) = match layout.row().element() {
            Travels::Fp8(Scaling::Ue8m0) => (Element::E4m3, Some(Element::I32)),
            Travels::Fp8(_) => (Element::E4m3, Some(Element::F32)),
            Travels::Int8 if scales == Scales::BehindCodes => (Element::U8, None),
            Travels::Int8 => (Element::I8, Some(Element::F32)),
            _ => (Element::Bf16, None),
        };
        let width = if codes == Element::U8 { layout.row().payload_bytes() as i64 } else { hidden };
        let x = vec![experts, rows, width];
        let strides = if scales == Scales::ByRow { [rows * columns, columns, 1] } else { [rows * columns, 1, rows] };
        let mut end = 0;
        let mut cut = |elements: i64, bytes: usize| {
            let begin = end;
            end = (begin + elements as usize * bytes).next_multiple_of(ALIGN);
            begin
        };
        let places = [
            cut(experts * rows * width, codes.bytes()),
            cut(experts * rows * columns, 4),
            cut(experts, 4),
            cut(experts * ranks, 8),
            cut(experts * rows, 4),
        ];
        let (base, owner) = take(end)?;
        let [at_x, at_scales, at_counts, at_segments, at_tokens] = places.map(|place| base + place);
        let tensor = |address, shape, strides, element| Tensor {
            address,
            shape,
            strides,
            element,
            device: device.clone(),
            owner: Box::new(Arc::clone(&owner)),
        };
        Ok(Self {
            x: tensor(at_x, x, None, codes),
            scales: scale
                .map(|element| tensor(at_scales, vec![experts, rows, columns], Some(strides.to_vec()), element)),
            expert_counts: tensor(at_counts, vec![experts], None, Element::I32),
            segments: tensor(at_segments, vec![experts, ranks], None, Element::I64),
            source_token: tensor(at_tokens, vec![experts, rows], None, Element::I32),
            into: LowInto {
                x: at_x,
                scales: scale.map(|_| (at_scales, strides)),
                expert_counts: at_counts,
                segments: at_segments,
                source_token: at_tokens,
                stats: None,
                owner,
            },
        })
    }
}
