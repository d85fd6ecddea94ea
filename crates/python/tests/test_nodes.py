"""Ranks on several nodes: who shares one, what carries rows between them, both modes, V2, ranks that fail. CPU ranks over the loop."""

from __future__ import annotations

import os
import time
from typing import Any

import conftest
import deep_ep
import oracle
import pytest
import torch
import torch.distributed as dist
from deep_ep.utils.envs import get_physical_domain_size
from deep_ep.utils.math import per_token_cast_back, per_token_cast_to_fp8
from moexpress import Communicator, Meeting, _nodes, errors
from test_low_latency import FORMS, weighted
from test_suite import check_move

TOKENS = [16, 0, 9, 3]
SIZES: dict[str, Any] = {"experts": 8, "topk": 2, "hidden": 256, "max_tokens": 16, "device": "cpu"}
LAYER = oracle.Layer(world=4, experts=8, topk=2, hidden=256, ranks_per_node=2)


# Who shares a node.


def told(*ranks: tuple[str, int | None], local: int | None = None, asked: int | None = None) -> list[dict[str, Any]]:
    """What ranks told: host, and node by the launcher."""
    return [{"host": host, "node": node, "local": local, "asked": asked} for host, node in ranks]


def test_nodes_are_what_was_asked_for_or_the_launcher_says_or_hosts() -> None:
    one_host = [("a", 0), ("a", 0), ("a", 1), ("a", 1)]
    assert _nodes.agreed(told(*one_host, local=2)) == 2
    assert _nodes.agreed(told(*one_host, local=2, asked=4)) == 4
    assert _nodes.agreed(told(("a", None), ("a", None))) == 2
    assert _nodes.agreed(told(("a", None), ("a", None), ("b", None), ("b", None))) == 2
    # A group of every second rank, and one of the second half.
    assert _nodes.agreed(told(("a", 0), ("b", 1), local=8)) == 1
    assert _nodes.agreed(told(("b", 1), ("b", 1), local=2)) == 2


@pytest.mark.parametrize(
    ("places", "refusal"),
    [
        (told(("a", 0), ("b", 0), local=2), "LOCAL_WORLD_SIZE is 2, .* rank 1 runs on another one than rank 0"),
        (told(("a", 0), ("b", 1), local=1, asked=2), "ranks_per_node is 2, .* rank 1 runs on another one than rank 0"),
        (told(("a", 0), ("a", 0), ("a", 0), asked=2), "ranks_per_node is 2, allowed: a divisor of 3"),
        (told(("a", None), ("a", None), ("b", None)), "ranks of the nodes are 2, 1, allowed: the same number"),
        (told(("a", None), ("b", None), ("a", None)), "ranks of the nodes are 1, 1, 1, .* node after node"),
        ([*told(("a", 0), local=2), *told(("a", 0), local=4)], "LOCAL_WORLD_SIZE is 4 on rank 1, allowed: 2"),
        ([*told(("a", 0), local=2), *told(("a", None))], "LOCAL_WORLD_SIZE is None on rank 1, allowed: 2"),
    ],
)
def test_nodes_that_cannot_be_are_refused_by_name(places: list[dict[str, Any]], refusal: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=refusal):
        _nodes.agreed(places)


def check_wrong(rank: int, world: int) -> None:
    def refused(match: str, **options: Any) -> None:
        with pytest.raises((errors.InvalidArgument, errors.Unsupported), match=match):
            Communicator(**{**SIZES, **options}, timeout=10)

    refused("ranks_per_node is 3, allowed: a divisor of 4", ranks_per_node=3)
    refused("ranks_per_node is 0, allowed: 1 to", ranks_per_node=0)
    refused("ranks_per_node is 4 on rank 3, allowed: 2, as on rank 0", ranks_per_node=4 if rank == 3 else 2)
    refused("far is ib, allowed: loop, roce, ibgda", far="ib")
    refused("far is roce on rank 3, allowed: loop, as on rank 0", far="roce" if rank == 3 else "loop")
    refused("far is ibgda, allowed: roce or loop on CPUs", far="ibgda")
    refused("far_devices is mlx5_0, allowed: none with far loop", far_devices="mlx5_0")
    refused("nodes is 2, allowed: 1 with pulled placement", placement="pulled")
    # Whatever this machine has, it has no such device.
    refused("RoCE on rank .*far='loop' .MOEXPRESS_FAR=loop. needs no adapter", far="roce", far_devices="no_such_device")
    meeting = Meeting()
    with pytest.raises(errors.InvalidArgument, match="ranks_per_node is 4, allowed: a divisor of 2"):
        Communicator(meeting, **SIZES, ranks_per_node=4)
    meeting.close()
    before = os.environ["LOCAL_WORLD_SIZE"]
    try:
        for wrong, why in (("3", "a divisor of WORLD_SIZE, 4"), ("two", "a whole number, 1 or more")):
            os.environ["LOCAL_WORLD_SIZE"] = wrong
            refused(f"LOCAL_WORLD_SIZE is '?{wrong}'?, allowed: {why}")
    finally:
        os.environ["LOCAL_WORLD_SIZE"] = before


