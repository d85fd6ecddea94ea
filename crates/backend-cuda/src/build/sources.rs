//! The kernel files, and the headers they include.

use ep_core::transport::DeviceSource;

use super::Target;
use crate::{args, proxy};

/// A kernel file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Source {
    /// Positions and counts.
    Positions,
    /// Membership and counts without a communicator.
    Members,
    /// Exchange of counts.
    Counts,
    /// Direct placement.
    Dispatch,
    /// Headers of placed rows.
    Unpack,
    /// Zeros behind the rows that came.
    Blank,
    /// Where rows by expert stand.
    Slots,
    /// Rows by expert.
    Spread,
    /// Sums of the results of rows by expert.
    Fold,
    /// Headers of offered rows.
    Offer,
    /// Saying that none are offered, between nodes.
    OfferNone,
    /// Rows through rings.
    DispatchRing,
    /// Sums of pulled rows.
    Combine,
    /// Results through rings.
    CombineRing,
    /// Rows by way of outboxes.
    DispatchPulled,
    /// Sums of rows in outboxes.
    CombinePulled,
    /// Telling a rank that it was given up.
    GiveUp,
    /// Low-latency dispatch.
    LowDispatch,
    /// Low-latency combine.
    LowCombine,
    /// Going on without a rank in low latency.
    LowMask,
    /// Telling whom a rank is about to give up, between nodes.
    LowLastWords,
    /// Meeting of all ranks, for measurements.
    Meet,
    /// What the links carry, for measurements.
    Ceiling,
    /// Scripts of verbs, for tests.
    Probe,
    /// Posts to a lane between nodes, for tests and measurements.
    Posts,
    /// Moves what a network made of software carries.
    Move,
    /// Plays adapters of a network, for tests and for hosts that have none.
    Hca,
    /// Consumes rows of low latency as they come, for tests.
    Consumer,
}

/// All kernel files.
pub const ALL: [Source; 28] = [
    Source::Positions,
    Source::Members,
    Source::Counts,
    Source::Dispatch,
    Source::Unpack,
    Source::Blank,
    Source::Slots,
    Source::Spread,
    Source::Fold,
    Source::Offer,
    Source::OfferNone,
    Source::DispatchRing,
    Source::Combine,
    Source::CombineRing,
    Source::DispatchPulled,
    Source::CombinePulled,
    Source::GiveUp,
    Source::LowDispatch,
    Source::LowCombine,
    Source::LowMask,
    Source::LowLastWords,
    Source::Meet,
    Source::Ceiling,
    Source::Probe,
    Source::Posts,
    Source::Move,
    Source::Hca,
    Source::Consumer,
];

/// Ranks whose rows a combine has in flight at the same time where they go through registers; it is compiled for each.
const PULL_WIDTHS: [u32; 4] = [1, 2, 4, 8];

/// Whether GPUs of an architecture have the bulk copy engine.
pub(crate) fn copies_in_bulk(arch: &str) -> bool {
    let digits: String = arch.chars().filter(char::is_ascii_digit).collect();
    digits.parse::<u32>().is_ok_and(|number| number >= 90)
}

/// The kernels of a combine, each with the ranks that it is for at most.
pub(crate) fn combines(arch: &str) -> Vec<(u32, Target)> {
    let plain = Target::new(Source::Combine, arch);
    if copies_in_bulk(arch) {
        return vec![(u32::MAX, plain)];
    }
    PULL_WIDTHS.iter().map(|&width| (width, plain.clone().define("EP_PULL_WIDTH", width))).collect()
}

/// The combine of low latency that waits for results while they are made: apart, so that others pay nothing for it.
pub(crate) fn low_combine_ready(arch: &str) -> Target {
    Target::new(Source::LowCombine, arch).define("EP_LOW_READY", 1)
}

/// File, kernel and text of each source.
macro_rules! sources {
    ($($source:ident: $file:literal $kernel:literal;)*) => {
        impl Source {
            /// Its file, in the folder of kernels.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$source => $file,)* }
            }

            /// The kernel in it, as the linker sees its name.
            pub const fn kernel(self) -> &'static str {
                match self { $(Self::$source => $kernel,)* }
            }

            /// Its text.
            pub const fn text(self) -> &'static str {
                match self { $(Self::$source => include_str!(concat!("../../kernels/", $file)),)* }
            }
        }
    };
}

