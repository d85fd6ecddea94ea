//! `moexpress run` on made batches.

use crate::{moexpress, moexpress_with, moexpress_with_env};

#[test]
fn without_options_it_verifies_an_example() {
    let text = moexpress("run").success();
    assert!(text.contains("8 ranks on 1 node, sim (explore, seed 0), throughput"), "{text}");
    assert!(text.contains("VERIFIED"), "{text}");
}

#[test]
fn json_holds_the_promised_keys() {
    let object = moexpress("run --json --ranks-per-node 4 --tokens 8 --hidden 32 --experts 8 --topk 2 --seed 5").json();
    assert_eq!(object["verified"], true);
    assert_eq!((&object["backend"], &object["mode"]), (&"sim".into(), &"throughput".into()));
    assert_eq!((&object["ranks"], &object["seed"]), (&4.into(), &5.into()));
    assert_eq!((&object["rows_far"], &object["bytes_far"]), (&0.into(), &0.into()));
    for key in ["rows_near", "bytes_near", "dispatch_ns", "combine_ns", "events"] {
        assert!(object[key].as_u64().is_some_and(|value| value > 0), "{key} is {}", object[key]);
    }
}

#[test]
fn rows_are_counted_once_there_and_once_back() {
    let object = moexpress("run --json --ranks-per-node 2 --tokens 10,0 --hidden 16 --experts 2 --topk 2").json();
    // Both experts, so every token goes to both ranks and comes back from both.
    assert_eq!((&object["rows_own"], &object["rows_near"]), (&20.into(), &20.into()));
    // A row is a header of 16 bytes, two choices of 8, and 16 values of 2.
    assert_eq!(object["bytes_near"], 20 * (16 + 16 + 32));
    assert_eq!((&object["verified_rows"], &object["verified_weights"]), (&30.into(), &60.into()));
}

#[test]
fn the_same_seed_repeats_a_run() {
    let run = |seed: &str| {
        let mut object = moexpress(&format!("run --json --tokens 6 --hidden 16 --drop 0.3 --seed {seed}")).json();
        let fields = object.as_object_mut().expect("an object");
        for key in ["dispatch_ns", "combine_ns", "rank_spans_ns", "memory_peak_bytes"] {
            fields.remove(key);
        }
        object
    };
    assert_eq!(run("9"), run("9"));
    assert_ne!(run("9")["events"], run("10")["events"]);
}

#[test]
fn every_routing_and_placement_is_verified() {
    for routing in ["uniform", "grouped:4:2", "skewed:1.5", "single"] {
        for placement in ["ring", "direct"] {
            let line = format!(
                "run --json --ranks-per-node 4 --tokens 9,0,30,1 --hidden 24 --experts 16 --topk 3 --drop 0.1 \
                 --routing {routing} --placement {placement} --slots 3 --chunk 2 --credit 3 --channels 2"
            );
            let object = moexpress(&line).json();
            assert_eq!(object["verified"], true, "{routing} {placement}");
            assert_eq!(object["placement"], placement);
        }
    }
}

#[test]
fn rows_of_bytes_halve_what_dispatch_moves() {
    let bytes = |dtype: &str| {
        let object =
            moexpress(&format!("run --json --hidden 1024 --tokens 24 --nodes 2 --ranks-per-node 2 --dtype {dtype}"))
                .json();
        assert_eq!(object["verified"], true, "{dtype}");
        object["bytes_far"].as_u64().unwrap() as f64
    };
    let bf16 = bytes("bf16");
    for dtype in ["fp8", "fp8-pow2", "fp8-ue8m0", "int8"] {
        // Combine brings bf16 back, so that three quarters are left.
        let share = bytes(dtype) / bf16;
        assert!((0.72..0.80).contains(&share), "{dtype}: {share}");
    }
}

#[test]
fn rows_travel_once_to_each_node() {
    for placement in ["ring", "direct"] {
        let line = format!("run --json --nodes 3 --ranks-per-node 2 --experts 48 --tokens 40 --placement {placement}");
        let object = moexpress(&line).json();
        assert_eq!(object["verified"], true, "{placement}");
        let far = object["rows_far"].as_u64().unwrap();
        // Dispatch and combine, each at most once to each of the two other nodes.
        assert!(far > 0 && far <= 2 * 2 * 6 * 40, "{far} rows went between nodes");
    }
}

