//! Bytes on the connection: frames with a length in front, and the messages in them.
//!
//! A connection opens with four plain frames ([`Opening`], [`Answer`]), in which both sides prove that they hold the
//! job's secret. After that every frame carries a tag ([`crate::secret::Seal`]) before its message.

mod frame;
mod message;
pub(crate) mod ranks;

pub use frame::Malformed;
pub(crate) use frame::{Body, Frames, TAG, decode, plain};
pub(crate) use message::{Answer, Collective, Discord, MAGIC, Opening, Reply, Request, VERSION};

/// The most bytes of one message, and so of all contributions to a collective together.
pub const MAX_MESSAGE: usize = 16 << 20;

/// The most bytes of a message from somebody who has not proved to be of this job.
pub(crate) const MAX_OPENING: usize = 4 << 10;
