//! `moexpress run --backend cuda` where no GPU is visible, and what it cannot do anywhere.

use crate::moexpress;

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
    assert!(moexpress("bench --backend cuda --multiprocessors 8,0").refusal().contains("invalid value '0'"));
}
