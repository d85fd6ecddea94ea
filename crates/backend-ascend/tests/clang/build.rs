//! The script for whoever has CANN, with a clang in place of the vendor's compiler: all files are there, each source compiles by itself, and all of
//! them are linked.

use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::{DEVICE, clang};

/// Takes of the script's flags what a clang knows.
const COMPILER: &str = r#"#!/bin/sh
echo "$@" >> "$LOG"
while [ $# -gt 0 ]; do
    case $1 in
        -I*) folders="$folders $1" ;;
        *.cpp) source=$1 ;;
        -o) shift; object=$1 ;;
    esac
    shift
done
"#;
const LINKER: &str = "#!/bin/sh\nwhile [ \"$1\" != -static ]; do shift; done\nshift\nfor object in $*; do [ \"$object\" = -o ] && break; cat \"$object\"; done > kernels.o\n";

/// Writes a program by another process: one that is open for writing in ours would be open in what other tests start meanwhile, and could not run.
fn write(at: &Path, text: &str) {
    let mut install = Command::new("install");
    install.args(["-D", "-m", "755", "/dev/stdin"]).arg(at).stdin(Stdio::piped());
    let mut install = install.spawn().expect("install runs");
    install.stdin.take().expect("it is piped").write_all(text.as_bytes()).expect("install reads");
    assert!(install.wait().expect("install ends").success(), "{at:?} is not written");
}

fn build(folder: &Path, toolkit: Option<&Path>, log: &Path) -> Output {
    let mut command = Command::new(folder.join(ep_ascend::BUILD));
    command.env_remove("ASCEND_HOME_PATH").env("LOG", log);
    if let Some(at) = toolkit {
        command.env("ASCEND_HOME_PATH", at);
    }
    command.output().expect("a shell runs")
}

#[test]
#[ignore = "needs clang: CI runs it"]
fn the_script_builds_what_it_is_given() {
    let clang = clang();
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (kernels, toolkit, log) =
        (folder.path().join("kernels"), folder.path().join("cann"), folder.path().join("log"));
    ep_ascend::build_files().iter().for_each(|(name, text)| write(&kernels.join(name), text));

    let said = |output: &Output| String::from_utf8_lossy(&output.stderr).into_owned();
    let nowhere = build(&kernels, None, &log);
    assert!(!nowhere.status.success() && said(&nowhere).contains("ASCEND_HOME_PATH: is not set"), "{nowhere:?}");
    let without_tools = build(&kernels, Some(&toolkit), &log);
    assert!(!without_tools.status.success() && said(&without_tools).contains("no bisheng in"), "{without_tools:?}");
    let compiler = format!("{COMPILER}exec {clang} {} $folders -S \"$source\" -o \"$object\"\n", DEVICE.join(" "));
    write(&toolkit.join("bin/bisheng"), &compiler);
    write(&toolkit.join("x86_64-linux/ccec_compiler/bin/ld.lld"), LINKER);
    let without_headers = build(&kernels, Some(&toolkit), &log);
    assert!(!without_headers.status.success() && said(&without_headers).contains("no headers"), "{without_headers:?}");

    write(&toolkit.join("x86_64-linux/tikcpp/tikcfw/kernel_operator.h"), include_str!("kernel_operator.h"));
    let built = build(&kernels, Some(&toolkit), &log);
    assert!(built.status.success(), "{}", said(&built));
    let linked = fs::read_to_string(kernels.join("kernels.o")).expect("what was linked");
    for kernel in ["ep_positions_kernel", "ep_dispatch", "ep_combine", "ep_spread_kernel", "ep_low_tell_kernel"] {
        assert!(linked.contains(kernel), "{kernel} is missing");
    }
    let log = fs::read_to_string(log).expect("what the compiler was asked for");
    assert_eq!(log.lines().count(), ep_ascend::sources().len());
    for wanted in
        ["--cce-aicore-only --cce-aicore-arch=dav-c220-vec", "-mllvm -cce-aicore-dcci-insert-for-scalar=false"]
    {
        assert!(log.lines().all(|line| line.contains(wanted) && !line.contains("auto-sync")), "{log}");
    }
}
