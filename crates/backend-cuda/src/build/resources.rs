//! What compiled kernels need: the section `.nv.info` of a cubin lists attributes of functions.

use std::collections::BTreeMap;

use super::cubin::{name_at, sections, u16_at, u32_at};
use ep_core::transport::DeviceSource;

use super::{ALL, Cache, CudaError, Source, Target, code, compile, is_whole, side_by_side, specialised};

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

/// The needs of every kernel in a cubin, by name.
///
/// # Errors
/// What is wrong with the file.
pub fn resources(cubin: &[u8]) -> Result<BTreeMap<String, Resources>, &'static str> {
    let sections = sections(cubin).ok_or("not an ELF file of 64 bits")?;
    let of = |name: &str| sections.iter().find(|(section, _)| *section == name).map(|(_, bytes)| *bytes);
    let (symbols, strings) = (of(".symtab").ok_or("no symbols")?, of(".strtab").ok_or("no names")?);
    let info = of(".nv.info").ok_or("no .nv.info")?;
    let is_kernel = |name: &str| sections.iter().any(|(section, _)| section.strip_prefix(".text.") == Some(name));
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

/// Compiles all kernels for `arch`, those for tests and those of a usual shape too, and returns what each but those for tests needs; fails where one that
/// moves rows uses local memory. What a cache has is not compiled again.
///
/// # Errors
/// As [`code`], and [`CudaError::Compile`] for local memory.
pub fn check(cache: &Cache, arch: &str) -> Result<Vec<(String, Resources)>, CudaError> {
    let proxied = |source: Source| source.between_nodes(arch, &crate::proxy::source());
    let products: Vec<_> =
        ALL.into_iter().flat_map(|source| source.variants(arch).into_iter().chain(proxied(source))).collect();
    // Tests' kernels between nodes take long, and a toy device has their checks.
    let near = products.iter().filter(|target| target.far.is_none());
    let tests: Vec<_> = near.map(|target| target.clone().for_tests(true)).collect();
    side_by_side::each(&tests, |target| code(cache, target))?;
    let shape = specialised::usual();
    let special = products.iter().map(|target| target.clone().specialised(&shape));
    let special = special.filter(|target| target.shape.is_some()).collect::<Vec<_>>();
    let targets: Vec<_> = products.into_iter().chain(special).collect();
    let needed = side_by_side::each(&targets, |target| needs(target, &code(cache, target)?))?;
    Ok(needed.into_iter().flatten().collect())
}

/// The same of kernels that reach other nodes, over lanes with this text.
///
/// # Errors
/// As [`compile`], and [`CudaError::Compile`] for local memory.
pub fn check_over(arch: &str, lanes: &DeviceSource) -> Result<Vec<(String, Resources)>, CudaError> {
    let posts = Target::new(Source::Posts, arch).over(lanes);
    let targets: Vec<_> = ALL.iter().filter_map(|source| source.between_nodes(arch, lanes)).chain([posts]).collect();
    let needed = side_by_side::each(&targets, |target| needs(target, &compile(target)?))?;
    Ok(needed.into_iter().flatten().collect())
}

/// What the kernels of one compilation need.
fn needs(target: &Target, cubin: &[u8]) -> Result<Vec<(String, Resources)>, CudaError> {
    let said = |log| CudaError::Compile { kernel: target.source.name(), arch: target.arch.clone(), log };
    is_whole(cubin).map_err(|problem| said(problem.to_owned()))?;
    let mut all = Vec::new();
    for (kernel, needs) in resources(cubin).map_err(|problem| said(problem.to_owned()))? {
        if needs.local_memory > 0 {
            return Err(said(format!("{kernel} uses {} bytes of local memory", needs.local_memory)));
        }
        let far = target.far.is_some().then_some("over lanes between nodes");
        let defines = target.defines.iter().map(String::as_str);
        let special = target.shape.is_some().then_some("of one shape");
        let variant: Vec<_> = [kernel.as_str()].into_iter().chain(defines).chain(far).chain(special).collect();
        all.push((variant.join(" "), needs));
    }
    Ok(all)
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
