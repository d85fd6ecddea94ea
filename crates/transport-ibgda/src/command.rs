//! DEVX commands: messages to an adapter's firmware, made from one table of bit offsets.
//!
//! A field is named by its first bit, counted from the message's beginning (bit 0 is the top bit of byte 0), and its width. So numbers are
//! big-endian by construction. The tests of `card::queue` hold whole messages against bytes written by hand.

/// A field of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Field {
    at: usize,
    bits: usize,
}

const fn field(at: usize, bits: usize) -> Field {
    assert!(bits >= 1 && bits <= 64, "a field of 1 to 64 bits");
    Field { at, bits }
}

impl Field {
    /// The same field of a structure that begins so many bytes later in another message.
    pub(crate) const fn shifted(self, bytes: usize) -> Self {
        field(self.at + 8 * bytes, self.bits)
    }
}

/// What a command does. Those that destroy, the kernel's driver sends itself when an object is given up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u16)]
pub(crate) enum Opcode {
    QueryHcaCap = 0x100,
    CreateCq = 0x400,
    CreateQp = 0x500,
    Rst2Init = 0x502,
    Init2Rtr = 0x503,
    Rtr2Rts = 0x504,
    ToError = 0x507,
    QueryQp = 0x50b,
}

impl Opcode {
    /// As error messages name it.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::QueryHcaCap => "QUERY_HCA_CAP",
            Self::CreateCq => "CREATE_CQ",
            Self::CreateQp => "CREATE_QP",
            Self::Rst2Init => "RST2INIT_QP",
            Self::Init2Rtr => "INIT2RTR_QP",
            Self::Rtr2Rts => "RTR2RTS_QP",
            Self::ToError => "2ERR_QP",
            Self::QueryQp => "QUERY_QP",
        }
    }

    /// Bytes of its message.
    const fn bytes(self) -> usize {
        match self {
            Self::CreateCq | Self::CreateQp | Self::Rst2Init | Self::Init2Rtr | Self::Rtr2Rts => 0x110,
            _ => 0x10,
        }
    }
}

/// Of every message and every answer.
pub(crate) mod any {
    use super::{Field, field};
    /// What is asked for.
    pub(crate) const OPCODE: Field = field(0x0, 16);
    /// Which of its kinds.
    pub(crate) const OP_MOD: Field = field(0x30, 16);
    /// Of an answer: 0 when it was carried out.
    pub(crate) const STATUS: Field = field(0x0, 8);
    /// Of an answer: why not.
    pub(crate) const SYNDROME: Field = field(0x20, 32);
    /// The number of a queue: of what was made, in the answer; of what is meant, in the message.
    pub(crate) const NUMBER: Field = field(0x48, 24);
}

/// CREATE_CQ.
pub(crate) mod cq {
    use super::{Field, field};
    pub(crate) const DBR_UMEM_VALID: Field = field(0x86, 1);
    pub(crate) const DBR_UMEM_ID: Field = field(0xa0, 32);
    pub(crate) const LOG_CQ_SIZE: Field = field(0xe3, 5);
    pub(crate) const UAR_PAGE: Field = field(0xe8, 24);
    pub(crate) const C_EQN: Field = field(0x138, 8);
    pub(crate) const DBR_ADDR: Field = field(0x240, 64);
    pub(crate) const UMEM_OFFSET: Field = field(0x280, 64);
    pub(crate) const UMEM_ID: Field = field(0x2c0, 32);
    pub(crate) const UMEM_VALID: Field = field(0x2e0, 1);
}

/// CREATE_QP and the commands that change a queue pair's state.
pub(crate) mod qp {
    use super::{Field, field};
    pub(crate) const PM_STATE: Field = field(0xd3, 2);
    pub(crate) const PD: Field = field(0xe8, 24);
    pub(crate) const MTU: Field = field(0x100, 3);
    pub(crate) const LOG_MSG_MAX: Field = field(0x103, 5);
    pub(crate) const LOG_SQ_SIZE: Field = field(0x111, 4);
    pub(crate) const UAR_PAGE: Field = field(0x128, 24);
    pub(crate) const REMOTE_QPN: Field = field(0x168, 24);
    pub(crate) const GRH: Field = field(0x1a8, 1);
    pub(crate) const RLID: Field = field(0x1b0, 16);
    pub(crate) const ACK_TIMEOUT: Field = field(0x1c0, 5);
    pub(crate) const SRC_ADDR_INDEX: Field = field(0x1c8, 8);
    pub(crate) const HOP_LIMIT: Field = field(0x1d8, 8);
    pub(crate) const TCLASS: Field = field(0x1e4, 8);
    /// Its upper half; the lower one follows.
    pub(crate) const RGID: [Field; 2] = [field(0x200, 64), field(0x240, 64)];
    pub(crate) const DSCP: Field = field(0x28a, 6);
    pub(crate) const UDP_SPORT: Field = field(0x290, 16);
    pub(crate) const ETH_PRIO: Field = field(0x2a1, 3);
    pub(crate) const SL: Field = field(0x2a4, 4);
    pub(crate) const VHCA_PORT_NUM: Field = field(0x2a8, 8);
    pub(crate) const RMAC: Field = field(0x2b0, 48);
    pub(crate) const LOG_SRA_MAX: Field = field(0x448, 3);
    pub(crate) const RETRY_COUNT: Field = field(0x44d, 3);
    pub(crate) const RNR_RETRY: Field = field(0x450, 3);
    pub(crate) const NEXT_SEND_PSN: Field = field(0x488, 24);
    pub(crate) const CQN_SND: Field = field(0x4a8, 24);
    pub(crate) const LOG_RRA_MAX: Field = field(0x548, 3);
    pub(crate) const ATOMIC_MODE: Field = field(0x54c, 4);
    pub(crate) const RWE: Field = field(0x551, 1);
    pub(crate) const RAE: Field = field(0x552, 1);
    pub(crate) const MIN_RNR_NAK: Field = field(0x563, 5);
    pub(crate) const NEXT_RCV_PSN: Field = field(0x568, 24);
    pub(crate) const CQN_RCV: Field = field(0x5a8, 24);
    pub(crate) const DBR_ADDR: Field = field(0x5c0, 64);
    pub(crate) const RQ_TYPE: Field = field(0x625, 3);
    pub(crate) const DBR_UMEM_VALID: Field = field(0x743, 1);
    pub(crate) const DBR_UMEM_ID: Field = field(0x7e0, 32);
    pub(crate) const WQ_UMEM_OFFSET: Field = field(0x800, 64);
    pub(crate) const WQ_UMEM_ID: Field = field(0x840, 32);
    pub(crate) const WQ_UMEM_VALID: Field = field(0x860, 1);
    /// In the answer of QUERY_QP, whose structure begins where that of the commands does.
    pub(crate) const STATE: Field = field(0xc0, 4);
}

