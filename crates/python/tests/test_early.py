"""Rows that are consumed as they come, and results that are read as they are ready: on GPUs, by operations of torch behind the sending half; elsewhere refused by
name."""

from __future__ import annotations

import inspect
from typing import Any

import deep_ep
import moexpress
import pytest
import torch
import torch.distributed as dist
from gpus import LIMIT, device, needs_two

EXPERTS, TOPK, HIDDEN, TOKENS, BLOCK = 8, 2, 128, 24, 16


def make(device: torch.device | str) -> Any:
    return moexpress.Communicator(
        experts=EXPERTS, topk=TOPK, hidden=HIDDEN, max_tokens=TOKENS, device=device, low_latency=True
    )


def batch(rank: int, turn: int, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * turn + rank)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    topk_idx = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOPK).indices
    return x.to(device), topk_idx.to(device), torch.rand(TOKENS, TOPK, generator=generator).to(device)


def check_refused(rank: int, world: int) -> None:
    one = make("cpu")
    with pytest.raises(moexpress.errors.Unsupported, match="GPUs of one node"):
        one.early(BLOCK)
    for rows in (0, -1, 1.0):
        with pytest.raises(moexpress.Error, match=r"rows is .*, allowed: (a whole number, )?1 to"):
            one.early(rows)
    x, topk_idx, weights = batch(rank, 0, "cpu")
    got = one.low_latency_dispatch(x, topk_idx, weights)
    y = got.x.clone()
    with pytest.raises(moexpress.errors.Unsupported, match="GPUs of one node"):
        one.send_combine(y, got.handle, ready=moexpress.Ready(1))
    local = EXPERTS // world
    for ready, message in [
        (moexpress.Ready(0), "due of ready is 0, allowed: 1 to"),
        (moexpress.Ready(1, rows=4), "rows of ready is 4, allowed: None without signals"),
        (moexpress.Ready(1, torch.zeros(local)), "dtype of signals of ready is torch.float32"),
        (moexpress.Ready(1, torch.zeros(local + 1, dtype=torch.int32)), "signals of ready"),
        (moexpress.Ready(1, multiprocessors=0), "multiprocessors of ready is 0, allowed: 1 to"),
        (1, "ready is a int, allowed: a moexpress.Ready"),
    ]:
        with pytest.raises(moexpress.Error, match=message):
            one.send_combine(y, got.handle, ready=ready)
    # Nothing moved.
    one.low_latency_combine(y, got.handle)
    one.close()


def test_refused_on_cpus(ranks: Any) -> None:
    ranks.run(check_refused)


def check_forms(rank: int, world: int) -> None:
    buffer = deep_ep.Buffer(dist.group.WORLD, 0, 1 << 20, low_latency_mode=True, explicitly_destroy=True)
    x, topk_idx, weights = batch(rank, 0, "cpu")
    _, counts, handle, _, _ = buffer.low_latency_dispatch(x, topk_idx, TOKENS, EXPERTS, use_fp8=False)
    y = torch.zeros(EXPERTS // world, world * TOKENS, HIDDEN, dtype=torch.bfloat16)
    words = torch.zeros(64, dtype=torch.int32)
    for options, message in [
        ({"overlap": True}, "comp_signal is None, allowed: int32"),
        ({"comp_signal": words}, "comp_signal is given and overlap is False"),
        ({"overlap": True, "comp_signal": words, "src_signals": words}, "allowed: one of them"),
        ({"overlap": True, "comp_signal": words, "threshold": 0}, "due of ready is 0, allowed: 1 to"),
        ({"overlap": True, "comp_signal": words, "threshold": 1, "packed_recv_count": 3}, "packed_recv_count is a int"),
        ({"overlap": True, "comp_signal": words, "threshold": 1, "packed_recv_count": counts}, "GPUs of one node"),
    ]:
        with pytest.raises(moexpress.Error, match=message):
            buffer.low_latency_combine(y, topk_idx, weights, handle, **options)
    buffer.low_latency_combine(y, topk_idx, weights, handle)
    buffer.destroy()


def test_forms_of_readiness_are_looked_at(ranks: Any) -> None:
    ranks.run(check_forms)


def test_signatures_name_the_forms() -> None:
    named = inspect.signature(deep_ep.Buffer.low_latency_combine).parameters
    for name in ("overlap", "packed_recv_count", "comp_signal", "block_m", "threshold", "num_sms", "src_signals"):
        assert named[name].kind is inspect.Parameter.KEYWORD_ONLY, name


def check_on_gpus(rank: int, world: int) -> None:
    """The results are made on another stream while a combine waits for them, and said to be ready in every form."""
    where = device(rank)
    one, buffer = (
        make(where),
        deep_ep.Buffer(dist.group.WORLD, 0, 1 << 20, low_latency_mode=True, explicitly_destroy=True),
    )
    early, side, current = one.early(BLOCK, multiprocessors=4), torch.cuda.Stream(where), torch.cuda.current_stream()
    local, room = EXPERTS // world, world * TOKENS
    blocks = -(-room // BLOCK)
    y = torch.zeros(local, room, HIDDEN, dtype=torch.bfloat16, device=where)

    def make_results(x: torch.Tensor, say: torch.Tensor, due: int) -> None:
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000)
            torch.mul(x, 2, out=y)
            say.add_(due)

    # Kernels that are loaded while others wait for them would wait for those.
    for dtype in (torch.int32, torch.int64):
        make_results(y, torch.zeros(8, dtype=dtype, device=where), 1)
    torch.cuda.synchronize()
    dist.barrier()
    for turn in range(6):
        x, topk_idx, weights = batch(rank, turn, where)
        plain = one.low_latency_dispatch(x, topk_idx)
        expected = one.low_latency_combine(plain.x * 2, plain.handle, weights)
        sent = one.send_dispatch(x, topk_idx, early=early)
        got = sent.receive(beside=True)
        current.wait_stream(one.order.stream)
        torch.cuda.synchronize()
        number = (turn + 1) << 32
        assert early.epoch.tolist() == [number] and early.stopped.tolist() == [0]
        assert torch.equal(early.arrived, early.expected)
        rows = (early.expected - number).sum(1)
        assert torch.equal(rows > 0, got.expert_counts > 0)
        y.zero_()
        side.wait_stream(current)
        one_ready = moexpress.Ready(3, multiprocessors=3)
        sums = one.send_combine(y, got.handle, weights, ready=one_ready)
        make_results(got.x, early.ready, 3)
        back = sums.receive()
        current.wait_stream(side)
        assert torch.equal(back, expected)
        for form in ("blocks", "experts"):
            received, counts, handle, _, _ = buffer.low_latency_dispatch(x, topk_idx, TOKENS, EXPERTS, use_fp8=False)
            y.zero_()
            signals = torch.zeros(local * blocks if form == "blocks" else local, dtype=torch.int32, device=where)
            options: dict[str, Any] = {"src_signals": signals, "src_signal_expect_value": 3}
            if form == "blocks":
                options = {
                    "overlap": True,
                    "packed_recv_count": counts,
                    "comp_signal": signals,
                    "block_m": BLOCK,
                    "threshold": 3,
                }
            side.wait_stream(current)
            sums, _, hook = buffer.low_latency_combine(y, topk_idx, weights, handle, return_recv_hook=True, **options)
            make_results(received, signals, 3)
            hook()
            current.wait_stream(side)
            assert torch.equal(sums, expected), form
    buffer.destroy()
    one.close()


@needs_two
def test_results_are_read_as_they_are_ready(two: Any) -> None:
    two.run(check_on_gpus, limit=LIMIT)
