"""The same on GPUs: deep_ep.Buffer on CUDA tensors, one process a GPU, against the oracle, and captured into CUDA graphs.

Skipped, and counted so, on machines without two GPUs.
"""

from __future__ import annotations

from typing import Any

import moexpress
import oracle
import pytest
import torch
import torch.distributed as dist
from deep_ep._members import Members
from deep_ep.utils.math import calc_diff, per_token_cast_back, per_token_cast_to_fp8
from gpus import LIMIT, bits, device, make_buffer, needs_two, on
from moexpress import Communicator, errors


def check_layouts(rank: int, world: int) -> None:
    """Members of batches of all sizes, with and without a histogram in shared memory, before there is a communicator."""
    where = device(rank)
    for ranks, experts, topk, tokens in [
        (2, 8, 3, 0),
        (2, 8, 3, 1),
        (2, 256, 8, 4096),
        (8, 288, 8, 513),
        (40, 80, 20, 1000),
        (64, 6400, 9, 70_000),
    ]:
        layer = oracle.Layer(ranks, experts, topk, 8)
        topk_idx = oracle.batches(layer, [tokens])[0].topk_idx
        expected = oracle.members(layer, topk_idx)
        counts = torch.bincount(topk_idx[topk_idx >= 0], minlength=experts).int()
        # Choices that no expert has count nowhere, and strides are taken as they are.
        odd = torch.cat([topk_idx, torch.full((tokens, 2), experts)], dim=1).to(where)
        odd[:, -1] = -7
        for given in (topk_idx.to(where), odd, topk_idx.to(where).T.contiguous().T):
            per_rank, per_expert, in_rank = Members(ranks).of(given, experts)
            assert torch.equal(in_rank.cpu(), expected) and in_rank.is_contiguous()
            assert torch.equal(per_rank.cpu(), expected.sum(0, dtype=torch.int32))
            assert torch.equal(per_expert.cpu(), counts)


@needs_two
def test_layouts(two: Any) -> None:
    two.run(check_layouts, limit=LIMIT)


def check_normal(rank: int, world: int) -> None:
    where = device(rank)
    layer = oracle.Layer(world, 8, 4, 512)
    buffer = make_buffer()
    for counts in ([300] * world, [70, 0, 5, 33][:world]):
        all_batches = oracle.batches(layer, counts)
        batch, expected = on(all_batches[rank], where), oracle.arrived(layer, all_batches, rank)
        layout = buffer.get_dispatch_layout(batch.topk_idx, layer.experts)
        for with_topk, fp8, asynchronous in [
            (t, f, a) for t in (True, False) for f in (False, True) for a in (False, True)
        ]:
            sent = [per_token_cast_to_fp8(each.x) if fp8 else each.x for each in all_batches]
            mine: Any = tuple(one.to(where) for one in sent[rank]) if fp8 else batch.x
            if fp8 and asynchronous:
                # Scales of neighbouring rows side by side, as matrix kernels like them.
                mine = (mine[0], mine[1].T.contiguous().T)
            arguments: dict[str, Any] = {
                "num_tokens_per_rank": layout[0],
                "is_token_in_rank": layout[3],
                "num_tokens_per_expert": layout[2],
                "async_finish": asynchronous,
                "previous_event": buffer.capture(),
            }
            if with_topk:
                arguments |= {"topk_idx": batch.topk_idx, "topk_weights": batch.topk_weights}
            x, idx, weights, numbers, handle, event = buffer.dispatch(mine, **arguments)
            if asynchronous:
                event.current_stream_wait()
            assert numbers == expected.counts
            for got, those in zip(x if fp8 else (x,), zip(*sent, strict=True) if fp8 else (sent,), strict=True):
                assert got.is_contiguous() and torch.equal(bits(got), bits(oracle.gathered(list(those), expected)))
            if with_topk:
                assert torch.equal(idx.cpu(), expected.topk_idx) and torch.equal(weights.cpu(), expected.topk_weights)
                worst = buffer.dispatch(mine, num_worst_tokens=2000, **arguments)
                if asynchronous:
                    worst[5].current_stream_wait()
                rows = worst[0][0] if fp8 else worst[0]
                count = len(expected.source_rank)
                assert worst[3] == [] and len(rows) == 2000
                assert torch.equal(bits(rows[:count]), bits(x[0] if fp8 else x))
                assert torch.equal(worst[1][:count], idx) and bool((worst[1][count:] == -1).all())
                # Without a count on the host, along the same handle.
                y = per_token_cast_back(rows[:count], worst[0][1][:count]) if fp8 else rows[:count]
                padded = torch.zeros(2000, layer.hidden, dtype=torch.bfloat16, device=where)
                padded[:count] = y
                sums = buffer.combine(padded, worst[4])[0]
                assert calc_diff(sums.float(), batch.x.float() * layout[3].sum(1, keepdim=True)) < 1e-3 or not len(sums)
            assert torch.equal(
                handle[0].cpu()[:, rank], torch.bincount(expected.source_rank.long(), minlength=world).cumsum(0).int()
            )
            assert torch.equal(handle[3].cpu(), expected.source_token) and len(list(handle)) == 6
            again = buffer.dispatch(mine, handle=handle)[0]
            assert torch.equal(bits(again[0] if fp8 else again), bits(x[0] if fp8 else x))
            received = per_token_cast_back(*x) if fp8 else x
            plain = [per_token_cast_back(*one) if fp8 else one for one in sent]
            results = [oracle.gathered(plain, oracle.arrived(layer, all_batches, r)) for r in range(world)]
            bias = torch.ones_like(batch.x)
            sums, sum_weights, _ = buffer.combine(received, handle, weights, bias=(bias, bias))
            wanted = oracle.combined(layer, all_batches, rank, results, [bias.cpu(), bias.cpu()])
            assert torch.equal(sums.cpu(), wanted)
            if with_topk:
                assert torch.equal(
                    sum_weights.cpu(), all_batches[rank].topk_weights * (all_batches[rank].topk_idx >= 0)
                )
    assert buffer.get_comm_stream() is not None
    buffer.destroy()


