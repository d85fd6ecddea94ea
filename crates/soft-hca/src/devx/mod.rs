//! Firmware commands, decoded with tables of bits of their own, and what is refused.

pub(crate) mod cap;
pub(crate) mod cq;
pub(crate) mod qp;
pub(crate) mod tables;

use crate::bits::{Field, stray_bit};
use crate::complaint::Rule;
use crate::objects::{CardState, Umem};

pub(crate) const CREATE_CQ: u16 = 0x400;
pub(crate) const CREATE_QP: u16 = 0x500;
pub(crate) const RST2INIT: u16 = 0x502;
pub(crate) const INIT2RTR: u16 = 0x503;
pub(crate) const RTR2RTS: u16 = 0x504;
pub(crate) const TO_ERR: u16 = 0x507;
pub(crate) const TO_RST: u16 = 0x50a;
pub(crate) const QUERY_QP: u16 = 0x50b;
pub(crate) const QUERY_HCA_CAP: u16 = 0x100;

/// A command that is refused: the status and syndrome of its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) status: u8,
    pub(crate) syndrome: u32,
}

pub(crate) const BAD_OP: u8 = 0x02;
pub(crate) const BAD_PARAM: u8 = 0x03;
pub(crate) const BAD_RESOURCE: u8 = 0x05;
pub(crate) const LIMIT: u8 = 0x08;
pub(crate) const BAD_STATE: u8 = 0x10;
pub(crate) const BAD_INPUT_LENGTH: u8 = 0x50;
pub(crate) const BAD_OUTPUT_LENGTH: u8 = 0x51;

/// One command: what it says, and whom it can complain to.
pub(crate) struct Command<'a> {
    pub(crate) card: &'a mut CardState,
    pub(crate) context: u32,
    pub(crate) name: &'static str,
    pub(crate) input: &'a [u8],
    pub(crate) output: &'a mut [u8],
}

impl Command<'_> {
    /// Refuses, and says why.
    pub(crate) fn refuse<T>(&mut self, rule: Rule, status: u8, text: impl std::fmt::Display) -> Result<T, Refusal> {
        // The syndrome says which refusal it was, as firmware's do: by a number that only its makers can read.
        let text = format!("{}: {text}", self.name);
        let syndrome =
            text.bytes().fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
        self.card.complain(rule, text);
        Err(Refusal { status, syndrome: syndrome | 1 })
    }

    /// A field of the command.
    pub(crate) fn get(&self, field: &Field) -> u64 {
        field.u64(self.input)
    }

    /// Refuses a field unless it has the value.
    pub(crate) fn must_be(&mut self, field: &Field, value: u64) -> Result<(), Refusal> {
        let seen = self.get(field);
        match seen == value {
            true => Ok(()),
            false => {
                self.refuse(Rule::Command, BAD_PARAM, format_args!("{} is {seen:#x}, must be {value:#x}", field.name))
            }
        }
    }

    /// Refuses a field above a limit.
    pub(crate) fn at_most(&mut self, field: &Field, limit: u64) -> Result<(), Refusal> {
        let seen = self.get(field);
        match seen <= limit {
            true => Ok(()),
            false => {
                self.refuse(Rule::Command, BAD_PARAM, format_args!("{} is {seen:#x}, at most {limit:#x}", field.name))
            }
        }
    }

    /// Refuses other lengths, and bits that no field has.
    pub(crate) fn shape(&mut self, input: usize, output: usize, tables: &[&[Field]]) -> Result<(), Refusal> {
        let seen = (self.input.len(), self.output.len());
        if seen.0 != input {
            return self.refuse(
                Rule::Command,
                BAD_INPUT_LENGTH,
                format_args!("{:#x} bytes, must be {input:#x}", seen.0),
            );
        }
        if seen.1 < output {
            return self.refuse(
                Rule::Command,
                BAD_OUTPUT_LENGTH,
                format_args!("room for {:#x} bytes of answer, at least {output:#x}", seen.1),
            );
        }
        if let Some(at) = stray_bit(self.input, &[&[tables::HEAD], tables].concat()) {
            return self.refuse(Rule::Command, BAD_PARAM, format_args!("bit {at:#x} is set, where no field lies"));
        }
        Ok(())
    }

    /// Memory of a umem, as a command names it.
    pub(crate) fn umem(
        &mut self,
        id: u32,
        offset: u64,
        len: usize,
        align: u64,
        what: &str,
    ) -> Result<crate::memory::Memory, Refusal> {
        let context = self.context;
        let Some(Umem { memory, access, .. }) = self.card.umems.get(&id).filter(|umem| umem.context == context) else {
            return self.refuse(
                Rule::Unknown,
                BAD_RESOURCE,
                format_args!("{what}: umem {id:#x} does not exist in this context"),
            );
        };
        let (bytes, writable) = (memory.len(), access & crate::abi::LOCAL_WRITE != 0);
        let (part, start) = (memory.part(offset, len), memory.base() as u64);
        if !writable {
            return self.refuse(Rule::Memory, BAD_RESOURCE, format_args!("{what}: umem {id:#x} is not writable"));
        }
        if !offset.is_multiple_of(align) || !start.is_multiple_of(align) {
            let text = format_args!(
                "{what}: offset {offset:#x} of umem {id:#x} at {start:#x}, both must be multiples of {align:#x}"
            );
            return self.refuse(Rule::Command, BAD_PARAM, text);
        }
        match part {
            Some(part) => Ok(part),
            None => {
                let text = format_args!("{what}: {len:#x} bytes at {offset:#x} of umem {id:#x}, which has {bytes:#x}");
                self.refuse(Rule::Memory, BAD_RESOURCE, text)
            }
        }
    }

    /// Refuses a doorbell page that is not this context's.
    pub(crate) fn uar(&mut self, page: u32) -> Result<(), Refusal> {
        let context = self.context;
        match self.card.uars.get(&page).is_some_and(|uar| uar.context == context) {
            true => Ok(()),
            false => self.refuse(
                Rule::Unknown,
                BAD_RESOURCE,
                format_args!("doorbell page {page:#x} does not exist in this context"),
            ),
        }
    }
}

/// The name of a command. None: not one that this card has.
pub(crate) fn name(opcode: u16) -> Option<&'static str> {
    Some(match opcode {
        QUERY_HCA_CAP => "QUERY_HCA_CAP",
        CREATE_CQ => "CREATE_CQ",
        CREATE_QP => "CREATE_QP",
        RST2INIT => "RST2INIT_QP",
        INIT2RTR => "INIT2RTR_QP",
        RTR2RTS => "RTR2RTS_QP",
        TO_ERR => "2ERR_QP",
        TO_RST => "2RST_QP",
        QUERY_QP => "QUERY_QP",
        _ => return None,
    })
}
