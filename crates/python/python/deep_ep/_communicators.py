"""Communicators of a buffer. DeepEP's buffer knows no sizes before the first call; moexpress's communicators are made for sizes, so
each new combination makes one, which all ranks do in the same call."""

from __future__ import annotations

import torch
from moexpress import Communicator, Meeting, errors
from moexpress._shape import Element

WORST_TOKENS = 1 << 20
"""Bound on ``num_worst_tokens``, a rank. It takes no memory."""
ARENA = (1 << 26, 1 << 30)
"""Least and most bytes of the arena that throughput communicators take, where ``num_nvl_bytes`` says how many."""

_Sizes = tuple[int, int, int, int, Element]


class Communicators:
    """Makes and keeps them.

    Args:
        meeting: the ranks.
        num_nvl_bytes: hint for the arena's size.
        timeout: seconds that an operation may take.
    """

    def __init__(self, meeting: Meeting, num_nvl_bytes: int, timeout: float) -> None:
        self.meeting, self.timeout = meeting, timeout
        self.arena_bytes = min(max(num_nvl_bytes, ARENA[0]), ARENA[1])
        self.multiprocessors = 20
        self._normal: dict[_Sizes, Communicator] = {}
        self._low: dict[_Sizes, Communicator] = {}
        self.masked: set[int] = set()
        self.device: torch.device | None = None
        self.closed = False

    def normal(self, device: torch.device, experts: int, topk: int, hidden: int, element: Element) -> Communicator:
        """For throughput mode."""
        sizes = (experts, topk, hidden, WORST_TOKENS, element)
        return self._get(self._normal, sizes, device)

    def low(
        self, device: torch.device, experts: int, topk: int, hidden: int, tokens: int, element: Element
    ) -> Communicator:
        """For low latency."""
        return self._get(self._low, (experts, topk, hidden, tokens, element), device)

    def all_low(self) -> list[Communicator]:
        """Those for low latency, in the order in which they were made."""
        return list(self._low.values())

    def close(self) -> None:
        """Closes all of them, and leaves the meeting."""
        self.closed = True
        for communicator in [*self._low.values(), *self._normal.values()]:
            communicator.close()
        self._low.clear()
        self._normal.clear()
        self.meeting.close()

    def _get(self, kept: dict[_Sizes, Communicator], sizes: _Sizes, device: torch.device) -> Communicator:
        if self.closed:
            raise errors.Closed("the buffer was destroyed; make a new one")
        if self.device is None:
            self.device = device
        if device != self.device:
            raise errors.InvalidArgument(
                f"device of the tensors is {device}, allowed: {self.device}, as in earlier calls"
            )
        communicator = kept.get(sizes)
        if communicator is None:
            experts, topk, hidden, tokens, element = sizes
            is_low = kept is self._low
            communicator = Communicator(
                self.meeting,
                experts=experts,
                topk=topk,
                hidden=hidden,
                max_tokens=tokens,
                element=element,
                device=device,
                low_latency=is_low,
                placement="ring" if is_low else "direct",
                arena_bytes=0 if is_low else self.arena_bytes,
                timeout=self.timeout,
                multiprocessors=self.multiprocessors if device.type == "cuda" else None,
            )
            kept[sizes] = communicator
            for rank in sorted(self.masked) if is_low else ():
                communicator.mask_rank(rank)
        return communicator
