"""deep_ep.ElasticBuffer on GPUs: what test_elastic.py asks of CPU ranks, on streams, and captured.

Skipped, and counted so, on machines without two GPUs.
"""

from __future__ import annotations

from typing import Any

import oracle_elastic
import pytest
import torch
from deep_ep.utils.math import align
from gpus import LIMIT, device, needs_two, on
from test_elastic import MOST, Expectation, equal, layer_of, make_buffer

ALIGNMENT = 16


def host(x: Any) -> Any:
    """Tensors, in tuples too, on the host."""
    return tuple(one.cpu() for one in x) if isinstance(x, tuple) else x.cpu()


def check_calls(rank: int, world: int, kind: str, asynchronous: bool, where: torch.device | None = None) -> None:
    where = where or device(rank)
    layer, buffer = layer_of(world), make_buffer()
    expected = Expectation(layer, rank, kind, ALIGNMENT)
    batch, rows = on(expected.mine, where), expected.rows
    # As the processor made them: a GPU divides the scales otherwise.
    x = tuple(part.to(where) for part in expected.x) if isinstance(expected.x, tuple) else expected.x.to(where)
    results = torch.zeros(len(rows.source_rank), layer.topk, layer.hidden, dtype=torch.bfloat16)
    for row, choice in (rows.topk_idx >= 0).nonzero().tolist():
        at = int(rows.source_rank[row]), int(rows.source_token[row])
        results[row, choice] = oracle_elastic.results(layer, *at, choice)
    asked: dict[str, Any] = {"num_experts": layer.experts, "expert_alignment": ALIGNMENT}
    told: dict[str, Any] = {"async_with_compute_stream": asynchronous}
    for sync in (True, False):
        for expand in (False, True):
            told["previous_event"] = buffer.capture() if asynchronous else None
            got, idx, weights, handle, event = buffer.dispatch(
                x,
                batch.topk_idx,
                batch.topk_weights,
                do_cpu_sync=sync,
                do_expand=expand,
                do_zero_padding=expand,
                use_tma_aligned_col_major_sf=expand,
                **asked,
                **told,
            )
            if asynchronous:
                event.current_stream_wait()
            places = expected.expanded
            equal(host(got), [places.of(part) for part in expected.received] if expand else expected.received)
            equal(host(weights), [places.weights(rows) if expand else rows.topk_weights])
            if not expand:
                assert torch.equal(idx[: len(rows.topk_idx)].cpu(), rows.topk_idx)
            if expand and kind != "bf16":
                assert got[1].stride() == (1, align(len(got[1]), 4))
            assert torch.equal(handle.recv_src_metadata[: len(rows.topk_idx), 0].cpu() % MOST, rows.source_token)
            again, _, _, _, event = buffer.dispatch(x, handle=handle, do_expand=expand, do_zero_padding=expand, **told)
            if asynchronous:
                event.current_stream_wait()
            equal(host(again), [places.of(part) for part in expected.received] if expand else expected.received)
            y = torch.zeros((len(weights), layer.hidden), dtype=torch.bfloat16)
            if expand:
                y[expected.slots[rows.topk_idx >= 0].long()] = results[rows.topk_idx >= 0]
            else:
                y[: len(results)] = results.float().sum(1).bfloat16()
            sums, back, event = buffer.combine(y.to(where), handle, weights, **told)
            if asynchronous:
                event.current_stream_wait()
            torch.testing.assert_close(
                sums.cpu(), oracle_elastic.summed(layer, expected.all, rank, [], True), rtol=0.02, atol=0.02
            )
            assert torch.equal(back, batch.topk_weights.masked_fill(batch.topk_idx < 0, 0))
            # Rows alone go by low latency.
            sums, back, event = buffer.combine(y.to(where), handle, **told)
            if asynchronous:
                event.current_stream_wait()
            assert back is None
            torch.testing.assert_close(
                sums.cpu(), oracle_elastic.summed(layer, expected.all, rank, [], True), rtol=0.02, atol=0.02
            )
    buffer.destroy()