@needs_two
def test_rows_go_there_and_back(two: Any) -> None:
    two.run(check_normal, limit=LIMIT)


FORMS: list[dict[str, bool]] = [
    {"use_fp8": False},
    {"use_fp8": True},
    {"use_fp8": True, "round_scale": True},
    {"use_fp8": True, "round_scale": True, "use_ue8m0": True},
]


def check_low_latency(rank: int, world: int) -> None:
    where = device(rank)
    most, layer = 32, oracle.Layer(world, 6, 3, 1024)
    buffer = make_buffer(low_latency_mode=True)
    for tokens in ([32] * world, [9, 0, 4, 1][:world]):
        all_batches = oracle.batches(layer, tokens)
        batch = on(all_batches[rank], where)
        for form, hook, zero_copy in [(f, h, z) for f in FORMS for h in (False, True) for z in (False, True)]:
            stats = torch.full((layer.local,), 3, dtype=torch.int32, device=where)
            idx = batch.topk_idx.clone()
            received, counts, handle, _, receive = buffer.low_latency_dispatch(
                batch.x, idx, most, layer.experts, stats, return_recv_hook=hook, **form
            )
            # What was sent is kept: the choices may be written to, the rows after the receiving half.
            idx.fill_(-1)
            if receive is not None:
                receive()
            assert torch.equal(stats, counts + 3)
            plain = torch.zeros(layer.local, world * most, layer.hidden, dtype=torch.bfloat16, device=where)
            for expert in range(layer.local):
                number = expert + rank * layer.local
                chose = [(each.topk_idx == number).any(1).nonzero()[:, 0] for each in all_batches]
                count = int(counts[expert])
                assert count == sum(map(len, chose))
                assert handle[0][expert, :count].tolist() == torch.cat(chose).tolist()
                wanted = torch.cat([each.x[those] for each, those in zip(all_batches, chose, strict=True)])
                if isinstance(received, tuple):
                    rows = per_token_cast_back(received[0][expert, :count], received[1][expert, :count])
                    assert not count or calc_diff(rows.float().cpu(), wanted.float()) < 9e-4
                else:
                    rows = received[expert, :count]
                    assert torch.equal(rows.cpu(), wanted)
                plain[expert, :count] = rows
            for _ in range(2):
                if zero_copy:
                    buffer.get_next_low_latency_combine_buffer(handle)[:] = plain
                sums, _, receive = buffer.low_latency_combine(
                    plain, batch.topk_idx, batch.topk_weights, handle, zero_copy=zero_copy, return_recv_hook=hook
                )
                if receive is not None:
                    receive()
                kept = batch.topk_weights.masked_fill(batch.topk_idx < 0, 0).sum(1, keepdim=True)
                if len(sums):
                    assert calc_diff(sums.float(), batch.x.float() * kept) < (9e-4 if form["use_fp8"] else 1e-5)
    buffer.destroy()


