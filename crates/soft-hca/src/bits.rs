//! Fields of firmware commands: bits counted from the start of the message, the first being the highest bit of byte 0.

/// A field by name, first bit and width.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Field {
    pub(crate) name: &'static str,
    pub(crate) at: usize,
    pub(crate) width: usize,
}

/// A field, as the tables write it.
pub(crate) const fn field(name: &'static str, at: usize, width: usize) -> Field {
    Field { name, at, width }
}

fn bit(bytes: &[u8], at: usize) -> bool {
    bytes[at / 8] >> (7 - at % 8) & 1 == 1
}

impl Field {
    /// Its value in a message. Panics beyond the end: lengths are checked before fields are.
    pub(crate) fn get(&self, message: &[u8]) -> u128 {
        (self.at..self.at + self.width).fold(0, |value, at| value << 1 | u128::from(bit(message, at)))
    }

    /// Its value, of fields of at most 64 bits.
    pub(crate) fn u64(&self, message: &[u8]) -> u64 {
        debug_assert!(self.width <= 64, "{} is wider than 64 bits", self.name);
        self.get(message) as u64
    }

    /// Its value, of fields of at most 32 bits.
    pub(crate) fn u32(&self, message: &[u8]) -> u32 {
        debug_assert!(self.width <= 32, "{} is wider than 32 bits", self.name);
        self.get(message) as u32
    }

    /// Writes a value.
    pub(crate) fn set(&self, message: &mut [u8], value: u128) {
        for step in 0..self.width {
            let at = self.at + step;
            let mask = 1 << (7 - at % 8);
            if value >> (self.width - 1 - step) & 1 == 1 {
                message[at / 8] |= mask;
            } else {
                message[at / 8] &= !mask;
            }
        }
    }
}

/// The first bit that is set and belongs to no field of the tables.
pub(crate) fn stray_bit(message: &[u8], tables: &[&[Field]]) -> Option<usize> {
    let mut rest = message.to_vec();
    for known in tables.iter().copied().flatten() {
        if known.at + known.width <= rest.len() * 8 {
            known.set(&mut rest, 0);
        }
    }
    (0..rest.len() * 8).find(|&at| bit(&rest, at))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_count_from_the_highest_of_the_first_byte() {
        let mut message = [0; 16];
        field("opcode", 0, 16).set(&mut message, 0x0500);
        field("number", 0x48, 24).set(&mut message, 0xabcdef);
        field("flag", 0x40, 1).set(&mut message, 1);
        assert_eq!(message, [5, 0, 0, 0, 0, 0, 0, 0, 0x80, 0xab, 0xcd, 0xef, 0, 0, 0, 0]);
        assert_eq!(field("number", 0x48, 24).u32(&message), 0xabcdef);
        let known = [field("opcode", 0, 16), field("number", 0x48, 24)];
        assert_eq!(stray_bit(&message, &[&known]), Some(0x40));
    }
}
