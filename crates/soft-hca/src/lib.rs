//! An mlx5 network card made of software: it reads the very bytes that a driver writes for a real one, and carries them
//! out in the worst order that a real one may choose. For tests, on any Linux machine, without a card, kernel or network.
//!
//! A driver reaches the card as it reaches a real one: through the functions of `libibverbs` and `libmlx5`, by name
//! ([`symbol`]). It opens a device, registers memory, sends firmware commands (DEVX) that make and connect queues, writes
//! work queue elements and doorbells into memory, and reads completions from memory.
//!
//! ```
//! use std::ffi::{CStr, c_char, c_int};
//! use soft_hca::abi::Device;
//! use soft_hca::{Fabric, Link, Mood};
//!
//! let fabric = Fabric::builder(2, Link::Ethernet).seed(7).mood(Mood::hostile()).running();
//!
//! // A driver has these signatures from rdma-core's headers.
//! type List = unsafe extern "C" fn(*mut c_int) -> *mut *mut Device;
//! type Free = unsafe extern "C" fn(*mut *mut Device);
//! type Name = unsafe extern "C" fn(*mut Device) -> *const c_char;
//! // SAFETY: the signatures are those of the names.
//! let (list, free, name) = unsafe {
//!     let find = |name| soft_hca::symbol(name).expect(name).as_ptr();
//!     (
//!         std::mem::transmute::<_, List>(find("ibv_get_device_list")),
//!         std::mem::transmute::<_, Free>(find("ibv_free_device_list")),
//!         std::mem::transmute::<_, Name>(find("ibv_get_device_name")),
//!     )
//! };
//! // SAFETY: the list is used before it is freed.
//! unsafe {
//!     let mut count = 0;
//!     let devices = list(&mut count);
//!     let first = CStr::from_ptr(name(*devices)).to_str()?.to_owned();
//!     assert_eq!((count, first), (2, fabric.card(0).name()));
//!     free(devices);
//! }
//! assert!(fabric.complaints().is_empty());
//! # Ok::<(), std::str::Utf8Error>(())
//! ```
//!
//! # The model
//!
//! A [`Fabric`] is some [`Card`]s on one network, RoCEv2 or InfiniBand ([`Link`]). All cards of the process are in
//! `ibv_get_device_list`, named `soft_hca0` and so on; a card reaches those of its own fabric. [`Model`] says what a card
//! has: DEVX, dmabuf, atomics, relaxed ordering, and its limits.
//!
//! - [`Builder::stepped`]: cards do one thing for each call of [`Fabric::step`]. A seed replays exactly.
//! - [`Builder::running`]: a thread drives them, for drivers that wait.
//! - [`Builder::carried`]: someone else carries elements out, where queues lie in memory that no CPU reaches ([`Carrier`]). The cards decode
//!   commands and keep objects; nothing below of liberties holds.
//!
//! # What a card may do
//!
//! [`Mood`] has the liberties with their chances. [`Mood::mild`] takes none of them.
//!
//! | liberty | what it finds |
//! |---|---|
//! | the producer index comes from the bell or from the record; the record is looked at without a bell; a card begins anew from the record | a record or a bell too early, too late, wrong, or missing |
//! | bells are late, in any order, more than once | indices that are not compared modulo 2^16 |
//! | messages are torn at any word of 8 bytes; pieces arrive in any order and are visible early | readers that look at data without a signal |
//! | a write to relaxed memory passes earlier writes; a fetch-add into relaxed memory may, too | signals in relaxed memory |
//! | queue pairs are not ordered among themselves | a signal on another queue pair |
//! | payload is read with its element or much later | sources used again too early |
//! | completions are late, those of a collapsed queue merged; undefined bytes are noise | who counts completions, or reads a part of one |
//! | elements are read again until their completion is written | slots used again too early |
//!
//! What a card may not do: tear an aligned word of 8 bytes; carry out a fetch-add twice; let anything pass a fetch-add
//! into strict memory; let a strict write arrive before what was posted earlier; write the last word of a completion
//! before the rest of it.
//!
//! # What a card checks
//!
//! Every command is decoded by tables of bits made from the facts. Lengths, values, bits where no field lies, objects,
//! states and their order are checked, as are elements, keys, bounds, rights, alignment, and what both ends of a
//! connection must have been told alike. What is wrong is refused as a real card refuses it (status and syndrome of a
//! command, syndrome of a completion, silence and then syndrome 15h), and [`Card::complaints`] says in words why.
//!
//! An element that fails breaks its queue pair: first its syndrome, then the state is error, then everything behind it is
//! flushed with syndrome 5. Elements that are wrong in themselves fail with 2, own keys with 4, the peer's with 12h or
//! 13h. A test can make any of it happen: [`Card::fail`], [`Card::refuse`], [`Card::kill`], [`Card::cut`],
//! [`Card::break_element`]. An old library is a `symbol` function that answers None for some names.
//!
//! # What callers of the C functions promise
//!
//! The functions are `extern "C"`, with rdma-core's signatures. Pointers to objects are looked up, so a wrong one is
//! refused ([`stray_pointers`]). The rest is C's: memory that is registered stays mapped, readable and writable until it
//! is deregistered; messages are as long as they say; a dmabuf is any file that can be mapped (a memfd). Cards read and
//! write registered memory at any time, by atomic accesses of 8, 4 and 1 bytes. Whoever shares that memory must do so, too.
//!
//! # Limits
//!
//! - Reliable connections, and on them RDMA writes, 8-byte fetch-adds and no-ops. No receive queues, no reads, no other
//!   atomics.
//! - A doorbell register is one word of memory: where queue pairs share a page, the card looks at all their records when
//!   one of them rings.
//! - What a card reads beyond the producer index it reads again once the index covers it, as every driver relies on. So
//!   reading ahead changes nothing, and is left out.
//! - Cards see memory as this machine's threads do. A fence that is missing is found where a test puts the store off, as
//!   a machine with weaker order might; one of the wrong scope is not found.
//! - Packets are not modelled, and nothing is said about speed.
#![cfg(target_os = "linux")]

pub mod abi;
mod bits;
mod c;
mod carrier;
mod complaint;
mod devx;
mod engine;
mod fabric;
mod face;
mod handles;
mod memory;
mod model;
mod mood;
mod objects;
mod rng;

pub use c::{stray_pointers, symbol};
pub use carrier::{Carrier, Progress, Queue, Region, Work};
pub use complaint::{Complaint, Rule};
pub use devx::qp::QpState;
pub use fabric::{Builder, Card, Fabric, QpView};
pub use face::Face;
pub use model::{Link, Model};
pub use mood::Mood;
pub use objects::Counts;
