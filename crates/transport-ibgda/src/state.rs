//! What a kernel that posts finds in its lane's state, and the text that reads it.

use ep_core::c_struct;
use ep_core::declare::CStruct as _;
use ep_core::transport::DeviceSource;

use crate::settings::{Doorbell, Settings, Signal};

c_struct! {
    /// The state of a lane whose queue pair a kernel posts to. The host writes it when lanes connect; then the one thread that posts does.
    pub(crate) struct QueueState = "EpMlx5" {
        /// Address of the queue's elements, 64 bytes each.
        pub elements: u64,
        /// Address of the completions, 64 bytes each, as many as elements.
        pub completions: u64,
        /// Address of the word that says how many elements there are, modulo 2^16.
        pub record: u64,
        /// Address of the word that says how many completions were read, modulo 2^24.
        pub read: u64,
        /// Address of the doorbell register.
        pub bell: u64,
        /// Address of the values that cells at the peer have, as published last: those of both generation banks.
        pub last: u64,
        /// Address of the own window, by its key.
        pub from: u64,
        /// Address of the peer's window, by its keys.
        pub to: u64,
        /// Bytes of a window.
        pub bytes: u64,
        /// Where the cells that this rank publishes at the peer begin in a window: those of both generation banks.
        pub cells: [u64; 2],
        /// Bytes of each.
        pub cell_bytes: u64,
        /// Address of eight bytes that take what fetch-adds return, by their key.
        pub returned: u64,
        /// Key of the own window.
        pub own_key: u32,
        /// Key of the peer's rows.
        pub rows_key: u32,
        /// Key of the peer's cells.
        pub cells_key: u32,
        /// Key of what takes the returned values.
        pub returned_key: u32,
        /// Number of the queue pair.
        pub number: u32,
        /// Elements that there is room for, as the power of two.
        pub log_slots: u32,
        /// Elements written, ever.
        pub posted: u64,
        /// Of those, how many the adapter was told of.
        pub rung: u64,
        /// Of those, how many have completed, as last seen.
        pub completed: u64,
        /// Of the elements written, up to the last of a put.
        pub put: u64,
        /// EP_FAR_OK, or why nothing is posted any more.
        pub status: u64,
        /// Zero.
        pub rest: [u64; 3],
    }
}

/// The text of the verbs, with which kernels are compiled: what [`Ibgda`](crate::Ibgda) gives, without an adapter.
pub fn source(settings: &Settings) -> DeviceSource {
    let begin = "#ifndef EP_FAR_LANES_H\n#define EP_FAR_LANES_H\n#include \"ep_far.h\"\n";
    let text = [begin, &QueueState::declaration(), include_str!("../kernels/ep_far_mlx5.h")].concat();
    let ordered_write = u32::from(settings.signal == Signal::OrderedWrite);
    let double = u32::from(settings.doorbell == Doorbell::Double);
    let defines = vec![
        ("EP_MLX5_BATCH", format!("{}u", settings.batch)),
        ("EP_MLX5_LONGEST", format!("{}ull", settings.longest)),
        ("EP_MLX5_DOUBLE_BELL", double.to_string()),
        ("EP_MLX5_ORDERED_WRITE", ordered_write.to_string()),
    ];
    DeviceSource { text, defines, state_bytes: size_of::<QueueState>() as u64 }
}
