//! What goes wrong on the way: each syndrome, in its place, and what comes after it.

use std::time::Duration;

use soft_hca::{Link, Mood, QpState, Rule, abi};

use crate::Pair;
use crate::message::Command;
use crate::poster::{Broken, Mutation, Poster, SIGNAL};
use crate::side::{CQ_RECORD, ENTRIES, REGION, Side};

fn pair(seed: u64) -> Pair {
    let link = if seed.is_multiple_of(2) { Link::Ethernet } else { Link::InfiniBand };
    Pair::new(link, Mood::hostile(), seed, 1, 5, 5, false)
}

/// The first error of the queue, and what the card said.
fn ends(pair: &Pair, mut poster: Poster) -> (u8, Vec<Rule>) {
    let queue = &pair.a.queues[0];
    poster.ring(queue);
    let seen = poster.drain(&pair.fabric, queue).expect_err("an error");
    (seen.syndrome, pair.a.card.complaints().iter().map(|complaint| complaint.rule).collect())
}

/// A write of 64 bytes with one thing changed.
fn write(pair: &Pair, change: impl FnOnce(&mut [u8])) -> (u8, Vec<Rule>) {
    let (a, b) = (&pair.a, &pair.b);
    let (queue, mut poster) = (&a.queues[0], Poster::new(None));
    poster.element(queue, 0, 0, &[]);
    let to = (b.rows.addr(0), Side::keys(b.rows_mr).1);
    poster.write(queue, SIGNAL, to, &[(a.rows.addr(0), Side::keys(a.rows_mr).0, 64)]);
    let mut bytes = queue.arena.read(queue.elements() + 64, 64);
    change(&mut bytes);
    queue.arena.write(queue.elements() + 64, &bytes);
    ends(pair, poster)
}

#[test]
fn a_wrong_element_ends_with_syndrome_2() {
    let changes: [(usize, u8); 9] =
        [(0, 8), (1, 1), (2, 9), (3, 0x10), (4, 0xff), (7, 0), (7, 65), (11, 8 | 0x10), (31, 1)];
    for (seed, (at, value)) in changes.into_iter().enumerate() {
        let pair = pair(seed as u64);
        assert_eq!(write(&pair, |bytes| bytes[at] = value), (2, vec![Rule::Element]), "byte {at}");
    }
}

#[test]
fn own_memory_ends_with_syndrome_4() {
    for seed in 0..4 {
        let pair = pair(seed);
        let outcome = write(&pair, |bytes| match seed {
            0 => bytes[36..40].copy_from_slice(&[1, 2, 3, 4]),
            1 => bytes[32..36].copy_from_slice(&(REGION as u32 + 1).to_be_bytes()),
            2 => bytes[40..48].copy_from_slice(&8_u64.to_be_bytes()),
            // A length of zero stands for 2^31.
            _ => bytes[32..36].fill(0),
        });
        assert_eq!(outcome, (4, vec![Rule::Access]), "seed {seed}");
    }
}

#[test]
fn the_peers_memory_ends_with_syndrome_13h() {
    for seed in 0..3 {
        let pair = pair(seed);
        let beyond = pair.b.rows.addr(0) + REGION as u64 - 63;
        let local = Side::keys(pair.b.rows_mr).0;
        let outcome = write(&pair, |bytes| match seed {
            0 => bytes[24..28].copy_from_slice(&local.to_be_bytes()),
            1 => bytes[16..24].copy_from_slice(&beyond.to_be_bytes()),
            _ => bytes[16..24].copy_from_slice(&0_u64.to_be_bytes()),
        });
        assert_eq!(outcome, (0x13, vec![Rule::Access]), "seed {seed}");
        assert_eq!(pair.b.card.queue_pairs()[0].state, QpState::Error, "the end that refused");
        assert_eq!(pair.b.rows.read(0, REGION), vec![0; REGION], "nothing was written");
    }
}

/// What was posted behind a message that the peer refuses does not arrive, and is flushed.
#[test]
fn nothing_behind_a_refused_message_arrives() {
    for seed in 0..20 {
        let pair = pair(seed);
        let (a, b) = (&pair.a, &pair.b);
        let (queue, mut poster) = (&a.queues[0], Poster::new(None));
        let (key, base) = (Side::keys(b.rows_mr).1, b.rows.addr(0));
        for (place, key) in [(0, key), (64, key ^ 1), (128, key), (192, key)] {
            poster.write_inline(queue, SIGNAL, (base + place, key), b"row");
        }
        poster.ring(queue);
        pair.fabric.settle();
        let rows: Vec<bool> = [0, 64, 128, 192].iter().map(|&at| b.rows.read(at, 3) == b"row").collect();
        assert_eq!(rows, [true, false, false, false], "seed {seed}");
        let ends: Vec<u8> = (0..4).map(|slot| queue.arena.read(ENTRIES + slot * 64 + 55, 1)[0]).collect();
        assert_eq!(ends[1..], [0x13, 5, 5], "seed {seed}");
        assert_eq!(a.card.complaints().len(), 1, "{:?}", a.card.complaints());
    }
}

