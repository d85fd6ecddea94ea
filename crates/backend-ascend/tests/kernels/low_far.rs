//! Low latency between servers, each of one rank: all goes by queues. And the faults that are planted in what posts there.

use ep_ascend::Roles;
use ep_ascend::args::Plant;
use ep_conformance::harness::share;
use ep_core::Topology;

use crate::low::{Planted, RANKS, SEEDS, Story, found_over};

/// What was wrong with what the ranks did; nothing where all is as it must be.
fn found(story: Story, seed: u64, plant: u32) -> Option<String> {
    let roles = Roles { senders: 2, coordinators: 2, forwarders: 1, forwarder_coordinators: 0, receivers: 2 };
    let roles = match story {
        // Several cores for each rank, and each queue another one's.
        Story::Wide | Story::Left => Roles { senders: 4, coordinators: 3, receivers: 4, ..roles },
        _ => roles,
    };
    found_over(Topology::new(RANKS, 1).expect("a topology"), roles, story, seed, plant)
}

pub(crate) const PLANTED: &[Planted] = &[
    (Plant::LowFarStagingEarly, Story::Close, &["oracle: ", "refused: "]),
    (Plant::LowFarOneMore, Story::Rounds, &["oracle: ", "refused: ", "roce: ", "deadline: "]),
    (Plant::LowFarArrivalFirst, Story::Rounds, &["oracle: ", "refused: "]),
    (Plant::LowFarHelpersUnawaited, Story::Wide, &["oracle: ", "refused: "]),
    (Plant::LowFarCut, Story::Rounds, &["oracle: "]),
    (Plant::LowFarSilent, Story::Chain, &["failure: "]),
    (Plant::LowFarUnreceived, Story::Rounds, &["deadline: "]),
    (Plant::LowFarMaskUntold, Story::Masked, &["failure: "]),
    (Plant::LowFarUndrained, Story::Ends, &["failure: "]),
    // The queues are throughput mode's, and so are these faults.
    (Plant::OwnerStays, Story::Rounds, &["roce: "]),
    (Plant::OtherDepth, Story::Rounds, &["roce: "]),
    (Plant::KeysSwapped, Story::Rounds, &["roce: "]),
    (Plant::OneWord, Story::Rounds, &["oracle: ", "refused: ", "deadline: "]),
];

/// Seeds until a fault must be caught whose word must be posted again before the card has read it: one in eight shows it.
const RARE: u64 = 40;

#[test]
fn each_fault_in_low_latency_between_servers_is_caught_by_what_it_breaks() {
    for (plant, story, said) in PLANTED {
        let seeds = if *plant as u32 == Plant::OneWord as u32 { RARE } else { SEEDS };
        let caught = (1..=seeds).find_map(|seed| found(*story, seed, *plant as u32));
        let caught = caught.unwrap_or_else(|| panic!("{plant:?} is not caught in {seeds} seeds"));
        assert!(said.iter().any(|said| caught.starts_with(said)), "{plant:?} is caught as {caught}, expected {said:?}");
    }
}

#[test]
fn low_latency_between_servers_without_a_plant_does_as_it_must() {
    let some = [Story::Rounds, Story::Wide, Story::Int8, Story::Ahead, Story::Close, Story::OtherKind, Story::Masked];
    for story in some.into_iter().chain([
        Story::OtherMode,
        Story::Chain,
        Story::LateChain,
        Story::Absent,
        Story::Left,
        Story::Ends,
    ]) {
        for seed in 1..=share(2, 1) {
            assert_eq!(found(story, seed, 0), None, "{story:?}, seed {seed}");
        }
    }
    assert_eq!(found(Story::Long, 1, 0), None, "long rows");
}
