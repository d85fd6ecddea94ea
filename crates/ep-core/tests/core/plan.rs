//! Plans against an independent, naive computation of the same things.

use std::collections::BTreeSet;

use ep_core::plan::{
    Exchange, Expansion, LocalChoices, Membership, Plan, Repeats, TopK, align_counts, channel_share, channel_tokens,
};
use ep_core::{Error, Rank, RankSet, Shape};
use proptest::prelude::*;
use proptest::sample::{Index, subsequence};

/// A layer and the batch of every rank.
#[derive(Clone, Debug)]
struct Batches {
    shape: Shape,
    ranks: u32,
    /// Of each rank, of each token: the chosen experts or -1.
    chosen: Vec<Vec<Vec<i64>>>,
}

impl Batches {
    fn local(&self) -> i64 {
        i64::from(self.shape.experts() / self.ranks)
    }

    fn topk_idx(&self, rank: usize) -> Vec<i64> {
        self.chosen[rank].concat()
    }

    fn plan(&self, rank: usize, mask: &RankSet) -> Plan {
        Plan::of_topk(&self.shape, self.ranks, mask, TopK { topk_idx: &self.topk_idx(rank) }).expect("a valid routing")
    }

    /// The ranks that a token goes to.
    fn targets(&self, token: &[i64], mask: &RankSet) -> BTreeSet<u32> {
        let rank = |&expert: &i64| (expert / self.local()) as u32;
        token.iter().filter(|&&expert| expert >= 0).map(rank).filter(|&rank| !mask.contains(Rank(rank))).collect()
    }
}

/// One token: distinct experts in any order, some dropped.
fn token(experts: u32, topk: u32) -> impl Strategy<Value = Vec<i64>> {
    let all: Vec<_> = (0..i64::from(experts)).collect();
    let dropped = proptest::collection::vec(proptest::bool::weighted(0.15), topk as usize);
    (subsequence(all, topk as usize).prop_shuffle(), dropped).prop_map(|(mut experts, dropped)| {
        experts.iter_mut().zip(dropped).filter(|(_, dropped)| *dropped).for_each(|(expert, _)| *expert = -1);
        experts
    })
}

fn batches() -> impl Strategy<Value = Batches> {
    (1u32..=9, 1u32..=4, 1u32..=6).prop_flat_map(|(ranks, local, topk)| {
        let experts = ranks * local;
        let topk = topk.min(experts);
        let shape = Shape::builder().experts(experts).topk(topk).hidden(8).build().expect("a valid shape");
        let batch = proptest::collection::vec(token(experts, topk), 0..20);
        proptest::collection::vec(batch, ranks as usize).prop_map(move |chosen| Batches { shape, ranks, chosen })
    })
}

fn masked(ranks: u32, bits: u32) -> RankSet {
    (0..ranks).filter(|rank| bits >> rank & 1 == 1).map(Rank).collect()
}