@needs_two
def test_low_latency(two: Any) -> None:
    two.run(check_low_latency, limit=LIMIT)


def check_odd_rows(rank: int, world: int) -> None:
    """Low latency with rows of bf16 that are no multiple of 16 bytes brings what throughput mode does, and writes nowhere else."""
    where = device(rank)
    sizes: dict[str, Any] = {"experts": 6, "topk": 3, "hidden": 100, "max_tokens": 16, "low_latency": True}
    layer = oracle.Layer(world, 6, 3, 100)
    batch = on(oracle.batches(layer, [16] * world)[rank], where)
    with Communicator(device=where, **sizes) as ranks:
        plain = ranks.dispatch(batch.x, batch.topk_idx, batch.topk_weights)
        got = ranks.low_latency_dispatch(batch.x, batch.topk_idx, batch.topk_weights, by_source=True, host_counts=True)
        assert got.handle is not None and got.handle.rows == plain.rows
        assert got.topk_idx is not None and got.source_rank is not None
        for told, expected in (
            (got.x, plain.x),
            (got.topk_idx, plain.topk_idx),
            (got.source_rank, plain.source_rank),
            (got.source_token, plain.source_token),
        ):
            assert expected is not None and torch.equal(told[: plain.rows], expected)
        assert (got.topk_idx[plain.rows :] == -1).all() and not got.x[plain.rows :].any()
        # Results of just the rows that came.
        sums = ranks.low_latency_combine(got.x[: plain.rows].contiguous(), got.handle)
        assert torch.equal(sums, ranks.combine(plain.x.contiguous(), plain.handle).x)
        by_expert = ranks.low_latency_dispatch(batch.x, batch.topk_idx)
        for expert, count in enumerate(by_expert.expert_counts.tolist()):
            mine = (plain.topk_idx == expert).any(1)
            assert torch.equal(by_expert.x[expert, :count], plain.x[mine])


@needs_two
def test_rows_of_odd_sizes_in_low_latency(two: Any) -> None:
    two.run(check_odd_rows, limit=LIMIT)


def check_odd_sizes(rank: int, world: int) -> None:
    """Low latency with rows of FP8 that are no multiple of 16 bytes: the same rows as bf16 brings, in one call and in halves."""
    where = device(rank)
    sizes: dict[str, Any] = {"experts": 6, "topk": 3, "hidden": 200, "max_tokens": 16, "low_latency": True}
    layer = oracle.Layer(world, 6, 3, 200)
    batch = on(oracle.batches(layer, [16] * world)[rank], where)
    # Codes that do not begin at a multiple of 16 bytes, and none at all, with scales side by side.
    with Communicator(device=where, element="fp8", **(sizes | {"hidden": 256})) as shifted:
        codes, scales = per_token_cast_to_fp8(torch.randn(16, 256, device=where).bfloat16())
        odd = torch.empty(16 * 256 + 8, dtype=torch.uint8, device=where)[8:].view(16, 256).view(codes.dtype)
        odd.copy_(codes)
        beside = scales.T.contiguous().T
        got, same = (shifted.dispatch(x, batch.topk_idx, scales=beside) for x in (codes, odd))
        assert torch.equal(bits(got.x.contiguous()), bits(same.x.contiguous())) and got.scales is not None
        assert same.scales is not None and torch.equal(got.scales, same.scales)
        none = shifted.dispatch(codes[:0], batch.topk_idx[:0], scales=beside[:0])
        assert none.rows == 0
    with Communicator(device=where, **sizes) as plain, Communicator(device=where, element="fp8", **sizes) as fp8:
        expected = plain.low_latency_dispatch(batch.x, batch.topk_idx)
        halves = fp8.send_dispatch(batch.x, batch.topk_idx).receive()
        for got in (fp8.low_latency_dispatch(batch.x, batch.topk_idx), halves):
            assert torch.equal(got.expert_counts, expected.expert_counts) and got.scales is not None
            for expert, count in enumerate(expected.expert_counts.tolist()):
                scales = got.scales[expert, :count].repeat_interleave(128, dim=1)[:, :200]
                rows = got.x[expert, :count].float() * scales
                assert not count or calc_diff(rows, expected.x[expert, :count].float()) < 9e-4


