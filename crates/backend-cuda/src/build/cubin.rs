//! What a compiled kernel needs, read from its cubin: an ELF file whose section `.nv.info` lists attributes of functions.

use std::collections::BTreeMap;

/// Registers and memory of one kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Resources {
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of local memory of a thread: arrays that are indexed at run time, spilled registers, calls.
    pub local_memory: u32,
}

/// `EIATTR_FRAME_SIZE`: bytes of a function's stack frame.
const FRAME_SIZE: u8 = 0x11;
/// `EIATTR_MIN_STACK_SIZE`: bytes with those of the functions it calls.
const MIN_STACK_SIZE: u8 = 0x12;
/// `EIATTR_REGCOUNT`: registers of a function.
const REGISTERS: u8 = 0x2f;
/// `EIFMT_SVAL`: a length, then the value.
const SIZED: u8 = 4;

fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}

fn u16_at(bytes: &[u8], at: usize) -> Option<usize> {
    Some(u16::from_le_bytes(number(bytes, at)?).into())
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(number(bytes, at)?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<usize> {
    usize::try_from(u64::from_le_bytes(number(bytes, at)?)).ok()
}

fn name_at(strings: &[u8], at: usize) -> Option<&str> {
    let rest = strings.get(at..)?;
    std::str::from_utf8(&rest[..rest.iter().position(|&byte| byte == 0)?]).ok()
}

struct Section<'a> {
    name: &'a str,
    bytes: &'a [u8],
}

fn sections(elf: &[u8]) -> Option<Vec<Section<'_>>> {
    if elf.get(..4)? != b"\x7fELF" || *elf.get(4)? != 2 {
        return None;
    }
    let (start, size, count, names) = (u64_at(elf, 40)?, u16_at(elf, 58)?, u16_at(elf, 60)?, u16_at(elf, 62)?);
    let header = |index: usize| elf.get(start.checked_add(index * size)?..);
    let content = |index: usize| {
        let header = header(index)?;
        // A section without bytes in the file has type 8.
        if u32_at(header, 4)? == 8 {
            return Some(&elf[..0]);
        }
        let (at, len) = (u64_at(header, 24)?, u64_at(header, 32)?);
        elf.get(at..at.checked_add(len)?)
    };
    let strings = content(names)?;
    (0..count)
        .map(|index| {
            let name = name_at(strings, u32_at(header(index)?, 0)? as usize)?;
            Some(Section { name, bytes: content(index)? })
        })
        .collect()
}

/// The needs of every kernel in a cubin, by name.
///
/// # Errors
/// What is wrong with the file.
pub fn resources(cubin: &[u8]) -> Result<BTreeMap<String, Resources>, &'static str> {
    let sections = sections(cubin).ok_or("not an ELF file of 64 bits")?;
    let of = |name: &str| sections.iter().find(|section| section.name == name).map(|section| section.bytes);
    let (symbols, strings) = (of(".symtab").ok_or("no symbols")?, of(".strtab").ok_or("no names")?);
    let info = of(".nv.info").ok_or("no .nv.info")?;
    let is_kernel = |name: &str| sections.iter().any(|section| section.name.strip_prefix(".text.") == Some(name));
    let mut all: BTreeMap<String, Resources> = BTreeMap::new();
    let mut at = 0;
    while let (Some(&[form, attribute]), Some(size)) =
        (info.get(at..at + 2).map(|two| two.as_array().unwrap_or(&[0; 2])), u16_at(info, at + 2))
    {
        let value = at + 4;
        at = if form == SIZED { value + size } else { value };
        if form != SIZED || size < 8 {
            continue;
        }
        let (Some(symbol), Some(amount)) = (u32_at(info, value), u32_at(info, value + 4)) else { break };
        let name = u32_at(symbols, symbol as usize * 24).and_then(|name| name_at(strings, name as usize));
        let Some(name) = name.filter(|name| is_kernel(name)) else { continue };
        let needs = all.entry(name.to_owned()).or_default();
        match attribute {
            FRAME_SIZE | MIN_STACK_SIZE => needs.local_memory = needs.local_memory.max(amount),
            REGISTERS => needs.registers = amount,
            _ => {}
        }
    }
    if all.is_empty() { Err("no kernels") } else { Ok(all) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_cubin_is_refused() {
        assert!(resources(b"").is_err());
        assert!(resources(b"\x7fELF\x02").is_err());
        assert!(resources(&[0x7f; 300]).is_err());
    }
}
