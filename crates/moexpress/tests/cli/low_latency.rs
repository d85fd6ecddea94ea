//! `moexpress run --mode low-latency`.

use ep_conformance::low_latency::{Seen, SeenExpert, Weighing, verify};
use ep_conformance::workload::Batch;
use ep_core::reference::World;
use ep_core::{Element, RankSet, Scaling, Shape, Topology};
use safetensors::{Dtype, SafeTensors};

use crate::{moexpress, moexpress_with};

const SMALL: &str = "run --json --mode low-latency --ranks-per-node 4 --hidden 64 --experts 16 --topk 4";

#[test]
fn both_forms_are_verified_and_say_what_moved() {
    let one_row_a_rank = |results: &str| {
        let object = moexpress(&format!("{SMALL} --tokens 9,0,16,3 --drop 0.1 --results {results}")).json();
        assert_eq!((&object["verified"], &object["mode"]), (&true.into(), &"low-latency".into()));
        assert_eq!(object["results"], results);
        object["rows_near"].as_u64().unwrap()
    };
    let (per_choice, per_rank) = (one_row_a_rank("per-choice"), one_row_a_rank("per-rank"));
    assert!(per_choice > per_rank && per_rank > 0, "{per_choice} rows one a choice, {per_rank} one a rank");
    for more in ["--dtype fp8", "--dtype fp8-ue8m0 --nodes 2 --ranks-per-node 2", "--dtype int8", "--schedule timed"] {
        let line = if more.contains("nodes") { SMALL.replace("--ranks-per-node 4", "") } else { SMALL.to_owned() };
        assert_eq!(moexpress(&format!("{line} --tokens 12 {more}")).json()["verified"], true, "{more}");
    }
    let text = moexpress("run --mode low-latency --tokens 5 --hidden 32").success();
    for part in ["low-latency", "two banks of slots for 5 rows of each rank; results per-choice", "VERIFIED"] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[test]
fn elided_payload_takes_the_same_time() {
    for more in ["--results per-rank", "--dtype fp8"] {
        let line = format!("{SMALL} --tokens 24 --schedule timed {more}");
        let (whole, elided) = (moexpress(&line).json(), moexpress(&format!("{line} --elide-payload")).json());
        for key in ["dispatch_ns", "combine_ns", "bytes_own", "bytes_near", "rows_near", "events"] {
            assert_eq!(whole[key], elided[key], "{key} with {more}");
        }
        assert_eq!((&whole["verified"], &elided["verified"]), (&true.into(), &false.into()));
    }
}

#[test]
fn results_without_low_latency_are_refused() {
    let error = moexpress("run --results per-rank").refusal();
    assert!(error.contains("--mode with --results is throughput, allowed: low-latency"), "{error}");
}

#[test]
fn a_dump_holds_what_the_oracle_says() {
    let dir = tempfile::tempdir().expect("a directory");
    let line =
        "run --mode low-latency --ranks-per-node 2 --tokens 7,3 --hidden 200 --experts 4 --topk 3 --dtype fp8 --dump";
    moexpress_with(line, &[dir.path().to_str().expect("a printable path")]).success();
    let shape = Shape::builder().experts(4).topk(3).hidden(200).max_tokens(7).element(Element::Fp8(Scaling::Exact));
    let world = World::new(shape.build().unwrap(), Topology::new(1, 2).unwrap(), RankSet::new()).unwrap();
    let (batches, seen): (Vec<_>, Vec<_>) = (0..2)
        .map(|rank| {
            let bytes = std::fs::read(dir.path().join(format!("rank{rank}.safetensors"))).expect("a file of each rank");
            read(&SafeTensors::deserialize(&bytes).expect("safetensors"))
        })
        .unzip();
    let compared = verify::run(&world, &batches, Weighing::AtSource, &seen).expect("what the oracle says");
    assert!(compared.rows > 20);
}

/// Room for rows of each expert: two ranks of at most seven tokens.
const STRIDE: usize = 14;

fn read(file: &SafeTensors<'_>) -> (Batch, Seen) {
    let shape = |name: &str| file.tensor(name).expect(name).shape().to_vec();
    let data = |name: &str| file.tensor(name).expect(name).data().to_vec();
    let words = |name: &str| -> Vec<i32> { data(name).as_chunks().0.iter().map(|&b| i32::from_le_bytes(b)).collect() };
    assert_eq!((shape("recv_x"), file.tensor("recv_x").unwrap().dtype()), (vec![2, STRIDE, 200], Dtype::U8));
    assert_eq!((shape("recv_scales"), shape("recv_counts")), (vec![2, STRIDE, 2], vec![2]));
    assert_eq!((shape("recv_src_rank"), shape("recv_src_token")), (vec![2, STRIDE], vec![2, STRIDE]));
    let (codes, scales) = (data("recv_x"), data("recv_scales"));
    let (source_rank, source_token) = (words("recv_src_rank"), words("recv_src_token"));
    let experts = words("recv_counts").into_iter().enumerate().map(|(at, count)| {
        let rows = at * STRIDE..at * STRIDE + count as usize;
        assert!(source_rank[rows.end..(at + 1) * STRIDE].iter().all(|&rank| rank == -1), "no row, no rank");
        // Codes padded to 16 bytes, then the scales: a row as it travels.
        let row = |row: usize| [&codes[row * 200..(row + 1) * 200], &[0; 8], &scales[row * 8..(row + 1) * 8]].concat();
        SeenExpert {
            x: rows.clone().flat_map(row).collect(),
            source_rank: source_rank[rows.clone()].to_vec(),
            source_token: source_token[rows].to_vec(),
        }
    });
    let seen = Seen { experts: experts.collect(), combined_x: data("combined_x") };
    let batch = Batch {
        tokens: shape("x")[0] as u32,
        x: data("x").as_chunks().0.iter().map(|&b| u16::from_le_bytes(b)).collect(),
        topk_idx: data("topk_idx").as_chunks().0.iter().map(|&b| i64::from_le_bytes(b)).collect(),
        topk_weights: data("topk_weights").as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect(),
    };
    (batch, seen)
}