/// What an adapter can do, as QUERY_HCA_CAP answers: bits of a structure behind the answer's first sixteen bytes.
pub(crate) mod cap {
    use super::{Field, field};
    /// The structure begins there.
    const AT: usize = 0x10;
    const fn of(at: usize, bits: usize) -> Field {
        field(at, bits).shifted(AT)
    }
    /// Bytes of the answer.
    pub(crate) const ANSWER: usize = AT + 0x1000;
    /// General ones.
    pub(crate) const GENERAL: u64 = 0;
    /// Those of atomics.
    pub(crate) const ATOMIC: u64 = 3;
    pub(crate) const LOG_MAX_QP_SZ: Field = of(0x88, 8);
    pub(crate) const LOG_MAX_CQ_SZ: Field = of(0xc8, 8);
    pub(crate) const RELAXED_ORDERING_WRITE: Field = of(0xe8, 1);
    pub(crate) const CQE_VERSION: Field = of(0x1fc, 4);
    pub(crate) const ROCE: Field = of(0x21d, 1);
    pub(crate) const ATOMICS: Field = of(0x21e, 1);
    pub(crate) const RC: Field = of(0x23f, 1);
    pub(crate) const MAX_WQE_SZ_SQ: Field = of(0x290, 16);
    pub(crate) const ATOMIC_OPERATIONS: Field = of(0x90, 16);
    pub(crate) const ATOMIC_SIZE_QP: Field = of(0xb0, 16);
}

/// A message, or an answer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Message(Vec<u8>);

impl Message {
    /// A message with this opcode, all else zero.
    pub(crate) fn new(opcode: Opcode) -> Self {
        let mut message = Self(vec![0; opcode.bytes()]);
        message.set(any::OPCODE, opcode as u64);
        message
    }

    /// The same about the queue with this number.
    pub(crate) fn about(opcode: Opcode, number: u32) -> Self {
        Self::new(opcode).with(any::NUMBER, number.into())
    }

    /// Room for an answer of so many bytes.
    pub(crate) fn answer(bytes: usize) -> Self {
        Self(vec![0; bytes])
    }

    /// Its bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }

    /// Writes a field.
    ///
    /// # Panics
    /// When the value has more bits, or the message ends before the field: a programming error.
    pub(crate) fn set(&mut self, field: Field, value: u64) {
        let Field { at, bits } = field;
        assert!(bits == 64 || value >> bits == 0, "{value:#x} in {bits} bits at {at:#x}");
        for bit in 0..bits {
            let (place, mask) = (at + bit, 1 << (7 - (at + bit) % 8));
            let byte = &mut self.0[place / 8];
            *byte = *byte & !mask | if value >> (bits - 1 - bit) & 1 == 1 { mask } else { 0 };
        }
    }

    /// The same, as a value.
    #[must_use]
    pub(crate) fn with(mut self, field: Field, value: u64) -> Self {
        self.set(field, value);
        self
    }

    /// Reads a field.
    ///
    /// # Panics
    /// When the message ends before the field: a programming error.
    pub(crate) fn get(&self, field: Field) -> u64 {
        (field.at..field.at + field.bits)
            .fold(0, |value, at| value << 1 | u64::from(self.0[at / 8] >> (7 - at % 8) & 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_changes_its_own_bits_and_no_others() {
        for (at, bits) in [(0, 1), (3, 5), (7, 2), (0x48, 24), (0x5c, 36), (0x40, 64)] {
            let field = field(at, bits);
            let value = 0xa5c3_9671_e84d_2b17 >> (64 - bits);
            for background in [0u8, 0xff] {
                let mut message = Message(vec![background; 0x10]);
                message.set(field, value);
                assert_eq!(message.get(field), value, "{field:?}");
                let outside = (0..0x80).filter(|bit| !(at..at + bits).contains(bit));
                for bit in outside {
                    assert_eq!(message.0[bit / 8] >> (7 - bit % 8) & 1, background & 1, "{field:?}, bit {bit}");
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "0x10 in 4 bits")]
    fn a_value_that_is_too_wide_is_refused() {
        Message::new(Opcode::CreateQp).set(qp::LOG_SQ_SIZE, 16);
    }
}
