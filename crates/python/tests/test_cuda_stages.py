"""Stages of shared memory on GPUs, again and again, and what a capture finds: errors that others made (docs/cuda.md, Checks).

Skipped, and counted so, on machines without two GPUs.
"""

from __future__ import annotations

from typing import Any, Literal

import moexpress
import pytest
import torch
from gpus import LIMIT, device, needs_two
from moexpress import Communicator

ROUNDS = 300


def codes(rank: int, turn: int, tokens: int, hidden: int, where: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 rows with f32 scales, other ones in each turn; every rank can make those of all."""
    generator = torch.Generator(device=where)
    generator.manual_seed(1000 * turn + rank)
    rows = torch.randint(0, 120, (tokens, hidden), dtype=torch.uint8, device=where, generator=generator)
    scales = torch.rand(tokens, -(-hidden // 128), device=where, generator=generator)
    return rows.view(torch.float8_e4m3fn), scales


def check_stages(rank: int, world: int, placement: Literal["direct", "pulled"], hidden: int, tokens: int) -> None:
    """Every token goes to every rank. Rows of more than 16 KiB move in pieces, scales of odd sizes word by word."""
    where = device(rank)
    communicator = Communicator(
        experts=world, topk=world, hidden=hidden, max_tokens=tokens, element="fp8", device=where, placement=placement
    )
    topk_idx = torch.arange(world, device=where).repeat(tokens, 1)
    weights = torch.ones(tokens, world, device=where)
    handle = None
    for turn in range(ROUNDS):
        x, scales = codes(rank, turn, tokens, hidden, where)
        if handle is None:
            got = communicator.dispatch(x, topk_idx, weights, scales=scales)
            handle = got.handle
        else:
            got = communicator.redispatch(x, handle, scales=scales)
        assert got.scales is not None
        for source in range(world):
            rows, its = codes(source, turn, tokens, hidden, where)
            begin, end = source * tokens, (source + 1) * tokens
            assert torch.equal(got.x[begin:end].view(torch.uint8), rows.view(torch.uint8)), f"codes in turn {turn}"
            assert torch.equal(got.scales[begin:end], its), f"scales in turn {turn}"
        if turn % 10 == 0:
            y = torch.full((world * tokens, hidden), turn + rank + 1.0, dtype=torch.bfloat16, device=where)
            sums = communicator.combine(y, handle).x
            expected = float(sum(turn + other + 1 for other in range(world)))
            assert bool((sums.float() - expected).abs().max() <= expected / 128)
        del got
    communicator.close()


@needs_two
@pytest.mark.parametrize("placement", ["direct", "pulled"])
@pytest.mark.parametrize(("hidden", "tokens"), [(16640, 300), (8320, 500), (7168, 500)])
def test_a_stage_that_is_used_again_brings_no_old_bytes(two: Any, placement: str, hidden: int, tokens: int) -> None:
    two.run(check_stages, placement, hidden, tokens, limit=LIMIT)


def check_first_call_in_a_capture(rank: int, world: int) -> None:
    """A communicator whose first calls are captured: what is not there yet is made beside the capture, or refused by name."""
    where = device(rank)
    communicator = Communicator(experts=world, topk=1, hidden=256, max_tokens=8, device=where)
    x = torch.full((8, 256), rank + 1.0, dtype=torch.bfloat16, device=where)
    topk_idx = torch.full((8, 1), (rank + 1) % world, device=where)
    graph, refused = torch.cuda.CUDAGraph(), None
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        try:
            communicator.dispatch(x, topk_idx)
        except moexpress.errors.Unsupported as error:
            refused = str(error)
        got = communicator.dispatch(x, topk_idx, worst_rows=8 * world, device_counts=True)
        back = communicator.combine(got.x, got.handle)
    assert refused is not None and "captured" in refused
    for turn in range(3):
        x.fill_(rank + 1.0 + turn)
        graph.replay()
        torch.cuda.synchronize()
        source = (rank - 1) % world
        assert bool((got.x[:8].float() == source + 1.0 + turn).all()) and bool(
            (back.x.float() == rank + 1.0 + turn).all()
        )
    communicator.close()


@needs_two
def test_a_first_call_may_be_captured(two: Any) -> None:
    two.run(check_first_call_in_a_capture, limit=LIMIT)
