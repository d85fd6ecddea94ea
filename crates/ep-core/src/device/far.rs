//! What a verb on a lane between nodes gives to the kernel that posts.

use crate::c_enum;
use crate::declare::CEnum;

c_enum! {
    /// What became of a verb on a lane between nodes.
    pub enum FarStatus = "EP_FAR" {
        /// It is through.
        Ok = 0,
        /// The lane has broken: the host knows why.
        Broken = 1,
        /// The time was up: what was posted is under way.
        Timeout = 2,
        /// The time was up: whoever posts for the device takes nothing.
        Stalled = 3,
        /// Whoever posts for the device has ended.
        Gone = 4,
        /// What was posted is no verb, or reaches out of the window.
        Refused = 5,
    }
}

const PROLOGUE: &str = include_str!("c/far_prologue.h");
const VERBS: &str = include_str!("c/far_verbs.h");

/// The header `ep_far.h`.
pub(super) fn header() -> String {
    [PROLOGUE, &FarStatus::declaration(), VERBS].concat()
}
