//! What a right driver sees.

use std::sync::atomic::Ordering;

use soft_hca::{Link, Mood};

use crate::Pair;
use crate::poster::{Poster, SIGNAL};
use crate::side::Side;

/// Queue pairs that share a page lose no bells: what one overwrites, the card looks for in the other's record.
#[test]
fn bells_on_a_shared_page_are_all_heard() {
    for seed in 0..20 {
        let pair = Pair::with(Link::InfiniBand, Mood::hostile(), seed, (2, 4, 4), true, 1);
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
