"""Ranks on NPUs, by their twin: the same calls as on CPUs bring the same bits, on memory of the NPU, in the order of the caller's stream."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import moexpress
import pytest
import torch
from moexpress import Communicator, Meeting, _native, _npu, errors

from tests import conftest, npus
from tests.conftest import Ranks
from tests.npus import both, clean, needs_twin, put, started

TOKENS, TOPK, HIDDEN, EXPERTS = 7, 3, 48, 8
SIZES = {"experts": EXPERTS, "topk": TOPK, "hidden": HIDDEN, "max_tokens": 8}
LIMIT = 240.0


@pytest.fixture(scope="module", autouse=True)
def _library() -> Iterator[None]:
    yield
    npus.remove_library()


PLACES = {"2 ranks": (2, 2), "4 ranks": (4, 4), "2 servers of 2": (4, 2)}


@pytest.fixture(params=PLACES.values(), ids=PLACES.keys())
def place(request: pytest.FixtureRequest) -> tuple[Ranks, int]:
    """Ranks, and how many of them a server has."""
    world, near = request.param
    return _group(world, near), near


def _group(world: int, near: int) -> Ranks:
    key = ("npu", world, near)
    return conftest._groups.setdefault(key, Ranks(world, None if near == world else near))  # type: ignore[call-overload]


def _batch(rank: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    tokens = TOKENS - rank
    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    topk_idx = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOPK] for _ in range(tokens)])
    topk_idx[0, 1] = -1
    return x, topk_idx, torch.rand(tokens, TOPK, generator=generator)


def _same(here: Any, there: Any, what: str) -> None:
    if here is None or there is None:
        assert here is None and there is None, what
        return
    assert here.dtype == there.dtype and here.shape == there.shape, (what, here.dtype, there.dtype, here.shape, there.shape)
    assert torch.equal(here.contiguous().view(torch.uint8), there.contiguous().view(torch.uint8)), what


NAMES = ("x", "scales", "topk_idx", "topk_weights", "source_token", "source_rank")


def _throughput(rank: int, world: int, near: int, library: str) -> None:
    npu = started(rank, world, near, library)
    meeting = Meeting()
    cpus, npus_ = both(meeting, **SIZES)
    for seed in range(3):
        x, topk_idx, topk_weights = _batch(rank, seed)
        here = cpus.dispatch(x, topk_idx, topk_weights, alignment=4)
        there = npus_.dispatch(put(npu, x), put(npu, topk_idx), put(npu, topk_weights), alignment=4)
        assert (here.rows, here.expert_counts) == (there.rows, there.expert_counts)
        for name in NAMES:
            _same(getattr(here, name), getattr(there, name), name)
        y, weights, bias = here.x * 2, here.topk_weights, torch.randn_like(x)
        back = cpus.combine(y, here.handle, topk_weights=weights, bias=bias)
        again = npus_.combine(put(npu, y), there.handle, topk_weights=put(npu, weights), bias=put(npu, bias))
        _same(back.x, again.x, "sums")
        _same(back.topk_weights, again.topk_weights, "weights")
        cached, other = cpus.redispatch(x + 1, here.handle), npus_.redispatch(put(npu, x + 1), there.handle)
        _same(cached.x, other.x, "cached rows")
        in_rank = (topk_idx[:, :, None] // (EXPERTS // world) == torch.arange(world)).any(1)
        counts = torch.bincount(topk_idx[topk_idx >= 0], minlength=EXPERTS).tolist()
        _same(cpus.dispatch_members(x, in_rank, counts).x, npus_.dispatch_members(put(npu, x), put(npu, in_rank), counts).x, "members")
    assert npus_.stats()["rows_sent"] == cpus.stats()["rows_sent"]
    cpus.close()
    npus_.close()
    meeting.close()
    del here, there, back, again, cached, other
    gc.collect()
    clean(npu)


@needs_twin
def test_throughput_brings_what_cpu_ranks_bring(place: tuple[Ranks, int]) -> None:
    ranks, near = place
    ranks.run(_throughput, near, npus.library(), limit=LIMIT)
