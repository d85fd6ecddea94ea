//! `moexpress run --dump`: what is written is what the oracle says, computed here from the dumped inputs.

use std::path::Path;

use ep_conformance::verify::{self, Observed};
use ep_conformance::workload::Batch;
use ep_core::reference::World;
use ep_core::{RankSet, Shape, Topology};
use safetensors::{Dtype, SafeTensors};

use crate::moexpress_with;

const RANKS: u32 = 4;
const TENSORS: [(&str, Dtype); 11] = [
    ("x", Dtype::BF16),
    ("topk_idx", Dtype::I64),
    ("topk_weights", Dtype::F32),
    ("recv_x", Dtype::BF16),
    ("recv_src_rank", Dtype::I32),
    ("recv_src_token", Dtype::I32),
    ("recv_topk_idx", Dtype::I64),
    ("recv_topk_weights", Dtype::F32),
    ("recv_counts", Dtype::I32),
    ("combined_x", Dtype::BF16),
    ("combined_topk_weights", Dtype::F32),
];

fn numbers<const N: usize, T>(tensors: &SafeTensors<'_>, name: &str, read: fn([u8; N]) -> T) -> Vec<T> {
    let data = tensors.tensor(name).expect(name).data().to_vec();
    data.as_chunks::<N>().0.iter().map(|&bytes| read(bytes)).collect()
}

fn read(dir: &Path, rank: u32) -> (Batch, Observed) {
    let bytes = std::fs::read(dir.join(format!("rank{rank}.safetensors"))).expect("a file of each rank");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    assert_eq!(file.len(), TENSORS.len());
    for (name, dtype) in TENSORS {
        assert_eq!(file.tensor(name).expect(name).dtype(), dtype, "{name}");
    }
    let shape = |name: &str| file.tensor(name).expect(name).shape().to_vec();
    let rows = shape("recv_src_rank")[0];
    assert_eq!((shape("recv_x"), shape("recv_topk_idx")), (vec![rows, 20], vec![rows, 3]));
    assert_eq!((shape("combined_x"), shape("combined_topk_weights")), (shape("x"), shape("topk_weights")));
    assert_eq!(shape("recv_counts"), [2]);
    let batch = Batch {
        tokens: shape("x")[0] as u32,
        x: numbers(&file, "x", u16::from_le_bytes),
        topk_idx: numbers(&file, "topk_idx", i64::from_le_bytes),
        topk_weights: numbers(&file, "topk_weights", f32::from_le_bytes),
    };
    let seen = Observed {
        recv_x: file.tensor("recv_x").expect("recv_x").data().to_vec(),
        source_rank: numbers(&file, "recv_src_rank", i32::from_le_bytes),
        source_token: numbers(&file, "recv_src_token", i32::from_le_bytes),
        topk_idx: numbers(&file, "recv_topk_idx", i64::from_le_bytes),
        topk_weights: numbers(&file, "recv_topk_weights", f32::from_le_bytes),
        expert_counts: numbers(&file, "recv_counts", u32::from_le_bytes),
        combined_x: file.tensor("combined_x").expect("combined_x").data().to_vec(),
        combined_topk_weights: numbers(&file, "combined_topk_weights", f32::from_le_bytes),
    };
    (batch, seen)
}

#[test]
fn fp8_rows_are_dumped_as_codes_and_scales() {
    let dir = tempfile::tempdir().expect("a directory");
    let line = "run --ranks-per-node 2 --experts 8 --topk 2 --hidden 200 --tokens 9 --dtype fp8-ue8m0 --dump";
    moexpress_with(line, &[dir.path().to_str().expect("a path")]).success();
    let bytes = std::fs::read(dir.path().join("rank1.safetensors")).expect("a file of each rank");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let (codes, scales) = (file.tensor("recv_x").expect("recv_x"), file.tensor("recv_scales").expect("recv_scales"));
    assert_eq!((codes.dtype(), scales.dtype()), (Dtype::U8, Dtype::F32));
    assert_eq!((codes.shape()[1], scales.shape()[1]), (200, 2));
    assert_eq!(codes.shape()[0], scales.shape()[0]);
    for scale in numbers(&file, "recv_scales", f32::from_le_bytes) {
        assert!(scale > 0.0 && scale.to_bits() << 9 == 0, "{scale} is no power of two");
    }
}

#[test]
fn int8_rows_are_dumped_as_signed_codes_and_a_scale_a_row() {
    let dir = tempfile::tempdir().expect("a directory");
    let line = "run --ranks-per-node 2 --experts 8 --topk 2 --hidden 200 --tokens 9 --dtype int8 --dump";
    moexpress_with(line, &[dir.path().to_str().expect("a path")]).success();
    let bytes = std::fs::read(dir.path().join("rank1.safetensors")).expect("a file of each rank");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let (codes, scales) = (file.tensor("recv_x").expect("recv_x"), file.tensor("recv_scales").expect("recv_scales"));
    assert_eq!((codes.dtype(), scales.dtype(), scales.shape()[1]), (Dtype::I8, Dtype::F32, 1));
    assert_eq!(codes.shape(), [scales.shape()[0], 200]);
    let largest = |row: &[u8]| row.iter().map(|&code| (code as i8).unsigned_abs()).max();
    assert!(
        codes.data().chunks(200).all(|row| largest(row) == Some(127)),
        "a row's largest element has the largest code"
    );
}

#[test]
fn a_dump_holds_what_the_oracle_says() {
    let dir = tempfile::tempdir().expect("a directory");
    let target = dir.path().join("made/for this");
    let line = "run --ranks-per-node 4 --tokens 7,0,12,1 --hidden 20 --experts 8 --topk 3 --drop 0.2 --dump";
    moexpress_with(line, &[target.to_str().expect("a printable path")]).success();
    let (batches, observed): (Vec<_>, Vec<_>) = (0..RANKS).map(|rank| read(&target, rank)).unzip();
    assert_eq!(batches.iter().map(|batch| batch.tokens).collect::<Vec<_>>(), [7, 0, 12, 1]);
    assert!(batches.iter().any(|batch| batch.topk_idx.contains(&-1)));
    let shape = Shape::builder().experts(8).topk(3).hidden(20).max_tokens(12).build().expect("a shape");
    let world = World::new(shape, Topology::new(1, RANKS).expect("ranks"), RankSet::new()).expect("a world");
    let compared = verify::run(&world, &batches, &observed).expect("what the oracle says");
    assert!(compared.rows > 20);
}

#[test]
fn a_dump_that_cannot_be_written_is_refused_before_the_run() {
    let dir = tempfile::tempdir().expect("a directory");
    std::fs::create_dir(dir.path().join("rank1.safetensors")).expect("an obstacle");
    let line = "run --ranks-per-node 2 --tokens 3 --hidden 16 --dump";
    let refusal = moexpress_with(line, &[dir.path().to_str().expect("a printable path")]).refusal();
    assert!(refusal.contains("cannot create ") && refusal.contains("rank1.safetensors: Is a directory"), "{refusal}");
    let refusal = moexpress_with(line, &["/dev/null"]).refusal();
    assert!(refusal.contains("--dump is /dev/null, a file, allowed: a directory"), "{refusal}");
}
