//! What the ring's arithmetic costs per row, publishing decisions included, on one thread. The yardstick is a push and a
//! pop of `rtrb`, a ring of one producer and one consumer with a similar split of work, which also moves the element.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use ep_core::ring::{Consumer, Geometry, Producer};

const SLOTS: u32 = 256;
const ROWS: u64 = 1024;

/// Moves [`ROWS`] rows one by one, handing published counters over at once; returns the sum of the slots used.
fn rows(producer: &mut Producer, consumer: &mut Consumer) -> u64 {
    let mut slots = 0;
    for _ in 0..ROWS {
        slots += u64::from(producer.slot().expect("room"));
        if let Some(tail) = producer.push() {
            consumer.saw_tail(tail).expect("a right tail");
        }
        while let Some(slot) = consumer.slot() {
            slots += u64::from(slot);
            if let Some(head) = consumer.pop() {
                producer.saw_head(head).expect("a right head");
            }
        }
    }
    slots
}

fn cursors(c: &mut Criterion) {
    let mut group = c.benchmark_group("cursors");
    group.throughput(Throughput::Elements(ROWS));
    for step in [1, 16, 64] {
        let geometry = Geometry { slots: SLOTS, chunk: step, credit: step };
        let (mut producer, mut consumer) = (Producer::new(geometry), Consumer::new(geometry));
        group.bench_function(format!("push+pop/{step}"), |b| b.iter(|| black_box(rows(&mut producer, &mut consumer))));
    }
    let (mut producer, mut consumer) = rtrb::RingBuffer::<u64>::new(SLOTS as usize);
    group.bench_function("rtrb", |b| {
        b.iter(|| {
            for row in 0..ROWS {
                producer.push(black_box(row)).expect("room");
                black_box(consumer.pop().expect("a row"));
            }
        });
    });
    group.finish();
}

criterion_group!(benches, cursors);
criterion_main!(benches);