#[test]
fn a_misaligned_fetch_add_ends_with_syndrome_12h() {
    let pair = pair(5);
    let (a, b) = (&pair.a, &pair.b);
    let mut poster = Poster::new(None);
    let back = (a.cells.addr(0), Side::keys(a.cells_mr).0);
    poster.fetch_add(&a.queues[0], SIGNAL, (b.cells.addr(12), Side::keys(b.cells_mr).1), 1, back);
    assert_eq!(ends(&pair, poster), (0x12, vec![Rule::Access]));
}

/// Addresses of a region may be even where its memory is not: the peer refuses, and the cards go on.
#[test]
fn a_fetch_add_into_memory_that_is_askew_ends_with_syndrome_12h() {
    let pair = pair(5);
    let (a, b) = (&pair.a, &pair.b);
    let access = abi::LOCAL_WRITE | abi::REMOTE_WRITE | abi::REMOTE_ATOMIC;
    // SAFETY: memory of the pair, which outlives its cards.
    let askew = unsafe { (b.lib.ibv_reg_mr_iova2)(b.pd, b.cells.at(4), 64, 0, access) };
    assert!(!askew.is_null());
    let mut poster = Poster::new(None);
    let back = (a.cells.addr(0), Side::keys(a.cells_mr).0);
    poster.fetch_add(&a.queues[0], SIGNAL, (0, Side::keys(askew).1), 1, back);
    assert_eq!(ends(&pair, poster), (0x12, vec![Rule::Access]));
    assert_eq!(b.cells.read(0, 16), [0; 16]);
}

/// The first syndrome, then 5 for all that was posted behind it, then 5 for what is posted later. A reset begins at zero.
#[test]
fn a_broken_queue_pair_is_flushed_and_begins_anew() {
    for seed in 0..20 {
        let pair = pair(seed);
        let (a, b) = (&pair.a, &pair.b);
        let (queue, mut poster) = (&a.queues[0], Poster::new(None));
        a.card.break_element(queue.number, 2, 0x14);
        for _ in 0..6 {
            poster.element(queue, 0, 0, &[]);
        }
        poster.ring(queue);
        pair.fabric.settle();
        poster.element(queue, 0, 0, &[]);
        poster.ring(queue);
        pair.fabric.settle();
        let syndromes: Vec<(u8, u8, u8)> = (0..6)
            .map(|slot| {
                let cqe = queue.arena.read(ENTRIES + slot * 64, 64);
                (cqe[63] >> 4, cqe[55], cqe[61])
            })
            .collect();
        assert_eq!(syndromes[..5], [(13, 0x14, 2), (13, 5, 3), (13, 5, 4), (13, 5, 5), (13, 5, 6)], "seed {seed}");
        assert_eq!(syndromes[5].0, 15);
        let view = &a.card.queue_pairs()[0];
        assert_eq!((view.state, view.syndrome), (QpState::Error, Some(0x14)));

        let reset = |side: &Side| Command::new(0x50a, 16).set(0x48, 24, side.queues[0].number.into());
        for side in [a, b] {
            assert_eq!(side.modify(side.queues[0].qp, &reset(side)), Ok(()));
            side.queues[0].arena.word(4).store(0, std::sync::atomic::Ordering::Release);
        }
        a.connect(0, b);
        b.connect(0, a);
        let mut poster = Poster::new(None);
        poster.element(queue, 0, SIGNAL, &[]);
        poster.ring(queue);
        pair.fabric.settle();
        assert_eq!(a.card.queue_pairs()[0].retired, 1, "seed {seed}");
        let cqe = queue.arena.read(ENTRIES + 5 * 64, 64);
        assert_eq!((cqe[63], cqe[60], cqe[61]), (0, 0, 0), "the completion queue goes on");
        pair.close();
    }
}

/// A peer that does not answer is given up after the time that the queue pair was told: 8 tries of 4.096 us x 2^8.
#[test]
fn a_peer_that_is_gone_ends_with_syndrome_15h() {
    for seed in 0..8 {
        let pair = pair(seed);
        let (a, b) = (&pair.a, &pair.b);
        let (queue, mut poster) = (&a.queues[0], Poster::new(None));
        match seed % 4 {
            0 => b.card.kill(),
            1 => b.card.cut(b.queues[0].number, true),
            2 => a.card.cut(queue.number, true),
            _ => {
                let broken = Command::new(0x507, 16).set(0x48, 24, b.queues[0].number.into());
                assert_eq!(b.modify(b.queues[0].qp, &broken), Ok(()));
            }
        }
        let to = (b.rows.addr(0), Side::keys(b.rows_mr).1);
        poster.write_inline(queue, SIGNAL, to, b"lost");
        poster.ring(queue);
        pair.fabric.settle();
        assert_eq!(poster.poll(queue), Ok(()), "not yet");
        pair.fabric.pass(Duration::from_millis(9));
        assert_eq!(poster.drain(&pair.fabric, queue), Err(Broken { syndrome: 0x15 }), "seed {seed}");
        assert_eq!(pair.fabric.complaints(), []);
    }
}

