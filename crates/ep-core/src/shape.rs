//! What one token and one layer look like: sizes that never change during a communicator's life.

use std::fmt;

use crate::error::Error;
use crate::quant::{self, Number, Scaling, groups, int8};
use crate::terms::{ROW_ALIGN, round_up};

/// The most experts a token may be routed to.
pub const MAX_TOPK: u32 = 32;
/// The most experts of one layer.
pub const MAX_EXPERTS: u32 = 1 << 16;
/// The most elements of one token's row.
pub const MAX_HIDDEN: u32 = 1 << 16;
/// The most tokens one rank brings to one operation.
pub const MAX_TOKENS: u32 = 1 << 26;

/// How the rows of a dispatch travel. Rows that combine returns are bf16 always.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum Element {
    /// bfloat16, two bytes, no scales.
    #[default]
    Bf16,
    /// E4M3, one byte, with a scale for every [`GROUP`](crate::quant::GROUP) elements behind the codes.
    Fp8(Scaling),
    /// Signed bytes, with one f32 scale a row behind the codes ([`int8`]). For machines without FP8.
    Int8,
}

impl Element {
    /// Every element type.
    pub const ALL: [Self; 5] =
        [Self::Bf16, Self::Fp8(Scaling::Exact), Self::Fp8(Scaling::PowerOfTwo), Self::Fp8(Scaling::Ue8m0), Self::Int8];

    /// Its number on the wire and in the C header.
    pub const fn number(self) -> u32 {
        match self {
            Self::Bf16 => 0,
            Self::Fp8(Scaling::Exact) => 1,
            Self::Fp8(Scaling::PowerOfTwo) => 2,
            Self::Fp8(Scaling::Ue8m0) => 3,
            Self::Int8 => 4,
        }
    }

    /// Bytes of the codes of `hidden` elements, without their scales.
    pub const fn codes_bytes(self, hidden: u32) -> u64 {
        match self {
            Self::Bf16 => hidden as u64 * 2,
            Self::Fp8(_) | Self::Int8 => hidden as u64,
        }
    }

    /// Scales of `hidden` elements.
    pub const fn scales(self, hidden: u32) -> u32 {
        match self {
            Self::Bf16 => 0,
            Self::Fp8(_) => groups(hidden),
            Self::Int8 => 1,
        }
    }

    /// Bytes of the scales of `hidden` elements.
    pub const fn scales_bytes(self, hidden: u32) -> u64 {
        match self {
            Self::Bf16 => 0,
            Self::Fp8(scaling) => groups(hidden) as u64 * scaling.scale_bytes() as u64,
            Self::Int8 => int8::SCALE_BYTES as u64,
        }
    }

    /// Bytes of a row of `hidden` elements: codes; with scales, codes padded to [`ROW_ALIGN`], then the scales. What
    /// would follow the last of these is not counted.
    pub const fn row_bytes(self, hidden: u32) -> u64 {
        match self {
            Self::Bf16 => self.codes_bytes(hidden),
            Self::Fp8(_) | Self::Int8 => round_up(self.codes_bytes(hidden), ROW_ALIGN) + self.scales_bytes(hidden),
        }
    }

    /// Quantises a row, `[hidden]`, to its codes and scales.
    ///
    /// # Errors
    /// [`Error::Invalid`] when `codes` or `scales` has another length than [`Self::codes_bytes`] and [`Self::scales_bytes`]
    /// say, and for bf16, which has no codes.
    pub fn quantize<T: Number>(self, row: &[T], codes: &mut [u8], scales: &mut [u8]) -> Result<(), Error> {
        match self {
            Self::Bf16 => Err(Error::invalid("element to quantise to", self, "fp8, int8")),
            Self::Fp8(scaling) => quant::quantize(scaling, row, codes, scales),
            Self::Int8 => int8::quantize(row, codes, scales),
        }
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bf16 => "bf16",
            Self::Fp8(Scaling::Exact) => "fp8 with f32 scales",
            Self::Fp8(Scaling::PowerOfTwo) => "fp8 with power-of-two scales",
            Self::Fp8(Scaling::Ue8m0) => "fp8 with ue8m0 scales",
            Self::Int8 => "int8 with a scale a row",
        })
    }
}

/// Sizes of a layer and its tokens, the same on every rank, validated once by [`Shape::builder`].
///
/// ```
/// let shape = ep_core::Shape::builder().experts(256).topk(8).hidden(7168).max_tokens(4096).build()?;
/// assert_eq!(shape.row_bytes(), 14336);
/// # Ok::<(), ep_core::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Shape {
    experts: u32,
    topk: u32,
    hidden: u32,
    max_tokens: u32,
    element: Element,
}

impl Shape {
    /// Starts a shape of 256 experts, top-8, hidden 7168, 4096 tokens, bf16.
    pub const fn builder() -> ShapeBuilder {
        ShapeBuilder { shape: Self { experts: 256, topk: 8, hidden: 7168, max_tokens: 4096, element: Element::Bf16 } }
    }

