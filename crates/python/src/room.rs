//! Memory for what a low-latency dispatch brings: a block cut into tensors, and another for the small ones, which callers keep longer.

use std::any::Any;
use std::collections::VecDeque;
use std::sync::Arc;

use moexpress::engine::low_latency::LowOrder;
use moexpress::{Element as Travels, Error, Layout, Scaling};

use crate::backend::{BySourceInto, LowInto, PackedInto};
use crate::dlpack::{Device, Element, Tensor};

/// Tensors begin at multiples of this.
const ALIGN: usize = 256;

/// Keeps a block of memory.
pub(crate) type Owner = Arc<dyn Any + Send + Sync>;

/// Blocks of the caller's, in place of new ones.
#[derive(Debug, Default)]
pub(crate) struct Given(VecDeque<(usize, usize, Owner)>);

impl Given {
    /// Of an address, the bytes there, and what keeps them, each.
    pub(crate) fn new(blocks: impl IntoIterator<Item = (usize, usize, Owner)>) -> Self {
        Self(blocks.into_iter().collect())
    }

    /// The next block.
    fn take(&mut self, bytes: usize) -> Result<(usize, Owner), Error> {
        let (address, room, owner) =
            self.0.pop_front().ok_or_else(|| Error::invalid("blocks of room", "too few", 2))?;
        if room < bytes || !address.is_multiple_of(ALIGN) {
            let limit = format_args!("{bytes} bytes at least, at a multiple of {ALIGN}");
            return Err(Error::invalid("room for results", format_args!("{room} bytes at {address}"), limit));
        }
        Ok((address, owner))
    }
}

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
    pub(crate) by_source: Option<BySource>,
    pub(crate) packed: Option<Packed>,
}

/// The same of [`LowPacked`](moexpress::engine::low_latency::LowPacked).
pub(crate) struct Packed {
    pub(crate) first: Tensor,
    pub(crate) slots: Tensor,
    pub(crate) weights: Tensor,
}

/// The same of [`LowBySource`](moexpress::engine::low_latency::LowBySource).
pub(crate) struct BySource {
    pub(crate) first_of: Tensor,
    pub(crate) topk_idx: Tensor,
    pub(crate) topk_idx_too: Tensor,
    pub(crate) topk_weights: Tensor,
    pub(crate) source_rank: Tensor,
}

/// Bytes of the blocks that such a room is cut of.
pub(crate) fn sizes(layout: &Layout, scales: Scales, order: LowOrder) -> Result<Vec<usize>, Error> {
    let mut sizes = Vec::new();
    LowRoom::new(layout, &Device::Cpu, scales, order, None, |bytes| {
        sizes.push(bytes);
        Ok((ALIGN, Arc::new(())))
    })?;
    Ok(sizes)
}

