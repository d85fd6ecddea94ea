"""deep_ep as its callers use it, on GPUs: results of many layers that are kept, handles put together again, choices of other kinds.

Skipped, and counted so, on machines without two GPUs.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import deep_ep
import oracle
import pytest
import torch
import torch.distributed as dist
from deep_ep import _arena
from gpus import LIMIT, bits, device, needs_two, on
from test_arena import Log
from test_dropin import low_latency_repeats, through_autograd

TOKENS, HIDDEN = 4096, 7168


def check_layers(rank: int, world: int) -> None:
    """20 layers forward, with the size of a buffer that frameworks compute, and back again."""
    where = device(rank)
    config = deep_ep.Buffer.get_dispatch_config(world)
    hint = config.get_nvl_buffer_size_hint(2 * HIDDEN, world)
    layer = oracle.Layer(world, 8 * world, 8, HIDDEN)
    for asynchronous in (False, True):
        buffer = deep_ep.Buffer(dist.group.WORLD, hint, explicitly_destroy=True)
        kept = []
        with Log() as log:
            for number in range(20):
                torch.manual_seed(100 * rank + number)
                topk_idx = torch.rand(TOKENS, layer.experts, device=where).topk(layer.topk).indices
                weights = torch.rand(TOKENS, layer.topk, device=where)
                x = torch.randn(TOKENS, HIDDEN, device=where).bfloat16()
                layout = buffer.get_dispatch_layout(topk_idx, layer.experts)
                given = (layout[0], None, layout[3], layout[2], topk_idx, weights)
                received, *_, handle, event = buffer.dispatch(x, None, *given, async_finish=asynchronous)
                if asynchronous:
                    event.current_stream_wait()
                kept.append((x, received, handle, layout[3].sum(1, keepdim=True)))
            for x, received, handle, times in reversed(kept):
                sums, _, event = buffer.combine(received, handle, async_finish=asynchronous)
                if asynchronous:
                    event.current_stream_wait()
                torch.testing.assert_close(sums.float(), x.float() * times, rtol=1e-2, atol=1e-2)
                again = buffer.dispatch(x, handle=handle)[0]
                assert torch.equal(again, received)
        stats = buffer.stats()
        assert not log.said and stats["rows_through_rings"] == stats["results_through_rings"] == 0, (log.said, stats)
        # Room for 20 layers and some batches ahead, of which a piece has more than was there before at most.
        batch = world * TOKENS * (2 * HIDDEN + 128)
        assert 20 * batch < stats["arena_bytes"] < 50 * batch, stats
        before = torch.cuda.mem_get_info(where)[0]
        # Memory that nobody has goes after a while, when calls have come since.
        del kept, received, handle, x, sums, again, times, topk_idx, weights, layout, given
        x, topk_idx = (
            torch.ones(3, HIDDEN, dtype=torch.bfloat16, device=where),
            torch.zeros(3, layer.topk, device=where).long(),
        )
        layout = buffer.get_dispatch_layout(topk_idx, layer.experts)
        given = (layout[0], None, layout[3], layout[2], topk_idx, torch.ones(3, layer.topk, device=where))
        for _ in range(40):
            buffer.dispatch(x, None, *given)
            time.sleep(0.1)
        torch.cuda.synchronize()
        assert buffer.stats()["arena_bytes"] < 8 * batch, buffer.stats()
        assert torch.cuda.mem_get_info(where)[0] > before + 12 * batch
        assert bool((buffer.dispatch(x, None, *given)[0] == 1).all())
        buffer.destroy()
        # Others have it mapped, too, until they have done so.
        dist.barrier()
        torch.cuda.synchronize()
        assert torch.cuda.mem_get_info(where)[0] > before + stats["arena_bytes"] - batch


@needs_two
def test_layers_whose_results_are_kept_never_go_through_rings(two: Any) -> None:
    two.run(check_layers, limit=LIMIT)


def check_growth(rank: int, world: int) -> None:
    where = device(rank)
    buffer = deep_ep.Buffer(dist.group.WORLD, 0, explicitly_destroy=True)
    experts = 2 * world
    stream, ringed, kept = None, [], []
    with Log() as log:
        for tokens in (3, TOKENS, TOKENS, TOKENS):
            x = torch.full((tokens, HIDDEN), rank + 1.0, dtype=torch.bfloat16, device=where)
            topk_idx = (2 * torch.arange(world, device=where)).repeat(tokens, 1)
            layout = buffer.get_dispatch_layout(topk_idx, experts)
            given = (layout[0], None, layout[3], layout[2], topk_idx, torch.ones(tokens, world, device=where))
            received, *_, handle, _ = buffer.dispatch(x, None, *given)
            stream = stream or buffer.get_comm_stream()
            assert buffer.get_comm_stream() == stream
            expected = torch.arange(1, world + 1, device=where).repeat_interleave(tokens).bfloat16()
            assert torch.equal(received[:, 0], expected) and torch.equal(received[:, -1], expected)
            assert bool((buffer.combine(received, handle)[0] == world * (rank + 1)).all())
            ringed.append(buffer.stats()["rows_through_rings"])
            kept.append((tokens, x, received.clone(), handle))
    # The batch for which there was no room went through outboxes, and so do the calls along its handle: through rings they take 13 and 109 ms.
    for tokens, x, rows, handle in kept:
        took = []
        for _ in range(5):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            dist.barrier()
            start.record()
            again = buffer.dispatch(x, handle=handle)[0]
            back = buffer.combine(again, handle)[0]
            end.record()
            torch.cuda.synchronize()
            took.append(start.elapsed_time(end))
        assert torch.equal(again, rows) and bool((back == world * (rank + 1)).all())
        assert min(took) < 13, f"{tokens} tokens took {took} ms"
    assert ringed == [0, TOKENS * world, TOKENS * world, TOKENS * world] and not log.said
    del kept, x, received, handle, rows, again, back
    # The stream of the first communicator outlives it.
    with torch.cuda.stream(stream):
        torch.ones(4, device=where)
    torch.cuda.synchronize()
    buffer.destroy()


@needs_two
def test_an_arena_grows_with_the_largest_batch(two: Any) -> None:
    two.run(check_growth, limit=LIMIT)


def check_handles_and_choices(rank: int, world: int, outboxes: bool) -> None:
    where = device(rank)
    if outboxes:
        _arena.has_outboxes = lambda device, room, nodes: True
    layer = oracle.Layer(world, 4 * world, 4, 256)
    buffer = deep_ep.Buffer(dist.group.WORLD, 0, low_latency_mode=True, explicitly_destroy=True)
    for repeats, short in itertools.product((False, True), (False, True)):
        every = oracle.batches(layer, [37, 5], drop=0)
        for each in every:
            each.topk_idx[:, 2] = each.topk_idx[:, 0] if repeats else each.topk_idx[:, 2]
        batch, expected = on(every[rank], where), oracle.arrived(layer, every, rank)
        topk_idx = batch.topk_idx.int() if short else batch.topk_idx
        layout = buffer.get_dispatch_layout(topk_idx, layer.experts, deep_ep.EventOverlap())
        named = torch.bincount(batch.topk_idx.flatten(), minlength=layer.experts)
        assert torch.equal(layout[2], named.int())
        given = (layout[0], None, layout[3], layout[2], topk_idx, batch.topk_weights)
        x, idx, weights, counts, handle, _ = buffer.dispatch(batch.x, None, *given, previous_event=layout[4])
        assert idx.dtype == topk_idx.dtype and torch.equal(idx.cpu().long(), expected.topk_idx)
        assert torch.equal(weights.cpu(), expected.topk_weights)
        mine = range(rank * layer.local, (rank + 1) * layer.local)
        assert counts == [sum(int((each.topk_idx == expert).sum()) for each in every) for expert in mine]
        worst = buffer.dispatch(batch.x, None, *given, num_worst_tokens=100)
        assert torch.equal(worst[1][: len(idx)], idx)
        sums, summed, _ = buffer.combine(x, handle, weights)
        assert torch.equal(summed, batch.topk_weights)
        for again in (list(handle), through_autograd(handle), [one.clone() for one in handle]):
            assert torch.equal(bits(buffer.combine(x, again, weights)[0]), bits(sums))
            assert torch.equal(bits(buffer.dispatch(batch.x, handle=again)[0]), bits(x))
    assert (buffer.stats()["rows_placed"] == 0) == outboxes
    memory = buffer.get_local_buffer_tensor(torch.uint8)
    assert memory.device == where and memory.numel() == 0
    buffer.destroy()


@needs_two
@pytest.mark.parametrize("outboxes", [False, True])
def test_handles_and_choices(two: Any, outboxes: bool) -> None:
    two.run(check_handles_and_choices, outboxes, limit=LIMIT)


def check_low_latency_repeats(rank: int, world: int) -> None:
    low_latency_repeats(rank, world, device(rank))


@needs_two
def test_in_low_latency_a_token_may_name_an_expert_twice(two: Any) -> None:
    two.run(check_low_latency_repeats, limit=LIMIT)


def check_recovery(rank: int, world: int) -> None:
    where = device(rank)
    layer = oracle.Layer(world, 4 * world, 4, 256)
    buffer = deep_ep.Buffer(dist.group.WORLD, 0, low_latency_mode=True, enable_shrink=True, explicitly_destroy=True)
    batch = on(oracle.batches(layer, [37, 5], drop=0)[rank], where)
    expected = batch.x.float() * batch.topk_weights.sum(1, keepdim=True)

    def there_and_back() -> None:
        x, _, handle, _, _ = buffer.low_latency_dispatch(batch.x, batch.topk_idx, 64, layer.experts, use_fp8=False)
        sums = buffer.low_latency_combine(x, batch.topk_idx, batch.topk_weights, list(handle), use_logfmt=True)[0]
        torch.testing.assert_close(sums.float(), expected, rtol=1e-2, atol=1e-2)

    there_and_back()
    torch.cuda.synchronize()
    dist.barrier()
    buffer.low_latency_update_mask_buffer(1 - rank, True)
    dist.barrier()
    buffer.low_latency_update_mask_buffer(1, False)
    buffer.low_latency_update_mask_buffer(0, False)
    there_and_back()
    buffer.recover()
    there_and_back()
    with pytest.raises(ValueError, match="allowed: 0 to 1"):
        buffer.recover([2])
    buffer.destroy()


@needs_two
def test_masks_and_recovery(two: Any) -> None:
    two.run(check_recovery, limit=LIMIT)


def check_stream(rank: int, world: int) -> None:
    """Whoever waits for the stream of the buffer waits for its calls, whichever communicator carries them; and they come behind what it holds."""
    where = device(rank)
    layer = oracle.Layer(world, 2 * world, 2, 256)
    batch = on(oracle.batches(layer, [64] * world, drop=0)[rank], where)
    buffer = deep_ep.Buffer(dist.group.WORLD, 0, low_latency_mode=True, explicitly_destroy=True)
    stream, side = buffer.get_comm_stream(), torch.cuda.Stream()
    told = buffer.get_dispatch_layout(batch.topk_idx, layer.experts)
    given = (told[0], None, told[3], told[2], batch.topk_idx, batch.topk_weights)
    codes = batch.x.to(torch.float8_e4m3fn), torch.ones(64, 2, device=where)
    for rows in (batch.x, codes):
        for _ in range(2):  # the first makes a communicator
            torch.cuda.synchronize()
            torch.cuda._sleep(1 << 28)
            received, *_ = buffer.dispatch(rows, None, *given, num_worst_tokens=64 * world, async_finish=True)
            side.wait_stream(stream)
            with torch.cuda.stream(side):
                came = [one.clone() for one in (received if isinstance(received, tuple) else (received,))]
            torch.cuda.synchronize()
            wanted = received if isinstance(received, tuple) else (received,)
            assert all(torch.equal(bits(one), bits(two)) for one, two in zip(came, wanted, strict=True))
    x = torch.zeros_like(batch.x)
    buffer.low_latency_dispatch(x, batch.topk_idx, 64, layer.experts, use_fp8=False)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1 << 28)
        x.fill_(1)
    rows, counts, *_ = buffer.low_latency_dispatch(x, batch.topk_idx, 64, layer.experts, use_fp8=False)
    assert all(bool((rows[expert, :count] == 1).all()) for expert, count in enumerate(counts.tolist()))
    assert buffer.get_comm_stream() is stream and buffer.runtime.get_comm_stream() is stream
    buffer.destroy()
    with torch.cuda.stream(stream):
        torch.ones(4, device=where)
    torch.cuda.synchronize()


@needs_two
def test_calls_come_behind_the_stream_that_callers_have_and_it_behind_them(two: Any) -> None:
    two.run(check_stream, limit=LIMIT)
