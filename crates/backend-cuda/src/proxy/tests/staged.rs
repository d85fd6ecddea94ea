//! Rows staged through memory of the host, between devices of CPU threads: windows that only their backend moves, and networks that know memory of
//! the host alone.

use super::*;
use crate::proxy::Staged;

type StagedPair = Pair<Staged<Loop>>;

/// So often a fault is planted that shows only where the other side gets on.
const TRIES: u32 = 16;

fn pair(network: Loop, log_slots: u32) -> StagedPair {
    Pair::with(Staged(network), log_slots, Home::Device, HostMemory::new)
}

/// F1, F3, F5, F9.
#[test]
fn what_a_device_posts_arrives_intact_by_way_of_pinned_memory() {
    let Some(device) = Device::usual() else { return };
    let narrow = network().bytes_per_second(200_000_000).unwrap().queue_depth(2).unwrap();
    for (seed, network, log_slots, staged) in
        [(31, network(), 0, 1), (32, network(), 9, 2), (33, late(), 3, 4), (34, late(), 9, 16), (35, narrow, 3, 2)]
    {
        let mut pair = pair(network, log_slots);
        let wrong = traffic(Traffic { seed, staged, ..TRAFFIC }, &pair, device);
        assert_eq!(wrong, "", "seed {seed}");
        while !pair.ends.iter_mut().all(|end| end.lanes.drain(Scope::All)) {}
        assert_eq!(pair.ends[0].lanes.broken(B), None);
        // Once more on new connections: records begin anew. Cells of another generation are other cells.
        let [tail, head] = pair.ends[0].cells();
        pair.ends[1].window.write(tail, &[0; 8]);
        pair.ends[0].window.write(head, &[0; 8]);
        pair.meet();
        let wrong = traffic(Traffic { seed: seed + 100, staged, messages: 60, ..TRAFFIC }, &pair, device);
        assert_eq!(wrong, "", "seed {seed}, connected anew");
    }
}

/// Lanes that share a queue share its records, which keep the order of the queue.
#[test]
fn staged_lanes_that_share_a_queue_arrive_intact() {
    let Some(device) = Device::usual() else { return };
    for queues in Queues::NAMED {
        let pair = pair(late().queues(queues), 2);
        let wrong = traffic(Traffic { seed: 9, messages: 100, ..TRAFFIC }, &pair, device);
        assert_eq!(wrong, "", "{queues:?}");
    }
}

/// What a planted fault leads to, in one of several tries: the time of threads decides. Where messages do not come in time, it is tried again.
fn said_with(plant: Plant, traffic_of: Traffic) -> String {
    let Some(device) = Device::usual() else { return "NOT RUN".to_owned() };
    let mut last = String::new();
    for seed in 50..80 {
        let pair = pair(network(), 9);
        for end in &pair.ends {
            end.lanes.shared.between_turns().transport.plant(plant);
        }
        let said = traffic(Traffic { seed, allowed: Duration::from_secs(2), ..traffic_of }, &pair, device);
        if said.contains("other bytes") {
            return said;
        }
        if !said.is_empty() {
            last = said;
        }
    }
    last
}

#[test]
fn planted_posting_of_rows_that_were_not_fetched_is_caught() {
    let said = said_with(Plant::PostedEarly, TRAFFIC);
    assert!(said.contains("other bytes") || said == "NOT RUN", "{said}");
}

#[test]
fn planted_cells_that_are_raised_before_their_rows_are_caught() {
    let said = said_with(Plant::RaisedEarly, TRAFFIC);
    assert!(said.contains("other bytes") || said == "NOT RUN", "{said}");
}

/// Waits until the cell of tails at B is so much, or B's lanes are broken; whether they are.
fn breaks_before(pair: &StagedPair, tail: u64) -> bool {
    let (began, [at, _]) = (Instant::now(), pair.ends[0].cells());
    while pair.ends[1].window.cell(at) < tail {
        if pair.ends[1].lanes.broken(A).is_some() {
            return true;
        }
        assert!(began.elapsed() < LONG, "nothing comes, and nothing breaks");
        thread::yield_now();
    }
    false
}

/// 200 messages to a peer that does not look for a while. Whether its lanes break.
fn a_peer_that_rests_breaks(plant: Plant, device: &Device) -> bool {
    let pair = pair(late(), 9);
    pair.ends[1].lanes.shared.between_turns().transport.plant(plant);
    let [rows, _] = pair.posters(device);
    let (at, [tail, _]) = (pair.ends[0].arena().0, pair.ends[0].cells());
    let publish = |number| {
        assert!(rows.put([at, at, 64], LONG).is_ok());
        assert_eq!(rows.publish(tail.0, number, LONG), FarStatus::Ok);
    };
    publish(1);
    assert!(!breaks_before(&pair, 1));
    let resting = pair.ends[1].lanes.shared.between_turns();
    (2..=201).for_each(publish);
    thread::sleep(SHORT);
    drop(resting);
    breaks_before(&pair, 201)
}

/// 64 records are kept until they were read, the others wait; where they do not wait, records that were not read are written over.
#[test]
fn records_wait_until_they_were_read_and_planted_credit_for_others_is_caught() {
    let Some(device) = Device::usual() else { return };
    assert!(!a_peer_that_rests_breaks(Plant::Nothing, device));
    // A busy processor may keep the other side from sending as much while the peer rests.
    assert!((0..TRIES).any(|_| a_peer_that_rests_breaks(Plant::ReadEarly, device)));
}

/// One rank's rows are staged, the other's are not: the first says so by name.
#[test]
fn a_rank_that_stages_and_one_that_does_not_do_not_meet() {
    let network = network();
    let mut staged = End::new(A, Staged(network.clone()), 1, Home::Device, HostMemory::new);
    let mut direct = End::new(B, network, 1, Home::Device, HostMemory::new);
    let offers = [Some(staged.lanes.offer().unwrap()), Some(direct.lanes.offer().unwrap())];
    let said = staged.lanes.connect(&offers).unwrap_err().to_string();
    assert!(said.contains("rank 1, whose rows are not staged"), "{said}");
    assert!(direct.lanes.connect(&offers).is_err());
}

#[test]
fn staged_commands_that_reach_out_of_the_window_break_their_lane() {
    let Some(device) = Device::usual() else { return };
    for wrong in [[0, u64::MAX >> 30, 64], [u64::MAX >> 30, 0, 64]] {
        let pair = pair(network(), 2);
        let [rows, _] = pair.posters(device);
        let ticket = rows.put(wrong, LONG).unwrap();
        assert_eq!(rows.flush(ticket, LONG), FarStatus::Refused);
        assert!(matches!(pair.ends[0].lanes.broken(B), Some(Fault::OutOfRange { .. })));
    }
}
