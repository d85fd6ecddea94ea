//! The cases, by what they are about.

mod bounds;
mod by_expert;
mod campaign;
mod engine;
mod failures;
mod fixture;
mod low_by_source;
mod low_latency;
mod low_lost;
mod low_nodes;
mod low_packed;
mod memory;
mod misuse;
mod modes;
mod nodes;
mod overflow;
#[cfg(feature = "plant")]
mod planted;
mod pulled;
mod rules;
mod zombies;

use crate::harness::Case;

/// All cases of the suite.
pub(crate) fn all<B: crate::backend::Backend>() -> Vec<Case<B>> {
    let mut all = rules::cases();
    all.extend(engine::cases());
    all.extend(memory::cases());
    all.extend(pulled::cases());
    all.extend(overflow::cases());
    all.extend(bounds::cases());
    all.extend(by_expert::cases());
    all.extend(failures::cases());
    all.extend(modes::cases());
    all.extend(low_latency::cases());
    all.extend(low_by_source::cases());
    all.extend(low_packed::cases());
    all.extend(low_lost::cases());
    all.extend(low_nodes::cases());
    all.extend(zombies::cases());
    all.extend(misuse::cases());
    all.extend(nodes::cases());
    #[cfg(feature = "plant")]
    all.extend(planted::cases());
    all.extend(campaign::cases());
    all
}
