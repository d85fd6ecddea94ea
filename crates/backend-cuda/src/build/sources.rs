//! The kernel files, and the headers they include.

use super::Target;
use crate::args;
use crate::rank::PIECES;

/// A kernel file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Source {
    /// Positions and counts.
    Layout,
    /// Membership and counts without a communicator.
    Members,
    /// Exchange of counts.
    Counts,
    /// Direct placement.
    Dispatch,
    /// Headers of placed rows.
    Unpack,
    /// Headers of offered rows.
    Offer,
    /// Rows through rings.
    DispatchRing,
    /// Sums of pulled rows.
    Combine,
    /// Results through rings.
    CombineRing,
    /// Low-latency dispatch.
    LowDispatch,
    /// Low-latency combine.
    LowCombine,
    /// Going on without a rank in low latency.
    LowMask,
    /// Meeting of all ranks, for measurements.
    Meet,
    /// What the links carry, for measurements.
    Ceiling,
    /// Scripts of verbs, for tests.
    Probe,
}

/// All kernel files.
pub const ALL: [Source; 15] = [
    Source::Layout,
    Source::Members,
    Source::Counts,
    Source::Dispatch,
    Source::Unpack,
    Source::Offer,
    Source::DispatchRing,
    Source::Combine,
    Source::CombineRing,
    Source::LowDispatch,
    Source::LowCombine,
    Source::LowMask,
    Source::Meet,
    Source::Ceiling,
    Source::Probe,
];

/// Ranks whose rows a combine has in flight at the same time; it is compiled for each.
pub(crate) const PULL_WIDTHS: [u32; 4] = [1, 2, 4, 8];

