//! The sources of the kernels, as a compiler gets them.

use crate::args;

/// Headers that the kernels include, by name: the protocol's, and the crate's own. `kernel_operator.h` is the compiler's.
pub fn headers() -> Vec<(&'static str, String)> {
    let own = [
        ("ep_control.h", include_str!("../kernels/ep_control.h")),
        ("ep_coordinate.h", include_str!("../kernels/ep_coordinate.h")),
        ("ep_counts.h", include_str!("../kernels/ep_counts.h")),
        ("ep_far_send.h", include_str!("../kernels/ep_far_send.h")),
        ("ep_fill.h", include_str!("../kernels/ep_fill.h")),
        ("ep_fold.h", include_str!("../kernels/ep_fold.h")),
        ("ep_fma.h", include_str!("../kernels/ep_fma.h")),
        ("ep_forward.h", include_str!("../kernels/ep_forward.h")),
        ("ep_gather.h", include_str!("../kernels/ep_gather.h")),
        ("ep_low.h", include_str!("../kernels/ep_low.h")),
        ("ep_low_control.h", include_str!("../kernels/ep_low_control.h")),
        ("ep_low_play.h", include_str!("../kernels/ep_low_play.h")),
        ("ep_low_post.h", include_str!("../kernels/ep_low_post.h")),
        ("ep_low_receive.h", include_str!("../kernels/ep_low_receive.h")),
        ("ep_low_reduce.h", include_str!("../kernels/ep_low_reduce.h")),
        ("ep_low_return.h", include_str!("../kernels/ep_low_return.h")),
        ("ep_low_send.h", include_str!("../kernels/ep_low_send.h")),
        ("ep_mail.h", include_str!("../kernels/ep_mail.h")),
        ("ep_npu.h", include_str!("../kernels/ep_npu.h")),
        ("ep_play.h", include_str!("../kernels/ep_play.h")),
        ("ep_positions.h", include_str!("../kernels/ep_positions.h")),
        ("ep_quantize.h", include_str!("../kernels/ep_quantize.h")),
        ("ep_receive.h", include_str!("../kernels/ep_receive.h")),
        ("ep_reduce.h", include_str!("../kernels/ep_reduce.h")),
        ("ep_return.h", include_str!("../kernels/ep_return.h")),
        ("ep_rings.h", include_str!("../kernels/ep_rings.h")),
        ("ep_roce.h", include_str!("../kernels/ep_roce.h")),
        ("ep_rows.h", include_str!("../kernels/ep_rows.h")),
        ("ep_send.h", include_str!("../kernels/ep_send.h")),
        ("ep_share.h", include_str!("../kernels/ep_share.h")),
        ("ep_spread.h", include_str!("../kernels/ep_spread.h")),
    ];
    let mut all = ep_core::device::headers().to_vec();
    all.push(("ep_args.h", args::header()));
    all.extend(own.map(|(name, text)| (name, text.to_owned())));
    all
}

/// The kernels' files, by name.
pub fn sources() -> [(&'static str, &'static str); 10] {
    [
        ("positions.cpp", include_str!("../kernels/positions.cpp")),
        ("counts.cpp", include_str!("../kernels/counts.cpp")),
        ("dispatch.cpp", include_str!("../kernels/dispatch.cpp")),
        ("combine.cpp", include_str!("../kernels/combine.cpp")),
        ("spread.cpp", include_str!("../kernels/spread.cpp")),
        ("fold.cpp", include_str!("../kernels/fold.cpp")),
        ("quantize.cpp", include_str!("../kernels/quantize.cpp")),
        ("low_dispatch.cpp", include_str!("../kernels/low_dispatch.cpp")),
        ("low_combine.cpp", include_str!("../kernels/low_combine.cpp")),
        ("low_tell.cpp", include_str!("../kernels/low_tell.cpp")),
    ]
}

/// The script that builds the kernels with CANN's compiler, by the name that it has beside them.
pub const BUILD: &str = "build.sh";

/// All files that CANN's compiler needs, by name, and [the script](BUILD) that calls it.
pub fn build_files() -> Vec<(&'static str, String)> {
    let script = (BUILD, include_str!("../kernels/build.sh").to_owned());
    headers().into_iter().chain(sources().map(|(name, text)| (name, text.to_owned()))).chain([script]).collect()
}
