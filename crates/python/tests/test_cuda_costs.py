"""What calls cost on GPUs: the time of the host, and memory over many iterations.

Skipped, and counted so, on machines without two GPUs.
"""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import torch
import torch.distributed as dist
from deep_ep.utils.math import per_token_cast_to_fp8
from gpus import LIMIT, device, make_buffer, needs_two, on
from moexpress import Communicator


def check_host_time(rank: int, world: int) -> dict[str, float]:
    """Microseconds of the host, in Python and below: calls are enqueued behind a stream that sleeps, so that no kernel runs and none is
    waited for. The fastest mean of 20 calls."""
    where = device(rank)
    layer = oracle.Layer(world, 8, 2, 512)
    batch = on(oracle.batches(layer, [8] * world)[rank], where)
    communicator = Communicator(experts=8, topk=2, hidden=512, device=where)
    handle = communicator.dispatch(batch.x, batch.topk_idx).handle
    native, stream, address = communicator.native, torch.cuda.current_stream().cuda_stream, batch.x.data_ptr()
    buffer = make_buffer(low_latency_mode=True)
    layout = buffer.get_dispatch_layout(batch.topk_idx, layer.experts)
    routing = (batch.topk_idx, batch.topk_weights)
    x, _, _, _, kept, _ = buffer.dispatch(batch.x, None, layout[0], None, layout[3], layout[2], *routing)
    codes = per_token_cast_to_fp8(batch.x)
    kept_fp8 = buffer.dispatch(codes, None, layout[0], None, layout[3], layout[2], *routing)[4]
    stats = torch.zeros(layer.local, dtype=torch.int32, device=where)
    y = torch.zeros(layer.local, world * 8, 512, dtype=torch.bfloat16, device=where)

    def low_latency() -> None:
        low = buffer.low_latency_dispatch(batch.x, batch.topk_idx, 8, layer.experts, stats)
        buffer.low_latency_combine(y, *routing, low[2])

    calls: dict[str, Callable[[], object]] = {
        "cached dispatch, native": lambda: native.redispatch((stream, False), (address, 8, None), handle, None),
        "cached dispatch, Communicator": lambda: communicator.redispatch(batch.x, handle).x,
        "cached dispatch, deep_ep": lambda: buffer.dispatch(batch.x, handle=kept),
        "cached dispatch of FP8 rows, deep_ep": lambda: buffer.dispatch(codes, handle=kept_fp8),
        "combine, deep_ep": lambda: buffer.combine(x, kept),
        "layout, deep_ep": lambda: buffer.get_dispatch_layout(batch.topk_idx, layer.experts),
        "low latency, both, deep_ep": low_latency,
    }
    for call in calls.values():
        call()
    best = dict.fromkeys(calls, float("inf"))
    for name, call in [*calls.items()] * 30:
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda._sleep(20_000_000)
        began = time.perf_counter()
        for _ in range(20):
            call()
        best[name] = min(best[name], (time.perf_counter() - began) / 20 * 1e6)
    torch.cuda.synchronize()
    communicator.close()
    buffer.destroy()
    return {name: round(time, 1) for name, time in best.items()}


@needs_two
def test_host_time_of_calls(two: Any) -> None:
    times = two.run(check_host_time, limit=LIMIT)
    print(f"host time, us: {times}")
    # Shared processors differ by a factor of two from run to run; docs/benchmarks/cuda.md has what was measured.
    assert all(each["cached dispatch, deep_ep"] < 40 for each in times)


def used(where: torch.device) -> dict[str, int]:
    """Bytes of the GPU that are taken, whoever has them; resident bytes of this process; its descriptors and threads."""
    gc.collect()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info(where)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    open_ones = len(os.listdir("/proc/self/fd")) + len(os.listdir("/proc/self/task"))
    return {"device": total - free, "host": resident, "descriptors and threads": open_ones}


def check_leaks(rank: int, world: int, iterations: int) -> list[dict[str, int]]:
    """All kinds of calls, whose results are dropped in any order; what is used before, half-way and after."""
    where = device(rank)
    layer = oracle.Layer(world, 8, 2, 512)
    batch = on(oracle.batches(layer, [64] * world)[rank], where)
    x8 = per_token_cast_to_fp8(batch.x)
    buffer = make_buffer(low_latency_mode=True)
    layout = buffer.get_dispatch_layout(batch.topk_idx, layer.experts)
    routing: dict[str, Any] = {
        "num_tokens_per_rank": layout[0],
        "is_token_in_rank": layout[3],
        "num_tokens_per_expert": layout[2],
        "topk_idx": batch.topk_idx,
        "topk_weights": batch.topk_weights,
    }
    kept = buffer.dispatch(batch.x, **routing)[4]
    y = torch.zeros(layer.local, world * 64, 512, dtype=torch.bfloat16, device=where)
    held: list[Any] = []
    order = random.Random(rank)

    def once(turn: int) -> None:
        held.append(buffer.get_dispatch_layout(batch.topk_idx, layer.experts))
        asynchronous = bool(turn % 2)
        if turn % 4 == 0:
            x, _, weights, _, handle, _ = buffer.dispatch(batch.x, **routing)
            held.append((x, handle, buffer.combine(x, handle, weights)))
        elif turn % 4 == 1:
            held.append(buffer.dispatch(x8, **routing))
        elif turn % 4 == 2:
            held.append(buffer.dispatch(batch.x, num_worst_tokens=256, **routing))
        again = buffer.dispatch(batch.x, handle=kept, async_finish=asynchronous)
        if asynchronous:
            again[5].current_stream_wait()
        held.append((again, buffer.combine(again[0], kept, bias=batch.x)))
        low = buffer.low_latency_dispatch(
            batch.x, batch.topk_idx, 64, layer.experts, use_fp8=asynchronous, return_recv_hook=turn % 3 == 0
        )
        if low[4] is not None:
            low[4]()
        held.append(low)
        held.append(buffer.low_latency_combine(y, batch.topk_idx, batch.topk_weights, low[2]))
        while len(held) > 12:
            held.pop(order.randrange(len(held)))

    readings = []
    for turns in (iterations // 2, iterations // 2, iterations - iterations // 2):
        for turn in range(turns):
            once(turn)
        held.clear()
        readings.append(used(where))
    buffer.destroy()
    return readings


@needs_two
def test_nothing_leaks_over_10000_iterations(two: Any) -> None:
    for before, half_way, after in two.run(check_leaks, 10_000, limit=LIMIT):
        print(f"used before, half-way, after: {before} {half_way} {after}")
        # Allocators take the GPU's memory 2 MiB at a time.
        assert after["device"] <= half_way["device"] <= before["device"] + (2 << 20)
        # A leak of one small object an iteration would be more.
        assert after["host"] - before["host"] < 1_000_000
        assert after["descriptors and threads"] <= before["descriptors and threads"]
