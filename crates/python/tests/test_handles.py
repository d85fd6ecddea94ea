"""What goes along a handle and was not there in its dispatch: weights of which a copy does not tell, rows of another width, room for a worst case."""

from __future__ import annotations

import copy
from typing import Any

import deep_ep
import oracle
import pytest
import torch
from moexpress import errors
from test_dropin import Job, make_buffer

Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def coded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.to(torch.float8_e4m3fn), torch.ones(len(x), x.shape[1] // 128)


def dispatch(buffer: deep_ep.Buffer, batch: oracle.Batch, experts: int, x: Rows | None = None, **asked: Any) -> Any:
    told = buffer.get_dispatch_layout(batch.topk_idx, experts)
    choices = (batch.topk_idx, batch.topk_weights)
    return buffer.dispatch(batch.x if x is None else x, None, told[0], None, told[3], told[2], *choices, **asked)


def copied(handle: Any) -> Any:
    return tuple(copy.deepcopy(handle))


def sent(batch: oracle.Batch) -> torch.Tensor:
    """Weights as they come back."""
    return batch.topk_weights.masked_fill(batch.topk_idx < 0, 0)


def check_copies_of_fp8(rank: int, world: int) -> None:
    """No rows of bf16 went by this buffer before, so none of its communicators is known to have as many choices."""
    job, buffer = Job(rank, world), make_buffer()
    for first in ("combine", "cached dispatch"):
        handle, weights = (dispatch(buffer, job.own, job.layer.experts, coded(job.own.x))[index] for index in (4, 2))
        remade = copied(handle)
        if first == "cached dispatch":
            assert torch.equal(buffer.dispatch(job.own.x, handle=remade)[0], job.received)
        for _ in range(2):
            sums, back, _ = buffer.combine(job.received, remade, weights)
            assert torch.equal(sums, job.sums) and torch.equal(back, sent(job.own))
        assert torch.equal(buffer.combine(job.received, remade)[0], job.sums)
    buffer.destroy()


def check_copies_of_layers(rank: int, world: int) -> None:
    """Layers with two and four choices. What is learnt first of the copies is where the first layer's rows go."""
    job, buffer = Job(rank, world), make_buffer()
    few = oracle.Layer(world, 8, 2, 256)
    dispatch(buffer, oracle.batches(few, [3] * world)[rank], 8)
    _, _, weights, _, handle, _ = dispatch(buffer, job.own, 8)
    remade = copied(handle)
    operations = [one.stats()["operations"] for one in buffer._communicators.all_normal()]
    for _ in range(2):
        # As the backward pass has it.
        assert torch.equal(buffer.dispatch(job.own.x, handle=remade)[0], job.received)
        sums, back, _ = buffer.combine(job.received, remade, weights)
        assert torch.equal(sums, job.sums) and torch.equal(back, sent(job.own))
    done = [one.stats()["operations"] for one in buffer._communicators.all_normal()]
    # Two calls of each, and what each learnt once.
    assert [now - before for now, before in zip(done, operations, strict=True)] == [3, 3]
    if len(job.received):
        with pytest.raises(errors.InvalidArgument, match=r"shape of topk_weights is \[\d+, 2\], allowed: \[\d+, 4\]"):
            buffer.combine(job.received, handle, weights[:, :2].contiguous())
    buffer.destroy()


@pytest.mark.parametrize("check", [check_copies_of_fp8, check_copies_of_layers], ids=["fp8", "layers"])
def test_weights_go_back_along_a_copy_however_many_choices_there_were(ranks: Any, check: Any) -> None:
    ranks.run(check)


def check_copies_over_nodes(rank: int, world: int) -> None:
    job, buffer = Job(rank, world), make_buffer()
    _, _, weights, _, handle, _ = dispatch(buffer, job.own, job.layer.experts, coded(job.own.x))
    remade = copied(handle)
    assert torch.equal(buffer.dispatch(job.own.x, handle=remade)[0], job.received)
    assert torch.equal(buffer.combine(job.received, remade, weights)[1], sent(job.own))
    narrow = job.own.x[:, :128].contiguous()
    for one in (handle, remade):
        assert torch.equal(buffer.dispatch(narrow, handle=one)[0], job.received[:, :128])
    buffer.destroy()


def test_over_nodes_too(two_nodes: Any) -> None:
    two_nodes.run(check_copies_over_nodes)


def check_widths(rank: int, world: int, worst: bool) -> None:
    """Rows of 128 elements along handles of rows of 256, there and back, and rows of 256 after that."""
    job, buffer, other = Job(rank, world), make_buffer(), make_buffer()
    asked = {"num_worst_tokens": sum(len(each.x) for each in job.all) + 3} if worst else {}
    came = len(job.received)
    for rows in (job.own.x, coded(job.own.x)):
        x, _, weights, _, handle, _ = dispatch(buffer, job.own, job.layer.experts, rows, **asked)
        room = len(x) if isinstance(x, torch.Tensor) else len(x[0])
        for along, of in ((handle, buffer), (list(handle), buffer), (copied(handle), buffer), (handle, other)):
            for width in (128, 256):
                narrow = job.own.x[:, :width].contiguous()
                y = torch.zeros(room, width).bfloat16()
                y[:came] = job.received[:, :width]
                for _ in range(2):
                    sums, back, _ = of.combine(y, along, weights)
                    assert torch.equal(sums, job.sums[:, :width]) and torch.equal(back, sent(job.own))
                    again = of.dispatch(narrow, handle=along)[0]
                    assert len(again) == room and torch.equal(again[:came], job.received[:, :width])
                    codes, scales = of.dispatch(coded(narrow), handle=along, async_finish=True)[0]
                    wanted = coded(job.received[:, :width])
                    assert len(codes) == len(scales) == room and scales.shape[1] == width // 128
                    assert torch.equal(codes[:came].view(torch.uint8), wanted[0].view(torch.uint8))
                    assert torch.equal(scales[:came], wanted[1])
    with pytest.raises(errors.InvalidArgument, match=r"dtype of x is torch.float32, allowed: torch.bfloat16"):
        buffer.dispatch(job.own.x[:, :128].float(), handle=handle)
    with pytest.raises(errors.InvalidArgument, match=r"dtype of y is torch.float32, allowed: torch.bfloat16"):
        buffer.combine(torch.zeros(room, 128), handle)
    buffer.destroy()
    other.destroy()


@pytest.mark.parametrize("worst", [False, True], ids=["rows that came", "a worst case"])
def test_rows_of_another_width_go_along_a_handle(ranks: Any, worst: bool) -> None:
    ranks.run(check_widths, worst)


def check_room(rank: int, world: int) -> None:
    """A copy brings as many rows as the handle. On the last rank as many came as there was room for."""
    job, buffer = Job(rank, world), make_buffer()
    for each in job.all:
        each.topk_idx[:, 0] = job.layer.experts - 1
    every, layer = [each.x for each in job.all], job.layer
    results = [oracle.gathered(every, oracle.arrived(layer, job.all, other)) for other in range(world)]
    worst = len(results[-1])
    _, _, weights, _, handle, _ = dispatch(buffer, job.own, layer.experts, num_worst_tokens=worst)
    remade, came = copied(handle), len(results[rank])
    for _ in range(2):
        for along in (handle, remade):
            rows = buffer.dispatch(job.own.x, handle=along)[0]
            assert rows.shape == (worst, 256) and torch.equal(rows[:came], results[rank]) and rows.is_contiguous()
            y = torch.full((worst, 256), torch.nan).bfloat16()
            y[:came] = results[rank]
            sums, back, _ = buffer.combine(y, along, weights)
            assert torch.equal(sums, oracle.combined(layer, job.all, rank, results))
            assert torch.equal(back, sent(job.own))
    buffer.destroy()


def test_a_copy_of_a_worst_cases_handle_has_its_room(ranks: Any) -> None:
    ranks.run(check_room)
