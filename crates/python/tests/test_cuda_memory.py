"""Whose memory it is, on GPUs: of a forked child, of storages that were freed, of ranks that end without a word. And memory that comes back: of
results that are gone, and that of graphs which share a pool.

Skipped, and counted so, on machines without two GPUs.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import deep_ep
import oracle
import pytest
import torch
import torch.distributed as dist
from gpus import LIMIT, bits, device, make_buffer, needs_two, on
from moexpress import Communicator, errors


def check_forked(rank: int, world: int) -> None:
    """What a child drops stays the parent's."""
    where = device(rank)
    layer = oracle.Layer(world, 2 * world, 2, 512)
    batch = on(oracle.batches(layer, [8] * world)[rank], where)
    communicator = Communicator(experts=layer.experts, topk=2, hidden=512, max_tokens=8, device=where, low_latency=True)
    got = communicator.dispatch(batch.x, batch.topk_idx, batch.topk_weights)
    rows, low = got.x, communicator.low_latency_dispatch(batch.x, batch.topk_idx)
    before = bits(rows)
    # Of torch's own memory a child must drop none that another stream has used: torch ends the child then.
    gc.collect()
    gc.disable()
    child = os.fork()
    if child == 0:
        del got, rows, low
        os._exit(0)
    gc.enable()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(bits(rows), before)
    assert torch.equal(bits(communicator.redispatch(batch.x, got.handle).x), before)
    del rows, low
    communicator.close()


@needs_two
def test_a_forked_child_gives_no_memory_back(two: Any) -> None:
    two.run(check_forked, limit=LIMIT)


def check_freed(rank: int, world: int) -> None:
    """Memory that is freed by a resize (FSDP's idiom) before the GPU has read it."""
    where = device(rank)
    layer = oracle.Layer(world, 2 * world, 2, 512)
    batch = on(oracle.batches(layer, [8] * world)[rank], where)
    communicator = Communicator(experts=layer.experts, topk=2, hidden=512, max_tokens=8, device=where, low_latency=True)
    # The receiving half may read rows again: they must be there.
    x = batch.x.clone()
    sent = communicator.send_dispatch(x, batch.topk_idx)
    x.untyped_storage().resize_(0)
    with pytest.raises(errors.InvalidArgument, match="x is a storage that was resized, allowed: what was given"):
        sent.receive()
    torch.cuda.synchronize()
    dist.barrier()
    communicator.close()
    # An asynchronous call has its rows to itself until it is done, whatever becomes of the storage.
    buffer = make_buffer()
    layout = buffer.get_dispatch_layout(batch.topk_idx, layer.experts)
    routing = (batch.topk_idx, batch.topk_weights)
    handle = buffer.dispatch(batch.x, None, layout[0], None, layout[3], layout[2], *routing)[4]
    expected = bits(buffer.dispatch(batch.x, handle=handle)[0])
    x = batch.x.clone()
    torch.cuda._sleep(20_000_000)
    received, _, _, _, _, event = buffer.dispatch(x, handle=handle, async_finish=True)
    x.untyped_storage().resize_(0)
    others = [torch.full_like(batch.x, float("nan")) for _ in range(8)]
    event.current_stream_wait()
    assert torch.equal(bits(received), expected) and len(others) == 8
    buffer.destroy()


@needs_two
def test_memory_freed_by_a_resize_is_not_read(two: Any) -> None:
    two.run(check_freed, limit=LIMIT)