impl LowRoom {
    /// Of blocks that are given, or else that `take` takes: the address of each, and what keeps it.
    pub(crate) fn new(
        layout: &Layout,
        device: &Device,
        scales: Scales,
        order: LowOrder,
        given: Option<Given>,
        mut take: impl FnMut(usize) -> Result<(usize, Owner), Error>,
    ) -> Result<Self, Error> {
        let (of_caller, mut given) = (given.is_some(), given);
        let mut take = |bytes| given.as_mut().map_or_else(|| take(bytes), |given| given.take(bytes));
        let [experts, ranks] = [layout.local_experts(), layout.topology().ranks()].map(i64::from);
        let [most, hidden] = [layout.shape().max_tokens(), layout.shape().hidden()].map(i64::from);
        let (rows, topk, at_once) = (ranks * most, i64::from(layout.shape().topk()), order.tells_rows());
        // By source, and packed, rows lie as if there were one expert: so many of them.
        let lying = i64::from(order.rows(layout)?);
        let columns = layout.row().scales_bytes().div_ceil(4) as i64;
        let (codes, scale) = match layout.row().element() {
            Travels::Fp8(Scaling::Ue8m0) => (Element::E4m3, Some(Element::I32)),
            Travels::Fp8(_) => (Element::E4m3, Some(Element::F32)),
            Travels::Int8 if scales == Scales::BehindCodes => (Element::U8, None),
            Travels::Int8 => (Element::I8, Some(Element::F32)),
            _ => (Element::Bf16, None),
        };
        let width = if codes == Element::U8 { layout.row().payload_bytes() as i64 } else { hidden };
        let shaped = |tail: &[i64]| {
            let head: &[i64] = if at_once { &[lying] } else { &[experts, rows] };
            [head, tail].concat()
        };
        // As throughput mode brings them.
        let strides =
            if scales == Scales::ByRow || at_once { [rows * columns, columns, 1] } else { [rows * columns, 1, rows] };
        let mut cuts = [0, 0];
        let mut cut = |block: usize, elements: i64, bytes: usize| {
            let begin = cuts[block];
            cuts[block] = (begin + elements as usize * bytes).next_multiple_of(ALIGN);
            (block, begin)
        };
        // Callers drop rows, and keep handles and counts of many calls: then the rows' block is not theirs.
        let kept = 1;
        let tokens = if at_once { vec![rows] } else { vec![experts, rows] };
        let places = [
            cut(0, lying * width, codes.bytes()),
            cut(0, lying * columns, 4),
            cut(kept, experts, 4),
            cut(kept, experts * ranks, 8),
            cut(kept, tokens.iter().product(), 4),
        ];
        let packs = matches!(order, LowOrder::Packed { .. });
        let packed = packs.then(|| [cut(kept, experts + 1, 4), cut(kept, rows * topk, 4), cut(0, lying, 4)]);
        let told = at_once.then(|| {
            [
                cut(kept, ranks + 1, 4),
                cut(0, rows * topk, 8),
                cut(kept, rows * topk, 8),
                cut(0, rows * topk, 4),
                cut(kept, rows, 4),
            ]
        });
        let blocks = [take(cuts[0])?, take(cuts[1])?];
        let at = |(block, begin): (usize, usize)| blocks[block].0 + begin;
        let [at_x, at_scales, at_counts, at_segments, at_tokens] = places.map(at);
        let told = told.map(|places| {
            let [first_of, topk_idx, topk_idx_too, topk_weights, source_rank] = places.map(at);
            BySourceInto { first_of, topk_idx, topk_idx_too, topk_weights, source_rank }
        });
        let packed = packed.map(|places| {
            let [first, slots, weights] = places.map(at);
            PackedInto { first, slots, weights }
        });
        let of = |block: usize, address, shape, strides, element| Tensor {
            address,
            shape,
            strides,
            element,
            device: device.clone(),
            owner: Box::new(Arc::clone(&blocks[block].1)),
        };
        let rows_of = |address, shape, strides, element| of(0, address, shape, strides, element);
        let tensor = |address, shape, element| of(kept, address, shape, None, element);
        Ok(Self {
            x: rows_of(at_x, shaped(&[width]), None, codes),
            scales: scale.map(|element| {
                let by_row = strides[usize::from(at_once)..].to_vec();
                rows_of(at_scales, shaped(&[columns]), Some(by_row), element)
            }),
            expert_counts: tensor(at_counts, vec![experts], Element::I32),
            segments: tensor(at_segments, vec![experts, ranks], Element::I64),
            source_token: tensor(at_tokens, tokens, Element::I32),
            by_source: told.map(|told| BySource {
                first_of: tensor(told.first_of, vec![ranks + 1], Element::I32),
                topk_idx: rows_of(told.topk_idx, vec![rows, topk], None, Element::I64),
                topk_idx_too: tensor(told.topk_idx_too, vec![rows, topk], Element::I64),
                topk_weights: rows_of(told.topk_weights, vec![rows, topk], None, Element::F32),
                source_rank: tensor(told.source_rank, vec![rows], Element::I32),
            }),
            packed: packed.map(|told| Packed {
                first: tensor(told.first, vec![experts + 1], Element::I32),
                slots: tensor(told.slots, vec![rows, topk], Element::I32),
                weights: rows_of(told.weights, vec![lying], None, Element::F32),
            }),
            into: LowInto {
                x: at_x,
                scales: scale.map(|_| (at_scales, strides)),
                expert_counts: at_counts,
                segments: at_segments,
                source_token: at_tokens,
                by_source: told,
                packed,
                rows: lying as u32,
                most: None,
                stats: None,
                owner: Arc::new(blocks.map(|(_, owner)| owner)),
                of_caller,
            },
        })
    }
}
