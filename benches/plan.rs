//! Planning a dispatch of 4096 tokens, top-8 of 256 experts, over 64 ranks. The aim is less than 100 us on one core:
//! it runs on the host before the first row can leave.

use std::hint::black_box;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use ep_core::plan::{Exchange, Membership, Plan, TopK};
use ep_core::{Rank, RankSet};

const TOKENS: u32 = 4096;
const RANKS: u32 = 64;

fn plan(c: &mut Criterion) {
    let shape = moexpress_benches::large_shape();
    let topk_idx = moexpress_benches::routing(&shape, TOKENS, 0);
    let none = RankSet::new();
    let of_topk = || Plan::of_topk(&shape, RANKS, &none, TopK { topk_idx: black_box(&topk_idx) }).expect("a plan");
    c.bench_function("plan/topk", |b| b.iter(of_topk));

    let plan = of_topk();
    let mut in_rank = vec![0u8; (TOKENS * RANKS) as usize];
    for token in 0..TOKENS {
        plan.reached(token).iter().for_each(|(to, _)| in_rank[(token * RANKS + to.0) as usize] = 1);
    }
    let tokens_per_expert = plan.experts();
    c.bench_function("plan/membership", |b| {
        b.iter(|| {
            let routing = Membership { in_rank: black_box(&in_rank), tokens_per_expert };
            Plan::of_membership(&shape, RANKS, &none, routing).expect("a plan")
        });
    });

    let rows: Vec<u32> = (0..RANKS).flat_map(|_| plan.rows().to_vec()).collect();
    c.bench_function("plan/exchange", |b| {
        let own = || (rows.clone(), vec![TOKENS; RANKS as usize], vec![0; 4]);
        let exchange = |(rows, tokens, experts)| Exchange::new(rows, tokens, experts).expect("an exchange");
        b.iter_batched(own, exchange, BatchSize::SmallInput);
    });
    c.bench_function("plan/walk", |b| {
        let walk = || (0..RANKS).flat_map(|to| plan.sent_to(Rank(to))).map(|&token| u64::from(token)).sum::<u64>();
        b.iter(|| black_box(walk()));
    });
}

criterion_group!(benches, plan);
criterion_main!(benches);
