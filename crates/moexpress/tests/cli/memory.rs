//! What a run takes of memory is told before it is taken.

use crate::{moexpress, moexpress_with_env};

/// Runs whose rows, windows or ranks outweigh all else.
const RUNS: [&str; 9] = [
    "--tokens 192 --hidden 7168 --topk 8",
    "--tokens 192 --hidden 7168 --topk 8 --dtype fp8",
    "--tokens 192 --hidden 7168 --topk 8 --placement direct",
    "--tokens 192 --hidden 7168 --topk 8 --schedule timed",
    "--tokens 192 --hidden 7168 --topk 8 --nodes 2 --ranks-per-node 4",
    "--tokens 64 --hidden 7168 --topk 8 --mode low-latency",
    "--tokens 1 --hidden 8 --ranks-per-node 32",
    "--tokens 1 --hidden 8 --nodes 16 --experts 512 --schedule timed --elide-payload",
    "--tokens 16 --hidden 7168 --nodes 32 --experts 256 --topk 8 --mode low-latency --schedule timed --elide-payload",
];

#[test]
#[cfg(target_os = "linux")]
fn estimates_are_near_what_is_taken() {
    // A plain run of the tests takes a share of them.
    let step = if std::env::var_os("EP_THOROUGH").is_some() { 1 } else { 4 };
    let mut runs: Vec<_> = RUNS.into_iter().step_by(step).collect();
    let host = "--tokens 192 --hidden 7168 --topk 8 --backend host";
    runs.extend([host, "--tokens 64 --hidden 7168 --topk 8 --mode low-latency --backend host"]);
    let mut wrong = Vec::new();
    for line in runs {
        let object = moexpress(&format!("run --json {line}")).json();
        let [told, taken] = ["estimate", "peak"].map(|key| object[format!("memory_{key}_bytes")].as_f64().unwrap());
        let ratio = told / taken;
        if !(0.8..1.7).contains(&ratio) {
            wrong.push(format!("{ratio:.2} of {:.0} MiB: {line}", taken / 1048576.0));
        }
    }
    assert!(wrong.is_empty(), "estimates by what was taken:\n{}", wrong.join("\n"));
}

#[test]
fn what_exceeds_the_machine_is_refused_with_value_limit_and_remedy() {
    for (line, says) in [
        ("run --tokens 60000000", ["memory of a run of 8 ranks is about ", "fewer --tokens"]),
        ("run --tokens 60000000 --backend host", ["rows ", "what this machine has left"]),
        ("run --tokens 4194304 --mode low-latency --hidden 65536", ["run of 8 ranks is about ", "--elide-payload"]),
        ("run --ranks-per-node 4096 --experts 4096 --tokens 1", ["a run of 4096 ranks is about ", "the simulator "]),
        (
            "run --tokens 1 --slots 1048576 --channels 64 --ranks-per-node 64",
            ["a run of 64 ranks is about ", "the simulator "],
        ),
        (
            "run --schedule timed --elide-payload --nodes 2048 --experts 16384 --tokens 1",
            ["a run of 16384 ranks is about ", "has left; fewer --tokens or ranks\n"],
        ),
        ("tune --tokens 60000000", ["timed runs of 8 ranks is about ", "fewer --tokens"]),
        ("compare deepep", ["memory of 8 simulated ranks is about ", "what this machine has left"]),
    ] {
        // Eight simulated ranks take little.
        let memory = if line.starts_with("compare") { "1000" } else { "68719476736" };
        let refusal = moexpress_with_env(line, &[("MOEXPRESS_MEMORY", memory)]).refusal();
        assert!(says.iter().all(|part| refusal.contains(part)), "{line}: {refusal}");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn windows_and_measurements_of_cpu_ranks_are_refused_likewise() {
    for (line, says) in [
        ("run --backend host --slots 1048576 --channels 64 --tokens 1", "the 8 ranks of this host is about "),
        ("bench --backend host --tokens 60000000", "memory of "),
        ("bench --backend host --low-latency-tokens 1000000 --mode low-latency", "memory of "),
    ] {
        let refusal = moexpress_with_env(line, &[("MOEXPRESS_MEMORY", "68719476736")]).refusal();
        assert!(refusal.contains(says) && refusal.contains("allowed: at most 64.0 GiB"), "{line}: {refusal}");
    }
}

#[test]
fn how_much_there_is_can_be_said() {
    let line = "run --tokens 64 --ranks-per-node 2";
    let refusal = moexpress_with_env(line, &[("MOEXPRESS_MEMORY", "1000")]).refusal();
    assert!(refusal.contains("allowed: at most 1000 B, what this machine has left"), "{refusal}");
    let refusal = moexpress_with_env(line, &[("MOEXPRESS_MEMORY", "much")]).refusal();
    assert!(refusal.contains("MOEXPRESS_MEMORY is \"much\", allowed: a number of bytes"), "{refusal}");
    moexpress_with_env(line, &[("MOEXPRESS_MEMORY", "1000000000")]).success();
}
