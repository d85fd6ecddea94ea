"""Rows of a low-latency dispatch that are consumed as they come, and results that a combine reads as they are ready."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from . import _check, _limits, _native

if TYPE_CHECKING:
    from ._order import Order
    from ._shape import Shape


class Early:
    """Counters by which consumers learn of rows as they come (:meth:`Communicator.early`), for one dispatch after the other.

    All are int64 on the GPU. A counter holds the number of a batch in its high 32 bits and a count in the low ones, so it never falls and nothing has to be
    cleared. They stay where they are: kernels that were captured with their addresses replay.
    """

    def __init__(self, native: _native.Early, rows: int, order: Order) -> None:
        self.native, self._order = native, order
        self.rows = rows
        """Rows of a block; the last block of an expert may have fewer."""

    def _tensor(self, given: _native._Capsule | None) -> torch.Tensor:
        assert given is not None
        return self._order.tensor(given)

    @cached_property
    def epoch(self) -> torch.Tensor:
        """``[1]``: the number of the last batch that was sent, as counters have it (``number << 32``)."""
        return self._tensor(self.native.epoch())

    @cached_property
    def stopped(self) -> torch.Tensor:
        """``[1]``: ``epoch`` of a batch whose rows do not come, as its launch has failed."""
        return self._tensor(self.native.stopped())

    @cached_property
    def arrived(self) -> torch.Tensor:
        """``[local experts, blocks]``: all rows of a block are there once this has reached ``expected``."""
        return self._tensor(self.native.arrived())

    @cached_property
    def expected(self) -> torch.Tensor:
        """``[local experts, blocks]``: of the batch once it has reached ``epoch``; ``expert_counts`` and ``segments`` are there then."""
        return self._tensor(self.native.expected())

    @cached_property
    def ready(self) -> torch.Tensor:
        """``[local experts, blocks]``: a consumer adds here what it has done of a block's results. It begins at ``epoch``."""
        return self._tensor(self.native.ready())


@dataclass(slots=True)
class Ready:
    """When a combine may read which results. Blocks without rows need nothing."""

    due: int
    """What the signal of a block reaches when its results are ready: of the counters of an :class:`Early` how much is added in a batch."""
    signals: torch.Tensor | None = None
    """int32 or uint32, which the caller clears: one for each block of ``rows`` rows of an expert, at least ``local experts * blocks``, or, with ``rows``
    None, ``[local experts]``. None: ``ready`` of the counters of the dispatch."""
    rows: int | None = None
    """Rows of a block of ``signals``."""
    multiprocessors: int | None = None
    """Multiprocessors of the sending half, at most: the kernel that makes the results needs the others. None: all."""


RawReady = tuple[tuple[int, int] | None, int, int, int | None]
MOST = (1 << 31) - 1
"""The largest number of a block's rows, of multiprocessors, and that a signal reaches."""
SIGNALS = (torch.int32, getattr(torch, "uint32", torch.int32))


def raw(ready: Ready, shape: Shape) -> RawReady:
    """Checks readiness; as the native part takes it."""
    if not isinstance(ready, Ready):
        raise _check.invalid("ready", f"a {type(ready).__name__}", "a moexpress.Ready")
    due = _limits.number("due of ready", ready.due, 1, MOST)
    few = _limits.some("multiprocessors of ready", ready.multiprocessors, 1, MOST)
    if ready.signals is None:
        if ready.rows is not None:
            raise _check.invalid("rows of ready", ready.rows, "None without signals: those of the dispatch's counters")
        return None, 0, due, few
    rows = _limits.some("rows of ready", ready.rows, 1, MOST) or 0
    expected: tuple[int | str, ...] = ("signals",) if rows else (shape.local_experts,)
    signals = _check.tensor("signals of ready", ready.signals, SIGNALS, expected, shape.device)
    return (signals.data_ptr(), signals.numel()), rows, due, few