impl Source {
    /// Its file name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Layout => "layout.cu",
            Self::Members => "members.cu",
            Self::Counts => "counts.cu",
            Self::Dispatch => "dispatch.cu",
            Self::Unpack => "unpack.cu",
            Self::Offer => "offer.cu",
            Self::Combine => "combine.cu",
            Self::DispatchRing => "dispatch_ring.cu",
            Self::CombineRing => "combine_ring.cu",
            Self::LowDispatch => "low_dispatch.cu",
            Self::LowCombine => "low_combine.cu",
            Self::LowMask => "low_mask.cu",
            Self::Meet => "meet.cu",
            Self::Ceiling => "ceiling.cu",
            Self::Probe => "probe.cu",
        }
    }

    /// The kernel in it, as the linker sees its name.
    pub const fn kernel(self) -> &'static str {
        match self {
            Self::Layout => "ep_layout_kernel",
            Self::Members => "ep_members_kernel",
            Self::Counts => "ep_counts_kernel",
            Self::Dispatch => "ep_dispatch_kernel",
            Self::Unpack => "ep_unpack_kernel",
            Self::Offer => "ep_offer_kernel",
            Self::Combine => "ep_combine_kernel",
            Self::DispatchRing => "ep_dispatch_ring_kernel",
            Self::CombineRing => "ep_combine_ring_kernel",
            // ep_low_latency::dispatch(EpRank, EpLowDispatchArgs) and ep_low_latency::combine(EpRank, EpLowCombineArgs).
            Self::LowDispatch => "_ZN14ep_low_latency8dispatchE6EpRank17EpLowDispatchArgs",
            Self::LowCombine => "_ZN14ep_low_latency7combineE6EpRank16EpLowCombineArgs",
            Self::LowMask => "ep_low_mask_kernel",
            Self::Meet => "ep_meet_kernel",
            Self::Ceiling => "ep_ceiling_kernel",
            Self::Probe => "ep_probe_kernel",
        }
    }

    /// Its text.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Layout => include_str!("../../kernels/layout.cu"),
            Self::Members => include_str!("../../kernels/members.cu"),
            Self::Counts => include_str!("../../kernels/counts.cu"),
            Self::Dispatch => include_str!("../../kernels/dispatch.cu"),
            Self::Unpack => include_str!("../../kernels/unpack.cu"),
            Self::Offer => include_str!("../../kernels/offer.cu"),
            Self::Combine => include_str!("../../kernels/combine.cu"),
            Self::DispatchRing => include_str!("../../kernels/dispatch_ring.cu"),
            Self::CombineRing => include_str!("../../kernels/combine_ring.cu"),
            Self::LowDispatch => include_str!("../../kernels/low_dispatch.cu"),
            Self::LowCombine => include_str!("../../kernels/low_combine.cu"),
            Self::LowMask => include_str!("../../kernels/low_mask.cu"),
            Self::Meet => include_str!("../../kernels/meet.cu"),
            Self::Ceiling => include_str!("../../kernels/ceiling.cu"),
            Self::Probe => include_str!("../../kernels/probe.cu"),
        }
    }

    /// Sizes of its parameters as Rust has them, which it compares with its own.
    pub(super) fn sizes(self) -> Vec<String> {
        let args = match self {
            Self::Layout => size_of::<args::Layout>(),
            Self::Members => size_of::<args::Members>(),
            Self::Counts => size_of::<args::Counts>(),
            Self::Dispatch => size_of::<args::Dispatch>(),
            Self::Unpack => size_of::<args::Unpack>(),
            Self::Offer => size_of::<args::Offer>(),
            Self::Combine => size_of::<args::CombineRing>(),
            Self::DispatchRing => size_of::<args::DispatchRing>(),
            Self::CombineRing => size_of::<args::CombineRing>(),
            Self::LowDispatch => size_of::<args::LowDispatch>(),
            Self::LowCombine => size_of::<args::LowCombine>(),
            Self::LowMask => size_of::<args::LowMask>(),
            Self::Meet => size_of::<args::Meet>(),
            Self::Ceiling => size_of::<args::Ceiling>(),
            Self::Probe => size_of::<args::Probe>(),
        };
        vec![
            format!("EP_SIZE_RANK={}", size_of::<args::RankView>()),
            format!("EP_SIZE_LOCAL={}", args::LOCAL_BYTES),
            format!("EP_SIZE_REPORT={}", args::REPORT_BYTES),
            format!("EP_SIZE_LOW={}", args::LOW_BYTES),
            format!("EP_SIZE_TEST={}", size_of::<args::Test>()),
            format!("EP_SIZE_PIECES={PIECES}"),
            format!("EP_SIZE_ARGS={args}"),
        ]
    }

    /// Everything that it is compiled to for an architecture.
    pub fn variants(self, arch: &str) -> Vec<Target> {
        let plain = Target::new(self, arch);
        match self {
            Self::Combine => PULL_WIDTHS.iter().map(|width| plain.clone().define("EP_PULL_WIDTH", width)).collect(),
            _ => vec![plain],
        }
    }
}

/// The headers of these names, as they are in the folder of kernels.
macro_rules! headers {
    ($($name:literal)*) => { [$(($name, include_str!(concat!("../../kernels/", $name)))),*] };
}

/// Those that lie in the folder of kernels.
const HEADERS: [(&str, &str); 22] = headers! {
    "ep_bulk.h"
    "ep_combine_ring.h"
    "ep_copy.h"
    "ep_dispatch_ring.h"
    "ep_low.h"
    "ep_low_arrivals.h"
    "ep_low_banks.h"
    "ep_low_dispatch.h"
    "ep_low_end.h"
    "ep_low_headers.h"
    "ep_low_receive.h"
    "ep_low_rows.h"
    "ep_low_send.h"
    "ep_low_watch.h"
    "ep_notes.h"
    "ep_offers.h"
    "ep_pieces.h"
    "ep_quant.h"
    "ep_ring.h"
    "ep_sum.h"
    "ep_test.h"
    "ep_verbs.h"
};

/// The headers, by the names by which they are included. That of the layout is written anew: it is never stale.
pub fn headers() -> Vec<(&'static str, String)> {
    let kept = HEADERS.iter().map(|&(name, text)| (name, text.to_owned()));
    [("ep_layout.h", ep_core::layout::c_header())].into_iter().chain(kept).collect()
}
