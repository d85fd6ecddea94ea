//! Verbs allocate nothing once queues have grown to their size, with race tracking and records off.

use crate::common::{A, B, cell, cluster, free, lane, need, probe, shape};
use crate::counting;
use ep_core::machine::Machine as _;
use ep_core::port::Port as _;
use ep_sim::Machine;

#[test]
fn verbs_allocate_nothing_in_the_steady_state() {
    for seed in 0..20 {
        let cluster = cluster(1, 2).race_tracking(false).seed(seed).build(shape()).unwrap();
        let run = cluster.run_machines(async |machine: Machine| {
            let mut port = probe(&machine, 0);
            let me = machine.rank();
            let peer = if me == A { B } else { A };
            let place = free(&machine, 0);
            // Ends before any rank does: a rank that ends closes its port.
            let mut counted = (0, 0);
            for round in 1..=3_000u64 {
                match round {
                    2_000 => counted.0 = counting::allocations(),
                    2_990 => counted.1 = counting::allocations(),
                    _ => {}
                }
                let ticket = port.put(lane(peer), place.span(64), place.plus(64)).await.unwrap();
                port.get(lane(peer), place.span(64), place.plus(256)).await.unwrap();
                port.publish(lane(peer), cell(me), round).await.unwrap();
                port.wait_any(&need(peer, round)).await.unwrap();
                port.flush(lane(peer), ticket).await.unwrap();
                port.write(place, &[1; 64]).unwrap();
                port.read(place.plus(64), &mut [0; 64]).unwrap();
            }
            counted.1 - counted.0
        });
        assert_eq!(run.unwrap().finished(), [0, 0], "seed {seed}");
    }
}