sources! {
    Positions: "throughput/positions.cu" "ep_positions_kernel";
    Members: "throughput/members.cu" "ep_members_kernel";
    Counts: "throughput/counts.cu" "ep_counts_kernel";
    Dispatch: "throughput/dispatch.cu" "ep_dispatch_kernel";
    Unpack: "throughput/unpack.cu" "ep_unpack_kernel";
    Blank: "throughput/blank.cu" "ep_blank_kernel";
    Slots: "throughput/slots.cu" "ep_slots_kernel";
    Spread: "throughput/spread.cu" "ep_spread_kernel";
    Fold: "throughput/fold.cu" "ep_fold_kernel";
    Offer: "throughput/offer.cu" "ep_offer_kernel";
    OfferNone: "throughput/offer_none.cu" "ep_offer_none_kernel";
    DispatchRing: "throughput/dispatch_ring.cu" "ep_dispatch_ring_kernel";
    Combine: "throughput/combine.cu" "ep_combine_kernel";
    CombineRing: "throughput/combine_ring.cu" "ep_combine_ring_kernel";
    DispatchPulled: "throughput/dispatch_pulled.cu" "ep_dispatch_pulled_kernel";
    CombinePulled: "throughput/combine_pulled.cu" "ep_combine_pulled_kernel";
    GiveUp: "throughput/give_up.cu" "ep_give_up_kernel";
    LowDispatch: "low_latency/dispatch.cu" "_ZN14ep_low_latency8dispatchE6EpRank17EpLowDispatchArgs";
    LowCombine: "low_latency/combine.cu" "_ZN14ep_low_latency7combineE6EpRank16EpLowCombineArgs";
    LowMask: "low_latency/mask.cu" "ep_low_mask_kernel";
    LowLastWords: "low_latency/last_words.cu" "ep_low_last_words_kernel";
    Meet: "measure/meet.cu" "ep_meet_kernel";
    Ceiling: "measure/ceiling.cu" "ep_ceiling_kernel";
    Probe: "checks/probe.cu" "ep_probe_kernel";
    Posts: "checks/posts.cu" "ep_posts_kernel";
    Move: "far/move.cu" "ep_move_kernel";
    Hca: "far/hca.cu" "ep_hca_kernel";
    Consumer: "checks/consumer.cu" "ep_consumer_kernel";
}

impl Source {
    /// Everything that it is compiled to for an architecture.
    pub fn variants(self, arch: &str) -> Vec<Target> {
        let plain = Target::new(self, arch);
        match self {
            Self::Combine => combines(arch).into_iter().map(|(_, target)| target).collect(),
            Self::LowCombine => vec![plain, low_combine_ready(arch)],
            Self::Posts => vec![plain.over(&proxy::source())],
            _ => vec![plain],
        }
    }

    /// What it is compiled to for ranks of several nodes, whose lanes a transport with this text has.
    pub fn between_nodes(self, arch: &str, lanes: &DeviceSource) -> Option<Target> {
        use Source::{
            CombineRing, Counts, DispatchRing, LowCombine, LowDispatch, LowLastWords, LowMask, Meet, OfferNone, Probe,
            Slots, Unpack,
        };
        // A rank that fails tells those of other nodes, too.
        let speaks = matches!(self, Counts | DispatchRing | Unpack | Slots | CombineRing | OfferNone | Probe | Meet);
        let low = matches!(self, LowDispatch | LowCombine | LowMask | LowLastWords);
        (speaks || low).then(|| Target::new(self, arch).over(lanes))
    }
}

/// Everything that a GPU of an architecture is given before it is used: all kernels but those of tests and measurements.
pub fn targets(arch: &str) -> Vec<Target> {
    let others = [
        Source::Meet,
        Source::Ceiling,
        Source::Probe,
        Source::Posts,
        Source::Move,
        Source::Hca,
        Source::Consumer,
        Source::OfferNone,
        Source::LowLastWords,
    ];
    ALL.into_iter().filter(|source| !others.contains(source)).flat_map(|source| source.variants(arch)).collect()
}

/// What a GPU is given besides where ranks of several nodes use it: all that reaches other nodes but the scripts of tests.
pub(crate) fn targets_between(arch: &str, lanes: &DeviceSource) -> Vec<Target> {
    let all = ALL.into_iter().filter(|source| *source != Source::Probe);
    all.filter_map(|source| source.between_nodes(arch, lanes)).collect()
}

/// The headers of these names, as they are in the folder of kernels.
macro_rules! headers {
    ($($folder:literal: $($name:literal)*;)*) => {
        [$($(($name, include_str!(concat!("../../kernels/", $folder, $name))),)*)*]
    };
}

