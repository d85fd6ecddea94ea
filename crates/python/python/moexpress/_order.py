"""How a communicator's work is ordered with the caller's: the one place that knows about streams."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class HostOrder:
    """CPUs: a call has done its work when it returns."""

    stream: Any = None
    defer: bool = False
    """Whether the caller waits for the next call himself."""

    def enter(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Before a call that reads or writes ``tensors``."""

    def leave(self) -> None:
        """After a call."""
        self.defer = False

    def event(self) -> torch.cuda.Event | None:
        """What the completion of the last call is waited for by; None where it is complete."""
        return None

    def behind(self) -> AbstractContextManager[Any]:
        """What is enqueued inside comes behind the last call, whether the current stream waits for that or not."""
        return nullcontext()


class CudaOrder:
    """GPUs: calls enqueue to a stream of the communicator.

    It waits for what the caller's current stream holds when the call is made; unless the caller defers that, the current stream then waits
    for it. Memory of arguments is kept by ``record_stream``. Memory of results is given back on the communicator's stream when their
    last view is gone, and used again by calls made after that: so whatever reads them must have been enqueued to the stream that is
    current in the next call, or to one that this stream waits for.
    """

    def __init__(self, raw: int, device: torch.device) -> None:
        self.stream = torch.cuda.ExternalStream(raw, device=device)
        self.device = device
        self.defer = False

    def enter(self, tensors: Iterable[torch.Tensor | None]) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(self.stream)

    def leave(self) -> None:
        if not self.defer:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
        self.defer = False

    def event(self) -> torch.cuda.Event | None:
        event = torch.cuda.Event()
        event.record(self.stream)
        return event

    def behind(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.stream)


Order = HostOrder | CudaOrder
