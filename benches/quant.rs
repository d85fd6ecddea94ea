//! Quantising and dequantising rows of 7168 elements on one core. Throughput is bytes of bf16 (or f32), in or out: a
//! CPU rank of low-latency dispatch quantises what it sends, and dispatch of 128 such rows moves 1.8 MB.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use ep_core::Scaling;
use ep_core::quant::{Number, dequantize, groups, quantize};

const HIDDEN: usize = 7168;

fn quant(c: &mut Criterion) {
    let values: Vec<f32> = (0..HIDDEN).map(|at| ((at * 7919 % 1009) as f32 - 500.0) / 37.0).collect();
    let bits: Vec<u16> = values.iter().copied().map(u16::round).collect();
    let bytes: Vec<[u8; 2]> = bits.iter().map(|bits| bits.to_le_bytes()).collect();
    for (name, scaling) in [("f32", Scaling::Exact), ("power_of_two", Scaling::PowerOfTwo), ("ue8m0", Scaling::Ue8m0)] {
        both_ways(c, &format!("bf16/{name}"), scaling, &bits);
    }
    both_ways(c, "bf16_bytes/f32", Scaling::Exact, &bytes);
    both_ways(c, "f32/f32", Scaling::Exact, &values);
}

fn both_ways<T: Number>(c: &mut Criterion, name: &str, scaling: Scaling, row: &[T]) {
    let (mut codes, mut back) = (vec![0; HIDDEN], row.to_vec());
    let mut scales = vec![0; groups(HIDDEN as u32) as usize * scaling.scale_bytes()];
    let mut group = c.benchmark_group("quant");
    group.throughput(Throughput::Bytes(size_of_val(row) as u64));
    group.bench_function(format!("quantize/{name}"), |b| {
        b.iter(|| quantize(scaling, black_box(row), &mut codes, &mut scales).expect("lengths agree"));
    });
    group.bench_function(format!("dequantize/{name}"), |b| {
        b.iter(|| dequantize(scaling, black_box(&codes), black_box(&scales), &mut back).expect("lengths agree"));
    });
}

criterion_group!(benches, quant);
criterion_main!(benches);
