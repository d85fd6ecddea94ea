//! Rows as they travel, bf16 or codes with scales, and what the experts make of them.

use ep_core::layout::RowFormat;
use ep_core::reference::{
    self, CodedBatch, CodedReceived, CodedRows, Received, World, apply_experts, apply_experts_coded,
};
use ep_core::{Element, Error, Rank, Shape};
use half::bf16;

use crate::verify::{Observed, bytes_of};
use crate::workload::Batch;

/// The bytes of a batch's rows as dispatch takes them: bf16, or quantised as the shape says.
///
/// # Errors
/// Those of [`Element::quantize`]; a batch of the shape has none.
pub fn travelling(shape: &Shape, x: &[u16]) -> Result<Vec<u8>, Error> {
    if shape.element() == Element::Bf16 {
        return Ok(bytes_of(x));
    }
    let format = RowFormat::new(shape);
    let (row_bytes, hidden) = (format.payload_bytes() as usize, shape.hidden() as usize);
    let mut bytes = vec![0; x.len() / hidden * row_bytes];
    for (row, bytes) in x.chunks_exact(hidden).zip(bytes.chunks_exact_mut(row_bytes)) {
        let (codes, scales) = bytes.split_at_mut(format.scales_offset() as usize);
        shape.element().quantize(row, &mut codes[..hidden], scales)?;
    }
    Ok(bytes)
}

/// [`travelling`] by the oracle, which quantises by definition.
pub(crate) fn quantised(world: &World, x: &[u16]) -> Vec<u8> {
    if world.shape().element() == Element::Bf16 {
        return bytes_of(x);
    }
    joined(world.shape(), &reference::quantize(world, x))
}

/// Codes and scales as one row's bytes after the other.
fn joined(shape: &Shape, rows: &CodedRows) -> Vec<u8> {
    let format = RowFormat::new(shape);
    let scales = rows.scales.chunks_exact(format.scales_bytes() as usize);
    let mut bytes = Vec::new();
    for (codes, scales) in rows.codes.chunks_exact(shape.hidden() as usize).zip(scales) {
        let row = bytes.len();
        bytes.extend_from_slice(codes);
        bytes.resize(row + format.scales_offset() as usize, 0);
        bytes.extend_from_slice(scales);
    }
    bytes
}

/// What one rank received, seen or expected.
#[derive(Clone, PartialEq, Debug)]
pub struct Arrival {
    /// Where the rows come from and which experts they are for; its `x` is empty for coded rows.
    pub received: Received,
    /// Codes and scales, where rows have some.
    pub coded: Option<CodedRows>,
}

impl Arrival {
    /// What every rank must receive: `[ranks]`, by the oracle, which quantises by definition.
    pub fn expected(world: &World, batches: &[Batch]) -> Vec<Self> {
        if world.shape().element() == Element::Bf16 {
            let inputs: Vec<_> = batches.iter().map(Batch::reference).collect();
            return reference::dispatch(world, &inputs)
                .into_iter()
                .map(|received| Self { received, coded: None })
                .collect();
        }
        let rows: Vec<CodedRows> = batches.iter().map(|batch| reference::quantize(world, &batch.x)).collect();
        let inputs = rows.iter().zip(batches).map(|(x, batch)| CodedBatch { x, routing: batch.reference().routing });
        let received = reference::dispatch_coded(world, &inputs.collect::<Vec<_>>());
        received.into_iter().map(|got| Self { received: got.rows, coded: Some(got.x) }).collect()
    }

    /// What a rank saw.
    pub fn observed(shape: &Shape, seen: &Observed) -> Self {
        let mut received = seen.received();
        let coded = (shape.element() != Element::Bf16).then(|| {
            received.x.clear();
            split(shape, &seen.recv_x)
        });
        Self { received, coded }
    }

    /// The bytes of the rows as they travel.
    pub fn bytes(&self, shape: &Shape) -> Vec<u8> {
        match &self.coded {
            None => bytes_of(&self.received.x),
            Some(rows) => joined(shape, rows),
        }
    }

    /// What the reference experts of `rank` return, `[rows, hidden]` bits of bf16.
    pub fn experts(&self, world: &World, rank: Rank) -> Vec<u16> {
        match &self.coded {
            None => apply_experts(world, rank, &self.received),
            Some(x) => {
                let got = CodedReceived { x: x.clone(), rows: self.received.clone() };
                apply_experts_coded(world, rank, &got)
            }
        }
    }

    /// Twice each value, `[rows, hidden]` bits of bf16: what a cached round, whose rows carry no choices, returns.
    pub fn doubled(&self, world: &World) -> Vec<u16> {
        let twice = |value: f32| bf16::from_f32(2.0 * value).to_bits();
        match &self.coded {
            None => self.received.x.iter().map(|&bits| twice(bf16::from_bits(bits).to_f32())).collect(),
            Some(rows) => reference::dequantize(world, rows).into_iter().map(twice).collect(),
        }
    }
}

/// Codes and scales of rows as they travel.
pub fn split(shape: &Shape, bytes: &[u8]) -> CodedRows {
    let format = RowFormat::new(shape);
    let mut rows = CodedRows::default();
    for row in bytes.chunks_exact(format.payload_bytes() as usize) {
        rows.codes.extend_from_slice(&row[..shape.hidden() as usize]);
        rows.scales.extend_from_slice(&row[format.scales_offset() as usize..]);
    }
    rows
}
