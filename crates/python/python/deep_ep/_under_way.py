"""Operations of one communicator's low latency: halves under way, masks, statistics."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from moexpress import Communicator, errors
from moexpress._low_latency import LowCombine, LowDispatch

Half = LowDispatch | LowCombine


class UnderWay:
    """Operations that were sent and not received. They must be received in order; who asks for a later one first gets the earlier ones
    received, too.

    Args:
        communicator: made with ``low_latency=True``.
        shrink: whether a rank that does not deliver is masked, and the others go on without it.
        mask: masks a rank everywhere.
    """

    def __init__(self, communicator: Communicator, shrink: bool, mask: Callable[[int], None]) -> None:
        self.communicator, self.shrink, self.mask = communicator, shrink, mask
        self.calls = communicator._in_low_latency
        self._halves: deque[tuple[Half, Callable[[], None]]] = deque()
        self._zero_copy: torch.Tensor | None = None

    def zero_copy_buffer(self) -> torch.Tensor:
        """bf16 ``[local experts, ranks * max_tokens, hidden]``, the same each time: a combine has read it when it was sent."""
        if self._zero_copy is None:
            one = self.communicator
            shape = (one.local_experts, one.ranks * one.max_tokens, one.hidden)
            self._zero_copy = torch.empty(shape, dtype=torch.bfloat16, device=one.device)
        return self._zero_copy

    def goes_at_once(self) -> bool:
        """Whether both halves of an operation may be one call: nothing is under way, and nobody would have to be masked in between."""
        return not self.shrink and not self._halves

    def sent(self, half: Half, waited: torch.Tensor | None) -> Callable[[], None]:
        """Notes that ``half`` was sent. What it returns receives it; calling that again does nothing. ``waited`` int64 ``[ranks]`` gets
        the nanoseconds that each rank was waited for added."""

        def receive() -> None:
            before = self.communicator.stats()["waited_ns"] if waited is not None else []
            self._receive(half)
            if waited is not None:
                after = self.communicator.stats()["waited_ns"]
                spent = [late - early for early, late in zip(before, after, strict=True)]
                waited.add_(torch.tensor(spent, dtype=waited.dtype, device="cpu").to(waited.device))

        self._halves.append((half, receive))
        return lambda: self.upto(half)

    def upto(self, last: Half) -> None:
        """Receives everything up to ``last``."""
        while any(half is last for half, _ in self._halves):
            self._halves[0][1]()
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
