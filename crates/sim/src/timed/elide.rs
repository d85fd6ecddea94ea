//! Payload that takes time but no memory.
//!
//! A cluster whose payload is elided runs on a layout with rows of one element ([`stand_in`]): the engine, the roles and
//! the user's code are the same, only with a smaller hidden size. Where a row of the stand-in is put, got, copied or
//! summed, the scheduler counts the bytes that the row would have.
//!
//! It knows rows by their length: a role handles a row's payload, header and payload, or header, payload and mask at once,
//! of a row that is dispatched or of one that comes back; where rows are pulled, codes and scales by themselves, padded. The
//! stand-in's hidden size is chosen so that nothing else on a lane that carries rows has one of these lengths. A new form in
//! which rows travel has to be added to [`Elision::new`].

use ep_core::layout::{Choice, OpHeader, ROW_ALIGN, RowFormat, RowHeader, Share};
use ep_core::port::UNIT_DATA;
use ep_core::{Error, Layout, Settings, Shape, Topology};

/// The lengths of a stand-in's rows, and how many bytes are missing in each.
#[derive(Clone, Debug, Default)]
pub(crate) struct Elision {
    missing: Vec<(u64, u64)>,
}

/// A layout with rows as short as can be told from everything else, and what its rows lack.
pub(crate) fn stand_in(shape: &Shape, topology: &Topology, settings: &Settings) -> Result<(Layout, Elision), Error> {
    let mut clash = Error::invalid("hidden", shape.hidden(), "more, to elide payload");
    for hidden in 1..=shape.hidden().min(64) {
        let shorter = Shape::builder()
            .experts(shape.experts())
            .topk(shape.topk())
            .hidden(hidden)
            .max_tokens(shape.max_tokens())
            .element(shape.element())
            .build()?;
        let layout = Layout::new(&shorter, topology, settings)?;
        match Elision::new(shape, &layout) {
            Ok(elision) => return Ok((layout, elision)),
            Err(error) => clash = error,
        }
    }
    Err(clash)
}

impl Elision {
    fn new(shape: &Shape, layout: &Layout) -> Result<Self, Error> {
        let mask = layout.mask_bytes();
        let (whole, short) = (RowFormat::new(shape), layout.row());
        let bare = (size_of::<RowHeader>() + shape.topk() as usize * size_of::<Choice>()) as u64;
        let forms = |row: &RowFormat| {
            let (header, payload) = (row.header_bytes(), row.payload_bytes());
            let own = size_of::<RowHeader>() as u64;
            // Alone; staged for direct placement; in a near ring or a low-latency slot; in a far ring; a low-latency result.
            [payload, bare + payload, header + payload, row.wire_bytes() + mask, own + payload]
        };
        let mut missing: Vec<(u64, u64)> = forms(short).into_iter().zip(forms(&whole)).collect();
        missing.extend(forms(&short.results()).into_iter().zip(forms(&whole.results())));
        let (pulled, heads) = pulled_forms(&whole, layout);
        missing.extend(pulled);
        missing.iter_mut().for_each(|(short, whole)| *whole -= *short);
        missing.sort_unstable();
        missing.dedup();
        let opening = size_of::<OpHeader>() as u64;
        let shares = size_of::<Share>() as u64 * u64::from(layout.topology().ranks_per_node());
        // What says how many rows come as units, how many each expert gets, and their headers.
        let units = layout.settings().low_latency_units().then_some([
            UNIT_DATA,
            4 * u64::from(layout.local_experts()),
            layout.low_unit_header_bytes(),
        ]);
        // Headers that go ahead of rows, as many together as there is room for.
        let room = if layout.settings().low_latency_announced() { layout.low_staging(0).len } else { 0 };
        let heads_ahead = (1..=room / short.header_bytes()).map(|rows| rows * short.header_bytes());
        let others =
            [opening, opening + shares, bare].into_iter().chain(units.into_iter().flatten()).chain(heads_ahead);
        let others: Vec<u64> = others.chain(heads).collect();
        let twice = missing.windows(2).any(|pair| pair[0].0 == pair[1].0);
        if twice || missing.iter().any(|(short, _)| others.contains(short)) {
            return Err(Error::invalid("hidden", shape.hidden(), "rows that differ in length from other messages"));
        }
        Ok(Self { missing })
    }

    /// Whether any payload is missing.
    pub(super) fn is_on(&self) -> bool {
        !self.missing.is_empty()
    }

    /// The bytes to count for a put, get or piece of work of `bytes` bytes.
    pub(super) fn counted(&self, bytes: u64) -> u64 {
        let form = self.missing.iter().find(|(short, _)| *short == bytes);
        bytes + form.map_or(0, |&(_, missing)| missing)
    }
}

/// Lengths, in the stand-in and as they are, in which a row leaves an outbox by itself; and those of heads, which have no payload.
fn pulled_forms(whole: &RowFormat, layout: &Layout) -> (Vec<(u64, u64)>, Vec<u64>) {
    if !layout.settings().has_outboxes() {
        return (Vec::new(), Vec::new());
    }
    let short = layout.row();
    let padded = |bytes: u64| bytes.next_multiple_of(ROW_ALIGN);
    let codes = (short.scales_offset(), whole.scales_offset());
    let scales = (padded(short.scales_stride()), padded(whole.scales_stride()));
    let forms = [codes, scales].into_iter().filter(|&(short, _)| short > 0).collect();
    (forms, vec![short.header_bytes(), layout.outbox_head_bytes()])
}

#[cfg(test)]
mod tests {
    use ep_core::{Element, Scaling};

    use super::*;

    fn elided(nodes: u32, locals: u32, topk: u32) -> (Layout, Elision) {
        let shape = Shape::builder().experts(nodes * locals * 32).topk(topk).hidden(7168).build().unwrap();
        let topology = Topology::new(nodes, locals).unwrap();
        stand_in(&shape, &topology, &Settings::auto(&shape, &topology)).unwrap()
    }

    #[test]
    fn rows_count_in_full_and_other_messages_as_they_are() {
        let (layout, elision) = elided(2, 4, 8);
        assert_eq!(layout.shape().hidden(), 1);
        assert_eq!(elision.counted(2), 14336);
        assert_eq!(elision.counted(80 + 2), 80 + 14336);
        assert_eq!(elision.counted(layout.far_wire_bytes()), 80 + 14336 + 4);
        assert_eq!([0, 32, 64, 80, 8].map(|bytes| elision.counted(bytes)), [0, 32, 64, 80, 8]);
    }

    #[test]
    fn fp8_rows_and_their_results_count_as_what_they_are() {
        let shape = Shape::builder().experts(64).topk(8).hidden(7168).element(Element::Fp8(Scaling::Exact));
        let (shape, topology) = (shape.build().unwrap(), Topology::new(2, 4).unwrap());
        let (layout, elision) = stand_in(&shape, &topology, &Settings::auto(&shape, &topology)).unwrap();
        let row = layout.row();
        assert_eq!(elision.counted(80 + row.payload_bytes()), 80 + 7168 + 224);
        assert_eq!(elision.counted(80 + row.results().payload_bytes()), 80 + 14336);
        assert_eq!(elision.counted(16 + row.results().payload_bytes()), 16 + 14336);
    }

    #[test]
    fn a_row_as_long_as_an_opening_is_made_longer() {
        // 272 + 16 + 8 bytes of row and mask, 32 + 33 x 8 bytes of opening.
        let (layout, elision) = elided(2, 33, 32);
        assert!(layout.shape().hidden() > 1);
        assert_eq!(elision.counted(32 + 33 * 8), 32 + 33 * 8);
    }
}
