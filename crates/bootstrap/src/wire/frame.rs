//! Frames: a length (u32, little-endian) and that many bytes.

use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::secret::digest;

/// Bytes of the tag before a sealed message.
pub(crate) const TAG: usize = 32;

const LENGTH: usize = 4;

/// What is wrong with bytes that arrived.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Malformed {
    /// A frame longer than its limit.
    #[error("a frame of {bytes} bytes, allowed: {limit}")]
    TooLong {
        /// Length that the frame claims.
        bytes: u64,
        /// What is allowed here.
        limit: u64,
    },
    /// A sealed frame without room for its tag, or with a wrong one.
    #[error("a message whose tag is wrong")]
    Tag,
    /// Bytes that are no message.
    #[error("a message that cannot be decoded: {why}")]
    Undecodable {
        /// What the decoder said.
        why: String,
    },
    /// Bytes after the end of a message.
    #[error("{bytes} bytes after the end of a message")]
    Trailing {
        /// How many.
        bytes: usize,
    },
    /// A connection that does not begin as this protocol does.
    #[error("something else than this protocol")]
    Foreign,
    /// A message that may not come now.
    #[error("{what}, which is out of place")]
    OutOfPlace {
        /// The message.
        what: &'static str,
    },
}

/// Cuts a stream of bytes into frames. Holds no more than what has arrived, whatever length a frame claims.
#[derive(Debug, Default)]
pub(crate) struct Frames {
    bytes: Vec<u8>,
    start: usize,
}

impl Frames {
    /// More of the stream.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        if self.start > 0 && self.start >= self.bytes.len() / 2 {
            self.bytes.drain(..self.start);
            self.start = 0;
        }
        self.bytes.extend_from_slice(bytes);
    }

    /// The next frame of at most `limit` bytes, once it is complete.
    pub(crate) fn next(&mut self, limit: usize) -> Result<Option<&[u8]>, Malformed> {
        let rest = &self.bytes[self.start..];
        let Some((length, rest)) = rest.split_first_chunk::<LENGTH>() else { return Ok(None) };
        let length = u32::from_le_bytes(*length) as usize;
        if length > limit {
            return Err(Malformed::TooLong { bytes: length as u64, limit: limit as u64 });
        }
        if rest.len() < length {
            return Ok(None);
        }
        let from = self.start + LENGTH;
        self.start = from + length;
        Ok(Some(&self.bytes[from..from + length]))
    }
}

/// A frame without a tag.
pub(crate) fn plain(message: &impl Serialize) -> Vec<u8> {
    let bytes = encode(message);
    [&(bytes.len() as u32).to_le_bytes(), bytes.as_slice()].concat()
}

/// An encoded message, to be sealed for any number of connections.
#[derive(Clone, Debug)]
pub(crate) struct Body {
    pub(crate) bytes: Arc<[u8]>,
    pub(crate) digest: [u8; 32],
}

impl Body {
    pub(crate) fn new(message: &impl Serialize) -> Self {
        Self::of_bytes(encode(message))
    }

    pub(crate) fn of_bytes(bytes: Vec<u8>) -> Self {
        Self { digest: digest(&bytes), bytes: bytes.into() }
    }

    /// What goes before the bytes: length and `tag`.
    pub(crate) fn head(&self, tag: &[u8; TAG]) -> Vec<u8> {
        [&((TAG + self.bytes.len()) as u32).to_le_bytes(), tag.as_slice()].concat()
    }
}

fn encode(message: &impl Serialize) -> Vec<u8> {
    postcard::to_stdvec(message).expect("numbers, texts and lists of known length always encode")
}

/// The message that `bytes` are, and nothing more.
pub(crate) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Malformed> {
    match postcard::take_from_bytes(bytes) {
        Ok((message, [])) => Ok(message),
        Ok((_, rest)) => Err(Malformed::Trailing { bytes: rest.len() }),
        Err(error) => Err(Malformed::Undecodable { why: error.to_string() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_cut_wherever_the_stream_is() {
        let stream = [plain(&1u64), plain(&(2u64, 3u64)), plain(&4u64)].concat();
        for piece in 1..stream.len() {
            let (mut frames, mut seen) = (Frames::default(), Vec::new());
            for bytes in stream.chunks(piece) {
                frames.push(bytes);
                while let Some(frame) = frames.next(8).unwrap() {
                    seen.push(frame.to_vec());
                }
            }
            assert_eq!(seen, [vec![1], vec![2, 3], vec![4]]);
        }
    }

    #[test]
    fn a_frame_over_its_limit_is_refused_before_it_has_arrived() {
        let mut frames = Frames::default();
        frames.push(&9u32.to_le_bytes());
        assert_eq!(frames.next(8), Err(Malformed::TooLong { bytes: 9, limit: 8 }));
    }

    #[test]
    fn bytes_after_a_message_are_refused() {
        assert_eq!(decode::<u8>(&[1, 2, 3]), Err(Malformed::Trailing { bytes: 2 }));
        assert!(matches!(decode::<String>(&[200, 1, 65]), Err(Malformed::Undecodable { .. })));
    }
}
