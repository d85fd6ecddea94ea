//! Kernels that are compiled for windows of one shape and topology: what these say is constant to them. They have a fifth fewer instructions, and divide
//! by nothing that they are told at run time. They serve any size of arena and rings.

use std::sync::Arc;

use ep_core::device::header_of_shape;
use ep_core::layout::KernelWindow;

use super::{Source, Target};

/// Kernels that gain, as was measured. Others are bound by what they move.
const GAIN: [Source; 5] = [Source::Positions, Source::Counts, Source::Combine, Source::LowDispatch, Source::LowCombine];

/// In the environment: 0 where kernels are not specialised though nobody says so otherwise.
const VARIABLE: &str = "EP_CUDA_SPECIALISE";

/// Whether kernels are specialised where nobody says.
pub(crate) fn specialises() -> bool {
    says(&std::env::var(VARIABLE).unwrap_or_default())
}

fn says(value: &str) -> bool {
    if !matches!(value, "" | "0" | "1") {
        tracing::warn!("{VARIABLE} is {value}, allowed: 0 and 1; it is taken for 1");
    }
    value != "0"
}

/// The shape of a window, as kernels are specialised for it.
pub(crate) fn shape_of(window: &KernelWindow) -> Arc<str> {
    header_of_shape(window).into()
}

impl Target {
    /// For windows of one [shape](shape_of) alone, where its kernel gains from that. Its parameters stay what they are.
    #[must_use]
    pub(crate) fn specialised(self, shape: &Arc<str>) -> Self {
        Self { shape: GAIN.contains(&self.source).then(|| Arc::clone(shape)), ..self }
    }
}

/// A usual shape: 8 ranks, and FP8 rows of 7168 elements for 8 of 256 experts.
#[cfg(feature = "workshop")]
pub(super) fn usual() -> Arc<str> {
    use ep_core::quant::Scaling;
    use ep_core::{Element, Layout, Settings, Shape, Topology};

    let shape =
        Shape::builder().experts(256).topk(8).hidden(7168).max_tokens(128).element(Element::Fp8(Scaling::Exact));
    let shape = shape.build().expect("such a shape");
    let topology = Topology::new(1, 8).expect("such ranks");
    let settings = Settings::builder(&shape, &topology).low_latency(true).build().expect("such settings");
    let layout = Layout::new(&shape, &topology, &settings).and_then(Layout::with_kernels).expect("room");
    shape_of(&KernelWindow::from(&layout))
}

#[cfg(test)]
mod tests {
    use ep_core::{Layout, Settings, Shape, Topology};

    use super::*;
    use crate::build::cache::Key;

    #[test]
    fn only_a_zero_says_that_they_are_not() {
        assert_eq!(["", "1", "0", "no"].map(says), [true, true, false, true]);
    }

    fn shape(ranks: u32, arena: u64, slots: u32) -> Arc<str> {
        let shape = Shape::builder().experts(8).topk(2).hidden(64).build().unwrap();
        let topology = Topology::new(1, ranks).unwrap();
        let settings = Settings::builder(&shape, &topology).arena_bytes(arena).slots(slots).build().unwrap();
        shape_of(&KernelWindow::from(&Layout::new(&shape, &topology, &settings).unwrap()))
    }

    #[test]
    fn each_shape_has_code_of_its_own_where_that_gains() {
        let name = |source, shape: Option<Arc<str>>| {
            let target = Target::new(source, "sm_90a");
            let target = shape.map_or_else(|| target.clone(), |shape| target.clone().specialised(&shape));
            Key::shipped(&target).name().to_owned()
        };
        let names = |source| [None, Some(shape(2, 0, 4)), Some(shape(4, 0, 4))].map(|shape| name(source, shape));
        let [all, two, four] = names(Source::LowDispatch);
        assert!(all != two && all != four && two != four);
        assert_eq!(names(Source::Dispatch), [(); 3].map(|()| name(Source::Dispatch, None)));
        assert_eq!(name(Source::LowDispatch, Some(shape(2, 1 << 20, 8))), two, "whatever its arena and rings");
    }

    #[test]
    fn its_numbers_are_constants_and_its_kernels_take_what_they_took() {
        let layout = |target: &Target| {
            target.headers().into_iter().find(|(name, _)| *name == "ep_layout.h").expect("the header").1
        };
        let plain = Target::new(Source::Combine, "sm_90a");
        let text = layout(&plain.clone().specialised(&shape(4, 0, 4)));
        let constants = text.lines().filter(|line| line.starts_with("    static constexpr ")).count();
        assert_eq!(constants, KernelWindow::OF_SHAPE.len(), "names of fields");
        assert!(text.contains("    static constexpr ep_u32 ranks = 4u;\n"));
        let offsets = |text: &str| {
            let asserted = text.lines().filter(|line| line.contains("offsetof(EpWindow, ")).map(str::to_owned);
            asserted.map(|line| line.replace("_given", "")).collect::<Vec<_>>()
        };
        assert_eq!(offsets(&text), offsets(&layout(&plain)));
        assert!(!offsets(&text).is_empty());
    }
}
