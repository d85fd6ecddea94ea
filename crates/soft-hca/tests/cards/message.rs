//! Firmware commands as bytes, written by hand: nothing here is the card's.

/// A command under construction.
#[derive(Clone)]
pub(crate) struct Command(pub(crate) Vec<u8>);

impl Command {
    pub(crate) fn new(opcode: u16, bytes: usize) -> Self {
        let mut command = Self(vec![0; bytes]);
        command.0[..2].copy_from_slice(&opcode.to_be_bytes());
        command
    }

    /// Sets bits `at..at + width`, counted from the highest of byte 0.
    pub(crate) fn set(mut self, at: usize, width: usize, value: u128) -> Self {
        for step in 0..width {
            let (bit, at) = ((value >> (width - 1 - step)) as u8 & 1, at + step);
            self.0[at / 8] = self.0[at / 8] & !(0x80 >> (at % 8)) | bit << (7 - at % 8);
        }
        self
    }
}

/// Reads bits of an answer.
pub(crate) fn get(message: &[u8], at: usize, width: usize) -> u128 {
    (at..at + width).fold(0, |value, at| value << 1 | u128::from(message[at / 8] >> (7 - at % 8) & 1))
}
