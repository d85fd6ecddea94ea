"""Operations of one communicator's low latency: halves under way, masks, statistics."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable

import torch
from moexpress import Communicator, errors
from moexpress.adapter import LowCombine, LowDispatch, check

Half = LowDispatch | LowCombine


class UnderWay:
    """Operations that were sent and not received. They must be received in order; who asks for a later one first gets the earlier ones
    received, too. An operation lives as long as its hook: one whose hook was dropped is skipped by the communicator.

    Args:
        communicator: made with ``low_latency=True``.
        shrink: whether a rank that does not deliver is masked, and the others go on without it.
        mask: masks a rank everywhere.
    """

    def __init__(self, communicator: Communicator, shrink: bool, mask: Callable[[int], None]) -> None:
        self.communicator, self.shrink, self.mask = communicator, shrink, mask
        self.calls = communicator.in_low_latency
        self._halves: deque[weakref.ref[Callable[[], None]]] = deque()
        self._zero_copy: torch.Tensor | None = None

    def zero_copy_buffer(self) -> torch.Tensor:
        """bf16 ``[local experts, ranks * max_tokens, hidden]``, the same each time: a combine has read it when it was sent."""
        if self._zero_copy is None:
            one = self.communicator
            shape = (one.local_experts, one.ranks * one.max_tokens, one.hidden)
            self._zero_copy = one.order.empty(shape, torch.bfloat16, one.device)
        return self._zero_copy

    def goes_at_once(self) -> bool:
        """Whether both halves of an operation may be one call: nothing is under way, and nobody would have to be masked in between."""
        return not self.shrink and all(half() is None for half in self._halves)

    def sent(
        self, half: Half, waited: torch.Tensor | None, then: Callable[[], None] = lambda: None
    ) -> Callable[[], None]:
        """Notes that ``half`` was sent. What it returns receives it; calling that again does nothing. ``waited`` int64 ``[ranks]`` gets
        the nanoseconds that each rank was waited for added; ``then`` is called when it was received."""

        def receive() -> None:
            before = self.communicator.stats()["waited_ns"] if waited is not None else []
            self._receive(half)
            then()
            if waited is not None:
                check.memory("wait_recv_cost_stats", waited)
                after = self.communicator.stats()["waited_ns"]
                spent = [late - early for early, late in zip(before, after, strict=True)]
                waited.add_(torch.tensor(spent, dtype=waited.dtype, device="cpu").to(waited.device))

        self._halves = deque(half for half in self._halves if half() is not None)
        self._halves.append(weakref.ref(receive))
        return lambda: self.upto(receive)

    def upto(self, last: Callable[[], None]) -> None:
        """Receives everything up to what ``last`` receives."""
        while any(half() is last for half in self._halves):
            receive = self._halves[0]()
            if receive is not None:
                receive()
            self._halves.popleft()

    def clear(self) -> None:
        """After a rejoin nothing is under way any more."""
        self._halves.clear()

    def _receive(self, half: Half) -> None:
        while True:
            try:
                half.receive()
                return
            except errors.Poisoned:
                raise
            except errors.OperationFailed as failed:
                peer = failed.peer
                if not self.shrink or peer is None or peer in self.communicator.low_latency_mask:
                    raise
                self.mask(peer)
