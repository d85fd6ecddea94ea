"""Gradients through dispatch and combine, and the example that trains with them."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from moexpress import Communicator
from moexpress.autograd import combine, dispatch

EXAMPLE = Path(__file__).parents[3] / "examples" / "moe_torch.py"


def scaled(x: torch.Tensor, topk_idx: torch.Tensor, weights: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Experts that multiply: the weighted sum of a row's experts."""
    chosen = torch.where(topk_idx < 0, 0, topk_idx)
    total = (factors[chosen] * weights * (topk_idx >= 0)).sum(1, keepdim=True)
    return (x.float() * total).bfloat16()


def check_gradients(rank: int, world: int, ranks_per_node: int | None = None) -> None:
    layer = oracle.Layer(world, 2 * world, 3, 64, ranks_per_node)
    all_batches = oracle.batches(layer, [20, 0, 13, 7][:world], seed=4)
    target = [
        torch.randn(each.x.shape, generator=torch.Generator().manual_seed(9 + r)) for r, each in enumerate(all_batches)
    ]
    factors = torch.linspace(0.5, 2, layer.experts)

    # This rank's part.
    batch = all_batches[rank]
    x, weights = batch.x.clone().requires_grad_(), batch.topk_weights.clone().requires_grad_()
    mine = factors[rank * layer.local : (rank + 1) * layer.local].clone().requires_grad_()
    with Communicator(experts=layer.experts, topk=layer.topk, hidden=layer.hidden, device="cpu") as communicator:
        received = dispatch(communicator, x, batch.topk_idx, weights)
        y = scaled(received.x, received.topk_idx, received.topk_weights, mine)
        sums = combine(communicator, y, received.handle)
        (sums.float() * target[rank]).sum().backward()

    # Everything, without communication.
    xs = [each.x.clone().requires_grad_() for each in all_batches]
    all_weights = [each.topk_weights.clone().requires_grad_() for each in all_batches]
    all_factors = factors.clone().requires_grad_()
    loss = torch.zeros(())
    for source, each in enumerate(all_batches):
        total = torch.zeros(each.x.shape)
        for other in range(world):
            here = (each.topk_idx >= 0) & (each.topk_idx // layer.local == other)
            idx = torch.where(here, each.topk_idx, -1)
            # A copy for each rank, in f32, so that its gradients are summed as a combine does, which rounds once.
            part = scaled(xs[source].float(), idx, all_weights[source], all_factors)
            total = total + part.float() * here.any(1, keepdim=True)
        loss = loss + (total.bfloat16().float() * target[source]).sum()
    loss.backward()

    torch.testing.assert_close(sums.detach(), sums_of(all_batches, rank, layer, factors), rtol=0, atol=0)
    torch.testing.assert_close(x.grad, xs[rank].grad, rtol=1.6e-2, atol=1e-5)
    torch.testing.assert_close(weights.grad, all_weights[rank].grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        mine.grad, all_factors.grad[rank * layer.local : (rank + 1) * layer.local], rtol=1e-5, atol=1e-4
    )
    dist.barrier()


def sums_of(all_batches: list[oracle.Batch], rank: int, layer: oracle.Layer, factors: torch.Tensor) -> torch.Tensor:
    results = []
    for other in range(layer.world):
        rows = oracle.arrived(layer, all_batches, other)
        mine = factors[other * layer.local : (other + 1) * layer.local]
        results.append(
            scaled(oracle.gathered([each.x for each in all_batches], rows), rows.topk_idx, rows.topk_weights, mine)
        )
    return oracle.combined(layer, all_batches, rank, results)


def test_gradients_are_those_of_one_process(ranks: Any) -> None:
    ranks.run(check_gradients)


def test_gradients_over_nodes_are_those_of_one_process(two_nodes: Any) -> None:
    two_nodes.run(check_gradients, 2)


def check_weights_alone(rank: int, world: int) -> None:
    """Each rank sums all the weights of a row, also those of choices that are on other ranks."""
    layer = oracle.Layer(world, 2 * world, 3, 64)
    batch = oracle.batches(layer, [5] * world, seed=4)[rank]
    weights = batch.topk_weights.clone().requires_grad_()
    with Communicator(experts=layer.experts, topk=layer.topk, hidden=layer.hidden, device="cpu") as communicator:
        received = dispatch(communicator, batch.x, batch.topk_idx, weights)
        factor = float(rank + 1)
        y = (received.x.float() * factor * received.topk_weights.sum(1, keepdim=True)).bfloat16()
        combine(communicator, y, received.handle).float().sum().backward()
    factors = torch.where(batch.topk_idx < 0, 0, batch.topk_idx // layer.local + 1)
    expected = batch.x.float().sum(1, keepdim=True) * factors
    torch.testing.assert_close(weights.grad, expected, rtol=1e-5, atol=1e-4)
    dist.barrier()


def test_a_weight_has_the_gradient_of_its_choice_s_rank_alone(ranks: Any) -> None:
    ranks.run(check_weights_alone)


def check_by_expert(rank: int, world: int, by_row: bool) -> None:
    """Experts that are matrices, as a grouped GEMM has them: all slots of an expert, padding too, are rows of one product. ``by_row``: weights are those
    of the received rows, not of slots."""
    layer, alignment = oracle.Layer(world, 2 * world, 3, 64), 8
    all_batches = oracle.batches(layer, [20, 0, 13, 7][:world], seed=4)
    generator = torch.Generator().manual_seed(3)
    matrices = torch.randn((layer.experts, layer.hidden, layer.hidden), generator=generator) / 8

    batch = all_batches[rank]
    x, weights = batch.x.clone().requires_grad_(), batch.topk_weights.clone().requires_grad_()
    mine = matrices[rank * layer.local : (rank + 1) * layer.local].clone().requires_grad_()
    with Communicator(experts=layer.experts, topk=layer.topk, hidden=layer.hidden, device="cpu") as communicator:
        for _ in range(2):
            # What comes next lies where this did.
            communicator.dispatch(x.detach(), batch.topk_idx, alignment=64, by_expert=True).x.fill_(torch.nan)
        received = dispatch(communicator, x, batch.topk_idx, weights, alignment=alignment, by_expert=True)
        told = received.by_expert
        assert told is not None
        of_slots = told.weights
        if by_row:
            slots, counts = told.slots.long(), len(received.x)
            of_slots = torch.zeros(counts + 1).index_put(
                (torch.where(slots < 0, counts, slots),), received.topk_weights
            )[:counts]
        parts = zip(received.x.float().split([b - a for a, b in itertools.pairwise(told.first)]), mine, strict=True)
        y = (torch.cat([part @ matrix for part, matrix in parts]) * of_slots.unsqueeze(1)).bfloat16()
        combine(communicator, y, received.handle).float().square().sum().backward()

    # Everything, without communication.
    xs = [each.x.float().requires_grad_() for each in all_batches]
    all_weights = [each.topk_weights.clone().requires_grad_() for each in all_batches]
    all_matrices = matrices.clone().requires_grad_()
    loss = torch.zeros(())
    for source, each in enumerate(all_batches):
        chosen = all_matrices[each.topk_idx.clamp(min=0)]
        results = torch.einsum("th,tkhj->tkj", xs[source], chosen)
        weighted = results * (all_weights[source] * (each.topk_idx >= 0)).unsqueeze(2)
        loss = loss + weighted.sum(1).square().sum()
    loss.backward()
    for got, expected in (
        (x.grad, xs[rank].grad),
        (weights.grad, all_weights[rank].grad),
        (mine.grad, all_matrices.grad[rank * layer.local : (rank + 1) * layer.local]),
    ):
        scale = float(expected.abs().max()) if expected.numel() else 1.0
        torch.testing.assert_close(got.float(), expected, rtol=0, atol=2e-2 * scale)
    dist.barrier()


@pytest.mark.parametrize("by_row", [False, True], ids=["weights of slots", "weights of rows"])
def test_gradients_by_expert_are_those_of_one_process(ranks: Any, by_row: bool) -> None:
    ranks.run(check_by_expert, by_row)


def check_results_without_rows(rank: int, world: int, options: dict[str, Any]) -> None:
    """Gradients of padding, and of results that a combine leaves out, are zeros."""
    layer = oracle.Layer(world, 2 * world, 3, 64)
    batch = oracle.batches(layer, [5] * world, seed=4)[rank]
    sizes = {"experts": layer.experts, "topk": layer.topk, "hidden": layer.hidden, "max_tokens": 16}
    with Communicator(device="cpu", **sizes) as communicator:
        received = communicator.dispatch(batch.x, batch.topk_idx, **options)
        count = received.handle.result_rows
        is_result = torch.arange(count + 3) < count
        if received.by_expert is not None:
            slots = received.by_expert.slots
            is_result = torch.zeros(count + 3, dtype=torch.bool)
            is_result[slots[slots >= 0].long()] = True
        handle = received.handle
        del received
        for _ in range(3):
            # What comes next lies where this did.
            communicator.redispatch(batch.x, handle).x.fill_(torch.nan)
            y = torch.ones(count + 3, layer.hidden).bfloat16().requires_grad_()
            combine(communicator, y, handle).float().sum().backward()
            assert torch.equal(y.grad, is_result.bfloat16().unsqueeze(1).expand_as(y))
    dist.barrier()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"worst_rows": 30},
        {"by_expert": True, "alignment": 16},
        {"by_expert": True, "alignment": 16, "worst_rows": 30, "device_counts": True},
    ],
    ids=["rows", "a worst case", "by expert", "by expert, a worst case"],
)
def test_results_that_are_of_no_row_have_zeros_for_gradients(ranks: Any, options: dict[str, Any]) -> None:
    ranks.run(check_results_without_rows, options)


def test_the_example_trains_on_two_nodes_under_a_launcher() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, EXAMPLE, "--steps", "8"],
            env={**os.environ, **told, "RANK": str(rank), "MOEXPRESS_FAR": "loop"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(4)
    ]
    said = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4, said
    assert "largest difference" in said[0] and "4 ranks" in said[0], said


def test_the_example_trains_as_one_process_does() -> None:
    ended = subprocess.run(
        [sys.executable, EXAMPLE, "--ranks", "2", "--steps", "8"], capture_output=True, text=True, timeout=240
    )
    assert ended.returncode == 0 and "largest difference" in ended.stdout, ended.stdout + ended.stderr