#[test]
fn what_is_not_there_is_refused_by_name() {
    for (option, says) in [
        ("--nodes 0", "nodes is 0, allowed: at least 1"),
        ("--nodes 3", "experts is 64, allowed: a multiple of the 24 ranks"),
        ("--mode latency", "possible values: throughput, low-latency"),
        ("--dtype int4", "possible values: bf16, fp8, fp8-pow2, fp8-ue8m0, int8"),
        ("--backend tpu", "possible values: sim, host, cuda, ascend"),
        ("--schedule fair", "possible values: explore, timed"),
        ("--schedule timed --model tpu", "possible values: h800-cx7, h200-node, h200-loop, ascend-a2"),
        ("--placement anywhere", "possible values: ring, direct"),
    ] {
        let refusal = moexpress(&format!("run {option}")).refusal();
        assert!(refusal.contains(says), "{option}: {refusal}");
    }
}

#[test]
fn bad_values_are_refused_with_their_limit() {
    for (options, says) in [
        ("--ranks-per-node 0", "ranks per node is 0, allowed: at least 1"),
        ("--ranks-per-node 7", "experts is 64, allowed: a multiple of the 7 ranks"),
        ("--topk 0", "topk is 0, allowed: 1 to 32"),
        ("--topk 5 --experts 4 --ranks-per-node 4", "topk is 5, allowed: at most the 4 experts"),
        ("--hidden 0", "hidden is 0, allowed: 1 to 65536"),
        ("--tokens 1,2,3", "number of --tokens is 3, allowed: one number, or one for each of the 8 ranks"),
        ("--drop 2", "drop is 2, allowed: 0 to 1"),
        ("--drop -1", "drop is -1, allowed: 0 to 1"),
        ("--seed -1", "'-1' for '--seed <SEED>': allowed: a whole number, 0 to 18446744073709551615"),
        ("--tokens -1", "'-1' for '--tokens <N[,N...]>': allowed: whole numbers, 0 to 67108864"),
        ("--tokens 1,2,", "'' for '--tokens <N[,N...]>': allowed: whole numbers, 0 to 67108864"),
        ("--schedule timed --threads 0", "'0' for '--threads <N>': allowed: a whole number, 1 or more"),
        ("--routing skewed:1e308", "skewed:A with A 0 to 1000"),
        ("--drop NaN", "drop is NaN, allowed: 0 to 1"),
        ("--drop half", "'half' for '--drop <P>': allowed: a number, 0 to 1"),
        ("--routing zipf", "routing is \"zipf\", allowed: uniform, grouped:G:L, skewed:A or single"),
        ("--routing grouped:7:2", "groups G of grouped:G:L is 7, allowed: a divisor of the 64 experts"),
        ("--slots 4 --chunk 5", "ring chunk is 5, allowed: 1 to 4"),
        ("--far-slots 4", "nodes with --far-slots is 1, allowed: 2 or more"),
        ("--far-lanes one", "nodes with --far-lanes is 1, allowed: 2 or more"),
        ("--mode low-latency --slots 8", "--mode with --slots is low-latency, allowed: throughput"),
        ("--mode low-latency --placement ring", "--mode with --placement is low-latency, allowed: throughput"),
        ("--backend host --nodes 2", "nodes with --backend host is 2, allowed: 1; more with --far roce"),
        ("--channels 65", "channels is 65, allowed: 1 to 64"),
        ("--deadline 60", "no unit"),
        ("--deadline 0s", "more than 0"),
    ] {
        let refusal = moexpress(&format!("run {options}")).refusal();
        assert!(refusal.contains(says), "{options}: {refusal}");
    }
}

#[test]
fn places_that_cannot_be_written_are_refused_before_the_run() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("a file");
    std::fs::write(&file, b"").expect("a file");
    let inside = file.join("out");
    for option in ["--dump", "--trace", "--html"] {
        let refusal = moexpress_with("run", &[option, inside.to_str().expect("a printable path")]).refusal();
        assert!(refusal.contains("cannot create ") && refusal.contains("a file"), "{option}: {refusal}");
    }
}

#[test]
fn a_trace_names_every_rank() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("trace.json");
    let file = path.to_str().expect("a printable path");
    moexpress_with("run --ranks-per-node 2 --tokens 3 --hidden 16 --trace", &[file]).success();
    let trace: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).expect("a trace")).expect("JSON");
    let events = trace["traceEvents"].as_array().expect("events");
    for rank in ["rank 0", "rank 1"] {
        assert!(events.iter().any(|event| event["args"]["name"] == rank), "{rank}");
    }
}

