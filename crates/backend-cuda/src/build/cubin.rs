//! A compiled kernel as a file: cubins are ELF files.

fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}

pub(super) fn u16_at(bytes: &[u8], at: usize) -> Option<usize> {
    Some(u16::from_le_bytes(number(bytes, at)?).into())
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(number(bytes, at)?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<usize> {
    usize::try_from(u64::from_le_bytes(number(bytes, at)?)).ok()
}

pub(super) fn name_at(strings: &[u8], at: usize) -> Option<&str> {
    let rest = strings.get(at..)?;
    std::str::from_utf8(&rest[..rest.iter().position(|&byte| byte == 0)?]).ok()
}

/// The name of a section, and its bytes in the file.
pub(super) type Section<'a> = (&'a str, &'a [u8]);

pub(super) fn sections(elf: &[u8]) -> Option<Vec<Section<'_>>> {
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
            Some((name, content(index)?))
        })
        .collect()
}

/// Refuses an image that is no cubin, or whose headers name bytes beyond its end: who loads it would read them.
///
/// # Errors
/// What is wrong with it.
pub(crate) fn is_whole(cubin: &[u8]) -> Result<(), &'static str> {
    sections(cubin).ok_or("not a whole ELF file of 64 bits: a section lies beyond its end")?;
    let segments = || {
        let (start, size, count) = (u64_at(cubin, 32)?, u16_at(cubin, 54)?, u16_at(cubin, 56)?);
        (0..count).try_for_each(|index| {
            let header = cubin.get(start.checked_add(index * size)?..)?;
            let (at, len) = (u64_at(header, 8)?, u64_at(header, 32)?);
            // A note of the program table itself included: all of it is in the file.
            cubin.get(at..at.checked_add(len)?).map(drop)
        })
    };
    segments().ok_or("not a whole ELF file: a segment lies beyond its end")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A header of 64 bits with one section that names itself, and one segment, of so many bytes.
    fn image(section: u64, segment: u64) -> Vec<u8> {
        let mut elf = vec![0; 64 + 64 + 56];
        elf[..5].copy_from_slice(b"\x7fELF\x02");
        let mut put = |at: usize, bytes: &[u8]| elf[at..at + bytes.len()].copy_from_slice(bytes);
        put(40, &64u64.to_le_bytes());
        put(58, &64u16.to_le_bytes());
        put(60, &1u16.to_le_bytes());
        put(32, &128u64.to_le_bytes());
        put(54, &56u16.to_le_bytes());
        put(56, &1u16.to_le_bytes());
        put(64 + 24, &0u64.to_le_bytes());
        put(64 + 32, &section.to_le_bytes());
        put(128 + 32, &segment.to_le_bytes());
        // The section's name is empty: a zero among its bytes.
        put(64, &5u32.to_le_bytes());
        elf
    }

    #[test]
    fn images_that_name_bytes_beyond_their_end_are_refused() {
        assert_eq!(is_whole(&image(184, 184)), Ok(()));
        for (section, segment) in [(185, 0), (184, 185), (u64::MAX, 0), (184, u64::MAX)] {
            assert!(is_whole(&image(section, segment)).is_err(), "{section} {segment}");
        }
        for len in 0..184 {
            assert!(is_whole(&image(184, 184)[..len]).is_err(), "cut at {len}");
        }
        assert!(is_whole(b"a cubin").is_err() && is_whole(&[]).is_err());
    }
}
