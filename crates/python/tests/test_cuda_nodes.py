"""deep_ep over several nodes of GPUs, which are processes of one host, over the loop: two nodes of one rank, and of two that share a GPU with a
rank of the other node.

Skipped, and counted so, on machines without two GPUs.
"""

from __future__ import annotations

from typing import Any

import conftest
import oracle
import pytest
import torch
from gpus import GPUS, LIMIT, bits, device, needs_two, on
from test_internode import LAYER, batches, check_as_deep_ep, dispatched, make_buffer, received_by_all

SIZES = {"tokens": 4096, "hidden": 7168}


def check_ways(rank: int, world: int) -> int:
    return check_as_deep_ep(rank, world, 2, where=device(rank % GPUS), **SIZES)  # type: ignore[arg-type]


@needs_two
@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_what_deep_eps_internode_test_looks_at(ranks_per_node: int) -> None:
    ranks = conftest.on_nodes(2, ranks_per_node)
    assert ranks.run(check_ways, limit=2 * LIMIT) == [32] * ranks.world


def check_bits(rank: int, world: int) -> None:
    where, buffer = device(rank % GPUS), make_buffer()
    for seed in range(3):
        all_batches = batches(seed)
        batch, arrived, rows = (
            on(all_batches[rank], where),
            oracle.arrived(LAYER, all_batches, rank),
            received_by_all(all_batches),
        )
        x, idx, weights, counts, handle, _ = dispatched(buffer, batch)
        assert torch.equal(bits(x), bits(rows[rank])) and torch.equal(idx.cpu(), arrived.topk_idx)
        assert torch.equal(weights.cpu(), arrived.topk_weights) and counts == arrived.counts
        results = [one * (other + 1) / 3 for other, one in enumerate(rows)]
        expected = oracle.combined(LAYER, all_batches, rank, results)
        # As it is, its tensors, and copies of them.
        for remade in (handle, list(handle), [one.clone() for one in handle]):
            assert torch.equal(bits(buffer.internode_dispatch(batch.x, handle=remade)[0]), bits(rows[rank]))
            back = buffer.internode_combine(results[rank].to(where), remade)[0]
            assert torch.equal(bits(back), bits(expected))
        with pytest.raises(NotImplementedError, match="what passed through this rank"):
            handle[9]
    buffer.destroy()


@needs_two
def test_rows_and_sums_over_nodes_are_those_of_the_oracle(two_nodes: Any) -> None:
    two_nodes.run(check_bits, limit=LIMIT)
