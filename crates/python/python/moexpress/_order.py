"""How a communicator's work is ordered with the caller's: the one place that knows about streams."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

T = TypeVar("T")

On = tuple[int, bool]
"""What calls are told: the caller's stream, and whether he waits for the call himself."""

ANYWHERE: On = (0, True)
"""Of CPUs."""


class HostOrder:
    """CPUs: a call has done its work when it returns."""

    stream: Any = None
    defer: bool = False
    """Whether the caller waits for the next call himself."""

    def on(self, *tensors: torch.Tensor | None) -> On:
        """For a call that reads or writes ``tensors``."""
        self.defer = False
        return ANYWHERE

    def beyond(self, *tensors: torch.Tensor | None) -> None:
        """Keeps the memory of ``tensors`` for work that comes after the call."""

    def event(self) -> torch.cuda.Event | None:
        """What the completion of the last call is waited for by; None where it is complete."""
        return None

    def behind(self) -> AbstractContextManager[Any]:
        """What is enqueued inside comes behind the last call, whether the current stream waits for that or not."""
        return nullcontext()


class CudaOrder:
    """GPUs: calls enqueue to a stream of the communicator.

    It waits for what the caller's current stream holds when the call is made; unless the caller defers that, the current stream then
    waits for it, so that the memory of arguments may be used again in its order. Where the caller defers, ``record_stream`` keeps it.
    Memory of results is given back on the communicator's stream when their last view is gone, and used again by calls made after that:
    so whatever reads them must have been enqueued to the stream that is current in the next call, or to one that this stream waits for.
    """

    def __init__(self, raw: int, device: torch.device) -> None:
        self.stream = torch.cuda.ExternalStream(raw, device=device)
        self.device = device
        self.index = self.stream.device_index
        self.defer = False

    def on(self, *tensors: torch.Tensor | None) -> On:
        defer, self.defer = self.defer, False
        if defer:
            self.beyond(*tensors)
        return _current_stream(self.index), defer

    def beyond(self, *tensors: torch.Tensor | None) -> None:
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(self.stream)

    def event(self) -> torch.cuda.Event | None:
        event = torch.cuda.Event()
        event.record(self.stream)
        return event

    def behind(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.stream)


def _slow_current_stream(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


# The same without an object, where this torch has it.
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _slow_current_stream)

Order = HostOrder | CudaOrder


def deferring(order: Order, defer: bool, call: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Calls with ``order`` told whether the caller waits himself; a call that is refused leaves the next one as it is."""
    order.defer = defer
    try:
        return call(*arguments, **named)
    finally:
        order.defer = False
