//! `moexpress run --backend host`: ranks that are threads, and ranks that `moexpress launch` starts as processes.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::moexpress;

const LAYER: &str = "--tokens 30 --hidden 64 --experts 16 --topk 3";

fn verified(run: &Value) {
    assert_eq!((&run["verified"], &run["error"], &run["clock"]), (&true.into(), &Value::Null, &"host".into()));
    assert!(run["verified_rows"].as_u64().is_some_and(|rows| rows > 0));
}

/// What `moexpress launch -n processes -- moexpress run --backend host --processes` says, without the ranks in front.
fn launched(processes: u32, arguments: &str) -> (Option<i32>, String, String) {
    launched_on(1, processes, arguments)
}

/// The same on so many nodes.
fn launched_on(nodes: u32, processes: u32, arguments: &str) -> (Option<i32>, String, String) {
    let program = env!("CARGO_BIN_EXE_moexpress");
    let run = format!(
        "launch -n {processes} --nodes {nodes} -- {program} run --backend host --processes {LAYER} {arguments}"
    );
    let output = Command::new(program).args(run.split_whitespace()).env_remove("RUST_LOG").output();
    let output = output.expect("the binary runs");
    let text = |bytes: &[u8]| {
        let lines = String::from_utf8_lossy(bytes).into_owned();
        let said = lines.lines().map(|line| line.split_once("] ").map_or(line, |(_, said)| said));
        said.collect::<Vec<_>>().join("\n")
    };
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

#[test]
fn threads_are_verified_in_both_modes() {
    for mode in ["", "--placement direct --dtype fp8", "--mode low-latency"] {
        let run = moexpress(&format!("run --backend host --ranks-per-node 4 {LAYER} {mode} --json")).json();
        verified(&run);
        assert_eq!((&run["backend"], &run["events"]), (&"host".into(), &Value::Null));
    }
}

#[test]
fn processes_are_verified_in_both_modes() {
    for mode in ["", "--placement direct", "--mode low-latency --results per-rank"] {
        let (code, said, complaint) = launched(4, &format!("{mode} --json"));
        assert_eq!(code, Some(0), "{complaint}");
        verified(&serde_json::from_str(&said).expect("rank 0 prints one object"));
    }
}

/// Rank 2 is stopped once it has dispatched, so that the others combine without it, and never goes on.
#[test]
fn a_rank_stopped_for_good_keeps_nobody_longer_than_the_deadline() {
    let (program, folder) = (env!("CARGO_BIN_EXE_moexpress"), tempfile::tempdir().unwrap());
    let pid = folder.path().join("pid");
    let run = format!(
        "if [ $RANK = 2 ]; then echo $$ > {}; fi; exec {program} run --backend host --processes --deadline 20s \
         --tokens 200 --hidden 2048 --experts 16 --topk 4",
        pid.display()
    );
    let mut launcher = Command::new(program);
    launcher.args(["launch", "-n", "4", "--", "sh", "-c", &run]).env("RUST_LOG", "info");
    let mut launcher = launcher.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("the binary runs");
    let mut lines = BufReader::new(launcher.stderr.take().expect("it is piped")).lines().map_while(Result::ok);
    let dispatched = lines.by_ref().find(|line| line.starts_with("[rank 2]") && line.contains("dispatch"));
    assert!(dispatched.is_some(), "rank 2 tells of its dispatch");
    let stopped = fs::read_to_string(&pid).unwrap();
    assert!(Command::new("kill").args(["-s", "STOP", stopped.trim()]).status().unwrap().success());
    let began = Instant::now();
    let said: Vec<String> = lines.collect();
    assert_eq!(launcher.wait().unwrap().code(), Some(1), "{said:#?}");
    let took = began.elapsed();
    // Those who gathered results under a deadline of their own took twice as long.
    assert!(took < Duration::from_secs(36), "{took:?}: the deadline is 20 s\n{said:#?}");
    // An error that several say alike is said once: the log has each rank's own.
    for rank in [0, 1, 3] {
        let own = format!("[rank {rank}] ");
        let told = |line: &&String| line.starts_with(&own) && line.contains("culprit rank 2");
        assert!(said.iter().any(|line| told(&line)), "rank {rank}: {said:#?}");
    }
    let errors: Vec<_> = said.iter().filter(|line| line.contains("] error: ")).collect();
    assert!(!errors.is_empty() && errors.iter().all(|line| line.contains("rank 2")), "{said:#?}");
}

/// All fail for the same reason, which is printed once, and the report is that of the whole job.
#[test]
fn a_job_whose_processes_cannot_meet_is_reported_once() {
    let (program, lost) = (env!("CARGO_BIN_EXE_moexpress"), "nowhere.invalid");
    let run = format!("MOEXPRESS_MEETING={lost}:1 {program} run --backend host --processes {LAYER}; test $? = 1");
    let output =
        Command::new(program).args(["launch", "-n", "4", "--", "sh", "-c", &run]).env_remove("RUST_LOG").output();
    let output = output.expect("the binary runs");
    let [said, told] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    assert_eq!(output.status.code(), Some(0), "{said}{told}");
    assert_eq!(said.matches("NOT VERIFIED").count(), 1, "{said}");
    assert!(said.lines().all(|line| line.starts_with("[rank 0]")), "{said}");
    assert_eq!(told.matches(lost).count(), 1, "{told}");
}

#[test]
fn a_job_that_does_not_fit_the_processes_is_refused() {
    let (code, _, complaint) = launched(3, "");
    assert_eq!(code, Some(2), "{complaint}");
    assert!(complaint.contains("16"), "{complaint}");
}

#[test]
fn several_nodes_are_refused_with_what_is_missing() {
    let refusal = moexpress(&format!("run --backend host --nodes 2 --ranks-per-node 2 {LAYER}")).refusal();
    let expected =
        "error: nodes with --backend host is 2, allowed: 1; more with --far roce, which carries rows between them";
    assert!(refusal.starts_with(expected), "{refusal}");
}

#[test]
fn a_far_transport_that_cannot_be_is_refused_with_the_reason() {
    let two = "--nodes 2 --ranks-per-node 2";
    let refused = |arguments: &str| moexpress(&format!("run {two} {LAYER} {arguments}")).refusal();
    assert!(refused("--far roce").contains("--backend with --far is sim, allowed: host"));
    assert!(refused("--far-mtu 1024").contains("--far"));
    let host = |arguments: &str| refused(&format!("--backend host --far roce {arguments}"));
    assert!(host("--far-mtu 1500").contains("MTU is 1500, allowed: 256, 512, 1024, 2048 or 4096"));
    assert!(host("--far-devices a,b!").contains("RDMA device is b!, allowed: auto"));
    assert!(host("--far-ack-timeout 32").contains("ack timeout is 32, allowed: 1 to 31"));
    // Whatever this machine has, it has no such device.
    let missing = host("--far-devices no_such_device");
    let named =
        ["libibverbs.so.1 cannot be loaded", "there is no RDMA device"].iter().any(|named| missing.contains(named));
    assert!(named && missing.contains("RoCE on rank 0"), "{missing}");
}

/// Two nodes in one process, with a network made of software between them; at 1 GB/s it shows.
#[test]
fn several_nodes_are_verified_over_the_loop() {
    let two = "run --backend host --nodes 2 --ranks-per-node 2";
    for more in ["--far-rate 1 --far-latency 20us", "--far-lanes one --mode low-latency", "--far-latency 0s"] {
        let run = moexpress(&format!("{two} {LAYER} --far loop {more} --json")).json();
        verified(&run);
        assert!(run["bytes_far"].as_u64().is_some_and(|bytes| bytes > 0), "{run}");
    }
    let run =
        moexpress(&format!("{two} --tokens 64 --hidden 4096 --experts 16 --topk 3 --far loop --far-rate 0.02 --json"));
    let run = run.json();
    verified(&run);
    // Half of the bytes go in the dispatch, and a card has a fourth of those, about: half of that is sure.
    let (bytes, took) = (run["bytes_far"].as_u64().unwrap(), run["dispatch_ns"].as_u64().unwrap());
    assert!(took as f64 > bytes as f64 / 16.0 / 0.02, "{bytes} bytes took {took} ns");
}

#[test]
fn what_the_loop_cannot_do_is_refused() {
    let refused = |arguments: &str| {
        moexpress(&format!("run --backend host --nodes 2 --ranks-per-node 2 {LAYER} {arguments}")).refusal()
    };
    assert!(refused("--far loop --far-mtu 1024").contains("--far with --far-mtu is loop, allowed: roce"));
    assert!(refused("--far roce --far-rate 1").contains("--far with --far-rate is roce, allowed: loop"));
    assert!(refused("--far loop --far-rate 0").contains("--far-rate is 0, allowed: more than 0, in GB/s"));
    assert!(
        refused("--far loop --far-rate fast").contains("'fast' for '--far-rate <GB_S>': allowed: a number more than 0")
    );
    assert!(refused("--far loop --far-staged").contains("windows of --backend host lie in memory of the host"));
    assert!(refused("--far loop --far-movers 1").contains("--far-movers: windows of --backend host lie in memory"));
    assert!(refused("--far loop --far-latency 2min").contains("the loop's latency is 120s, allowed: at most 60s"));
}

/// The same as processes of one host, which carry what they posted themselves.
#[test]
fn processes_of_several_nodes_are_verified_over_the_loop() {
    for more in ["", "--placement direct --far-rate 1 --far-latency 200us", "--mode low-latency"] {
        let (code, said, complaint) = launched_on(2, 4, &format!("--far loop {more} --json"));
        assert_eq!(code, Some(0), "{more}: {complaint}");
        let run = serde_json::from_str::<Value>(&said).expect("rank 0 prints one object");
        verified(&run);
        assert!(run["bytes_far"].as_u64().is_some_and(|bytes| bytes > 0), "{run}");
    }
}

#[test]
fn a_far_transport_on_one_node_is_refused() {
    let expected = "nodes with --far is 1, allowed: 2 or more: nothing is far on one node";
    for nodes in ["", "--nodes 1 --ranks-per-node 4"] {
        let refusal = moexpress(&format!("run --backend host {nodes} {LAYER} --far roce")).refusal();
        assert!(refusal.contains(expected), "{refusal}");
    }
}

#[test]
fn processes_need_a_launcher() {
    let refusal = moexpress("run --backend host --processes").refusal();
    assert!(refusal.contains("moexpress launch -n 4 -- moexpress run --backend host --processes"), "{refusal}");
}

#[test]
fn bench_measures_calls_beside_copying_threads() {
    let line = "bench --backend host --ranks 2 --tokens 5 --low-latency-tokens 1,3 --hidden 64 --experts 4 --topk 2 --repetitions 2";
    let table = moexpress(line).success();
    assert!(table.contains("throughput") && table.contains("low latency"), "{table}");
    let rows = moexpress(&format!("{line} --json")).json();
    let rows = rows.as_array().expect("an array");
    assert_eq!(rows.len(), 2 * 2 + 2 * 2, "{rows:?}");
    for row in rows {
        assert!(row["dispatch_us"].as_f64().is_some_and(|us| us > 0.0), "{row}");
    }
    let refusal = moexpress("bench --backend host --ranks 3").refusal();
    assert!(refusal.contains("256"), "{refusal}");
    assert!(moexpress("bench --backend sim").refusal().contains("allowed: host, cuda"));
}

#[test]
fn bench_refuses_what_nothing_heeds() {
    for (options, told) in [
        ("--backend host --multiprocessors 8", "--backend with --multiprocessors is host, allowed: cuda"),
        ("--backend host --processes", "--backend with --processes is host, allowed: cuda"),
        ("--backend cuda --processes", "--mode with --processes is not given, allowed: throughput"),
        ("--backend cuda --far loop", "--nodes with --far is 1, allowed: 2 or more"),
        ("--backend cuda --channels 4", "--nodes with --channels is 1, allowed: 2 or more"),
        ("--backend host --nodes 2 --far loop", "--backend with --nodes is host, allowed: cuda"),
        ("--backend cuda --nodes 2 --mode throughput", "--far with --nodes is not given, allowed: loop"),
        ("--backend cuda --nodes 2 --far loop", "--mode with --nodes is not given, allowed: throughput"),
        (
            "--backend cuda --nodes 2 --far loop --mode throughput --ranks 3",
            "--ranks is 3, allowed: a multiple of 2 nodes",
        ),
        (
            "--backend cuda --nodes 2 --far loop --mode throughput --far-mtu 1024",
            "--far is loop, allowed: one that heeds --far-mtu",
        ),
        ("--backend host --mode low-latency --tokens 8", "--mode with --tokens is low-latency, allowed: throughput"),
        (
            "--backend host --mode throughput --low-latency-tokens 8",
            "--mode with --low-latency-tokens is throughput, allowed: low-latency",
        ),
    ] {
        let refusal = moexpress(&format!("bench {options}")).refusal();
        assert!(refusal.contains(told), "{refusal}");
    }
}

#[test]
fn a_failure_is_said_once() {
    // Planning the second batch takes longer than any wait that ends before it looks at the clock.
    for line in ["--backend host", "--backend sim"] {
        let done = moexpress(&format!("run {line} --ranks-per-node 2 --tokens 9,5000 --deadline 1ns"));
        let said = done.failure();
        // One line of each rank, and none of a log.
        assert_eq!(said.matches("operation 1 failed").count(), 2, "{line}: {said}");
    }
}
