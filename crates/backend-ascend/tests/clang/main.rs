//! What the device's compiler refuses and g++ takes: clang reads the kernels with functions of the device marked as such, and with pointers to
//! global memory apart from others. Nothing runs.

mod build;

use std::fs;
use std::process::Command;

/// What makes a clang read them so.
const DEVICE: [&str; 9] = [
    "-x",
    "cuda",
    "--cuda-device-only",
    "--cuda-gpu-arch=sm_70",
    "-nocudainc",
    "-nocudalib",
    "-nostdinc",
    "-std=c++17",
    "-Wno-unknown-cuda-version",
];

/// The name of the clang that is there.
fn clang() -> &'static str {
    let names = ["clang++", "clang++-14", "clang-14", "clang"];
    let runs = |name: &&str| Command::new(name).arg("--version").output().is_ok();
    names.into_iter().find(runs).expect("clang: install it")
}

/// What clang says of the kernels with a change: file, what stands there, what is put in its place. Nothing where it takes them.
fn refusal(clang: &str, change: Option<(&str, &str, &str)>, defines: &[&str]) -> Option<String> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let own = [("kernel_operator.h", include_str!("kernel_operator.h").to_owned())];
    for (name, mut text) in ep_ascend::headers().into_iter().chain(own) {
        if let Some((_, from, to)) = change.filter(|(file, ..)| *file == name) {
            assert_eq!(text.matches(from).count(), 1, "{name} has it once: {from}");
            text = text.replace(from, to);
        }
        fs::write(folder.path().join(name), text).expect("the file can be written");
    }
    let mut said = String::new();
    for (name, text) in ep_ascend::sources().into_iter().chain([ep_ascend::probe::source()]) {
        fs::write(folder.path().join(name), text).expect("the file can be written");
        let mut command = Command::new(clang);
        command.args(DEVICE).args(["-S", "-o", "out.s", "-Wall", "-Wextra", "-Werror"]);
        // A kernel has no double.
        command.args(["-Wdouble-promotion"]).args(defines.iter().map(|define| format!("-D{define}")));
        let output = command.arg(name).current_dir(folder.path()).output().expect("clang runs");
        if !output.status.success() {
            said += &String::from_utf8_lossy(&output.stderr);
        }
    }
    (!said.is_empty()).then_some(said)
}

#[test]
#[ignore = "needs clang: CI runs it"]
fn the_kernels_are_device_code() {
    let clang = clang();
    for defines in [&[][..], &["EP_TEST"]] {
        if let Some(said) = refusal(clang, None, defines) {
            panic!("{defines:?}: {said}");
        }
    }
}

#[test]
#[ignore = "needs clang: CI runs it"]
fn what_the_device_compiler_refuses_is_refused() {
    let clang = clang();
    let changes = [
        (
            "no matching function for call to 'ep_end'",
            ("ep_npu.h", "EP_DEV void ep_end(EpCore& c)", "inline void ep_end(EpCore& c)"),
        ),
        (
            "no matching member function for call to 'SetGlobalBuffer'",
            ("ep_npu.h", "tensor.SetGlobalBuffer((__gm__ T*)at);", "tensor.SetGlobalBuffer((T*)at);"),
        ),
        (
            "implicit conversion increases floating-point precision",
            (
                "ep_reduce.h",
                "weights[k] += ep_read_choice(b.head, k).weight;",
                "weights[k] += (float)(2.0 * weights[k]);",
            ),
        ),
    ];
    for (says, change) in changes {
        let said = refusal(clang, Some(change), &[]).unwrap_or_else(|| panic!("it is taken: {change:?}"));
        assert!(said.contains(says), "{said}");
    }
}
