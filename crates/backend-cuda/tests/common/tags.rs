//! Tags of units after billions of operations: memory for units is cleared, and tags wrap around. Nobody notices.
#![allow(unreachable_pub)] // The test targets that hold it are crates of their own.

use ep_conformance::low_latency::scenario::{Scenario, Turn};
use ep_conformance::workload::RoutingKind;
use ep_conformance::{Backend, Setup};
use ep_core::Element;
use ep_core::port::Tag;
use libtest_mimic::Trial;

/// A dispatch and a combine.
const TURN: Turn = Turn { at_experts: true, ..Turn::PLAIN };
/// Of each scenario: four operations of each bank.
const TURNS: usize = 4;

/// The last operation of the first stretch of tags.
fn end_of_the_first_stretch() -> u64 {
    let next = (1..64).map(|power| 1u64 << power).find(|&serial| Tag::era(serial) == 1);
    next.map_or(u64::MAX, |serial| serial - 1)
}

/// Operations 3 and 4 are the first of a stretch, or tags wrap around at operation 3; operations in flight, too.
fn nobody_notices<B: Backend>(backend: &B) -> Result<(), String> {
    for before in [end_of_the_first_stretch() - 2, u64::from(u32::MAX) - 3] {
        for ahead in [false, true] {
            let scenario = Scenario {
                // Results for the third rank's batch of four tokens travel as units, those for the first's of six lie in slots.
                seed: 12,
                nodes: 1,
                local_experts: 2,
                topk: 3,
                hidden: 40,
                element: Element::Bf16,
                max_tokens: 6,
                tokens: vec![6, 0, 4],
                routing: RoutingKind::Uniform,
                drop: 0.0,
                turns: vec![Turn { ahead, ..TURN }; TURNS],
                zombie: None,
            };
            let setup = scenario.setup().map_err(|error| error.to_string())?;
            let setup = Setup { settings: setup.settings.with_operations_before(before), ..setup };
            let compared = scenario.check_in(backend, &setup).map_err(|error| format!("after {before}: {error}"))?;
            if compared.rows == 0 {
                return Err(format!("after {before}: nothing was compared"));
            }
        }
    }
    Ok(())
}

/// `absent`: why nothing runs here.
pub fn trial<B: Backend + Send + 'static>(backend: B, absent: Option<&'static str>) -> Trial {
    let name = "tags::memory_is_cleared_and_tags_wrap_around";
    match absent {
        Some(reason) => Trial::test(name, move || Err(reason.into())).with_ignored_flag(true),
        None => Trial::test(name, move || nobody_notices(&backend).map_err(Into::into)),
    }
}