/// Packets that were lost for a while come, in order.
#[test]
fn a_link_that_comes_back_loses_nothing() {
    let pair = pair(1);
    let (a, b) = (&pair.a, &pair.b);
    let (queue, mut poster) = (&a.queues[0], Poster::new(None));
    a.card.cut(queue.number, true);
    poster.write_inline(queue, SIGNAL, (b.rows.addr(0), Side::keys(b.rows_mr).1), b"late");
    poster.ring(queue);
    pair.fabric.settle();
    assert_eq!(b.rows.read(0, 4), [0; 4]);
    a.card.cut(queue.number, false);
    assert_eq!(poster.drain(&pair.fabric, queue), Ok(true));
    assert_eq!(b.rows.read(0, 4), b"late");
    pair.close();
}

/// Ends that were told different things never hear one another.
#[test]
fn a_connection_that_does_not_agree_ends_with_syndrome_15h() {
    for (field, changed) in [(0x100, 3), (0x168, 24), (0x568, 24)] {
        for link in [Link::Ethernet, Link::InfiniBand] {
            let pair = Pair::new(link, Mood::mild(), 1, 1, 5, 5, true);
            let (a, b) = (&pair.a, &pair.b);
            let (queue, other) = (&a.queues[0], &b.queues[0]);
            let reset = Command::new(0x50a, 16).set(0x48, 24, other.number.into());
            let rtr = b.rtr(other.number, a, queue.number).set(field, changed, 4);
            for command in [reset, Side::init(other.number), rtr] {
                assert_eq!(b.modify(other.qp, &command), Ok(()));
            }
            let mut poster = Poster::new(None);
            poster.write_inline(queue, SIGNAL, (b.rows.addr(0), Side::keys(b.rows_mr).1), b"lost");
            poster.ring(queue);
            pair.fabric.settle();
            pair.fabric.pass(Duration::from_millis(9));
            assert_eq!(poster.drain(&pair.fabric, queue), Err(Broken { syndrome: 0x15 }), "bit {field:#x}");
            let said = pair.fabric.complaints();
            assert_eq!((said.len(), said[0].rule), (1, Rule::Connection), "{said:?}");
        }
    }
}

/// A consumer that does not say what it has taken loses the queue.
#[test]
fn a_completion_queue_that_runs_over_is_told() {
    let pair = Pair::new(Link::Ethernet, Mood::hostile(), 9, 1, 5, 2, false);
    let (queue, mut poster) = (&pair.a.queues[0], Poster::new(None));
    for _ in 0..5 {
        poster.element(queue, 0, SIGNAL, &[]);
    }
    poster.ring(queue);
    pair.fabric.settle();
    assert_eq!(pair.a.card.complaints().iter().map(|complaint| complaint.rule).collect::<Vec<_>>(), [Rule::Overrun]);
    assert_eq!(queue.arena.word(CQ_RECORD).load(std::sync::atomic::Ordering::Relaxed), 0);
    assert_eq!(pair.a.card.queue_pairs()[0].state, QpState::Error);
}

/// A slot belongs to the card until the completion: it may have to send the element once more.
#[test]
fn an_element_that_changes_before_its_completion_is_told() {
    let (mut told, mut unnoticed) = (0, 0);
    for seed in 0..40 {
        let pair = pair(seed);
        let (queue, mut poster) = (&pair.a.queues[0], Poster::new(None));
        poster.element(queue, 0, SIGNAL, &[]);
        poster.ring(queue);
        while pair.a.card.queue_pairs()[0].retired == 0 {
            pair.fabric.step();
        }
        queue.arena.write(queue.elements(), &[0xee; 64]);
        match poster.drain(&pair.fabric, queue) {
            Ok(true) => unnoticed += 1,
            outcome => {
                assert_eq!(outcome, Err(Broken { syndrome: 2 }), "seed {seed}");
                let said: Vec<Rule> = pair.a.card.complaints().iter().map(|complaint| complaint.rule).collect();
                assert_eq!(said, [Rule::Changed], "seed {seed}");
                told += 1;
            }
        }
    }
    assert!(told > 0 && unnoticed > 0, "acknowledgements are lost sometimes: told {told}, not {unnoticed}");
}

