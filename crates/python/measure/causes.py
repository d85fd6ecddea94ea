"""Separates what may lie between a kernel's time and what a caller of deep_ep sees, on GPUs.

    python -m measure.causes --ranks 2 [--moexpress PATH/TO/moexpress]

One batch, 4096 tokens of 7168 bf16, top-8 of 256 experts, 24 multiprocessors unless said otherwise; cached dispatch and combine, in
microseconds of the slowest rank, medians. Each row differs from the one above it, or from the row that it names, in one thing:

    threads               `moexpress bench`: ranks are threads, windows of one process, kernels behind each other on one stream
    processes             `moexpress bench --processes`: windows are mapped from other processes; the rest is the same
    native stream         calls of moexpress from Python, timed on the stream that they enqueue to: events are next to the kernels
    caller's stream       the same, timed on the caller's: it waits for that stream, and that stream for it
    deep_ep               the same by way of deep_ep
    weights home          the combine brings weights back
    arena 1, 2, 4 x       the arena that num_nvl_bytes asks for, in multiples of 2 GiB: more pages, the same rows
    rows as they lie      the combine gives received rows back, which lie in the arena: nothing is copied
    torch's memory        results lie in blocks that torch has asked the driver for since, each of its own size

A cause is where a row steps up. Rows that agree within 2 % leave it out. `kernels` is the time that the profiler gives the kernels
of a call alone, wherever they lie: what is left of `caller's stream` is waits of streams and launches.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import deep_ep
import torch
import torch.distributed as dist
from moexpress import Communicator

from . import ranks
from .ranks import Clock, largest, plain, say

TOKENS, HIDDEN, TOPK, EXPERTS, GIB = 4096, 7168, 8, 256, 1 << 30
Calls = tuple[Callable[[], object], Callable[[], object]]


class Batch:
    """The same on every row."""

    def __init__(self, rank: int, where: torch.device, tokens: int, hidden: int) -> None:
        generator = torch.Generator().manual_seed(1 + rank)
        self.x = torch.randn(tokens, hidden, generator=generator).bfloat16().to(where)
        scores = torch.rand(tokens, EXPERTS, generator=generator)
        self.topk_idx = scores.topk(TOPK).indices.to(where)
        self.weights = torch.rand(tokens, TOPK, generator=generator).to(where)


class Table:
    """Prints rows as they come."""

    def __init__(self, rank: int, clock: Clock) -> None:
        self.rank, self.clock = rank, clock
        say(rank, "                                dispatch   combine    kernels: dispatch, combine")

    def row(self, name: str, calls: Calls) -> None:
        took = [self.clock(call) for call in calls]
        kernels = [self._kernels(call) for call in calls]
        self.told(name, *took, *kernels)

    def told(self, name: str, *took: float | None) -> None:
        columns = [f"{'-' if value is None else format(value, '.1f'):>10}" for value in took]
        say(self.rank, f"{name:<30}" + "".join(columns))

    def _kernels(self, call: Callable[[], object]) -> float | None:
        """What the kernels of a call take, all together; the mean of ten calls that begin together, of the slowest rank."""
        if self.clock.where.type == "cpu":
            return None
        activities = [torch.profiler.ProfilerActivity.CUDA]
        calls = 10
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(calls):
                self.clock.wait()
                dist.barrier()
                call()
            self.clock.wait()
        took = 0.0
        for event in profile.key_averages():
            if event.key.startswith(("ep_", "void ep_")):
                took += float(getattr(event, "device_time_total", 0.0) or getattr(event, "cuda_time_total", 0.0))
        return largest(took / calls, self.clock.where)


def of_communicator(communicator: Communicator, batch: Batch) -> Calls:
    got = communicator.dispatch(batch.x, batch.topk_idx, batch.weights)
    y, handle = plain(got.x).clone(), got.handle
    del got
    return lambda: communicator.redispatch(batch.x, handle).x, lambda: communicator.combine(y, handle)


@contextmanager
def deep_ep_calls(
    batch: Batch, num_nvl_bytes: int, weights: bool = False, as_they_lie: bool = False
) -> Iterator[Calls]:
    buffer = deep_ep.Buffer(dist.group.WORLD, num_nvl_bytes, explicitly_destroy=True)
    layout = buffer.get_dispatch_layout(batch.topk_idx, EXPERTS)
    given = (layout[0], None, layout[3], layout[2], batch.topk_idx, batch.weights)
    received, _, received_weights, _, handle, _ = buffer.dispatch(batch.x, None, *given)
    assert handle is not None
    y = plain(received) if as_they_lie else plain(received).clone()
    home = received_weights if weights else None
    yield lambda: buffer.dispatch(batch.x, handle=handle)[0], lambda: buffer.combine(y, handle, home)
    buffer.destroy()


def work(rank: int, world: int, where: torch.device, samples: int, sms: int, tokens: int, hidden: int) -> None:
    batch, table = Batch(rank, where, tokens, hidden), Table(rank, Clock(where, samples))
    deep_ep.Buffer.set_num_sms(sms)
    rows = world * tokens
    communicator = Communicator(
        experts=EXPERTS,
        topk=TOPK,
        hidden=hidden,
        max_tokens=tokens,
        device=where,
        arena_bytes=6 * rows * (2 * hidden + 256),
        multiprocessors=sms if where.type == "cuda" else None,
    )
    calls = of_communicator(communicator, batch)
    if where.type == "cuda":
        with torch.cuda.stream(communicator.order.stream):
            table.row("native stream", calls)
    table.row("caller's stream", calls)
    communicator.close()
    with deep_ep_calls(batch, 0) as calls:
        table.row("deep_ep", calls)
    with deep_ep_calls(batch, 0, weights=True) as calls:
        table.row("  weights home", calls)
    with deep_ep_calls(batch, 0, as_they_lie=True) as calls:
        table.row("  rows as they lie", calls)
    for times in (1, 2, 4):
        unit = 2 * GIB if where.type == "cuda" else 1 << 27
        with deep_ep_calls(batch, times * unit) as calls:
            table.row(f"  arena {times} x", calls)
    held = []
    if where.type == "cuda":
        # The memory that torch keeps ready goes back, so that the driver is asked for each of these blocks, and for those of the calls.
        torch.cuda.empty_cache()
        held = [torch.empty(GIB // 64 + (1 << 20) * at, dtype=torch.uint8, device=where) for at in range(16)]
    with deep_ep_calls(batch, 0) as calls:
        table.row("  torch's memory", calls)
    del held


def bench(program: str, world: int, sms: int, processes: bool) -> tuple[float, float]:
    """Cached dispatch, and combine of rows anywhere, of `moexpress bench`."""
    asked = [
        "bench",
        "--backend",
        "cuda",
        "--mode",
        "throughput",
        "--tokens",
        str(TOKENS),
        "--multiprocessors",
        str(sms),
        "--json",
    ]
    command = [program, *asked, "--ranks", str(world)]
    if processes:
        command = [program, "launch", "-n", str(world), "--", program, *asked, "--processes"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    # A launcher says whose line it is.
    line = next(line for line in done.stdout.splitlines() if "[{" in line)
    rows = json.loads(line[line.index("[{") :])
    row = next(row for row in rows if row["dtype"] == "bf16" and row["processes"] == processes)
    return row["cached_dispatch_us"], row["combine_anywhere_us"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m measure.causes", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="cpu: to try the script itself")
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--sms", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--hidden", type=int, default=HIDDEN)
    parser.add_argument("--moexpress", help="the command line, for the rows of its bench")
    arguments = parser.parse_args()
    missing = ranks.check_gpus(arguments.ranks, arguments.device)
    if missing:
        parser.error(missing)
    if arguments.moexpress:
        for name, processes in (("threads", False), ("processes", True)):
            there, back = bench(arguments.moexpress, arguments.ranks, arguments.sms, processes)
            print(f"{name:<30}{there:>10.1f}{back:>10.1f}   (kernels next to each other)", flush=True)
    given = (arguments.samples, arguments.sms, arguments.tokens, arguments.hidden)
    return ranks.spawn(work, arguments.ranks, arguments.device, *given)


if __name__ == "__main__":
    sys.exit(main())