def check_once(rank: int, world: int, large: bool) -> None:
    """Expanded results that are rounded once, of large batches and of small ones."""
    where = device(rank)
    layer, buffer = layer_of(world), make_buffer(large, allow_multiple_reduction=False)
    expected = Expectation(layer, rank, "bf16", ALIGNMENT)
    batch, rows = on(expected.mine, where), expected.rows
    bias = torch.randn(batch.x.shape, generator=torch.Generator().manual_seed(3)).bfloat16()
    for sync, asynchronous in ((True, False), (False, True)):
        asked: dict[str, Any] = {"num_experts": layer.experts, "expert_alignment": ALIGNMENT, "do_cpu_sync": sync}
        x, _, weights, handle, _ = buffer.dispatch(batch.x, batch.topk_idx, batch.topk_weights, do_expand=True, **asked)
        assert (handle.routing.arena is None) == (not large)
        y = torch.full((len(x), layer.hidden), torch.nan).bfloat16()
        for row, choice in (rows.topk_idx >= 0).nonzero().tolist():
            at = int(rows.source_rank[row]), int(rows.source_token[row])
            y[expected.slots[row, choice]] = oracle_elastic.results(layer, *at, choice)
        for listed in ([], [bias]):
            told: dict[str, Any] = {"async_with_compute_stream": asynchronous}
            if listed:
                told["bias"] = bias.to(where)
            sums, back, event = buffer.combine(y.to(where), handle, weights if listed else None, **told)
            if asynchronous:
                event.current_stream_wait()
            wanted = oracle_elastic.summed(layer, expected.all, rank, listed, False)
            assert not wanted.numel() or float((sums.cpu() != wanted).float().mean()) < 0.01
            torch.testing.assert_close(sums.cpu(), wanted, rtol=2**-7, atol=2**-12)
            if listed:
                assert torch.equal(back, batch.topk_weights.masked_fill(batch.topk_idx < 0, 0))
    buffer.destroy()


@needs_two
@pytest.mark.parametrize("large", [False, True])
def test_expanded_results_are_rounded_once(two: Any, large: bool) -> None:
    two.run(check_once, large, limit=LIMIT)


@needs_two
@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_rows_and_sums_are_those_of_the_oracle(two: Any, kind: str, asynchronous: bool) -> None:
    two.run(check_calls, kind, asynchronous, limit=LIMIT)


def check_captured(rank: int, world: int, reduces_twice: bool) -> None:
    where = device(rank)
    layer, buffer = layer_of(world), make_buffer(allow_multiple_reduction=reduces_twice)
    expected = Expectation(layer, rank, "bf16", 1)
    batch = on(expected.mine, where)
    asked: dict[str, Any] = {"num_experts": layer.experts, "do_cpu_sync": False, "do_expand": True}
    asked["do_zero_padding"] = True
    with (
        pytest.raises(NotImplementedError, match="not supported in a capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        buffer.dispatch(batch.x, batch.topk_idx, batch.topk_weights, **asked)
    torch.cuda.synchronize()
    buffer.dispatch(batch.x, batch.topk_idx, batch.topk_weights, **asked)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows, _, weights, handle, _ = buffer.dispatch(batch.x, batch.topk_idx, batch.topk_weights, **asked)
        psum, sums = handle.psum_num_recv_tokens_per_expert, buffer.combine(rows, handle)[0]
    for times in (1, 2):
        batch.x.mul_(times)
        graph.replay()
        torch.cuda.synchronize()
        equal(host(rows), [times * expected.expanded.of(expected.received[0])])
        assert psum.tolist() == expected.expanded.psum and weights.shape == (len(rows),)
        there = (batch.topk_idx >= 0).sum(1, keepdim=True)
        torch.testing.assert_close(sums.float(), batch.x.float() * there, rtol=0.02, atol=0.02)
    buffer.destroy()


@needs_two
@pytest.mark.parametrize("reduces_twice", [True, False])
def test_expanded_rows_replay_with_a_graph(two: Any, reduces_twice: bool) -> None:
    two.run(check_captured, reduces_twice, limit=LIMIT)
