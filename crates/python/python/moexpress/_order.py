"""How a communicator's work is ordered with the caller's: the one place that knows about streams."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class HostOrder:
    """CPUs: a call has done its work when it returns."""

    stream: Any = None

    def enter(self, tensors: Iterable[torch.Tensor | None], after: Any = None) -> None:
        """Before a call that reads ``tensors``."""

    def leave(self, wait: bool = True) -> Any:
        """After a call. Returns what its completion is waited for by, if ``wait`` is false."""
        return None


class CudaOrder:
    """GPUs: calls enqueue to a stream of the communicator.

    It waits for what the caller's current stream held when the call was made (or for the event ``after``), and unless the call is
    asynchronous, the current stream then waits for it. Memory of arguments is kept by ``record_stream``.
    """

    def __init__(self, raw: int, device: torch.device) -> None:
        self.stream = torch.cuda.ExternalStream(raw, device=device)
        self.device = device

    def enter(self, tensors: Iterable[torch.Tensor | None], after: torch.cuda.Event | None = None) -> None:
        if after is None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        else:
            self.stream.wait_event(after)
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(self.stream)

    def leave(self, wait: bool = True) -> torch.cuda.Event | None:
        if not wait:
            event = torch.cuda.Event()
            event.record(self.stream)
            return event
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        return None


Order = HostOrder | CudaOrder
