"""What users of DeepEP V2 complain of is not so here."""

from __future__ import annotations

import subprocess
from typing import Any

import deep_ep
import oracle
import oracle_elastic
import pytest
import torch
import torch.distributed as dist
from deep_ep import _arena
from deep_ep.utils.math import per_token_cast_to_fp8
from test_elastic import MOST, Expectation, equal, layer_of, make_buffer


def check_nothing(rank: int, world: int, senders: int) -> None:
    layer, buffer = layer_of(world), make_buffer()
    tokens = [3 if source < senders else 0 for source in range(world)]
    every = oracle.batches(layer, tokens)
    for batch in every:
        batch.topk_idx.fill_(-1)
        batch.topk_idx[:, 0] = 0  # the others receive nothing either
    batch, came = every[rank], sum(tokens) if rank == 0 else 0
    for sync in (True, False):
        for expand in (False, True):
            for x in (batch.x, per_token_cast_to_fp8(batch.x)):
                asked: dict[str, Any] = {"num_experts": layer.experts, "do_cpu_sync": sync, "do_expand": expand}
                rows, _, weights, handle, _ = buffer.dispatch(x, batch.topk_idx, batch.topk_weights, **asked)
                assert handle.psum_num_recv_tokens_per_scaleup_rank[-1] == came
                assert handle.psum_num_recv_tokens_per_expert[-1] == came
                assert handle.recv_src_metadata.shape[1] == layer.topk + 2
                buffer.dispatch(x, handle=handle, do_expand=expand)
                y = torch.ones((len(weights), layer.hidden)).bfloat16()
                sums, back, _ = buffer.combine(y, handle, weights)
                assert torch.equal(sums, torch.ones_like(batch.x))
                assert torch.equal(back, batch.topk_weights.masked_fill(batch.topk_idx < 0, 0))
                assert (rows[0] if isinstance(rows, tuple) else rows).shape[0] == (came if sync else len(weights))
    buffer.destroy()


@pytest.mark.parametrize("senders", [0, 1])
def test_ranks_may_have_no_tokens(ranks: Any, senders: int) -> None:
    ranks.run(check_nothing, senders)


def check_order(rank: int, world: int) -> None:
    layer = layer_of(world)
    batch = oracle.batches(layer, [40] * world)[rank]
    told = []
    for deterministic in (False, True):
        buffer = make_buffer(deterministic=deterministic)
        for _ in range(5):
            asked: dict[str, Any] = {"num_experts": layer.experts, "expert_alignment": 4, "do_expand": True}
            asked["do_zero_padding"] = True
            rows, _, weights, handle, _ = buffer.dispatch(batch.x, batch.topk_idx, batch.topk_weights, **asked)
            sums = buffer.combine(rows, handle)[0]
            told.append([rows, weights, handle.recv_src_metadata, sums])
        buffer.destroy()
    for other in told[1:]:
        assert all(torch.equal(*pair) for pair in zip(told[0], other, strict=True))


def test_the_order_is_the_same_whether_asked_for_or_not(ranks: Any) -> None:
    ranks.run(check_order)


def check_batches(rank: int, world: int) -> None:
    layer, buffer = layer_of(world), make_buffer()
    for tokens in (1, 2, 7, 33, MOST):
        batch = oracle.batches(layer, [tokens] * world)[rank]
        for most in (tokens, MOST):
            asked: dict[str, Any] = {"num_experts": layer.experts, "num_max_tokens_per_rank": most}
            x, *_, handle, _ = buffer.dispatch(batch.x, batch.topk_idx, do_cpu_sync=False, **asked)
            assert len(x) == most * world
            goes = [(batch.topk_idx // layer.local == other).any(1) for other in range(world)]
            times = torch.stack(goes).sum(0).unsqueeze(1)
            assert torch.equal(buffer.combine(x, handle)[0], (batch.x.float() * times).bfloat16())
    assert [len(made) for made in (buffer._communicators.all_low(), buffer._communicators.all_normal())] == [1, 1]
    buffer.destroy()


def test_batches_of_all_sizes_use_what_the_first_made(two: Any) -> None:
    two.run(check_batches)


def check_capture(rank: int, world: int) -> None:
    layer, buffer = layer_of(world), make_buffer()
    expected = Expectation(layer, rank, "bf16", 1)
    batch, known = expected.mine, _arena.is_capturing

    def dispatch() -> torch.Tensor:
        rows: torch.Tensor = buffer.dispatch(
            batch.x, batch.topk_idx, num_experts=layer.experts, do_cpu_sync=False, do_expand=True, do_zero_padding=True
        )[0]
        return rows

    try:
        _arena.is_capturing = lambda device: True
        with pytest.raises(NotImplementedError, match="the first call with new sizes is not supported in a capture"):
            dispatch()
    finally:
        _arena.is_capturing = known
    # CPUs have no captures: there any call may be the first.
    equal(dispatch(), [expected.expanded.of(expected.received[0])])
    buffer.destroy()


def test_a_first_call_in_a_capture_is_refused_and_harms_nothing(ranks: Any) -> None:
    ranks.run(check_capture)


def check_network(rank: int, world: int) -> None:
    def started(*arguments: Any, **named: Any) -> None:
        raise AssertionError(f"{arguments[0]} was started to look for a network")

    known, subprocess.run = subprocess.run, started  # type: ignore[assignment]
    try:
        layer, buffer = layer_of(world), make_buffer()
        batch = oracle.batches(layer, [4] * world)[rank]
        rows, *_, handle, _ = buffer.dispatch(batch.x, batch.topk_idx, num_experts=layer.experts)
        buffer.combine(rows, handle)
        buffer.barrier()
        assert buffer.get_physical_domain_size() == buffer.get_logical_domain_size() == (1, world)
        assert (deep_ep.utils.envs.get_rdma_gbs(), deep_ep.utils.envs.check_fast_rdma_atomic_support()) == (0, False)
        buffer.destroy()
    finally:
        subprocess.run = known


def test_nobody_looks_for_a_network(two: Any) -> None:
    two.run(check_network)


def check_large(rank: int, world: int) -> None:
    layer = oracle.Layer(world=world, experts=32, topk=16, hidden=3584)
    buffer = deep_ep.ElasticBuffer(
        dist.group.WORLD, num_max_tokens_per_rank=16, hidden=3584, num_topk=16, explicitly_destroy=True
    )
    every = oracle.batches(layer, [9] * world)
    batch, rows = every[rank], oracle.arrived(layer, every, rank)
    places = oracle_elastic.expanded(layer, rows, 128)
    for fp8 in (False, True):
        sent = [per_token_cast_to_fp8(each.x) if fp8 else (each.x,) for each in every]
        x = sent[rank] if fp8 else batch.x
        for sync in (True, False):
            asked: dict[str, Any] = {
                "num_experts": 32,
                "expert_alignment": 128,
                "do_cpu_sync": sync,
                "do_zero_padding": True,
            }
            got = buffer.dispatch(x, batch.topk_idx, batch.topk_weights, do_expand=True, **asked)
            codes = [one.view(torch.uint8) if fp8 else one for one, *_ in sent]
            expected = [oracle.gathered(codes, rows)]
            if fp8:
                expected.append(oracle.gathered([scales for _, scales in sent], rows))
            equal(got[0], [places.of(part) for part in expected])
    buffer.destroy()


def test_rows_of_3584_elements_go_to_16_experts(ranks: Any) -> None:
    ranks.run(check_large)