@needs_two
def test_odd_sizes(two: Any) -> None:
    two.run(check_odd_sizes, limit=LIMIT)


def check_graphs(rank: int, world: int) -> None:
    """A dispatch without counts on the host, experts, and a combine; and low latency: captured, and replayed on new inputs."""
    where = device(rank)
    layer, most = oracle.Layer(world, 8, 2, 512), 64
    buffer = make_buffer(low_latency_mode=True)
    batch = on(oracle.batches(layer, [most] * world)[rank], where)

    def throughput() -> torch.Tensor:
        layout = buffer.get_dispatch_layout(batch.topk_idx, layer.experts)
        x, _, _, _, handle, _ = buffer.dispatch(
            batch.x,
            None,
            layout[0],
            None,
            layout[3],
            layout[2],
            batch.topk_idx,
            batch.topk_weights,
            num_worst_tokens=world * most,
        )
        return buffer.combine(x * 2, handle)[0]

    def low_latency() -> torch.Tensor:
        x, _, handle, _, _ = buffer.low_latency_dispatch(batch.x, batch.topk_idx, most, layer.experts, use_fp8=False)
        return buffer.low_latency_combine(x, batch.topk_idx, batch.topk_weights, handle)[0]

    for call in (throughput, low_latency):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call()
        for seed in (1, 2, 3):
            fresh = on(oracle.batches(layer, [most] * world, seed=seed)[rank], where)
            batch.x.copy_(fresh.x)
            batch.topk_idx.copy_(fresh.topk_idx)
            batch.topk_weights.copy_(fresh.topk_weights)
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(out, call())
            if call is throughput:
                reached = oracle.members(layer, fresh.topk_idx.cpu()).sum(1, keepdim=True).to(where)
                assert calc_diff(out.float(), 2 * fresh.x.float() * reached) < 1e-5
        del graph
    buffer.destroy()


@needs_two
def test_cuda_graphs(two: Any) -> None:
    two.run(check_graphs, limit=LIMIT)


def check_errors(rank: int, world: int) -> None:
    where = device(rank)
    communicator = Communicator(experts=4, topk=2, hidden=64, device=where, timeout=5.0)
    x, idx = torch.zeros(4, 64, dtype=torch.bfloat16, device=where), torch.arange(8, device=where).view(4, 2) % 4
    with pytest.raises(errors.InvalidArgument, match="device of x is cpu, allowed: cuda"):
        communicator.dispatch(x.cpu(), idx)
    with pytest.raises(errors.InvalidArgument, match="device of topk_idx is cpu"):
        communicator.dispatch(x, idx.cpu())
    with pytest.raises(errors.InvalidArgument, match="topk_idx of token 0 is 9"):
        communicator.dispatch(x, idx + 9)
    communicator.dispatch(x, idx)
    # A rank that does not come is named.
    if rank == 0:
        with pytest.raises(errors.OperationFailed) as failed:
            communicator.dispatch(x, idx)
        assert failed.value.culprit == 1
    dist.barrier()
    communicator.recover()
    communicator.dispatch(x, idx)
    communicator.close()


def check_recovers_behind(rank: int, world: int) -> None:
    where = device(rank)
    communicator = Communicator(experts=4, topk=2, hidden=64, device=where)
    # Some 200 ms, in place of a replay whose kernels wait for each other.
    torch.cuda._sleep(400_000_000)
    event = torch.cuda.Event()
    event.record()
    communicator.recover()
    assert event.query(), "it went on before what the current stream held"
    communicator.close()


@needs_two
def test_a_recovery_comes_behind_the_current_stream(two: Any) -> None:
    two.run(check_recovers_behind, limit=LIMIT)


@needs_two
def test_what_is_wrong_is_told(two: Any) -> None:
    two.run(check_errors, limit=LIMIT)


def test_without_a_driver_it_says_what_is_missing() -> None:
    if moexpress.cuda_available():
        pytest.skip("there is a driver")
    with pytest.raises(NotImplementedError, match=r"device cuda is not supported: .*(driver|GPU).*use device='cpu'"):
        Communicator(object(), experts=4, topk=2, hidden=64, device="cuda")
