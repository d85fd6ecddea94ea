"""Operations of one communicator's low latency: halves under way, masks, statistics."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager, suppress
from threading import TIMEOUT_MAX, RLock
from typing import TYPE_CHECKING

import torch
from moexpress import Communicator, errors
from moexpress.adapter import LowCombine, LowDispatch, check

if TYPE_CHECKING:
    from collections.abc import Iterator

Half = LowDispatch | LowCombine


class Sent:
    """An operation that was sent: DeepEP's hook. A call receives it, and those that were sent before; another call does nothing.

    Args:
        waited: int64 ``[ranks]``, to which the nanoseconds that each rank was waited for are added.
        then: called when it was received.
    """

    __slots__ = ("__weakref__", "half", "is_gone", "then", "under_way", "waited")

    def __init__(self, under_way: UnderWay, half: Half, waited: torch.Tensor | None, then: Callable[[], None]) -> None:
        self.under_way, self.waited = under_way, waited
        # None, both, once it was received.
        self.half: Half | None = half
        self.then: Callable[[], None] | None = then
        self.is_gone = False
        """Whether the ranks were brought together again before it was received."""

    def __call__(self) -> None:
        if self.half is not None:
            self.under_way.upto(self)

    def receive(self) -> None:
        """Receives it alone."""
        half, then, communicator, waited = self.half, self.then, self.under_way.communicator, self.waited
        if half is None or then is None:
            return
        before = communicator.stats()["waited_ns"] if waited is not None else []
        self.under_way.receive(half)
        then()
        self.half = self.then = self.waited = None
        if waited is not None:
            check.memory("wait_recv_cost_stats", waited)
            after = communicator.stats()["waited_ns"]
            spent = [late - early for early, late in zip(before, after, strict=True)]
            with torch.inference_mode():  # where the caller may have made it
                waited.add_(torch.tensor(spent, dtype=waited.dtype, device="cpu").to(waited.device))


class UnderWay:
    """Operations that were sent and not received. They must be received in order; who asks for a later one first gets the earlier ones
    received, too. An operation lives as long as its hook: one whose hook was dropped is skipped by the communicator.

    Args:
        communicator: made with ``low_latency=True``.
        mask: masks a rank that does not deliver everywhere, so that the others go on without it; None where it fails the call.
    """

    def __init__(self, communicator: Communicator, mask: Callable[[int], None] | None) -> None:
        self.communicator, self.mask = communicator, mask
        self.calls = communicator.in_low_latency
        self._sent: deque[weakref.ref[Sent]] = deque()
        self._turn = RLock()
        self._zero_copy: torch.Tensor | None = None

    def zero_copy_buffer(self) -> torch.Tensor:
        """bf16 ``[local experts, ranks * max_tokens, hidden]``, the same each time: a combine has read it when it was sent."""
        if self._zero_copy is None:
            one = self.communicator
            shape = (one.local_experts, one.ranks * one.max_tokens, one.hidden)
            with torch.inference_mode(False):  # callers write to it outside, too
                self._zero_copy = one.order.empty(shape, torch.bfloat16, one.device)
        return self._zero_copy

    def goes_at_once(self) -> bool:
        """Whether both halves of an operation may be one call: nothing is under way, and nobody would have to be masked in between."""
        # Other threads send and receive meanwhile.
        return self.mask is None and all(sent() is None for sent in tuple(self._sent))

    def sent(self, half: Half, waited: torch.Tensor | None, then: Callable[[], None] = lambda: None) -> Sent:
        """Notes that ``half`` was sent."""
        sent = Sent(self, half, waited, then)
        for reference in [reference for reference in tuple(self._sent) if reference() is None]:
            self._forget(reference)
        self._sent.append(weakref.ref(sent))
        return sent

    def upto(self, last: Sent) -> None:
        """Receives everything up to ``last``, if that was not received."""
        with self._in_turn():
            # Each step asks anew: other threads send and clear meanwhile, and signal handlers may receive.
            while last.half is not None and not last.is_gone:
                reference = next(iter(tuple(self._sent)), None)
                if reference is None:
                    break
                sent = reference()
                if sent is not None:
                    sent.receive()
                self._forget(reference)
        if last.is_gone and last.half is not None:
            raise errors.InvalidArgument(
                "hook is of an operation that was under way when the ranks were brought together again, allowed: one that was sent since"
            )

    def _forget(self, reference: weakref.ref[Sent]) -> None:
        with suppress(ValueError):  # another has
            self._sent.remove(reference)

    def clear(self) -> None:
        """The ranks were brought together again: nothing is under way any more."""
        for reference in tuple(self._sent):
            sent = reference()
            if sent is not None:
                sent.is_gone = True
            self._forget(reference)

    def receive(self, half: Half) -> None:
        """Receives it, without ranks that do not deliver where these are masked."""
        while True:
            try:
                half.receive()
                return
            except errors.Poisoned:
                raise
            except errors.OperationFailed as failed:
                peer = failed.peer
                if self.mask is None or peer is None or peer in self.communicator.low_latency_mask:
                    raise
                self.mask(peer)

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Hooks of several threads receive one at a time."""
        if not self._turn.acquire(timeout=min(self.communicator.timeout, TIMEOUT_MAX)):
            raise errors.Busy(
                f"another thread has been receiving for {self.communicator.timeout} s, the timeout: call the hook when it has returned"
            )
        try:
            yield
        finally:
            self._turn.release()
