//! Low latency: fixed slots instead of counts and rings, and the value that says that they are filled.
//!
//! Every region has two banks, one for even and one for odd operations:
//!
//! ```text
//! low slots     2 banks x writers x one part     dispatched rows, or results: max_tokens x (choices of a writer's experts)
//! low staging   slots                            the sources of the owner's puts, used in turn
//! low units     2 banks x writers x one part     where these travel as units: a unit that says how many rows come, and how many tokens a dispatch has;
//!                                                how many each expert gets, the rows' headers, in order, and each payload at the place of its token;
//!                                                or results, of small batches
//! ```
//!
//! The header of a row that travels as units is a unit of its own for the row and one for each choice ([`UnitRow`](super::UnitRow),
//! [`UnitChoice`](super::UnitChoice)). Who writes it says which of its rows for an expert this is; so where a row goes is known by the numbers of the
//! sources before it and its own header, and no other header. A result has no header: its place says what it is. Units are read where they lie.
//!
//! An operation brings rows or results, never both, so both lie in the same parts. A part is written to by one rank alone, results
//! too: what a rank still does that was given up falls where nobody reads any more (`docs/decisions.md` has the price).
//!
//! A row is a [`RowHeader`](super::RowHeader), its choices over *all* ranks (the same bytes go to every rank that the
//! token goes to) and the payload; a result is a header without choices and the payload. `position` in a row's header is 0,
//! as its position differs from rank to rank; in a result's it is the column. Its `op` is [`low_stamp`]: operations are numbered anew in
//! each generation, and a row of an earlier one must not pass for one of this.

use super::cut::{Cut, Slots};
use super::{Layout, ROW_ALIGN, RowFormat, RowHeader, SLOT_ALIGN, VALUE_BITS, round_up};
use crate::error::Error;
use crate::settings::Settings;
use crate::shape::Shape;
use crate::terms::{Offset, Span, UNIT_BYTES, UNIT_DATA, unit_bytes};
use crate::topology::{Rank, Topology};

/// What a low-latency operation brings.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u32)]
pub enum LowKind {
    /// Tokens to their experts' ranks.
    Dispatch = 0,
    /// Results, one row for each choice of a token; the token's rank applies the weights.
    PerChoice = 1,
    /// Results, one row for each rank of a token, weighted and summed there.
    PerRank = 2,
}

impl LowKind {
    /// Every kind.
    pub(super) const ALL: [Self; 3] = [Self::Dispatch, Self::PerChoice, Self::PerRank];

    /// The form of a combine whose weights were given with the dispatch (a row for each rank, weighed there), or are with the
    /// combine (a row for each choice).
    ///
    /// # Errors
    /// [`Error::Invalid`] when they were given twice, or not at all.
    pub fn of_weights(with_dispatch: bool, with_combine: bool) -> Result<Self, Error> {
        let wrong = |what| Err(Error::invalid("topk_weights", what, "given at dispatch or here"));
        match (with_dispatch, with_combine) {
            (false, true) => Ok(Self::PerChoice),
            (true, false) => Ok(Self::PerRank),
            (false, false) => wrong("absent"),
            (true, true) => wrong("given twice"),
        }
    }

    /// Lower-case name, as logs print it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Dispatch => "low-latency dispatch",
            Self::PerChoice => "low-latency combine per choice",
            Self::PerRank => "low-latency combine per rank",
        }
    }
}

/// The last value of every cell of low latency, once its writer goes on without the reader. More than any other.
pub const MASKED: u64 = (1 << VALUE_BITS) - 1;

/// The value of a bank's cell: all rows of an operation from one rank have been put.
///
/// ```text
/// value = (op * 4 + kind) * (limit + 1) + rows        limit: Arrival::limit, the most rows one rank sends another
/// ```
///
/// Operations of low latency are counted from 1 in each generation, so values only rise.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Arrival {
    /// The operation, counted from 1 in each generation.
    pub op: u64,
    /// What it brings.
    pub kind: LowKind,
    /// Rows that were put.
    pub rows: u32,
}

impl Arrival {
    /// The most rows that one rank sends another in one operation: a result for each choice of each token.
    pub const fn limit(shape: &Shape) -> u64 {
        shape.max_tokens() as u64 * shape.topk() as u64
    }

    /// The last operation of a generation: the next one would not fit a cell.
    pub const fn last_op(shape: &Shape) -> u64 {
        MASKED / (4 * (Self::limit(shape) + 1)) - 1
    }

    /// The value of the cell.
    pub const fn encode(self, shape: &Shape) -> u64 {
        (self.op * 4 + self.kind as u64) * (Self::limit(shape) + 1) + self.rows as u64
    }

    /// The least value that operation `op` may have.
    pub const fn due(op: u64, shape: &Shape) -> u64 {
        op * 4 * (Self::limit(shape) + 1)
    }

