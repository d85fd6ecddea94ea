"""NPUs for tests: a twin in each process, on whose memory tensors lie. Wheels for users have none."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from moexpress import Communicator, Meeting, _native, _npu
from moexpress._results import tensor_of

HAS_TWIN = hasattr(_native, "Twin")

needs_twin = pytest.mark.skipif(
    not HAS_TWIN, reason="this wheel has no twin of NPUs: build it with --features npu-twin for these tests"
)


@cache
def library() -> str:
    """Kernels and twin, compiled once for all tests."""
    return str(_native.Twin.build())


def remove_library() -> None:
    """At the end of all tests."""
    if library.cache_info().currsize:
        shutil.rmtree(Path(library()).parent)


class TwinNpu(_npu.Npu):
    """The device of this process's rank. Its tensors are a CPU's for torch."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal, self.device = ordinal, torch.device("cpu")

    def current(self) -> int:
        return int(_native.Twin.stream())

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = torch.Size(shape).numel()
        if not size:
            return torch.empty(shape, dtype=dtype)
        return tensor_of(_native.Twin.empty(size * dtype.itemsize)).view(dtype).view(shape)


_started: TwinNpu | None = None


def started(rank: int, world: int, ranks_per_node: int, path: str) -> TwinNpu:
    """The NPU of this process."""
    global _started
    if _started is None:
        _native.Twin.start(path, rank, world, ranks_per_node)
        _started = npu = TwinNpu(rank)
        _npu.finds = lambda ordinal: npu
    return _started


def put(npu: TwinNpu, tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the NPU."""
    there = npu.empty(tuple(tensor.shape), tensor.dtype)
    there.copy_(tensor)
    return there


def both(meeting: Meeting, **sizes: Any) -> tuple[Communicator, Communicator]:
    """A communicator of CPU ranks, and one of NPUs, for the same calls."""
    far = {"far": "loop"} if meeting.nodes > 1 else {}
    return Communicator(meeting, device="cpu", **sizes, **far), Communicator(meeting, device="npu", **sizes, far="roce")


def clean(npu: TwinNpu) -> None:
    """Fails where a kernel or a call of the library broke a rule."""
    fault = _native.Twin.fault()
    assert fault is None, fault
