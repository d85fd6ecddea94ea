"""``deep_ep`` on NPUs, by their twin: DeepEP's interface brings what it brings on CPUs; where sgl-kernel-npu's differs, what can be served is."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import deep_ep
import pytest
import torch
import torch.distributed as dist
from deep_ep import _arena
from deep_ep._npus import QUANTIZE
from moexpress import errors
from tests import npus
from tests.npus import clean, needs_twin, put, started
from tests.test_npu import EXPERTS, HIDDEN, LIMIT, TOKENS, _batch, _group, _same, place  # noqa: F401


class OnNpus:
    """While it lasts, buffers take tensors for an NPU's. With torch_npu their device says so."""

    def __enter__(self) -> None:
        self._named, _arena.named = _arena.named, lambda device: "npu"
        self._far, os.environ["MOEXPRESS_FAR"] = os.environ.get("MOEXPRESS_FAR"), "roce"

    def __exit__(self, *_: object) -> None:
        _arena.named = self._named
        del os.environ["MOEXPRESS_FAR"]
        if self._far is not None:
            os.environ["MOEXPRESS_FAR"] = self._far


def _buffer() -> deep_ep.Buffer:
    return deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True, explicitly_destroy=True)


Copies = Callable[[torch.Tensor], torch.Tensor]


def _layer(
    buffer: deep_ep.Buffer, x: Any, topk_idx: torch.Tensor, topk_weights: torch.Tensor, there: Copies = torch.clone
) -> list[Any]:
    """``there`` copies a tensor to where the ranks are."""
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, EXPERTS)
    came, idx, weights, counts, handle, _ = buffer.dispatch(
        x, None, per_rank, per_node, in_rank, per_expert, topk_idx, topk_weights, expert_alignment=2
    )
    y = came if isinstance(came, torch.Tensor) else came[0].bfloat16()
    sums, sum_weights, _ = buffer.combine(there(y), handle, weights)
    again = buffer.dispatch(x, handle=handle)[0]
    flat = [came, again] if isinstance(came, torch.Tensor) else [*came, *again]
    return [*flat, idx, weights, counts, sums, sum_weights]


def _layers(rank: int, world: int, near: int, library: str) -> None:
    npu = started(rank, world, near, library)
    x, topk_idx, topk_weights = _batch(rank)
    codes, scales = (x * 10).round().clamp(-127, 127).to(torch.int8), torch.rand(x.shape[0])
    cpus = _buffer()
    here = [_layer(cpus, rows, topk_idx, topk_weights) for rows in (x, (codes, scales))]
    low = _low(cpus, x, topk_idx, topk_weights, False)
    with OnNpus():
        buffer = _buffer()
        idx, weights = put(npu, topk_idx), put(npu, topk_weights)
        coded = put(npu, codes), put(npu, scales)
        there = [_layer(buffer, rows, idx, weights, partial(put, npu)) for rows in (put(npu, x), coded)]
        other = _low(buffer, put(npu, x), idx, weights, False, npu)
        hooked = _low(buffer, put(npu, x), idx, weights, True, npu)
        quantised = _low(buffer, put(npu, x), idx, weights, True, npu, use_fp8=True)
        _refusals(npu, buffer, put(npu, x), idx, weights)
        _quantised(npu, buffer, x, idx, weights)
        buffer.destroy()
    cpus.destroy()
    for mine, theirs in zip(here, there, strict=True):
        for number, (one, two) in enumerate(zip(mine, theirs, strict=True)):
            if isinstance(one, list):
                assert one == two
            else:
                _same(one, two, f"result {number}")
    for one, two, three in zip(low, other, hooked, strict=True):
        _same(one, two, "low latency")
        _same(one, three, "low latency, in halves")
    sums, rows = quantised[-1].float(), low[-1].float()
    assert (sums - rows).abs().max() <= 0.02 * rows.abs().max()
    clean(npu)