proptest! {
    #![proptest_config(crate::common::config("plan"))]

    #[test]
    fn channels_share_some_tokens_as_they_share_all(
        tokens in 0u32..200,
        channels in 1u32..=9,
        some in proptest::collection::btree_set(0u32..200, 0..60),
    ) {
        let some: Vec<_> = some.into_iter().filter(|&token| token < tokens).collect();
        let shares = (0..channels).map(|channel| (channel, channel_share(&some, tokens, channels, channel)));
        let mut next = 0;
        for (channel, share) in shares {
            prop_assert_eq!(share.start, next);
            next = share.end;
            let served = channel_tokens(tokens, channels, channel);
            prop_assert!(some[share.start as usize..share.end as usize].iter().all(|token| served.contains(token)));
        }
        prop_assert_eq!(next as usize, some.len());
    }

    #[test]
    fn counts_and_positions_are_those_of_a_naive_count(batches in batches(), bits: u32) {
        let mask = masked(batches.ranks, bits & bits >> 16);
        let plan = batches.plan(0, &mask);
        let tokens = &batches.chosen[0];
        prop_assert_eq!(plan.tokens() as usize, tokens.len());
        let mut rows = vec![0u32; batches.ranks as usize];
        for (token, chosen) in (0u32..).zip(tokens) {
            let expected: Vec<_> =
                batches.targets(chosen, &mask).into_iter().map(|to| (Rank(to), rows[to as usize])).collect();
            expected.iter().for_each(|(to, _)| rows[to.index()] += 1);
            prop_assert_eq!(plan.reached(token), expected);
        }
        prop_assert_eq!(plan.rows(), rows);
        for expert in 0..i64::from(batches.shape.experts()) {
            let lives = !mask.contains(Rank((expert / batches.local()) as u32));
            let chosen = tokens.concat().iter().filter(|&&e| e == expert && lives).count();
            prop_assert_eq!(plan.experts()[expert as usize] as usize, chosen);
        }
    }

    #[test]
    fn what_is_sent_is_the_transpose_of_what_is_reached(batches in batches(), bits: u32) {
        let plan = batches.plan(0, &masked(batches.ranks, bits & bits >> 16));
        let mut listed = 0;
        for to in (0..batches.ranks).map(Rank) {
            let sent = plan.sent_to(to);
            prop_assert!(sent.is_sorted_by(|a, b| a < b), "token order");
            prop_assert_eq!(sent.len(), plan.rows()[to.index()] as usize);
            for (position, &token) in (0u32..).zip(sent) {
                prop_assert!(plan.reached(token).contains(&(to, position)));
            }
            listed += sent.len();
        }
        prop_assert_eq!(listed, (0..plan.tokens()).map(|token| plan.reached(token).len()).sum::<usize>());
    }

    #[test]
    fn received_rows_are_dense_and_ordered_by_source_and_token(batches in batches()) {
        let plans: Vec<_> = (0..batches.ranks as usize).map(|rank| batches.plan(rank, &RankSet::new())).collect();
        let rows = plans.iter().flat_map(|plan| plan.rows().to_vec()).collect();
        let tokens: Vec<_> = plans.iter().map(Plan::tokens).collect();
        let exchange = Exchange::new(rows, tokens.clone(), vec![]).expect("few rows");
        for to in (0..batches.ranks).map(Rank) {
            let landed: Vec<_> = plans
                .iter()
                .zip((0..).map(Rank))
                .flat_map(|(plan, from)| plan.sent_to(to).iter().zip(0u32..).map(move |(&token, at)| (from, token, at)))
                .map(|(from, token, at)| (exchange.first_row(from, to) + at, from, token))
                .collect();
            prop_assert!(landed.iter().zip(0u32..).all(|(row, at)| row.0 == at), "dense: {:?}", landed);
            prop_assert!(landed.is_sorted_by_key(|&(_, from, token)| (from, token)));
            prop_assert_eq!(landed.len(), exchange.received(to) as usize);
        }
        for (from, plan) in (0..).map(Rank).zip(&plans) {
            prop_assert_eq!(exchange.tokens(from), plan.tokens());
            prop_assert!((0..batches.ranks).all(|to| exchange.rows(from, Rank(to)) == plan.rows()[to as usize]));
        }
    }

    #[test]
    fn masked_ranks_get_nothing_and_others_what_they_got(batches in batches(), bits: u32) {
        let mask = masked(batches.ranks, bits);
        let (with, without) = (batches.plan(0, &mask), batches.plan(0, &RankSet::new()));
        for rank in (0..batches.ranks).map(Rank) {
            let expected = if mask.contains(rank) { &[][..] } else { without.sent_to(rank) };
            prop_assert_eq!(with.sent_to(rank), expected);
        }
    }

    #[test]
    fn membership_plans_what_the_router_would(batches in batches(), bits: u32) {
        let mask = masked(batches.ranks, bits & bits >> 16);
        let none = RankSet::new();
        let row = |token: &Vec<i64>| {
            let targets = batches.targets(token, &none);
            (0..batches.ranks).map(|rank| u8::from(targets.contains(&rank)) * 3).collect::<Vec<_>>()
        };
        let in_rank = batches.chosen[0].iter().flat_map(row).collect::<Vec<_>>();
        let unmasked = batches.plan(0, &none);
        let routing = Membership { in_rank: &in_rank, tokens_per_expert: unmasked.experts() };
        let plan = Plan::of_membership(&batches.shape, batches.ranks, &mask, routing);
        prop_assert_eq!(plan.expect("a valid membership"), batches.plan(0, &mask));
    }

    #[test]
    fn an_expert_out_of_range_is_refused_by_token_and_value(
        batches in batches(), at: Index, beyond in prop_oneof![0i64..1000, Just(i64::MAX - 100_000)], below: bool,
    ) {
        prop_assume!(!batches.chosen[0].is_empty());
        let experts = i64::from(batches.shape.experts());
        let value = if below { -2 - beyond } else { experts + beyond };
        let mut topk_idx = batches.topk_idx(0);
        let at = at.index(topk_idx.len());
        topk_idx[at] = value;
        let error = Plan::of_topk(&batches.shape, batches.ranks, &RankSet::new(), TopK { topk_idx: &topk_idx });
        let token = at / batches.shape.topk() as usize;
        let limit = format!("-1 or 0 to {}", experts - 1);
        prop_assert_eq!(error, Err(Error::invalid(format!("topk_idx of token {token}"), value, limit)));
    }

    #[test]
    fn an_expert_chosen_twice_is_refused_even_on_a_masked_rank(
        batches in batches(), token: Index, pair: (Index, Index), bits: u32,
    ) {
        let topk = batches.shape.topk() as usize;
        prop_assume!(!batches.chosen[0].is_empty() && topk > 1);
        let token = token.index(batches.chosen[0].len());
        let (first, second) = (pair.0.index(topk), pair.1.index(topk));
        let mut topk_idx = batches.topk_idx(0);
        let expert = topk_idx[token * topk + first];
        prop_assume!(first != second && expert >= 0);
        topk_idx[token * topk + second] = expert;
        let mask = masked(batches.ranks, bits);
        let error = Plan::of_topk(&batches.shape, batches.ranks, &mask, TopK { topk_idx: &topk_idx });
        let error = error.expect_err("an expert twice").to_string();
        let what = format!("topk_idx of token {token} is {expert} twice, ");
        prop_assert!(error.starts_with(&what), "{}", error);
    }

    #[test]
    fn where_repeats_are_allowed_a_row_goes_once_and_each_choice_counts_or_the_first(batches in batches(), column: Index) {
        let topk = batches.shape.topk() as usize;
        let (mut repeated, mut once, mut more) = (batches.topk_idx(0), batches.topk_idx(0), 0);
        let column = column.index(topk);
        // The first choice once more in another column, in the place of what was there; or dropped there.
        let pairs = repeated.chunks_exact_mut(topk).zip(once.chunks_exact_mut(topk));
        for (repeated, once) in pairs.filter(|_| column > 0) {
            (repeated[column], once[column]) = (repeated[0], -1);
            more += usize::from(repeated[0] >= 0);
        }
        let none = RankSet::new();
        let plan = |topk_idx: &[i64], repeats: Repeats| {
            Plan::of_choices(&batches.shape, batches.ranks, &none, TopK { topk_idx }, repeats).expect("valid choices")
        };
        let (counted, once) = (plan(&repeated, Repeats::Counted), plan(&once, Repeats::Refused));
        prop_assert_eq!(counted.rows(), once.rows());
        let choices = |plan: &Plan| plan.experts().iter().sum::<u32>() as usize;
        prop_assert_eq!(choices(&counted), choices(&once) + more);
        prop_assert_eq!(plan(&repeated, Repeats::Once), once);
    }

    #[test]
    fn channels_share_the_tokens_evenly(tokens in 0u32..1 << 26, channels in 1u32..=64) {
        let shares: Vec<_> = (0..channels).map(|channel| channel_tokens(tokens, channels, channel)).collect();
        prop_assert_eq!((shares[0].start, shares[channels as usize - 1].end), (0, tokens));
        prop_assert!(shares.windows(2).all(|pair| pair[0].end == pair[1].start), "contiguous");
        let lengths = shares.iter().map(ExactSizeIterator::len);
        prop_assert!(lengths.clone().max().unwrap() - lengths.min().unwrap() <= 1, "as even as possible");
    }

    #[test]
    fn aligned_counts_are_the_next_multiples(counts in proptest::collection::vec(0u32..1 << 20, 0..9), unit in 1u32..300) {
        for (&count, aligned) in counts.iter().zip(align_counts(&counts, unit)) {
            prop_assert!(aligned.is_multiple_of(unit) && aligned >= count && aligned - count < unit);
        }
    }
}