    /// Experts in all.
    pub const fn experts(&self) -> u32 {
        self.experts
    }

    /// Experts chosen per token.
    pub const fn topk(&self) -> u32 {
        self.topk
    }

    /// Elements of a row.
    pub const fn hidden(&self) -> u32 {
        self.hidden
    }

    /// Bound on the tokens of one rank for low latency and worst-case sizing; throughput mode takes more.
    pub const fn max_tokens(&self) -> u32 {
        self.max_tokens
    }

    /// How the rows of a dispatch travel.
    pub const fn element(&self) -> Element {
        self.element
    }

    /// Bytes of one row of a dispatch: [`Element::row_bytes`].
    pub const fn row_bytes(&self) -> u64 {
        self.element.row_bytes(self.hidden)
    }

    /// Bytes of one row of results, as combine takes and returns them: bf16.
    pub const fn result_bytes(&self) -> u64 {
        Element::Bf16.row_bytes(self.hidden)
    }

    /// Experts of each of `ranks` ranks: expert `e` lives on rank `e / (experts / ranks)`.
    ///
    /// # Errors
    /// [`Error::Invalid`] when `ranks` does not divide the number of experts.
    pub fn local_experts(&self, ranks: u32) -> Result<u32, Error> {
        if ranks == 0 || !self.experts.is_multiple_of(ranks) {
            return Err(Error::invalid("experts", self.experts, format_args!("a multiple of the {ranks} ranks")));
        }
        Ok(self.experts / ranks)
    }
}

/// Collects the sizes of a [`Shape`].
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct ShapeBuilder {
    shape: Shape,
}

impl ShapeBuilder {
    /// Experts in all, 1 to [`MAX_EXPERTS`].
    pub const fn experts(mut self, experts: u32) -> Self {
        self.shape.experts = experts;
        self
    }

    /// Experts chosen per token, 1 to [`MAX_TOPK`].
    pub const fn topk(mut self, topk: u32) -> Self {
        self.shape.topk = topk;
        self
    }

    /// Elements of a row, 1 to [`MAX_HIDDEN`].
    pub const fn hidden(mut self, hidden: u32) -> Self {
        self.shape.hidden = hidden;
        self
    }

    /// Bound on the tokens of one rank for low latency and worst-case sizing, 1 to [`MAX_TOKENS`].
    pub const fn max_tokens(mut self, max_tokens: u32) -> Self {
        self.shape.max_tokens = max_tokens;
        self
    }

    /// How the rows of a dispatch travel.
    pub const fn element(mut self, element: Element) -> Self {
        self.shape.element = element;
        self
    }

    /// Checks every size.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the first size outside its limits.
    pub fn build(self) -> Result<Shape, Error> {
        let s = &self.shape;
        for (what, value, limit) in [
            ("experts", s.experts, MAX_EXPERTS),
            ("topk", s.topk, MAX_TOPK),
            ("hidden", s.hidden, MAX_HIDDEN),
            ("max tokens", s.max_tokens, MAX_TOKENS),
        ] {
            if value == 0 || value > limit {
                return Err(Error::invalid(what, value, format_args!("1 to {limit}")));
            }
        }
        if s.topk > s.experts {
            return Err(Error::invalid("topk", s.topk, format_args!("at most the {} experts", s.experts)));
        }
        Ok(self.shape)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_outside_their_limits_are_named() {
        let error = |b: ShapeBuilder| b.build().unwrap_err().to_string();
        assert_eq!(error(Shape::builder().topk(33)), "topk is 33, allowed: 1 to 32");
        assert_eq!(error(Shape::builder().hidden(0)), "hidden is 0, allowed: 1 to 65536");
        assert_eq!(error(Shape::builder().experts(4).topk(8)), "topk is 8, allowed: at most the 4 experts");
    }

    #[test]
    fn coded_rows_are_codes_and_scales_padded_between() {
        let bytes = |hidden| Element::ALL.map(|element| element.row_bytes(hidden));
        assert_eq!(bytes(7168), [14336, 7168 + 224, 7168 + 224, 7168 + 56, 7168 + 4]);
        assert_eq!(bytes(1), [2, 16 + 4, 16 + 4, 16 + 1, 16 + 4]);
        assert_eq!(bytes(129), [258, 144 + 8, 144 + 8, 144 + 2, 144 + 4]);
    }

    #[test]
    fn elements_are_numbered_in_their_order() {
        assert_eq!(Element::ALL.map(Element::number), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn experts_are_dealt_evenly_or_refused() {
        let shape = Shape::builder().experts(12).build().unwrap();
        assert_eq!(shape.local_experts(4).unwrap(), 3);
        assert_eq!(
            shape.local_experts(5).unwrap_err().to_string(),
            "experts is 12, allowed: a multiple of the 5 ranks"
        );
    }
}
