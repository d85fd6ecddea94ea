//! Writes the kernels' files to a folder, with the script that builds them with CANN's compiler; without a folder, lists them.
//!
//! ```console
//! $ cargo run -p ep-ascend --example kernels -- npu-kernels && npu-kernels/build.sh
//! ```

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

fn main() -> std::io::Result<()> {
    let files = ep_ascend::build_files();
    let Some(folder) = std::env::args_os().nth(1).map(PathBuf::from) else {
        files.iter().for_each(|(name, text)| println!("{:>7} {name}", text.len()));
        return Ok(());
    };
    fs::create_dir_all(&folder)?;
    for (name, text) in &files {
        fs::write(folder.join(name), text)?;
    }
    let script = folder.join(ep_ascend::BUILD);
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
    println!("{} files; now run {}", files.len(), script.display());
    Ok(())
}
