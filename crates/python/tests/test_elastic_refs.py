"""deep_ep.utils.refs, with which DeepEP's tests compare, agrees with the oracle of these tests."""

from __future__ import annotations

from typing import Any

import oracle
import oracle_elastic
import pytest
import torch
from deep_ep.utils import refs
from test_elastic import MOST, Expectation, layer_of, parts


def check_dispatch(rank: int, world: int, kind: str) -> None:
    layer = layer_of(world)
    expected = Expectation(layer, rank, kind, 1)
    batch, rows = expected.mine, expected.rows
    x, idx, weights, source, counts = refs.dispatch(expected.x, batch.topk_idx, batch.topk_weights, MOST, layer.experts)
    assert all(torch.equal(*pair) for pair in zip(parts(x), expected.received, strict=True))
    assert torch.equal(idx, rows.topk_idx) and torch.equal(source, rows.source_rank * MOST + rows.source_token)
    assert torch.equal(weights.masked_fill(idx < 0, 0), rows.topk_weights)
    assert counts.cumsum(0).tolist() == expected.psum_ranks
    assert refs.dispatch(expected.x, batch.topk_idx, None, MOST, layer.experts)[2] is None
    made = refs.generate_pre_combine_data(source, MOST, layer.topk, layer.hidden)
    assert made.shape == (len(source), layer.topk, layer.hidden) and not (made.abs() > 1).any()


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_dispatched_rows(ranks: Any, kind: str) -> None:
    ranks.run(check_dispatch, kind)


@pytest.mark.parametrize("biases", [0, 1, 2])
@pytest.mark.parametrize("reduces_twice", [True, False])
def test_combined_sums(biases: int, reduces_twice: bool) -> None:
    layer = layer_of(4)
    every = oracle.batches(layer, [9, 3, 0, 1])
    batch = every[0]
    y = torch.zeros(9, layer.topk, layer.hidden).bfloat16()
    for token, choice in (batch.topk_idx >= 0).nonzero().tolist():
        y[token, choice] = oracle_elastic.results(layer, 0, token, choice)
    bias = [torch.randn(batch.x.shape).bfloat16() for _ in range(biases)]
    given = None if not bias else bias[0] if biases == 1 else tuple(bias)
    got = refs.combine(y, batch.topk_idx, 1, 4, layer.experts, given, reduces_twice, False)
    assert torch.equal(got, oracle_elastic.summed(layer, every, 0, bias, reduces_twice))
    # Two domains of two ranks: a sum of each, rounded.
    if reduces_twice:
        got = refs.combine(y, batch.topk_idx, 2, 2, layer.experts, None, True, True)
        of_rank = refs.combine(y, batch.topk_idx, 1, 4, layer.experts, None, True, False)
        assert torch.allclose(got.float(), of_rank.float(), rtol=0.02, atol=0.02)


def test_domains_need_ranks() -> None:
    with pytest.raises(ValueError, match="reduce_in_scaleup is True, allowed: with reduce_in_local only"):
        refs.combine(torch.zeros(1, 1, 1), torch.zeros(1, 1), 1, 1, 1, None, False, True)
