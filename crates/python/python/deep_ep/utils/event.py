"""Events: when enqueued work is done."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch


class EventHandle:
    """A moment on a stream: what the current stream holds now. On CPUs, where calls end when their work is done, always past.

    Args:
        event: a recorded CUDA event instead.
    """

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        if event is None and torch.cuda.is_initialized():
            event = torch.cuda.Event()
            event.record()
        self.event = event

    def current_stream_wait(self) -> None:
        """Makes the current stream wait for it."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


class EventOverlap:
    """An event, and the tensors that must live until it has come.

    Usable as ``with event_overlap: ...``: what the block enqueues overlaps, and the current stream waits at its end.
    """

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[Any, ...] | None = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """Makes the current stream wait for the event.

        Raises:
            AssertionError: the call was not asynchronous and has no event.
        """
        assert self.event is not None, "this call was not asynchronous: there is no event to wait for"
        self.event.current_stream_wait()

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.event is not None:
            self.event.current_stream_wait()