def _low(
    buffer: deep_ep.Buffer,
    x: torch.Tensor,
    idx: torch.Tensor,
    weights: torch.Tensor,
    hook: bool,
    npu: npus.TwinNpu | None = None,
    use_fp8: bool = False,
) -> list[torch.Tensor]:
    rows, counts, handle, _, receive = buffer.low_latency_dispatch(
        x, idx, TOKENS, EXPERTS, use_fp8=use_fp8, return_recv_hook=hook
    )
    if receive is not None:
        receive()
    codes, scales = rows if isinstance(rows, tuple) else (rows, None)
    assert (codes.dtype is torch.int8) == use_fp8 and (scales is None or scales.shape == codes.shape[:2])
    y = torch.zeros(codes.shape, dtype=torch.bfloat16)
    for expert, count in enumerate(counts.tolist()):
        part = codes[expert, :count]
        y[expert, :count] = part if scales is None else part.float() * scales[expert, :count, None]
    y = y if npu is None else put(npu, y)
    sums, _, receive = buffer.low_latency_combine(y, idx, weights, handle, return_recv_hook=hook)
    if receive is not None:
        receive()
    return [counts, y[0, : int(counts[0])], sums]


def _quantised(
    npu: npus.TwinNpu, buffer: deep_ep.Buffer, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor
) -> None:
    """Rows that travel as INT8 because the environment says so are those that their rule makes."""
    os.environ[QUANTIZE] = "1"
    try:
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, EXPERTS)
        given = put(npu, x)
        (codes, scales), *_ = buffer.dispatch(given, None, per_rank, per_node, in_rank, per_expert, idx, weights)
    finally:
        del os.environ[QUANTIZE]
    largest = x.float().abs().amax(1)
    assert codes.dtype is torch.int8 and scales.shape == (codes.shape[0],)
    own = in_rank[:, buffer.rank].nonzero()[:, 0]
    first = sum(int(count) for count in _rows_before(buffer, per_rank))
    mine = slice(first, first + len(own))
    torch.testing.assert_close(scales[mine], largest[own] / 127, rtol=1e-6, atol=0)
    assert torch.equal(codes[mine], (x[own].float() * (127 / largest[own])[:, None]).round().to(torch.int8))


def _rows_before(buffer: deep_ep.Buffer, per_rank: torch.Tensor) -> list[int]:
    """Rows that ranks before this one send here."""
    told: list[Any] = [None] * buffer.group_size
    dist.all_gather_object(told, per_rank.tolist())
    return [counts[buffer.rank] for counts in told[: buffer.rank]]


def _refusals(
    npu: npus.TwinNpu, buffer: deep_ep.Buffer, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor
) -> None:
    waited = put(npu, torch.zeros(buffer.group_size, dtype=torch.int64))
    calls = {
        "round_scale": lambda: buffer.low_latency_dispatch(x, idx, TOKENS, EXPERTS, round_scale=True),
        "time waited": lambda: buffer.low_latency_dispatch(
            x, idx, TOKENS, EXPERTS, dispatch_wait_recv_cost_stats=waited
        ),
        "dispatch_wait_recv_cost_stats": lambda: buffer.dispatch(x, dispatch_wait_recv_cost_stats=waited),
        "combine_send_cost_stats": lambda: buffer.combine(x, (), combine_send_cost_stats=waited),
        "fused_deep_moe": lambda: buffer.fused_deep_moe(x, idx, weights),
        "get_notify_send_data": buffer.get_notify_send_data,
        "meta_addr": lambda: deep_ep.Buffer(dist.group.WORLD, meta_addr=64),
        "stream": buffer.get_comm_stream,
    }
    for text, call in calls.items():
        with pytest.raises(errors.Unsupported, match=text):
            call()


@needs_twin
def test_deep_ep_on_npus_brings_what_it_brings_on_cpus(place: Any) -> None:  # noqa: F811
    ranks, near = place
    ranks.run(_layers, near, npus.library(), limit=LIMIT)


def _on_cpus(rank: int, world: int) -> None:
    """INT8 rows of a caller travel between CPU ranks, too."""
    x, topk_idx, topk_weights = _batch(rank)
    buffer = _buffer()
    codes = torch.full((x.shape[0], HIDDEN), rank + 1, dtype=torch.int8)
    (came, scales), *_ = _layer(buffer, (codes, torch.full((x.shape[0], 1), 0.5)), topk_idx, topk_weights)[:2], None
    assert came.dtype is torch.int8 and scales.shape == (came.shape[0], 1) and (scales == 0.5).all()
    with pytest.raises(errors.InvalidArgument, match=r"x\[1\] is \[2\]"):
        _layer(buffer, (codes, torch.ones(2)), topk_idx, topk_weights)
    buffer.destroy()


def test_int8_rows_travel_between_cpu_ranks() -> None:
    _group(2, 2).run(_on_cpus, limit=LIMIT)