/// More elements than there is room for beside those of which no completion has told, although all of them are carried out.
#[test]
fn a_queue_that_is_overfilled_is_told() {
    let pair = Pair::new(Link::Ethernet, Mood::mild(), 1, 1, 4, 4, true);
    let (queue, mut poster) = (&pair.a.queues[0], Poster::new(None));
    let rules = || pair.a.card.complaints().iter().map(|complaint| complaint.rule).collect::<Vec<_>>();
    for (more, said) in [(16, &[][..]), (1, &[Rule::Slot])] {
        for _ in 0..more {
            poster.element(queue, 0, 0, &[]);
        }
        poster.ring(queue);
        pair.fabric.settle();
        assert_eq!((rules().as_slice(), pair.a.card.queue_pairs()[0].retired), (said, poster.next));
    }
}

/// A completion that was begun when its queue pair was reset is never ended.
#[test]
fn no_completion_comes_after_a_reset() {
    let pair = Pair::new(Link::Ethernet, Mood::mild(), 1, 1, 4, 4, false);
    let (a, queue, mut poster) = (&pair.a, &pair.a.queues[0], Poster::new(None));
    poster.element(queue, 0, SIGNAL, &[]);
    poster.ring(queue);
    while queue.arena.read(ENTRIES + 56, 4) == [0xff; 4] {
        assert!(pair.fabric.step());
    }
    assert_eq!(queue.arena.read(ENTRIES + 63, 1), [0xff], "not yet valid");
    let reset = Command::new(0x50a, 16).set(0x48, 24, queue.number.into());
    assert_eq!(a.modify(queue.qp, &reset), Ok(()));
    queue.arena.word(4).store(0, std::sync::atomic::Ordering::Release);
    a.connect(0, &pair.b);
    pair.fabric.settle();
    assert_eq!(queue.arena.read(ENTRIES + 63, 1), [0xff]);
}

/// An index in the middle of an element announces a part of it.
#[test]
fn an_index_within_an_element_is_told() {
    let pair = pair(2);
    let (a, b) = (&pair.a, &pair.b);
    let mut poster = Poster::new(Some(Mutation::IndexOneLess));
    poster.write_inline(&a.queues[0], SIGNAL, (b.rows.addr(0), Side::keys(b.rows_mr).1), &[1; 60]);
    assert_eq!(poster.next, 2);
    assert_eq!(ends(&pair, poster), (2, vec![Rule::Element]));
}

/// Rights are the queue pair's at the peer (rwe, rae, how many atomics) and the region's.
#[test]
fn what_the_peer_does_not_allow_is_refused() {
    let without_rwe = |command: Command| command.set(0x551, 1, 0);
    let few_atomics = |command: Command| command.set(0x548, 3, 2);
    for (case, syndrome) in [(0, 0x12), (1, 0x12), (2, 0x13), (3, 0x13)] {
        let pair = pair(case);
        let (a, b) = (&pair.a, &pair.b);
        let (number, qp) = (b.queues[0].number, b.queues[0].qp);
        let reset = Command::new(0x50a, 16).set(0x48, 24, number.into());
        let (init, rtr) = (Side::init(number), b.rtr(number, a, a.queues[0].number));
        let init = if case == 0 { without_rwe(init) } else { init };
        let rtr = if case == 1 { few_atomics(rtr) } else { rtr };
        for command in [reset, init, rtr] {
            assert_eq!(b.modify(qp, &command), Ok(()));
        }
        let (lib, memory) = (&b.lib, b.rows.at(0));
        // SAFETY: live domains, and memory that outlives the pair's cards.
        let (own, other) = unsafe {
            assert!((lib.ibv_reg_mr)(b.pd, memory, 4096, 2).is_null(), "remote writes without local ones");
            b.card.take_complaints();
            let other = (lib.ibv_alloc_pd)(b.context);
            ((lib.ibv_reg_mr)(b.pd, memory, 4096, 1), (lib.ibv_reg_mr)(other, memory, 4096, 7))
        };
        let key = match case {
            2 => Side::keys(own).1,
            3 => Side::keys(other).1,
            _ => Side::keys(b.rows_mr).1,
        };
        let (queue, mut poster) = (&a.queues[0], Poster::new(None));
        if case == 1 {
            let back = (a.cells.addr(0), Side::keys(a.cells_mr).0);
            poster.fetch_add(queue, SIGNAL, (b.cells.addr(0), Side::keys(b.cells_mr).1), 1, back);
        } else {
            poster.write_inline(queue, SIGNAL, (b.rows.addr(0), key), b"refused");
        }
        assert_eq!(ends(&pair, poster), (syndrome, vec![Rule::Access]), "case {case}");
        assert_eq!((b.rows.read(0, 7), b.cells.read(0, 8)), (vec![0; 7], vec![0; 8]));
    }
}
