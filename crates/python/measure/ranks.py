"""Ranks that are processes, and the time of a call on all of them."""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_context = multiprocessing.get_context("spawn")


def spawn(work: Callable[..., None], world: int, device: str, *arguments: Any) -> int:
    """Runs ``work(rank, world, where, *arguments)`` in a process for each rank, all in one group. The first exit code that is not 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        _context.Process(target=_rank, args=(work, rank, world, device, port, arguments)) for rank in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return next((process.exitcode or 1 for process in processes if process.exitcode != 0), 0)


def _rank(work: Callable[..., None], rank: int, world: int, device: str, port: int, arguments: tuple[Any, ...]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    where = torch.device("cpu") if device == "cpu" else torch.device("cuda", rank)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if where.type == "cuda" else "gloo", rank=rank, world_size=world)
    try:
        work(rank, world, where, *arguments)
        dist.barrier()
    finally:
        dist.destroy_process_group()


class Clock:
    """Times calls that begin on all ranks at about the same time: the slowest rank's, the median of the samples, in microseconds.

    On GPUs by events of the current stream: it sleeps first, so that the host gets ahead, then a tiny all-reduce lines the ranks up.
    """

    def __init__(self, where: torch.device, samples: int) -> None:
        self.where, self.samples = where, samples
        self._line = torch.zeros(1, device=where)

    def __call__(self, call: Callable[[], object], warm_up: int = 3) -> float:
        for _ in range(warm_up):
            call()
        self.wait()
        dist.barrier()
        took = torch.tensor([self.once(call) for _ in range(self.samples)], device=self.where)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        return float(statistics.median(took.tolist()))

    def wait(self) -> None:
        """Waits until the GPU has done what was enqueued."""
        if self.where.type == "cuda":
            torch.cuda.synchronize()

    def once(self, call: Callable[[], object]) -> float:
        """Microseconds of one call on this rank."""
        if self.where.type == "cpu":
            dist.barrier()
            began = time.perf_counter()
            call()
            return (time.perf_counter() - began) * 1e6
        torch.cuda._sleep(3_000_000)
        dist.all_reduce(self._line)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end) * 1e3)


def largest(value: float, where: torch.device) -> float:
    """The largest of all ranks' values."""
    told = torch.tensor([value], device=where, dtype=torch.float64)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return float(told.item())


def say(rank: int, line: str) -> None:
    """Prints on one rank."""
    if rank == 0:
        print(line)
        sys.stdout.flush()


def plain(x: object) -> torch.Tensor:
    """Rows that are one tensor, as bf16 rows are."""
    assert isinstance(x, torch.Tensor)
    return x


def check_gpus(world: int, device: str) -> str | None:
    """What is missing for so many ranks."""
    if device == "cuda" and torch.cuda.device_count() < world:
        return f"--ranks is {world}, allowed: 1 to {torch.cuda.device_count()}, the GPUs that are here"
    return None
