//! Whole messages against bytes that were written by hand from the manual's layout: where a value stands, and that nothing else does.

use ep_rdma::Wire;

use super::*;

/// A message of these words of 32 bits, each at its byte; all else is zero.
fn words(bytes: usize, words: &[(usize, u32)]) -> Vec<u8> {
    let mut all = vec![0; bytes];
    for &(at, word) in words {
        all[at..at + 4].copy_from_slice(&word.to_be_bytes());
    }
    all
}

const NAMES: Names = Names { domain: 0x1234, umem: 0xa1b2_c3d4, page: 0x0c0ffe, events: 0x15 };

/// The third queue of four with 256 places.
fn place() -> Place {
    Place::of(2, 4, 8)
}

#[test]
fn queues_lie_on_pages_and_their_records_on_lines_of_their_own() {
    let Place { elements, completions, .. } = place();
    assert_eq!((elements, completions), (0x1_0000, 0x1_4000));
    assert_eq!(
        (place().record(), place().sent(), place().read(), place().returned()),
        (0x2_0080, 0x2_0084, 0x2_0090, 0x2_00a0)
    );
    assert_eq!(Place::bytes(4, 8), 0x2_0100);
    for log_slots in 6..=15 {
        let places = [0, 1, 2].map(|number| Place::of(number, 3, log_slots));
        let starts = places.iter().flat_map(|place| [place.elements, place.completions]);
        assert!(starts.clone().all(|at| at.is_multiple_of(PAGE)), "{log_slots}");
        assert!(places[2].returned() + 8 <= Place::bytes(3, log_slots));
    }
}

#[test]
fn create_cq() {
    let expected = words(
        0x110,
        &[
            (0x00, 0x0400_0000),
            (0x10, 0x0200_0000), // status, with dbr_umem_valid
            (0x14, 0xa1b2_c3d4), // dbr_umem_id
            (0x1c, 0x080c_0ffe), // log_cq_size, uar_page
            (0x24, 0x0000_0015), // c_eqn
            (0x4c, 0x0002_0090), // dbr_addr, lower half
            (0x54, 0x0001_4000), // cq_umem_offset, lower half
            (0x58, 0xa1b2_c3d4), // cq_umem_id
            (0x5c, 0x8000_0000), // cq_umem_valid
        ],
    );
    assert_eq!(create_completions(NAMES, place(), 8).bytes(), expected);
}

#[test]
fn create_qp() {
    let expected = words(
        0x110,
        &[
            (0x00, 0x0500_0000),
            (0x18, 0x0000_1800),  // state reset, RC, pm_state 3
            (0x1c, 0x0000_1234),  // pd
            (0x20, 0x0000_4000),  // log_sq_size 8: bits 111..114
            (0x24, 0x000c_0ffe),  // uar_page
            (0x94, 0x0077_6655),  // cqn_snd
            (0xb4, 0x0077_6655),  // cqn_rcv
            (0xbc, 0x0002_0080),  // dbr_addr, lower half
            (0xc4, 0x0300_0000),  // rq_type
            (0xe8, 0x1000_0000),  // dbr_umem_valid
            (0xfc, 0xa1b2_c3d4),  // dbr_umem_id
            (0x104, 0x0001_0000), // wq_umem_offset, lower half
            (0x108, 0xa1b2_c3d4), // wq_umem_id
            (0x10c, 0x8000_0000), // wq_umem_valid
        ],
    );
    assert_eq!(create_pair(NAMES, place(), 8, 0x77_6655).bytes(), expected);
}

#[test]
fn to_init_lets_others_write_and_add_and_not_read() {
    let expected = words(
        0x110,
        &[
            (0x00, 0x0502_0000),
            (0x08, 0x00ab_cdef), // qpn
            (0x18, 0x0000_1800),
            (0x54, 0x0002_0000), // vhca_port_num
            (0xa8, 0x0003_6000), // atomic_mode 3: bits 54c..54f; rwe, rae: 551, 552
        ],
    );
    assert_eq!(to_init(0xab_cdef, 2).bytes(), expected);
}

const PATH: Connection = Connection {
    number: 0x33_4455,
    gid: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 9, 0, 1],
    lid: 0x0bad,
    their_psn: 0x11_2233,
    our_psn: 0x99_8877,
    mtu: 5,
    wire: Wire { service_level: 3, traffic_class: 0x68, ack_timeout: 14, retries: 6 },
};

#[test]
fn to_receive_over_roce() {
    let address = [0x02, 0x11, 0x22, 0x33, 0x44, 0x55];
    let target = Target::Ethernet { address, own_gid: 3, source_port: 0xc123 };
    let expected = words(
        0x110,
        &[
            (0x00, 0x0503_0000),
            (0x08, 0x00ab_cdef),
            (0x18, 0x0000_1800),
            (0x20, 0xbe00_0000), // mtu 5, log_msg_max 30
            (0x2c, 0x0033_4455), // remote_qpn
            (0x38, 0x0003_00ff), // src_addr_index, hop_limit
            (0x3c, 0x0680_0000), // tclass: bits 1e4..1eb
            (0x48, 0x0000_ffff), // rgid
            (0x4c, 0x0a09_0001),
            (0x50, 0x001a_c123), // dscp 1a: bits 28a..28f; udp_sport
            (0x54, 0x3001_0211), // eth_prio: bits 2a1..2a3; port; rmac
            (0x58, 0x2233_4455),
            (0xa8, 0x0083_6000), // log_rra_max 4: bits 548..54a; atomic_mode; rwe, rae
            (0xac, 0x0c11_2233), // min_rnr_nak, next_rcv_psn
        ],
    );
    assert_eq!(to_receive(0xab_cdef, 1, &PATH, target).bytes(), expected);
}

#[test]
fn to_receive_over_infiniband() {
    let expected = words(
        0x110,
        &[
            (0x00, 0x0503_0000),
            (0x08, 0x00ab_cdef),
            (0x18, 0x0000_1800),
            (0x20, 0xbe00_0000),
            (0x2c, 0x0033_4455),
            (0x34, 0x0000_0bad), // rlid
            (0x54, 0x0301_0000), // sl: bits 2a4..2a7; port
            (0xa8, 0x0083_6000),
            (0xac, 0x0c11_2233),
        ],
    );
    assert_eq!(to_receive(0xab_cdef, 1, &PATH, Target::InfiniBand { lid: 0x0bad }).bytes(), expected);
}

#[test]
fn to_send() {
    let expected = words(
        0x110,
        &[
            (0x00, 0x0504_0000),
            (0x08, 0x00ab_cdef),
            (0x18, 0x0000_1800),
            (0x38, 0x7000_0000), // ack_timeout 14
            (0x88, 0x0086_e000), // log_sra_max 4: bits 448..44a; retry_count 6: 44d..44f; rnr_retry 7: 450..452
            (0x90, 0x0099_8877), // next_send_psn
        ],
    );
    assert_eq!(super::to_send(0xab_cdef, &PATH).bytes(), expected);
}

#[test]
fn short_commands_name_the_queue_pair() {
    let about = |opcode| Message::about(opcode, 0xab_cdef).bytes().to_vec();
    assert_eq!(about(Opcode::ToError), words(0x10, &[(0x00, 0x0507_0000), (0x08, 0x00ab_cdef)]));
    assert_eq!(about(Opcode::QueryQp), words(0x10, &[(0x00, 0x050b_0000), (0x08, 0x00ab_cdef)]));
}
