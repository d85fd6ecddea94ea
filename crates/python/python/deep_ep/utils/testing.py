"""Timing that DeepEP's tests use."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from typing import Any

import torch
import torch.distributed as dist


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


KERNELS = {
    "dispatch_impl": "ep_dispatch",
    "dispatch_copy_epilogue_impl": None,
    "combine_impl": "ep_combine",
    "combine_reduce_epilogue_impl": None,
}
"""Kernels of DeepEP V2 by whose names its tests ask for times, and what the names of those here contain that do the same. None: the work of a second
kernel is done by the first here."""

L2_BYTES = 256 << 20
"""What is written to push everything else out of a GPU's cache."""


def flush_l2_cache(enabled: bool = True) -> None:
    """Pushes everything out of the current GPU's cache; nothing on CPUs."""
    if enabled and torch.cuda.is_available():
        torch.empty(L2_BYTES // 4, dtype=torch.int32, device="cuda").zero_()


def bench(
    fn: Callable[[], Any],
    num_warmups: int = 50,
    num_tests: int = 50,
    post_fn: Callable[[], Any] | None = None,
    flush_l2: bool = True,
) -> tuple[float, float, float]:
    """Mean, least and largest time of ``fn`` in seconds; the first run is left out. By CUDA events, or a clock on CPUs. ``flush_l2``:
    whether each run finds a GPU's cache without its data."""
    for _ in range(num_warmups):
        fn()
    times: list[Any] = []
    for _ in range(num_tests):
        flush_l2_cache(flush_l2)
        if torch.cuda.is_available():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            fn()
            end.record()
            times.append((begin, end))
        else:
            began = time.perf_counter()
            fn()
            times.append(time.perf_counter() - began)
        if post_fn is not None:
            post_fn()
    _synchronize()
    seconds = [one if isinstance(one, float) else one[0].elapsed_time(one[1]) / 1e3 for one in times][1:]
    return sum(seconds) / len(seconds), min(seconds), max(seconds)


def bench_kineto(
    fn: Callable[[], Any],
    kernel_names: str | Sequence[str],
    num_tests: int = 30,
    suppress_kineto_output: bool = False,
    trace_path: str | None = None,
    flush_l2: bool = True,
    barrier_comm_profiling: bool = False,
    num_kernels_per_period: int = 1,
    barrier: Callable[[], Any] | None = None,
) -> Any:
    """Mean time in seconds of the kernels whose names contain each of ``kernel_names``, by the profiler. GPUs only. ``barrier``: for
    ``barrier_comm_profiling``, instead of an all-reduce. Names of DeepEP V2's kernels stand for :data:`KERNELS`.

    Returns:
        One time for a string, a list for several; with ``num_kernels_per_period`` more than 1 a list of times for each name. NaN for a kernel of
        DeepEP that has no counterpart.
    """
    if not torch.cuda.is_available():
        raise NotImplementedError("kernels of CPUs are not profiled; use bench")
    names = [kernel_names] if isinstance(kernel_names, str) else list(kernel_names)
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
    quiet = redirect_stdout(StringIO()) if suppress_kineto_output else nullcontext()
    with (
        quiet,
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], schedule=schedule) as profiler,
    ):
        for _ in range(2):
            if barrier_comm_profiling and barrier is not None:
                barrier()
            elif barrier_comm_profiling:
                dist.all_reduce(torch.ones(1, dtype=torch.float, device="cuda"))
            for _ in range(num_tests):
                flush_l2_cache(flush_l2)
                fn()
            torch.cuda.synchronize()
            profiler.step()
    if trace_path is not None:
        profiler.export_chrome_trace(trace_path)
    launches = sorted(
        (event for event in profiler.events() if event.device_type == torch.profiler.DeviceType.CUDA),
        key=lambda event: event.time_range.start,
    )
    found: list[Any] = []
    for asked in names:
        name = KERNELS.get(asked, asked)
        if name is None:
            found.append(math.nan if num_kernels_per_period == 1 else [math.nan] * num_kernels_per_period)
            continue
        seconds = [event.time_range.elapsed_us() / 1e6 for event in launches if name in event.name]
        if not seconds:
            raise RuntimeError(f"no kernel whose name contains {name!r} ran")
        each = [seconds[start::num_kernels_per_period] for start in range(num_kernels_per_period)]
        means = [sum(times) / len(times) for times in each]
        found.append(means[0] if num_kernels_per_period == 1 else means)
    return found[0] if isinstance(kernel_names, str) else found
