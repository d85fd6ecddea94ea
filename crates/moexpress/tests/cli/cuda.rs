//! `moexpress run --backend cuda` where no GPU is visible, and what it cannot do anywhere.

use crate::{moexpress, moexpress_with_env};

#[test]
fn without_a_gpu_it_says_what_is_missing() {
    let refusal = moexpress("run --backend cuda --ranks-per-node 2 --tokens 3").refusal();
    assert!(refusal.starts_with("error: the CUDA backend is not supported: "), "{refusal}");
    assert!(refusal.contains("libcuda.so.1") || refusal.contains("GPU"), "{refusal}");
}

#[test]
fn what_only_the_simulator_has_is_refused() {
    for option in ["--schedule explore", "--trace nowhere.json", "--model h200-node", "--elide-payload", "--threads 2"]
    {
        for backend in ["cuda", "host", "ascend"] {
            let refusal = moexpress(&format!("run --backend {backend} {option}")).refusal();
            let name = option.split(' ').next().unwrap_or_default();
            assert_eq!(refusal.trim_end(), format!("error: --backend with {name} is {backend}, allowed: sim"));
        }
    }
}

#[test]
fn processes_need_a_launcher_and_one_size() {
    let refusal = moexpress("run --backend cuda --processes").refusal();
    assert!(refusal.contains("moexpress launch -n 4 -- moexpress run --backend cuda --processes"), "{refusal}");
    assert!(moexpress("run --backend cuda --processes --ranks-per-node 4").refusal().contains("--ranks-per-node"));
}

#[test]
fn bench_names_what_it_needs() {
    let refusal = moexpress("bench --backend cuda").refusal();
    assert!(refusal.contains("libcuda.so.1") || refusal.contains("GPU"), "{refusal}");
    assert!(moexpress("bench --backend sim").refusal().contains("moexpress run --schedule timed"));
    assert!(moexpress("bench --backend cuda --multiprocessors 8,0").refusal().contains("--multiprocessors is 0"));
}

/// GPUs made of software, of two nodes, and what is refused there.
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
#[test]
fn gpus_of_several_nodes_over_the_loop() {
    let twin = match ep_cuda_twin::Twin::build() {
        Err(_) if std::env::var_os("EP_WITHOUT_CXX").is_some() => return,
        twin => twin.expect("g++, or EP_WITHOUT_CXX=1 to leave out what needs it"),
    };
    // Kernels that ep-cuda's tests have compiled for the same twin are not compiled again.
    // Kernels of each shape would take its compiler long.
    let environment = [("LD_LIBRARY_PATH", twin.folder().to_str().unwrap()), ("EP_CUDA_SPECIALISE", "0")];
    let layer = "--ranks-per-node 2 --tokens 9 --experts 8 --topk 3 --hidden 64";
    let two = |more: &str| moexpress_with_env(&format!("run --backend cuda --nodes 2 {layer} {more}"), &environment);
    let run = two("--far loop --far-latency 20us --channels 1 --slots 4 --json").json();
    assert_eq!(run["verified"], true);
    assert!(run["rows_far"].as_u64() > Some(0), "{run}");
    let staged = two("--far loop --far-staged --channels 1 --slots 4 --json").json();
    assert_eq!(staged["verified"], true);
    let moved = two("--far loop --far-movers 1 --channels 1 --slots 4 --json").json();
    assert_eq!(moved["verified"], true);
    let crowded = two("--far loop --far-movers 5000").refusal();
    assert!(crowded.contains("multiprocessors that move rows between nodes is 5000, allowed: 0 to "), "{crowded}");
    let low = two("--far loop --far-latency 20us --mode low-latency --json").json();
    assert_eq!(low["verified"], true, "{low}");
    assert!(two("--far loop --placement pulled").refusal().contains("nodes is 2, allowed: 1 with pulled placement"));
    assert!(two("").refusal().contains("nodes with --backend cuda is 2, allowed: 1; more with --far roce"));
    let rdma = two("--far roce --far-devices nowhere_0").refusal();
    assert!(rdma.contains("RoCE on rank 0 is not supported: "), "{rdma}");
    // Each rank a process, which the launcher tells its node.
    let launched = |ranks: u32, far: &str| {
        let job = format!("--tokens 9 --experts 8 --topk 3 --hidden 64 {far} --channels 1 --slots 4 --json");
        let program = env!("CARGO_BIN_EXE_moexpress");
        let launch = format!("launch -n {ranks} --nodes 2 -- {program} run --backend cuda --processes {job}");
        let said = moexpress_with_env(&launch, &environment).success();
        let json = said.split_once("] ").expect("rank 0 reports, by its number").1;
        let run: serde_json::Value = serde_json::from_str(json).expect("one JSON object");
        assert_eq!((&run["verified"], &run["nodes"]), (&true.into(), &2.into()), "{run}");
    };
    launched(4, "--far loop");
    // Only on a machine without adapters: with them it might run.
    if std::fs::read_dir("/sys/class/infiniband").map_or(0, Iterator::count) == 0 {
        let refusal = two("--far ibgda").refusal();
        let named =
            ["libibverbs.so.1 cannot be loaded", "libmlx5.so.1 cannot be loaded", "there is no mlx5 adapter here"];
        assert!(named.iter().any(|what| refusal.contains(what)), "{refusal}");
    }
    assert!(
        two("--far ibgda --far-devices mlx5_0/mlx5_1")
            .refusal()
            .contains("allowed: auto, gpu, or names: mlx5_0,mlx5_1")
    );
    let played = two("--far ibgda --far-devices gpu --channels 1 --slots 4 --far-latency 20us --json");
    if cfg!(feature = "hca") {
        let run = played.json();
        assert_eq!((&run["verified"], &run["nodes"]), (&true.into(), &2.into()), "{run}");
        launched(2, "--far ibgda --far-devices gpu");
    } else {
        assert!(played.refusal().contains("a program that was built with the feature hca"));
    }
    assert!(two("--far roce --far-movers 1").refusal().contains("--far with --far-movers is roce, allowed: loop"));
    for option in ["--far-rate 9", "--far-movers 1"] {
        assert!(two(&format!("--far ibgda {option}")).refusal().contains("with --far loop, or --far-devices gpu"));
    }
    assert!(two("--far ibgda --far-signal counting").refusal().contains("allowed: fetch-add or ordered-write"));
    assert!(two("--far ibgda --far-ack-timeout 30").refusal().contains("ack timeout is 30, allowed: 1 to 18"));
    assert!(two("--far ibgda --far-mtu 1024").refusal().contains("--far with --far-mtu is ibgda, allowed: roce"));
    assert!(two("--far loop --far-ack-timeout 9").refusal().contains("is loop, allowed: roce or ibgda"));
    let host = moexpress_with_env(&format!("run --backend host --nodes 2 {layer} --far ibgda"), &environment);
    assert!(host.refusal().contains("--backend with --far ibgda is host, allowed: cuda: kernels post"));
}