def test_wrong_nodes_and_transports_are_refused_on_all_ranks(two_nodes: conftest.Ranks) -> None:
    two_nodes.run(check_wrong)


def check_hosts(rank: int, world: int) -> tuple[int, int]:
    """As if every two ranks ran on a host of their own: they meet at an address that is none of the loopback's alone."""
    host, before = _nodes.host, {name: os.environ.pop(name) for name in ("LOCAL_WORLD_SIZE", "RANK")}
    _nodes.host = lambda: f"host {rank // 2}"
    try:
        meeting = Meeting()
        assert get_physical_domain_size(dist.group.WORLD) == (2, 2)
    finally:
        _nodes.host = host
        os.environ.update(before)
    with Communicator(meeting, **SIZES) as communicator:
        check_move(communicator, LAYER, oracle.batches(LAYER, TOKENS), rank)
    meeting.close()
    return meeting.nodes, meeting.ranks_per_node


def test_ranks_of_several_hosts_meet_and_each_host_is_a_node(two_nodes: conftest.Ranks) -> None:
    assert two_nodes.run(check_hosts) == [(2, 2)] * 4


# Throughput mode.


def check_engine(rank: int, world: int, ranks_per_node: int, settings: dict[str, Any]) -> None:
    layer = oracle.Layer(world, 8, 2, 256, ranks_per_node if ranks_per_node < world else None)
    with Communicator(**{**SIZES, **settings}, ranks_per_node=ranks_per_node) as communicator:
        assert (communicator.ranks_per_node, communicator.meeting.nodes) == (ranks_per_node, world // ranks_per_node)
        for seed in range(3):
            check_move(communicator, layer, oracle.batches(layer, TOKENS, seed=seed), rank)
        placed = communicator.stats()["rows_placed"]
        assert placed == 0 if settings.get("placement") == "ring" else placed > 0


@pytest.mark.parametrize("ranks_per_node", [1, 2, 4])
@pytest.mark.parametrize("settings", [{}, {"placement": "ring", "slots": 1}], ids=["placed", "rings of one slot"])
def test_engine_on_nodes(two_nodes: conftest.Ranks, ranks_per_node: int, settings: dict[str, Any]) -> None:
    two_nodes.run(check_engine, ranks_per_node, settings)


# Low latency.


def check_low_latency(rank: int, world: int, form: str, near: bool) -> None:
    buffer = deep_ep.Buffer(
        dist.group.WORLD,
        0,
        1 << 20,
        low_latency_mode=True,
        explicitly_destroy=True,
        allow_nvlink_for_low_latency_mode=near,
    )
    all_batches = oracle.batches(LAYER, TOKENS, seed=3)
    batch, local, most = all_batches[rank], LAYER.local, SIZES["max_tokens"]
    stats = torch.zeros(local, dtype=torch.int32)
    for hook, zero_copy in ((False, False), (True, False), (False, True)):
        received, counts, handle, _, receive = buffer.low_latency_dispatch(
            batch.x, batch.topk_idx, most, 8, stats, return_recv_hook=hook, **FORMS[form]
        )
        if receive is not None:
            receive()
        for expert in range(local):
            sources = [(each.topk_idx == rank * local + expert).any(1).nonzero()[:, 0] for each in all_batches]
            assert int(counts[expert]) == sum(map(len, sources))
            for source, tokens in enumerate(sources):
                begin, count = divmod(int(handle[1][expert, source]), 1 << 32)
                assert sorted(handle[0][expert, begin : begin + count].tolist()) == tokens.tolist()
        x = received
        if isinstance(received, tuple):
            x = torch.stack([per_token_cast_back(*(part[expert] for part in received)) for expert in range(local)])
        out = buffer.get_next_low_latency_combine_buffer(handle) if zero_copy else x
        out.copy_(x)
        sums, _, receive = buffer.low_latency_combine(
            out, batch.topk_idx, batch.topk_weights, handle, zero_copy=zero_copy, return_recv_hook=hook
        )
        if receive is not None:
            receive()
        bound = 2e-2 if form == "bf16" else 2e-1
        torch.testing.assert_close(sums.float(), weighted(batch, batch.x), rtol=bound, atol=bound)
    # Nodes of one rank where nobody is reached through memory.
    assert [one.ranks_per_node for one in buffer._communicators.all_low()] == [2 if near else 1]
    buffer.destroy()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("near", [True, False], ids=["near", "all far"])
def test_low_latency_on_nodes(two_nodes: conftest.Ranks, form: str, near: bool) -> None:
    two_nodes.run(check_low_latency, form, near)


# V2.


def check_elastic(rank: int, world: int) -> None:
    buffer = deep_ep.ElasticBuffer(dist.group.WORLD, 1 << 26, explicitly_destroy=True)
    assert buffer.get_physical_domain_size() == buffer.get_logical_domain_size() == (2, 2)
    assert (buffer.scaleout_rank_idx, buffer.scaleup_rank_idx) == (rank // 2, rank % 2)
    all_batches = oracle.batches(LAYER, TOKENS, seed=5)
    batch, rows = all_batches[rank], oracle.arrived(LAYER, all_batches, rank)
    x, idx, weights, handle, _ = buffer.dispatch(
        batch.x, batch.topk_idx, batch.topk_weights, num_experts=8, num_max_tokens_per_rank=16
    )
    received = [
        oracle.gathered([each.x for each in all_batches], oracle.arrived(LAYER, all_batches, r)) for r in range(world)
    ]
    assert (
        torch.equal(x, received[rank]) and torch.equal(idx, rows.topk_idx) and torch.equal(weights, rows.topk_weights)
    )
    assert torch.equal(buffer.dispatch(batch.x, handle=handle)[0], x)
    results = [one * (other + 1) / 3 for other, one in enumerate(received)]
    sums = buffer.combine(results[rank], handle)[0]
    assert torch.equal(sums, oracle.combined(LAYER, all_batches, rank, results))
    codes = buffer.dispatch(per_token_cast_to_fp8(batch.x), handle=handle)[0]
    assert torch.equal(codes[0].view(torch.uint8), per_token_cast_to_fp8(x)[0].view(torch.uint8))
    buffer.destroy()
    flat = deep_ep.ElasticBuffer(dist.group.WORLD, 1 << 26, explicitly_destroy=True, allow_hybrid_mode=False)
    assert flat.get_physical_domain_size() == (2, 2) and flat.get_logical_domain_size() == (1, 4)
    assert (flat.scaleout_rank_idx, flat.scaleup_rank_idx) == (0, rank)
    flat.destroy()


def test_elastic_buffer_on_nodes(two_nodes: conftest.Ranks) -> None:
    two_nodes.run(check_elastic)


# Ranks that fail.


def check_death(rank: int, world: int) -> tuple[str, list[int], bool]:
    buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True)
    all_batches = oracle.batches(LAYER, TOKENS, drop=0)
    batch = all_batches[rank]

    def step() -> torch.Tensor:
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(batch.topk_idx, LAYER.experts)
        choices = (batch.topk_idx, batch.topk_weights)
        x, *_, handle, _ = buffer.dispatch(batch.x, None, per_rank, per_node, in_rank, per_expert, *choices)
        return buffer.combine(x, handle)[0]

    step()
    buffer.low_latency_dispatch(batch.x, batch.topk_idx, 16, 8, use_fp8=False)
    if rank == 3:
        os._exit(3)
    culprit = "nobody"
    try:
        for _ in range(3):
            step()
    except errors.OperationFailed as failed:
        culprit = str(failed.culprit)
    try:
        buffer.recover([3])
    except errors.Excluded:
        return culprit, [], False
    # What went to the other node is dropped.
    kept = oracle.members(LAYER, batch.topk_idx)[:, :2].sum(1, keepdim=True)
    back = step()
    masked = buffer._communicators.all_normal()[0].mask
    return culprit, masked, torch.equal(back.float(), (batch.x.float() * kept).bfloat16().float())


def test_a_node_leaves_as_a_whole_when_a_rank_dies() -> None:
    ranks = conftest.Ranks(4, 2)
    ranks.run(check_elastic)
    began = time.monotonic()
    for pipe in ranks._pipes:
        pipe.send((check_death, ()))
    told = []
    for pipe in ranks._pipes[:3]:
        assert pipe.poll(19), "told by the deadline only"
        outcome = pipe.recv()
        assert outcome.error is None, outcome.trace
        told.append(outcome.value)
    ranks.stop()
    assert told == [("3", [2, 3], True), ("3", [2, 3], True), ("3", [], False)]
    assert time.monotonic() - began < 19