def check_trimmed(rank: int, world: int) -> None:
    """Memory of results that were kept is free again: when a call of any kind has come, or without one by trim, once what reads them has ended."""
    where, kept_bytes = device(rank), 1 << 30
    layer = oracle.Layer(world, 2 * world, 2, 7168)
    tokens = 4096
    x = torch.ones(tokens, layer.hidden, device=where, dtype=torch.bfloat16)
    idx = torch.randint(0, layer.experts, (tokens, 2), device=where)
    weights = torch.ones(tokens, 2, device=where)
    buffer = deep_ep.Buffer(dist.group.WORLD, 0, 0, explicitly_destroy=True)
    layout = buffer.get_dispatch_layout(idx, layer.experts)

    def dispatch() -> tuple[Any, ...]:
        return buffer.dispatch(x, None, layout[0], None, layout[3], layout[2], idx, weights)

    dispatch()
    torch.cuda.synchronize()
    for how in ("trim", "combine", "late reader"):
        kept = []
        before = buffer.stats()["arena_bytes"]
        while buffer.stats()["arena_bytes"] < before + kept_bytes and len(kept) < 100:
            kept.append(dispatch())
            time.sleep(0.02)
        dist.barrier()
        small, handle = torch.ones(kept[-1][0].shape, device=where, dtype=torch.bfloat16), kept[-1][4]
        if how == "late reader":
            torch.cuda._sleep(10**10)
            read = [got[0].clone() for got in kept]
            expected = [got[0].shape for got in kept]
        del kept
        free = torch.cuda.mem_get_info()[0]
        if how == "combine":
            buffer.combine(small, handle)
        else:
            buffer.trim()
        if how == "late reader":
            time.sleep(3)
            assert torch.cuda.mem_get_info()[0] < free + (1 << 28), "gone while a kernel is to read it"
            torch.cuda.synchronize()
            assert all((one == 1).all() for one in read) and [one.shape for one in read] == expected
            del read
            torch.cuda.empty_cache()
        until = time.monotonic() + 20
        while torch.cuda.mem_get_info()[0] < free + kept_bytes // 2 and time.monotonic() < until:
            time.sleep(0.05)
        gained = torch.cuda.mem_get_info()[0] - free
        assert gained > kept_bytes // 2, f"{how}: {gained >> 20} MiB"
        dist.barrier()
    buffer.destroy()


@needs_two
def test_memory_of_kept_results_is_free_again(two: Any) -> None:
    two.run(check_trimmed, limit=LIMIT)


def check_captured(rank: int, world: int) -> None:
    """Layers of one graph, and further graphs that share its pool, use the same memory one after the other."""
    where, layers = device(rank), 10
    layer = oracle.Layer(world, 32, 4, 7168)
    batch = on(oracle.batches(layer, [64] * world)[rank], where)
    buffer = make_buffer(low_latency_mode=True)

    def forward(hook: bool) -> torch.Tensor:
        x = batch.x
        for _ in range(layers):
            got, _, handle, _, receive = buffer.low_latency_dispatch(
                x, batch.topk_idx, 128, layer.experts, use_fp8=False, return_recv_hook=hook
            )
            if receive is not None:
                receive()
            y = got * 0.5
            del got
            x, _, receive = buffer.low_latency_combine(
                y, batch.topk_idx, batch.topk_weights, handle, return_recv_hook=hook
            )
            if receive is not None:
                receive()
            del y, handle
        return x

    block = layer.experts // world * world * 128 * layer.hidden * 2
    for hook in (False, True):
        expected = forward(hook)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        pool, graphs, before = torch.cuda.graph_pool_handle(), [], torch.cuda.mem_get_info()[0]
        for _ in range(3):
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1], pool=pool):
                out = forward(hook)
            dist.barrier()
        taken = before - torch.cuda.mem_get_info()[0]
        assert taken < 6 * block, f"{taken >> 20} MiB for blocks of {block >> 20}"
        for graph in graphs:
            out.zero_()
            graph.replay()
            torch.cuda.synchronize()
        assert torch.equal(bits(out), bits(expected)), f"hook={hook}"
        del graphs, out
    buffer.destroy()


@needs_two
def test_layers_of_captured_graphs_use_the_same_memory(two: Any) -> None:
    two.run(check_captured, limit=LIMIT)


ENDS = """
import sys
import torch, torch.distributed as dist
import deep_ep

rank, store = int(sys.argv[1]), sys.argv[2]
torch.cuda.set_device(rank)
dist.init_process_group("gloo", init_method="file://" + store, world_size=2, rank=rank)
buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True)
x, idx = torch.ones(4, 128).bfloat16().cuda(), (torch.arange(8).view(4, 2) % 4).cuda()
for _ in range(20):
    layout = buffer.get_dispatch_layout(idx, 4)
    got = buffer.dispatch(x, None, layout[0], None, layout[3], layout[2], idx, torch.ones(4, 2).cuda())
    back = buffer.combine(got[0], got[4])
    low = buffer.low_latency_dispatch(x, idx, 4, 4, use_fp8=False)
    low_back = buffer.low_latency_combine(low[0], idx, torch.ones(4, 2).cuda(), low[2])
print("done")
"""


@needs_two
def test_ranks_end_well_without_destroy(tmp_path: Path) -> None:
    arguments = [[sys.executable, "-c", ENDS, str(rank), str(tmp_path / "store")] for rank in range(2)]
    pipe = subprocess.PIPE
    started = [subprocess.Popen(each, stdout=pipe, stderr=pipe, text=True) for each in arguments]
    for process in started:
        out, told = process.communicate(timeout=LIMIT)
        assert (process.returncode, out) == (0, "done\n") and "Error" not in told, told
