//! Cards that a thread drives, and drivers that wait in real time.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use soft_hca::{Fabric, Link, Mood};

use crate::poster::{Broken, Poster, SIGNAL};
use crate::side::Side;

fn sides(fabric: &Fabric) -> [Side; 2] {
    let mut sides = [0, 1].map(|card| Side::open(fabric.card(card), Link::Ethernet));
    for side in &mut sides {
        side.add_queue(5, 5, true);
    }
    sides[0].connect(0, &sides[1]);
    sides[1].connect(0, &sides[0]);
    sides
}

/// Rows and signals, while the reader looks from a thread of its own.
#[test]
fn rows_are_there_when_their_signal_is() {
    const MESSAGES: u64 = 200;
    for seed in 0..3 {
        let fabric = Fabric::builder(2, Link::Ethernet).mood(Mood::hostile()).seed(seed).running();
        let [a, b] = sides(&fabric);
        let deadline = Instant::now() + Duration::from_secs(60);
        let cell = b.cells.double(0) as *const _ as usize;
        std::thread::scope(|scope| {
            let rows = b.rows.addr(0) as usize;
            scope.spawn(move || {
                // SAFETY: the arenas outlive the scope, and are reached by atomics alone.
                let word = |at: usize| unsafe { std::sync::atomic::AtomicU64::from_ptr(at as *mut u64) };
                let mut seen = 0;
                while seen < MESSAGES && Instant::now() < deadline {
                    seen = word(cell).load(Ordering::Acquire);
                    for message in 1..=seen {
                        assert_eq!(word(rows + message as usize * 64).load(Ordering::Relaxed), message);
                    }
                    std::thread::yield_now();
                }
                assert_eq!(seen, MESSAGES);
            });
            let (queue, mut poster) = (&a.queues[0], Poster::new(None));
            let (rows, cells) = (Side::keys(b.rows_mr).1, Side::keys(b.cells_mr).1);
            let back = (a.cells.addr(8), Side::keys(a.cells_mr).0);
            for message in 1..=MESSAGES {
                while poster.room(queue) < 4 {
                    poster.poll(queue).unwrap();
                    assert!(Instant::now() < deadline, "no completion");
                    std::thread::yield_now();
                }
                let to = (b.rows.addr(message as usize * 64), rows);
                poster.write_inline(queue, 0, to, &message.to_ne_bytes());
                poster.fetch_add(queue, SIGNAL, (b.cells.addr(0), cells), 1, back);
                poster.ring(queue);
            }
            while !poster.is_done(queue, poster.next - 1) {
                poster.poll(queue).unwrap();
                assert!(Instant::now() < deadline, "no completion");
                std::thread::yield_now();
            }
        });
        assert_eq!(fabric.complaints(), []);
        a.close();
        b.close();
    }
}

/// The time until a dead peer is noticed is real: 8 tries of 4.096 us x 2^8.
#[test]
fn a_dead_peer_is_noticed_in_real_time() {
    let fabric = Fabric::builder(2, Link::Ethernet).running();
    let [a, b] = sides(&fabric);
    b.card.kill();
    let (queue, mut poster) = (&a.queues[0], Poster::new(None));
    poster.write_inline(queue, SIGNAL, (b.rows.addr(0), Side::keys(b.rows_mr).1), b"lost");
    poster.ring(queue);
    let begun = Instant::now();
    let outcome = loop {
        if let Err(Broken { syndrome }) = poster.poll(queue) {
            break syndrome;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "no completion");
        std::thread::yield_now();
    };
    assert_eq!(outcome, 0x15);
    assert!(begun.elapsed() >= Duration::from_millis(8));
}
