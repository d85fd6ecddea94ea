//! What every device has in common whose roles are kernels: the contract below the kernels.
//!
//! Kernels are a second reading of the protocol. Everything that both readings share is defined once and said to both:
//!
//! | header | from | holds |
//! |---|---|---|
//! | `ep_layout.h` | [`crate::layout`] | how a window is cut, the bytes of rows and messages, cells, lanes, alarms |
//! | `ep_state.h` | this module | one rank as its kernels see it, what they keep between launches, what they report |
//! | `ep_protocol.h` | this module | the rules: cursors of rings, who is to blame, which message is refused |
//! | `ep_words.h` | this module | names and rules of the words that roles have of a device, which defines them |
//! | `ep_verbs.h` | this module | names and rules of the verbs by which kernels reach other ranks; a device defines them |
//! | `ep_far.h` | this module | names and rules of the verbs on lanes between nodes; a transport defines them (`DeviceTransport`) |
//!
//! [`headers`] gives all six ([`header_of_shape`] for one shape), and they lie in the crate's folder `include`. Those that hold structs or numbers are generated, the others are text. They need a C++
//! compiler and no system header; `tests/core/c_header.rs` and `tests/core/c_protocol.rs` compile them
//! and compare them with the Rust code. A backend defines the structs of its own kernels' parameters with
//! [`c_struct!`](crate::c_struct), too.
//!
//! The order in which a device is used is that of every backend: windows are allocated by the [`crate::Layout`], a [`RankView`] is made for
//! each rank, and passed by value to each launch with what the call adds to it. [`Local`] and [`Low`] lie in the device's memory and are
//! zero at first. A kernel that cannot go on writes a [`Report`] and ends; [`Report::error`] is what the user gets.

mod far;
pub mod probe;
mod report;
mod roles;
mod state;

pub use far::FarStatus;
pub use report::{LowMismatch, Report, Status};
pub use roles::{BlockRole, LowRoles, RoleRow, Task, block_roles, low_roles, ring_roles, ring_roles_of};
pub use state::{EPOCH, Early, Local, Low, LowFar, Meeting, PlanHead, RankView};

use crate::declare::{CEnum, CStruct};
use crate::layout::{KernelWindow, Mismatch, c_header};

/// The headers that kernels include, by name.
pub fn headers() -> [(&'static str, String); 6] {
    [
        (LAYOUT_HEADER, c_header(None)),
        ("ep_state.h", state_header()),
        ("ep_protocol.h", PROTOCOL.to_owned()),
        ("ep_words.h", WORDS.to_owned()),
        ("ep_verbs.h", VERBS.to_owned()),
        ("ep_far.h", far::header()),
    ]
}

/// The name of the header that [`header_of_shape`] takes the place of.
pub const LAYOUT_HEADER: &str = "ep_layout.h";

/// `ep_layout.h` for kernels that are compiled for one shape and topology: [what these say](KernelWindow::OF_SHAPE) of a window is constant to them.
pub fn header_of_shape(window: &KernelWindow) -> String {
    c_header(Some(window))
}

const STATE_PROLOGUE: &str = include_str!("c/state_prologue.h");
const STATE_FUNCTIONS: &str = include_str!("c/state_functions.h");
const PROTOCOL: &str = include_str!("../../include/ep_protocol.h");
const WORDS: &str = include_str!("../../include/ep_words.h");
const VERBS: &str = include_str!("../../include/ep_verbs.h");

/// The header `ep_state.h`.
fn state_header() -> String {
    let parts = [
        Status::declaration(),
        Mismatch::declaration(),
        LowMismatch::declaration(),
        Meeting::declaration(),
        Report::declaration(),
        Local::declaration(),
        Low::declaration(),
        LowFar::declaration(),
        Early::declaration(),
        PlanHead::declaration(),
        RoleRow::declaration(),
        Task::declaration(),
        BlockRole::declaration(),
        LowRoles::declaration(),
        RankView::declaration(),
    ];
    [STATE_PROLOGUE, &parts.concat(), STATE_FUNCTIONS].concat()
}
