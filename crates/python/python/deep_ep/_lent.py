"""The stream that callers have of a buffer (``get_comm_stream``). In DeepEP all calls are of it, here each communicator has one of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

import moexpress
import torch
from moexpress import Communicator, errors

if TYPE_CHECKING:
    from ._communicators import Communicators

P = ParamSpec("P")
R = TypeVar("R")


class Lent:
    """It, one of torch's pool, which never ends. Once callers have it each call comes behind what it holds then, and it comes behind each call. In a
    capture nothing does: what a graph holds is ordered by the stream that captures it."""

    def __init__(self) -> None:
        self._stream: Any = None

    def stream(self, device: torch.device | None, made: Iterable[Communicator]) -> torch.Stream:
        """The same each time. ``device``: None before the first call; ``made``: those whose calls it is to come behind."""
        if self._stream is None:
            if not (moexpress.cuda_available() and torch.cuda.is_available()) or (device and device.type != "cuda"):
                raise errors.Unsupported("a stream is not supported on CPUs and NPUs: use none there")
            self._stream = torch.cuda.Stream(device)
            for communicator in made:
                self.follow(communicator)
        stream: torch.Stream = self._stream
        return stream

    def lead(self, communicator: Communicator) -> None:
        """The next call of ``communicator`` comes behind what it holds."""
        if self._stream is not None and communicator.order.stream is not None and not communicator.order.captures():
            communicator.order.stream.wait_stream(self._stream)

    def follow(self, communicator: Communicator) -> None:
        """It comes behind the last call of ``communicator``."""
        if self._stream is not None and communicator.order.stream is not None and not communicator.order.captures():
            self._stream.wait_stream(communicator.order.stream)


class _Calls(Protocol):
    communicators: Communicators


C = TypeVar("C", bound=_Calls)


def followed(call: Callable[Concatenate[C, P], R]) -> Callable[Concatenate[C, P], R]:
    """``call``, behind which the lent stream comes."""

    @wraps(call)
    def leading(calls: C, /, *arguments: P.args, **named: P.kwargs) -> R:
        result = call(calls, *arguments, **named)
        calls.communicators.is_called()
        return result

    return leading
