//! Calls of one rank on any machine, as the benchmarks repeat them: the same batch and routing each time.

use std::hint::black_box;

use ep_core::engine::endpoint::RoutingOf;
use ep_core::engine::{Combine, Engine, Handle, HostRows, Routing};
use ep_core::machine::Machine;
use ep_core::{Endpoint as _, Shape};

/// Elements of a row.
pub const HIDDEN: u32 = 7168;
/// Bytes of a row: bf16.
pub const ROW_BYTES: usize = HIDDEN as usize * 2;

/// What is timed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Part {
    /// A dispatch.
    Dispatch,
    /// A combine, out of ordinary memory or out of the window.
    Combine {
        /// Out of the window.
        pull: bool,
    },
    /// A dispatch and the combine of what the first one brought.
    Round,
}

/// Top-8 of 64 experts, rows of [`HIDDEN`] elements.
///
/// # Panics
/// When there are too many tokens for a shape.
pub fn shape(tokens: u32) -> Shape {
    Shape::builder().experts(64).topk(8).hidden(HIDDEN).max_tokens(tokens).build().expect("a valid shape")
}

/// A rank with all that its calls need.
#[derive(Debug)]
pub struct Calls<M: Machine> {
    ep: Engine<M>,
    part: Part,
    x: HostRows<M::Window>,
    routing: RoutingOf<Engine<M>>,
    handle: Handle,
    y: HostRows<M::Window>,
}

impl<M: Machine> Calls<M> {
    /// Gets ready to call `part` with `[tokens, topk]` choices; ends after a dispatch, which all ranks leave at about the same
    /// time.
    ///
    /// # Panics
    /// When a call fails.
    pub async fn new(mut ep: Engine<M>, part: Part, topk_idx: Vec<i64>) -> Self {
        let tokens = topk_idx.len() as u32 / ep.shape().topk();
        let x = ep.rows(&vec![1; tokens as usize * ROW_BYTES], tokens).expect("rows");
        let routing = Routing::TopK { topk_idx, topk_weights: None };
        let handle = ep.dispatch(&x, &routing).await.expect("a dispatch").handle;
        let rows = vec![1; handle.rows() as usize * ROW_BYTES];
        let y = if part == (Part::Combine { pull: true }) {
            let mut y = ep.output(&handle).expect("room in the arena");
            ep.store(&mut y, 0, &rows).expect("as many rows");
            y
        } else {
            ep.rows(&rows, handle.rows()).expect("rows")
        };
        drop(ep.dispatch(&x, &routing).await.expect("a dispatch"));
        Self { ep, part, x, routing, handle, y }
    }

    /// Rows that this rank receives in a dispatch, its own included.
    pub fn received(&self) -> u32 {
        self.handle.rows()
    }

    /// Those that come from other ranks.
    ///
    /// # Panics
    /// Never: such an engine keeps its counts.
    pub fn carried(&self) -> u32 {
        let me = self.ep.rank();
        self.received() - self.handle.exchange().expect("counts of this engine").rows(me, me)
    }

    /// Calls it once.
    ///
    /// # Panics
    /// When a call fails.
    pub async fn call(&mut self) {
        if matches!(self.part, Part::Dispatch | Part::Round) {
            drop(black_box(self.ep.dispatch(&self.x, &self.routing).await.expect("a dispatch")));
        }
        if self.part != Part::Dispatch {
            drop(black_box(self.ep.combine(&self.y, &self.handle, Combine::default()).await.expect("a combine")));
        }
    }
}
