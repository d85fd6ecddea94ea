//! Tells builds of one version apart: a hash of the sources that two ranks must have in common, those of the protocol and of
//! this crate.

use std::fs;
use std::path::{Path, PathBuf};

fn main() -> std::io::Result<()> {
    let mut files = Vec::new();
    // Outside of the workspace the protocol is a dependency with a version, which says enough.
    for folder in ["src", "../ep-core/src"].map(Path::new).into_iter().filter(|folder| folder.is_dir()) {
        println!("cargo::rerun-if-changed={}", folder.display());
        collect(folder, &mut files)?;
    }
    files.sort();
    // FNV-1a: nobody is kept out by it, only found out.
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut add = |bytes: &[u8]| {
        for &byte in bytes {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    };
    for file in files {
        add(file.to_string_lossy().as_bytes());
        add(&fs::read(&file)?);
    }
    println!("cargo::rustc-env=EP_SOURCES={hash:016x}");
    Ok(())
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> std::io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() { collect(&path, files)? } else { files.push(path) }
    }
    Ok(())
}