    /// What a cell's value says; none where no such operation exists.
    pub fn decode(value: u64, shape: &Shape) -> Option<Self> {
        let limit = Self::limit(shape) + 1;
        let (opened, rows) = (value / limit, value % limit);
        let kind = *LowKind::ALL.get((opened % 4) as usize)?;
        Some(Self { op: opened / 4, kind, rows: rows as u32 })
    }
}

/// Staging memory that the automatic choice does not exceed, in bytes, beyond a slot for each token.
const STAGING_BYTES: u64 = 64 << 20;

/// The regions of low latency; without room where the settings leave it out.
#[derive(Clone, Copy, Debug)]
pub(super) struct LowRegions {
    /// Parts of result slots; rows lie in the same parts.
    pub(super) slots: Slots,
    /// From one row to the next.
    pub(super) row_bytes: u64,
    pub(super) staging: Slots,
}

impl LowRegions {
    /// Memory for units: parts of one slot each.
    pub(super) fn cut_units(
        cut: &mut Cut,
        shape: &Shape,
        topology: &Topology,
        row: &RowFormat,
        settings: &Settings,
    ) -> Slots {
        let tokens = u64::from(shape.max_tokens());
        let counts = unit_bytes(4 * u64::from(shape.experts() / topology.ranks()));
        let rows = counts + (unit_bytes(unit_header(shape)) + unit_bytes(row.payload_bytes())).saturating_mul(tokens);
        let results = tokens * u64::from(low_columns(shape, topology, settings));
        let results = unit_bytes(row.results().payload_bytes()).saturating_mul(results);
        let part = round_up(UNIT_BYTES + rows.max(results), SLOT_ALIGN);
        let banks = if settings.low_latency_units() { 2 } else { 0 };
        cut.slots(banks * u64::from(topology.ranks()), 1, part)
    }

    pub(super) fn cut(cut: &mut Cut, shape: &Shape, topology: &Topology, row: &RowFormat, settings: &Settings) -> Self {
        let (on, units) = (settings.low_latency(), settings.low_latency_units());
        let (row_bytes, result_bytes) = (row_slot(row), result_slot(row));
        let (tokens, ranks) = (u64::from(shape.max_tokens()), u64::from(topology.ranks()));
        let results = tokens * u64::from(shape.topk());
        // Rows that travel as units have their headers behind them; and what each expert gets is staged, too.
        let counts = 4 * u64::from(shape.experts() / topology.ranks());
        let as_units = round_up((row.wire_bytes() + unit_header(shape)).max(counts), SLOT_ALIGN);
        let staged = row_bytes.max(result_bytes).max(if units { as_units } else { 0 });
        let staging = tokens.max(results.min(STAGING_BYTES / staged));
        let banks = if on { 2 } else { 0 };
        let part = tokens
            .saturating_mul(row_bytes)
            .div_ceil(result_bytes)
            .max(tokens * u64::from(low_columns(shape, topology, settings)));
        Self {
            slots: cut.slots(banks * ranks, part, result_bytes),
            row_bytes,
            staging: cut.slots(banks.min(1), staging, staged),
        }
    }
}

/// Results of one rank that a token may have: of its choices of that rank's experts, or one for all.
fn low_columns(shape: &Shape, topology: &Topology, settings: &Settings) -> u32 {
    if settings.low_latency_per_choice() { shape.topk().min(shape.experts() / topology.ranks()) } else { 1 }
}

/// Bytes of a row's header where it travels as units: a unit of data for the row, and one for each choice.
const fn unit_header(shape: &Shape) -> u64 {
    UNIT_DATA * (1 + shape.topk() as u64)
}

/// What the header of a low-latency row or result has as its operation: the generation above the operation's low bits.
pub const fn low_stamp(generation: u16, op: u64) -> u32 {
    (generation as u32) << 16 | (op & 0xffff) as u32
}

/// Refuses shapes of which the rows of a rank's experts, `[local experts, ranks * max_tokens]`, cannot be numbered.
pub(super) fn check_low_rows(shape: &Shape) -> Result<(), Error> {
    let rows = u64::from(shape.experts()) * u64::from(shape.max_tokens());
    let most = i32::MAX as u64;
    if rows > most {
        return Err(Error::invalid("experts x max tokens in low latency", rows, format_args!("at most {most}")));
    }
    Ok(())
}

fn row_slot(row: &RowFormat) -> u64 {
    round_up(row.wire_bytes(), SLOT_ALIGN)
}

fn result_slot(row: &RowFormat) -> u64 {
    round_up(RESULT_HEADER + row.results().payload_stride(), SLOT_ALIGN)
}

/// Bytes of a result before its payload.
pub(crate) const RESULT_HEADER: u64 = round_up(size_of::<RowHeader>() as u64, ROW_ALIGN);

