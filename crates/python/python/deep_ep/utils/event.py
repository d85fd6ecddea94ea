"""Events: when enqueued work is done."""

from __future__ import annotations

from collections.abc import Callable
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
    ``with event_overlap(release_handle=True): ...`` also lets go of the event then.
    """

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[Any, ...] | None = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors
        self.hook_after_wait: Callable[[], Any] | None = None
        self._releases = False

    def current_stream_wait(self, release_handle: bool = False) -> Any:
        """Makes the current stream wait for the event, and calls the hook.

        Args:
            release_handle: let go of the event then.

        Returns:
            What the hook returned; None where there is none.

        Raises:
            AssertionError: the call was not asynchronous and has no event.
        """
        assert self.event is not None, "this call was not asynchronous: there is no event to wait for"
        self.event.current_stream_wait()
        hook, self.hook_after_wait = self.hook_after_wait, None
        result = None if hook is None else hook()
        if release_handle:
            self.event = None
        return result

    def wait(self) -> Any:
        """:meth:`current_stream_wait`, of newer versions."""
        return self.current_stream_wait()

    def register_hook_after_wait(self, hook_after_wait: Callable[[], Any]) -> None:
        """Calls ``hook_after_wait`` once, behind the next wait.

        Raises:
            AssertionError: there is a hook already.
        """
        assert self.hook_after_wait is None, "there is a hook already: one is called behind a wait"
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        self._releases = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        releases, self._releases = self._releases, False
        if self.event is not None:
            self.current_stream_wait(releases)
