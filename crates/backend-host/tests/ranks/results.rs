//! Results of a call lie in memory that those of earlier calls left, once the user has dropped them and not before.

use ep_core::engine::{Combine, Engine, HostRows, Routing};
use ep_core::{Endpoint as _, Shape, Topology};
use ep_host::{Cluster, Machine, Window};

const TOKENS: u32 = 4;

fn shape() -> Shape {
    Shape::builder().experts(4).topk(1).hidden(64).max_tokens(TOKENS).build().unwrap()
}

fn address(rows: &HostRows<Window>) -> *const u8 {
    match rows {
        HostRows::Owned { bytes, .. } => bytes.as_ptr(),
        HostRows::Apart { .. } => panic!("bf16 rows have no scales"),
        HostRows::Leased(_) => panic!("rings bring rows to ordinary memory"),
    }
}

/// A batch of rows of `byte`; each token goes to both ranks' experts in turn.
async fn dispatch(ep: &mut Engine<Machine>, byte: u8) -> ep_core::engine::Received<Engine<Machine>> {
    let x = ep.rows(&vec![byte; TOKENS as usize * shape().row_bytes() as usize], TOKENS).unwrap();
    ep.dispatch(&x, &Routing::TopK { topk_idx: vec![0, 2, 1, 3], topk_weights: None }).await.unwrap()
}

fn on_two_ranks(work: impl AsyncFn(Engine<Machine>) + Sync) {
    let cluster = Cluster::builder(Topology::new(1, 2).unwrap()).build(shape()).unwrap();
    cluster.run(async |ep| work(ep).await).unwrap();
}

#[test]
fn dropped_results_leave_their_memory_to_later_calls() {
    on_two_ranks(async |mut ep| {
        let mut places = Vec::new();
        for round in 0..6 {
            let got = dispatch(&mut ep, round).await;
            let back = ep.combine(&got.x, &got.handle, Combine::default()).await.unwrap();
            places.push((address(&got.x), address(&back.x)));
        }
        assert!(places[2..].iter().all(|round| places[..2].contains(round)), "{places:?}");
    });
}

#[test]
fn results_that_are_held_stay_as_they_are() {
    on_two_ranks(async |mut ep| {
        let held = dispatch(&mut ep, 1).await;
        let bytes = ep.bytes(&held.x).unwrap();
        for round in 2..6 {
            let got = dispatch(&mut ep, round).await;
            assert_ne!(address(&got.x), address(&held.x));
            assert_ne!(ep.bytes(&got.x).unwrap(), bytes);
        }
        assert_eq!(ep.bytes(&held.x).unwrap(), bytes);
        assert!(bytes.iter().all(|&byte| byte == 1) && !bytes.is_empty());
    });
}