#[test]
fn ragged_inputs_are_refused() {
    let shape = Shape::builder().experts(8).topk(2).build().unwrap();
    let none = RankSet::new();
    let error = Plan::of_topk(&shape, 4, &none, TopK { topk_idx: &[0, 1, 2] }).unwrap_err().to_string();
    assert_eq!(error, "length of topk_idx is 3, allowed: a multiple of the 2 topk");
    let ragged = Membership { in_rank: &[1, 0, 1], tokens_per_expert: &[0; 8] };
    let error = Plan::of_membership(&shape, 4, &none, ragged).unwrap_err().to_string();
    assert_eq!(error, "length of in_rank is 3, allowed: a multiple of the 4 ranks");
    let short = Membership { in_rank: &[1, 0, 1, 0], tokens_per_expert: &[0; 7] };
    let error = Plan::of_membership(&shape, 4, &none, short).unwrap_err().to_string();
    assert_eq!(error, "length of tokens_per_expert is 7, allowed: 8 experts");
    let error = Plan::of_topk(&shape, 3, &none, TopK { topk_idx: &[] }).unwrap_err().to_string();
    assert_eq!(error, "experts is 8, allowed: a multiple of the 3 ranks");
}

#[test]
fn more_rows_than_a_destination_can_number_are_refused() {
    let many = 1 << 30;
    let error = Exchange::new(vec![many, 1, many, 1], vec![many; 2], vec![]).unwrap_err().to_string();
    assert_eq!(error, "rows to rank 0 is 2147483648 or more, allowed: less than 2^31");
    let exchange = Exchange::new(vec![many, 1, many - 1, 1], vec![many; 2], vec![]).unwrap();
    assert_eq!((exchange.received(Rank(0)), exchange.received(Rank(1))), ((1 << 31) - 1, 2));
}