#[test]
fn lanes_between_nodes_share_queues_as_asked() {
    let line = "run --json --nodes 2 --ranks-per-node 3 --experts 12 --hidden 40 --tokens 9 --channels 2";
    let automatic = moexpress(line).json();
    for queues in ["per-role", "rows-and-credit", "rows-with-credit", "one"] {
        let object = moexpress(&format!("{line} --far-lanes {queues}")).json();
        assert_eq!((&object["verified"], &object["far_lanes"]), (&true.into(), &queues.into()));
        assert_eq!(object["rows_far"], automatic["rows_far"]);
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_leaves_no_half_of_a_file() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().to_str().expect("a printable path");
    // Files may grow to 16 blocks. Whoever writes more is told so, or ended by a signal that is not ignored.
    for (trap, option, name) in [
        ("trap '' XFSZ;", "--dump", ""),
        ("", "--dump", ""),
        ("", "--html", "/page.html"),
        ("", "--trace", "/run.trace.json"),
    ] {
        let script = format!(
            "ulimit -f 16; {trap} exec {} run --ranks-per-node 2 --tokens 64 {option} {path}{name}",
            env!("CARGO_BIN_EXE_moexpress")
        );
        let output = std::process::Command::new("sh").args(["-c", &script]).output().expect("a shell");
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(told.contains(&format!("error: cannot write {path}/")) && told.contains("File too large"), "{told}");
        assert_eq!(std::fs::read_dir(path).expect("a directory").count(), 0, "nothing is left behind");
    }
    let full = moexpress("run --ranks-per-node 2 --tokens 4 --html /dev/full");
    assert_eq!(full.0.status.code(), Some(1));
    assert!(full.stderr().contains("cannot write /dev/full: No space left"), "{}", full.stderr());
}

/// What cannot be written is told before a run, and what is there is kept where the run fails.
#[test]
fn files_stay_as_they_are_until_they_are_written() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = |name: &str| dir.path().join(name).to_str().expect("a printable path").to_owned();
    let (folder, new) = (path("folder"), path("new/"));
    std::fs::create_dir(&folder).expect("a folder");
    for option in ["--html", "--trace"] {
        for (name, told) in [(&folder, "Is a directory"), (&new, "Is a directory"), (&path("none/below"), "directory")]
        {
            let refusal = moexpress_with(&format!("run {option}"), &[name]).refusal();
            assert!(refusal.contains(&format!("cannot create {name}: ")) && refusal.contains(told), "{refusal}");
        }
    }
    let old = path("rank0.safetensors");
    std::fs::write(&old, "before").expect("a file");
    std::fs::write(path("linked"), "before").expect("a file");
    std::os::unix::fs::symlink(path("linked"), path("rank1.safetensors")).expect("a link");
    let dump = path("");
    let fails = "run --ranks-per-node 2 --tokens 9,5000 --deadline 1ns --dump";
    assert!(moexpress_with(fails, &[&dump]).failure().contains("operation 1 failed"));
    assert!(moexpress_with("run --html", &[&old, "--trace", &folder]).refusal().contains("Is a directory"));
    for kept in [&old, &path("linked")] {
        assert_eq!(std::fs::read_to_string(kept).expect("a file"), "before");
    }
    assert_eq!(std::fs::read_dir(dir.path()).expect("a directory").count(), 4, "nothing is left behind");
    // One of the two would be lost.
    let both = moexpress_with("run --html", &[&old, "--trace", &old]).refusal();
    assert!(both.contains("--trace is") && both.contains("which is --html, too, allowed: another file"), "{both}");
}

/// A stack that no machine has room for: no thread can be started.
#[test]
fn a_run_needs_no_thread() {
    const STACK: (&str, &str) = ("RUST_MIN_STACK", "1125899906842624");
    let line = "run --ranks-per-node 2 --tokens 4 --hidden 16";
    assert!(moexpress_with_env(line, &[STACK]).success().contains("VERIFIED"));
    for line in [
        "run --ranks-per-node 2 --tokens 4 --hidden 16 --backend host",
        "launch -n 1 -- true",
        "bench --backend host --ranks 2 --tokens 4 --hidden 16 --mode throughput",
    ] {
        let failure = moexpress_with_env(line, &[STACK]).failure();
        assert!(failure.contains("error: ") && !failure.contains("panicked"), "{line}: {failure}");
    }
    for line in ["tune --ranks-per-node 2 --tokens 4 --hidden 16 --budget 10000", "compare deepep --up-to 8"] {
        let done = moexpress_with_env(line, &[STACK]);
        assert!(
            matches!(done.0.status.code(), Some(0..=2)) && !done.stderr().contains("panicked"),
            "{}",
            done.stderr()
        );
    }
}

#[test]
fn shells_and_man_learn_every_command() {
    for shell in ["bash", "zsh", "fish"] {
        let script = moexpress(&format!("completions {shell}")).success();
        assert!(["run", "bench", "elide-payload", "doctor"].iter().all(|word| script.contains(word)), "{shell}");
    }
    let page = moexpress("man").success();
    assert!([".TH moexpress", "moexpress\\-run", "elide\\-payload"].iter().all(|part| page.contains(part)), "{page}");
}
