//! `moexpress run --input`.

use std::path::{Path, PathBuf};

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use tempfile::TempDir;

use crate::{Done, moexpress, moexpress_with};

/// Tensors of a file: name, type, shape, bytes.
type Tensor = (&'static str, Dtype, Vec<usize>, Vec<u8>);

fn f32s(name: &'static str, shape: &[usize], values: &[f32]) -> Tensor {
    (name, Dtype::F32, shape.to_vec(), values.iter().flat_map(|value| value.to_le_bytes()).collect())
}

fn i64s(name: &'static str, shape: &[usize], values: &[i64]) -> Tensor {
    (name, Dtype::I64, shape.to_vec(), values.iter().flat_map(|value| value.to_le_bytes()).collect())
}

fn i32s(name: &'static str, shape: &[usize], values: &[i32]) -> Tensor {
    (name, Dtype::I32, shape.to_vec(), values.iter().flat_map(|value| value.to_le_bytes()).collect())
}

/// Three tokens of hidden 2, top-2.
fn x() -> Tensor {
    f32s("x", &[3, 2], &[1.0, -2.0, 0.5, 3.0, 7.0, 1.003])
}

fn topk_idx() -> Tensor {
    i64s("topk_idx", &[3, 2], &[0, 3, -1, 1, 2, 0])
}

fn written(tensors: &[Tensor]) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("batch.safetensors");
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, data)| (*name, TensorView::new(*dtype, shape.clone(), data).expect("a tensor")));
    safetensors::serialize_to_file(views, None, &path).expect("a file");
    (dir, path)
}

fn run_file(path: &Path, more: &str) -> Done {
    let line = format!("run --json --ranks-per-node 2 --experts 4 {more} --input");
    moexpress_with(&line, &[path.to_str().expect("a printable path")])
}

fn run(tensors: &[Tensor], more: &str) -> Done {
    let (_dir, path) = written(tensors);
    run_file(&path, more)
}

#[test]
fn sizes_come_from_the_file_and_blocks_are_equal() {
    let object = run(&[x(), topk_idx()], "").json();
    assert_eq!((&object["hidden"], &object["topk"], &object["dropped"]), (&2.into(), &2.into(), &1.into()));
    assert_eq!(object["tokens_per_rank"], serde_json::json!([1, 2]));
    assert_eq!(object["verified"], true);
}

#[test]
fn the_file_may_say_whose_each_token_is() {
    let object = run(&[x(), topk_idx(), i32s("rank", &[3], &[1, 1, 1])], "").json();
    assert_eq!(object["tokens_per_rank"], serde_json::json!([0, 3]));
}

#[test]
fn half_precision_and_bfloat16_are_read() {
    for dtype in [Dtype::F16, Dtype::BF16] {
        let x = ("x", dtype, vec![3, 2], vec![0x12; 12]);
        assert_eq!(run(&[x, topk_idx()], "").json()["verified"], true);
    }
}

#[test]
fn choices_of_a_file_can_be_dropped() {
    assert_eq!(run(&[x(), topk_idx()], "--drop 1").json()["dropped"], 6);
}

#[test]
fn the_real_router_trace_is_verified() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/router_trace.safetensors");
    let done = moexpress_with("run --json --placement direct --input", &[path.to_str().expect("a printable path")]);
    let object = done.json();
    assert_eq!((&object["verified"], &object["tokens"]), (&true.into(), &4096.into()));
    assert_eq!((&object["hidden"], &object["topk"]), (&256.into(), &4.into()));
}

#[test]
fn what_is_wrong_with_a_tensor_is_named() {
    let cases: [(Vec<Tensor>, &str); 13] = [
        (vec![x()], "tensor topk_idx is absent, allowed: present"),
        (vec![topk_idx()], "tensor x is absent, allowed: present"),
        (vec![i32s("x", &[3, 2], &[0; 6]), topk_idx()], "dtype of tensor x is I32, allowed: BF16 or F16 or F32"),
        (vec![f32s("x", &[6], &[0.0; 6]), topk_idx()], "shape of tensor x is [6], allowed: [tokens, hidden]"),
        (vec![f32s("x", &[3, 0], &[]), topk_idx()], "hidden of tensor x is 0, allowed: 1 to 65536"),
        (vec![x(), i32s("topk_idx", &[3, 1], &[0; 3])], "dtype of tensor topk_idx is I32, allowed: I64"),
        (vec![x(), i64s("topk_idx", &[2, 2], &[0, 1, 2, 3])], "rows of tensor topk_idx is 2, allowed: 3 as tensor x"),
        (vec![x(), i64s("topk_idx", &[3, 33], &[-1; 99])], "topk of tensor topk_idx is 33, allowed: 1 to 32"),
        (
            vec![x(), i64s("topk_idx", &[3, 2], &[0, 1, 2, 4, 0, 1])],
            "tensor topk_idx at token 1, choice 1 is 4, allowed: -1 or 0 to 3 (--experts 4)",
        ),
        (
            vec![x(), i64s("topk_idx", &[3, 2], &[0, 1, 0, 1, 2, 2])],
            "tensor topk_idx at token 2, choice 1 is 2 again, allowed: every expert once per token",
        ),
        (
            vec![x(), topk_idx(), f32s("topk_weights", &[3, 1], &[0.0; 3])],
            "shape of tensor topk_weights is [3, 1], allowed: [3, 2] as topk_idx",
        ),
        (vec![x(), topk_idx(), i64s("rank", &[3], &[0; 3])], "dtype of tensor rank is I64, allowed: I32"),
        (vec![x(), topk_idx(), i32s("rank", &[3], &[0, 2, 0])], "tensor rank at token 1 is 2, allowed: 0 to 1"),
    ];
    for (tensors, says) in cases {
        let refusal = run(&tensors, "").refusal();
        assert!(refusal.contains(says) && refusal.contains("batch.safetensors"), "{says}: {refusal}");
    }
}

#[test]
fn files_that_are_none_are_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let missing = run_file(&dir.path().join("nowhere"), "").refusal();
    assert!(missing.contains("nowhere") && missing.contains("a readable file"), "{missing}");
    for endless in ["/dev/zero", "/"] {
        let refusal = run_file(Path::new(endless), "").refusal();
        assert!(refusal.contains("no regular file, allowed: a regular file"), "{refusal}");
    }
    let huge = dir.path().join("huge");
    std::fs::File::create(&huge).and_then(|file| file.set_len(1 << 43)).expect("a sparse file");
    let refusal = run_file(&huge, "").refusal();
    assert!(refusal.contains("memory of input ") && refusal.contains("; a smaller file"), "{refusal}");
    let garbage = dir.path().join("garbage");
    std::fs::write(&garbage, b"no tensors in here").expect("a file");
    let refusal = run_file(&garbage, "").refusal();
    assert!(refusal.contains("allowed: a safetensors file"), "{refusal}");
    let refusal = moexpress(&format!("run --experts 0 --input {}", garbage.display())).refusal();
    assert!(refusal.contains("--experts is 0, allowed: at least 1"), "{refusal}");
}

#[test]
fn sizes_of_a_made_batch_do_not_go_with_a_file() {
    for option in ["--tokens 3", "--hidden 2", "--topk 2", "--routing single"] {
        let refusal = run(&[x(), topk_idx()], option).refusal();
        assert!(refusal.contains("cannot be used with"), "{option}: {refusal}");
    }
}