/// More than 64 ranks do not fit a word: each has the mask of its own word.
#[test]
fn masks_hold_above_64_ranks() {
    const RANKS: u32 = 200;
    let shape = Shape::builder().experts(RANKS).topk(4).hidden(8).build().unwrap();
    let chosen: Vec<Vec<i64>> =
        (0..RANKS).map(|token| [0, 63, 64, 131].map(|step| i64::from((token + step) % RANKS)).to_vec()).collect();
    let batches = Batches { shape, ranks: RANKS, chosen: vec![chosen] };
    for out in [&[0][..], &[63, 64], &[70, 191, 192], &[199]] {
        let mask: RankSet = out.iter().copied().map(Rank).collect();
        let (with, without) = (batches.plan(0, &mask), batches.plan(0, &RankSet::new()));
        for rank in (0..RANKS).map(Rank) {
            let expected = if mask.contains(rank) { &[][..] } else { without.sent_to(rank) };
            assert_eq!(with.sent_to(rank), expected, "rank {rank} where {out:?} are masked");
        }
        for (token, chosen) in (0..).zip(&batches.chosen[0]) {
            let reached: BTreeSet<u32> = with.reached(token).iter().map(|(rank, _)| rank.0).collect();
            assert_eq!(reached, batches.targets(chosen, &mask), "token {token} where {out:?} are masked");
        }
        assert!((0..RANKS).all(|expert| (with.experts()[expert as usize] == 0) == mask.contains(Rank(expert))));
        let in_rank: Vec<u8> = (batches.chosen[0].iter())
            .flat_map(|chosen| (0..i64::from(RANKS)).map(|rank| u8::from(chosen.contains(&rank))))
            .collect();
        let routing = Membership { in_rank: &in_rank, tokens_per_expert: without.experts() };
        assert_eq!(Plan::of_membership(&batches.shape, RANKS, &mask, routing).unwrap(), with);
    }
}

/// Local choices of some rows of one rank, by source: experts or -1, an expert more than once at times.
fn received() -> impl Strategy<Value = (Vec<i32>, Vec<i64>, u32, u32, u32)> {
    (1u32..=6, 1u32..=5, 1usize..=32, 0usize..40).prop_flat_map(|(ranks, experts, topk, rows)| {
        let sources = proptest::collection::vec(0..ranks as i32, rows).prop_map(|mut sources| {
            sources.sort_unstable();
            sources
        });
        let choices = proptest::collection::vec(-1..i64::from(experts), rows * topk);
        let alignment = proptest::sample::select(&[1u32, 2, 8, 128, 1000][..]);
        (sources, choices, Just(ranks), Just(experts), alignment)
    })
}

proptest! {
    #![proptest_config(crate::common::config("plan"))]

    /// Every choice has a slot of its own, at its expert, in order of row and choice; starts are aligned, and nothing is wasted.
    #[test]
    fn an_expansion_orders_choices_by_expert_row_and_column((sources, choices, ranks, experts, alignment) in received()) {
        let given = LocalChoices { topk_idx: &choices, source_rank: &sources };
        let expansion = Expansion::new(given, ranks, experts, alignment).expect("choices that can be");
        let mut sorted: Vec<(i64, usize)> = choices.iter().copied().zip(0..).filter(|(expert, _)| *expert >= 0).collect();
        sorted.sort_unstable();
        let mut next = 0;
        for (at, &(expert, choice)) in sorted.iter().enumerate() {
            if at == 0 || sorted[at - 1].0 != expert {
                next = u32::next_multiple_of(next, alignment);
                prop_assert_eq!(expansion.first()[expert as usize], next);
            }
            prop_assert_eq!(expansion.slots()[choice], next as i32);
            next += 1;
        }
        prop_assert_eq!(expansion.rows(), next.next_multiple_of(alignment));
        prop_assert_eq!(expansion.slots().iter().filter(|&&slot| slot >= 0).count(), sorted.len());
        prop_assert_eq!(expansion.padding().count() + sorted.len(), expansion.rows() as usize);
        let topk = choices.len().checked_div(sources.len()).unwrap_or(0);
        for (source, expert) in (0..ranks).flat_map(|source| (0..experts).map(move |expert| (source, expert))) {
            let is_before = |&&(other, choice): &&(i64, usize)| {
                other == i64::from(expert) && sources[choice / topk] < source as i32
            };
            let before = sorted.iter().filter(is_before).count() as u32;
            let offset = expansion.offsets()[(source * experts + expert) as usize];
            prop_assert_eq!(offset as u32, expansion.first()[expert as usize] + before);
        }
    }
}
