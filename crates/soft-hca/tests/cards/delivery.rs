//! What a right driver sees.

use std::sync::atomic::Ordering;

use soft_hca::{Link, Mood};

use crate::Pair;
use crate::poster::{Poster, SIGNAL};
use crate::side::{ENTRIES, Side};

/// Queue pairs that share a page lose no bells: what one overwrites, the card looks for in the other's record.
#[test]
fn bells_on_a_shared_page_are_all_heard() {
    for seed in 0..20 {
        // Nothing but bells leads the cards to look.
        let mood = Mood { early: 0, recover: 0, ..Mood::hostile() };
        let pair = Pair::with(Link::InfiniBand, mood, seed, (2, 4, 4), true, 1);
        let queues = &pair.a.queues;
        let mut posters = [Poster::new(None), Poster::new(None)];
        for (poster, queue) in posters.iter_mut().zip(queues) {
            poster.element(queue, 0, SIGNAL, &[]);
            poster.ring(queue);
        }
        for (poster, queue) in posters.iter_mut().zip(queues) {
            assert_eq!(poster.drain(&pair.fabric, queue), Ok(true), "seed {seed}");
        }
        pair.close();
    }
}

#[test]
fn a_write_and_a_fetch_add_arrive_and_are_told() {
    for (link, collapsed) in [(Link::Ethernet, true), (Link::InfiniBand, false)] {
        let pair = Pair::new(link, Mood::mild(), 1, 1, 4, 4, collapsed);
        let (a, b) = (&pair.a, &pair.b);
        let (queue, mut poster) = (&a.queues[0], Poster::new(None));
        a.rows.write(100, b"a row of the source");
        let (local, cells) = (Side::keys(a.rows_mr).0, Side::keys(a.cells_mr).0);
        let (rows, remote_cells) = (Side::keys(b.rows_mr).1, Side::keys(b.cells_mr).1);
        b.cells.double(64).store(40, Ordering::Relaxed);
        poster.write(queue, 0, (b.rows.addr(300), rows), &[(a.rows.addr(100), local, 19)]);
        poster.write_inline(queue, 0, (b.rows.addr(500), rows), b"inline");
        poster.fetch_add(queue, SIGNAL, (b.cells.addr(64), remote_cells), 2, (a.cells.addr(8), cells));
        poster.ring(queue);
        assert_eq!(poster.drain(&pair.fabric, queue), Ok(true));
        assert_eq!(b.rows.read(300, 19), b"a row of the source");
        assert_eq!(b.rows.read(500, 6), b"inline");
        assert_eq!(b.cells.double(64).load(Ordering::Relaxed), 42);
        assert_eq!(a.cells.double(8).load(Ordering::Relaxed), 40);
        let counts = a.card.counts();
        assert_eq!((counts.writes, counts.fetch_adds, counts.completions, counts.bells), (2, 1, 1, 1));
        pair.close();
    }
}

/// A write of what a fetch-add brings back: with a fence it carries the old value, without one it may carry what lay there.
#[test]
fn a_fence_waits_for_what_comes_back() {
    let fenced = 4 << 5;
    let carried = |flags: u8, seed: u64| {
        let pair = Pair::new(Link::Ethernet, Mood::hostile(), seed, 1, 4, 4, true);
        let (a, b) = (&pair.a, &pair.b);
        let (queue, mut poster) = (&a.queues[0], Poster::new(None));
        let ((local, _), (_, remote)) = (Side::keys(a.cells_mr), Side::keys(b.cells_mr));
        b.cells.double(0).store(77, Ordering::Relaxed);
        poster.fetch_add(queue, 0, (b.cells.addr(0), remote), 1, (a.cells.addr(64), local));
        poster.write(queue, flags | SIGNAL, (b.cells.addr(128), remote), &[(a.cells.addr(64), local, 8)]);
        poster.ring(queue);
        assert_eq!(poster.drain(&pair.fabric, queue), Ok(true), "seed {seed}");
        let carried = b.cells.double(128).load(Ordering::Relaxed);
        pair.close();
        carried
    };
    assert!((0..40).all(|seed| carried(fenced, seed) == 77));
    assert!((0..40).any(|seed| carried(0, seed) == 0), "the payload is never read early");
}

/// A hostile card does what it may: rows are seen in part before their signal, completions are merged, and the last word of a
/// completion comes after the rest of it.
#[test]
fn liberties_are_taken() {
    let (mut torn, mut merged, mut begun) = (0, 0, 0);
    for seed in 0..40 {
        let pair = Pair::new(Link::InfiniBand, Mood::hostile(), seed, 1, 4, 0, true);
        let (a, b) = (&pair.a, &pair.b);
        let (queue, mut poster) = (&a.queues[0], Poster::new(None));
        a.rows.write(0, &[1; 512]);
        let (local, remote) = (Side::keys(a.rows_mr).0, Side::keys(b.rows_mr).1);
        for row in 0..4 {
            poster.write(queue, SIGNAL, (b.rows.addr(row * 512), remote), &[(a.rows.addr(0), local, 512)]);
        }
        poster.ring(queue);
        let mut seen_in_part = false;
        while !poster.is_done(queue, 3) {
            pair.fabric.step();
            let first = b.rows.read(0, 512).iter().filter(|&&byte| byte == 1).count();
            seen_in_part |= (1..512).contains(&first);
            let entry = queue.arena.read(ENTRIES, 64);
            begun += u32::from(entry[63] == 0xff && entry[56..60] != [0xff; 4]);
            poster.poll(queue).unwrap();
        }
        torn += u32::from(seen_in_part);
        merged += u32::from(a.card.counts().completions < 4);
        pair.close();
    }
    assert!(torn > 0 && merged > 0 && begun > 0, "torn {torn}, merged {merged}, begun {begun}");
}

/// A write never comes before a fetch-add that was posted earlier, relaxed or not.
#[test]
fn no_write_passes_a_fetch_add() {
    for seed in 0..40 {
        let pair = Pair::new(Link::Ethernet, Mood::hostile(), seed, 1, 4, 4, true);
        let (a, b) = (&pair.a, &pair.b);
        let (queue, mut poster) = (&a.queues[0], Poster::new(None));
        let ((local, _), (_, cells), (_, rows)) =
            (Side::keys(a.cells_mr), Side::keys(b.cells_mr), Side::keys(b.rows_mr));
        poster.fetch_add(queue, 0, (b.cells.addr(0), cells), 1, (a.cells.addr(64), local));
        poster.write_inline(queue, SIGNAL, (b.rows.addr(0), rows), b"later");
        poster.ring(queue);
        while !poster.is_done(queue, 1) {
            pair.fabric.step();
            let (row, cell) = (b.rows.read(0, 1)[0], b.cells.double(0).load(Ordering::Relaxed));
            assert!(row == 0 || cell == 1, "seed {seed}");
            poster.poll(queue).unwrap();
        }
        pair.close();
    }
}