/// Those that lie in the folder of kernels.
const HEADERS: [(&str, &str); 73] = headers! {
    "far/": "ep_far_lanes.h" "ep_far_post.h" "ep_hca_copy.h" "ep_hca_element.h" "ep_hca_piece.h";
    "near/": "ep_bulk.h" "ep_device.h" "ep_fail.h" "ep_meet.h" "ep_near.h" "ep_rank.h" "ep_wait.h";
    "": "ep_quant.h" "ep_sum.h";
    "throughput/": "ep_carry.h" "ep_combine_due.h" "ep_combine_far.h" "ep_combine_ring.h" "ep_combine_rows.h" "ep_combine_team.h" "ep_copy.h" "ep_counts_far.h"
        "ep_dispatch_far.h" "ep_dispatch_ring.h" "ep_far_ring.h" "ep_flow.h" "ep_forward.h" "ep_last_look.h" "ep_notes.h" "ep_offers.h" "ep_outbox.h"
        "ep_pieces.h" "ep_place_far.h" "ep_pull.h" "ep_pull_bulk.h" "ep_pull_loads.h" "ep_pulled.h" "ep_pulled_receiver.h" "ep_pulled_sender.h"
        "ep_return_team.h" "ep_ring.h" "ep_send_far.h" "ep_slots.h" "ep_summing.h" "ep_team.h" "ep_unpack.h";
    "low_latency/": "ep_low.h" "ep_low_arrivals.h" "ep_low_banks.h" "ep_low_early.h" "ep_low_end.h" "ep_low_far.h"
        "ep_low_far_results.h" "ep_low_headers.h" "ep_low_packed.h" "ep_low_ready.h" "ep_low_receive_cells.h" "ep_low_receive_units.h" "ep_low_receiver.h"
        "ep_low_reduce_cells.h" "ep_low_reduce_units.h" "ep_low_results.h" "ep_low_return.h" "ep_low_return_cells.h"
        "ep_low_return_units.h" "ep_low_rows.h" "ep_low_send.h" "ep_low_send_cells.h" "ep_low_send_units.h" "ep_low_shares.h" "ep_low_units.h" "ep_low_watch.h";
    "checks/": "ep_test.h";
};

/// The headers, by the names by which they are included. Those that are generated are written anew: they are never stale.
pub fn headers() -> Vec<(&'static str, String)> {
    let kept = HEADERS.iter().map(|&(name, text)| (name, text.to_owned()));
    ep_core::device::headers().into_iter().chain([("ep_args.h", args::header())]).chain(kept).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Text without comments.
    fn code(text: &str) -> String {
        let mut parts = text.split("/*");
        let first = parts.next().unwrap_or_default().to_owned();
        first + &parts.filter_map(|part| part.split_once("*/")).map(|(_, code)| code).collect::<String>()
    }

    /// The lines of kernels outside of the near verbs that could reach a window by another way than a verb.
    fn ways_around(texts: &[(&str, &str)]) -> Vec<String> {
        let forbidden = ["EpNear", ".windows", "\"st.", " st.", "cp.async.bulk.global", "\"red.", " red.", "multimem"];
        let mut found = Vec::new();
        for (name, text) in texts {
            for line in code(text).lines().filter(|line| forbidden.iter().any(|word| line.contains(word))) {
                found.push(format!("{name}: {}", line.trim()));
            }
        }
        found
    }

    /// Other stores do not compile: only the near verbs know the address of an `EpAt`.
    #[test]
    fn kernels_reach_peers_by_verbs_alone() {
        let near = ["ep_bulk.h", "ep_device.h", "ep_fail.h", "ep_near.h", "ep_wait.h"];
        let headers = HEADERS.iter().copied().filter(|(name, _)| !near.contains(name));
        let all: Vec<_> = headers.chain(ALL.map(|source| (source.name(), source.text()))).collect();
        assert!(all.len() > 30);
        assert_eq!(ways_around(&all), Vec::<String>::new());
        let planted =
            "/* EpNear */ asm volatile(\"st.relaxed.sys.global.u64 [%0], %1;\" :: ...);\nep_u8* p = EpNear::of(at);\n";
        assert_eq!(ways_around(&[("planted", planted)]).len(), 2);
    }

    /// Rows of windows are read by gets: of what no kernel writes (`ld.global.nc`) a multiprocessor may keep what lay there before. The caller's rows are such.
    #[test]
    fn windows_are_not_read_as_what_nobody_writes() {
        let all = HEADERS.iter().copied().chain(ALL.map(|source| (source.name(), source.text())));
        let reads = |text: &str| code(text).contains("ep_ld16_once(") || code(text).contains(".nc.");
        let found: Vec<_> = all.filter(|(_, text)| reads(text)).map(|(name, _)| name).collect();
        assert_eq!(found, ["ep_device.h", "ep_copy.h"]);
    }
}
