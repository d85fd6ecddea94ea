"""torch.inference_mode: what is written to may have been made inside of it and come outside, or the other way round."""

from __future__ import annotations

from typing import Any

import deep_ep
import oracle
import pytest
import torch
import torch.distributed as dist
from test_dropin import make_buffer

MOST = 16


def layer_of(world: int) -> oracle.Layer:
    return oracle.Layer(world, 2 * world, 2, 256)


def check_low_latency(rank: int, world: int) -> None:
    layer, buffer = layer_of(world), make_buffer(low_latency_mode=True, enable_shrink=True)
    batch = oracle.batches(layer, [9] * world)[rank]
    with torch.inference_mode():
        stats = torch.zeros(layer.local, dtype=torch.int32)
        waited = torch.zeros(world, dtype=torch.int64)
        status = torch.full((world,), 7, dtype=torch.int32)

    def there_and_back() -> torch.Tensor:
        rows, counts, handle, _, _ = buffer.low_latency_dispatch(
            batch.x, batch.topk_idx, MOST, layer.experts, stats, waited, use_fp8=False
        )
        y = buffer.get_next_low_latency_combine_buffer(handle)
        y[:] = rows
        given = (rows, batch.topk_idx, batch.topk_weights, handle)
        sums: torch.Tensor = buffer.low_latency_combine(*given, zero_copy=True, combine_wait_recv_cost_stats=waited)[0]
        assert int(counts.sum()) > 0
        return sums

    with torch.inference_mode():
        sums = there_and_back()
        buffer.get_local_buffer_tensor(torch.float32)
    once = stats.clone()
    assert torch.equal(there_and_back(), sums) and torch.equal(stats, 2 * once)
    buffer.get_local_buffer_tensor(torch.float32).zero_()
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [0] * world
    buffer.destroy()


def test_low_latency_in_and_out_of_inference_mode(two: Any) -> None:
    two.run(check_low_latency)


def check_elastic(rank: int, world: int, most: int) -> None:
    layer = layer_of(world)
    sizes = {"num_max_tokens_per_rank": most, "hidden": layer.hidden}
    buffer = deep_ep.ElasticBuffer(dist.group.WORLD, **sizes, explicitly_destroy=True)
    every = oracle.batches(layer, [9] * world)
    batch, expected = every[rank], oracle.arrived(layer, every, rank)
    with torch.inference_mode():
        stats = torch.zeros(layer.local, dtype=torch.int32)
    for times in (1, 2):
        asked = {"num_experts": layer.experts, "cumulative_local_expert_recv_stats": stats}
        handle = buffer.dispatch(batch.x, batch.topk_idx, batch.topk_weights, **asked)[3]
        assert stats.tolist() == [times * count for count in expected.counts]
        assert not handle.num_unaligned_recv_tokens_per_expert.is_inference()
    buffer.destroy()


@pytest.mark.parametrize("most", [MOST, 256], ids=["small batches", "larger ones"])
def test_counts_are_added_to_a_tensor_of_inference_mode(two: Any, most: int) -> None:
    two.run(check_elastic, most)