/// Places of low latency. `op` counts from 1 in each generation; its bank is `op % 2`.
impl Layout {
    /// Refuses what needs regions that the settings left out.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn check_low_latency(&self) -> Result<(), Error> {
        if self.settings().low_latency() {
            return Ok(());
        }
        Err(Error::unsupported("low latency", "a communicator whose settings say low_latency(true)"))
    }

    /// Refuses a combine for whose results there is no room.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn check_low_kind(&self, kind: LowKind) -> Result<(), Error> {
        if kind != LowKind::PerChoice || self.settings().low_latency_per_choice() {
            return Ok(());
        }
        let what = "a row a choice in low latency whose settings say low_latency_per_choice(false)";
        Err(Error::unsupported(what, "topk_weights at dispatch, or rows by source"))
    }

    /// Rows of all local experts, `[local experts, ranks * max_tokens]`: less than 2^31, which cutting the layout has seen to.
    ///
    /// # Errors
    /// As [`Layout::check_low_latency`].
    pub fn low_expert_rows(&self) -> Result<u32, Error> {
        self.check_low_latency()?;
        // Local experts x ranks are all experts.
        Ok(self.shape().experts() * self.shape().max_tokens())
    }

    /// Where the row at `position` among those of `source` lies in the receiver's window; where each row is announced, and the source is another rank,
    /// that of token `position`, whose header is [ahead](Self::low_head).
    pub fn low_row(&self, op: u64, source: Rank, position: u32) -> Span {
        let at = self.low_part(op, source).offset;
        at.plus(u64::from(position) * self.low.row_bytes).span(self.row().wire_bytes())
    }

    /// Where the result in `column` of those that `writer` has for `token` lies in the window of the token's rank: that of the
    /// choice which is number `column` of the token's choices of the writer's experts; or, in column 0, their sum.
    pub fn low_result(&self, op: u64, writer: Rank, token: u32, column: u32) -> Span {
        let slot = token * self.low_columns() + column;
        let bytes = RESULT_HEADER + self.row().results().payload_stride();
        self.low.slots.slot(self.low_part_of(op, writer), 0, 0, slot, bytes)
    }

    /// All that `writer` puts into this rank's slots in operation `op`, rows or results.
    pub fn low_part(&self, op: u64, writer: Rank) -> Span {
        let Slots { per_part, bytes, .. } = self.low.slots;
        self.low.slots.slot(self.low_part_of(op, writer), 0, 0, 0, per_part * bytes)
    }

    fn low_part_of(&self, op: u64, writer: Rank) -> u32 {
        (op % 2) as u32 * self.topology().ranks() + writer.0
    }

    /// Where the unit lies by which `writer` says how many rows come in operation `op`, where they travel as units.
    pub fn low_unit_head(&self, op: u64, writer: Rank) -> Offset {
        self.low_units.slot(self.low_part_of(op, writer), 0, 0, 0, UNIT_BYTES).offset
    }

    /// Where the units begin by which it says how many rows each expert gets, u32 `[local experts]`, where the operation is a dispatch.
    pub fn low_unit_counts(&self, op: u64, writer: Rank) -> Offset {
        self.low_unit_head(op, writer).plus(UNIT_BYTES)
    }

    /// Where those of the header of its row at `position` begin.
    pub fn low_unit_header(&self, op: u64, writer: Rank, position: u32) -> Offset {
        let first = self.low_unit_counts(op, writer).plus(unit_bytes(4 * u64::from(self.local_experts())));
        first.plus(u64::from(position) * unit_bytes(self.low_unit_header_bytes()))
    }

    /// Bytes of such a header.
    pub fn low_unit_header_bytes(&self) -> u64 {
        unit_header(self.shape())
    }

    /// Where those of the payload of its row of `token` begin.
    pub fn low_unit_row(&self, op: u64, writer: Rank, token: u32) -> Offset {
        let first = self.low_unit_header(op, writer, self.shape().max_tokens());
        first.plus(u64::from(token) * unit_bytes(self.row().payload_bytes()))
    }

    /// Where those of the result in `column` of those that `writer` has for `token` begin in operation `op`, a combine.
    pub fn low_unit_result(&self, op: u64, writer: Rank, token: u32, column: u32) -> Offset {
        let at = u64::from(token) * u64::from(self.low_columns()) + u64::from(column);
        let bytes = unit_bytes(self.row().results().payload_bytes());
        self.low_unit_head(op, writer).plus(UNIT_BYTES + at * bytes)
    }

    /// The most tokens of a batch whose results travel as units in a combine of this kind; 0 where none do. Each token has as many results as choices, or ranks,
    /// and a like share of them from each rank.
    pub fn low_unit_tokens(&self, kind: LowKind) -> u32 {
        let (ranks, topk) = (u64::from(self.topology().ranks()), u64::from(self.shape().topk()));
        let results = if kind == LowKind::PerRank { topk.min(ranks) } else { topk };
        let all = results * (ranks - 1) * self.row().results().payload_bytes();
        if !self.settings().low_latency_units() || all == 0 {
            return 0;
        }
        let tokens = self.settings().low_latency_unit_bytes().saturating_mul(ranks) / all;
        tokens.min(u64::from(self.shape().max_tokens())) as u32
    }

    /// All memory for units that `writer` puts in operation `op`.
    pub fn low_unit_part(&self, op: u64, writer: Rank) -> Span {
        self.low_unit_head(op, writer).span(self.low_units.bytes)
    }

    /// Results of one rank for one token at most.
    pub fn low_columns(&self) -> u32 {
        low_columns(self.shape(), self.topology(), self.settings())
    }

    /// A slot of the staging memory of low latency.
    pub fn low_staging(&self, slot: u32) -> Span {
        self.low.staging.slot(0, 0, 0, slot, self.low.staging.bytes)
    }

    /// Slots of that staging memory.
    pub fn low_staging_slots(&self) -> u32 {
        self.low.staging.per_part as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_cannot_be_numbered_are_refused() {
        let topology = Topology::new(1, 2).unwrap();
        let refused = |low_latency| {
            let shape = Shape::builder().experts(1 << 16).topk(1).hidden(1).max_tokens(1 << 15).build().unwrap();
            let settings = Settings::builder(&shape, &topology).low_latency(low_latency).build().unwrap();
            Layout::new(&shape, &topology, &settings).err().map(|error| error.to_string())
        };
        let limit = "experts x max tokens in low latency is 2147483648, allowed: at most 2147483647";
        assert_eq!((refused(true).as_deref(), refused(false)), (Some(limit), None));
    }

    #[test]
    fn results_of_small_batches_travel_as_units() {
        let tokens = |ranks, units, bytes| {
            let topology = Topology::new(1, ranks).unwrap();
            let shape = Shape::builder().experts(16).topk(8).hidden(1024).max_tokens(128).build().unwrap();
            let settings = Settings::builder(&shape, &topology).low_latency(true).low_latency_units(units);
            let settings = settings.low_latency_unit_bytes(bytes).build().unwrap();
            let layout = Layout::new(&shape, &topology, &settings).unwrap();
            [LowKind::PerRank, LowKind::PerChoice].map(|kind| layout.low_unit_tokens(kind))
        };
        // Of two ranks a token has a result of 2 KiB from the other one, or four; of four, three or six from the others.
        assert_eq!(tokens(2, true, 64 << 10), [32, 8]);
        assert_eq!(tokens(4, true, 64 << 10), [10, 5]);
        assert_eq!(tokens(2, true, u64::MAX), [128, 128]);
        assert_eq!((tokens(2, true, 0), tokens(2, false, u64::MAX)), ([0, 0], [0, 0]));
        // No link lies between.
        assert_eq!(tokens(1, true, u64::MAX), [0, 0]);
    }

    /// A product that would wrap around is of a layout without low latency: nobody gets it.
    #[test]
    fn rows_of_experts_are_counted_where_there_is_low_latency_alone() {
        let topology = Topology::new(1, 2).unwrap();
        let rows = |max_tokens, low_latency| {
            let shape = Shape::builder().experts(1 << 16).topk(1).hidden(1).max_tokens(max_tokens).build().unwrap();
            let settings = Settings::builder(&shape, &topology).low_latency(low_latency).build().unwrap();
            Layout::new(&shape, &topology, &settings).unwrap().low_expert_rows()
        };
        assert_eq!(rows(1 << 4, true), Ok(1 << 20));
        assert!(matches!(rows(1 << 16, false), Err(Error::Unsupported { .. })));
    }

    #[test]
    fn arrivals_rise_with_the_operation_and_say_what_came() {
        let shape = Shape::builder().experts(64).topk(8).hidden(16).max_tokens(128).build().unwrap();
        let mut last = 0;
        for op in [1, 2, 3, 1 << 30, Arrival::last_op(&shape)] {
            for (kind, rows) in [(LowKind::Dispatch, 0), (LowKind::PerChoice, 1024), (LowKind::PerRank, 77)] {
                let arrival = Arrival { op, kind, rows };
                let value = arrival.encode(&shape);
                assert!(value >> VALUE_BITS == 0 && value >= Arrival::due(op, &shape) && value > last);
                assert_eq!(Arrival::decode(value, &shape), Some(arrival));
                last = value;
            }
        }
        assert!(Arrival::last_op(&shape) > 60_000_000_000, "two months of operations of 10 us, and more");
        assert_eq!(Arrival::decode(3 * (Arrival::limit(&shape) + 1), &shape), None);
    }
}
