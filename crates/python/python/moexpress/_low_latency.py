"""Low latency of one rank: what arguments must be, the calls beneath, and operations that were sent and are to be received."""

from __future__ import annotations

import torch

from . import _check, _limits, _native, errors
from ._check import Held
from ._early import MOST, Early, Ready, raw
from ._order import Order, Room
from ._plain import plain
from ._results import LowReceived
from ._shape import Shape

BY_SOURCE = (0, False)
"""How rows lie: each once. By expert: None. Packed: alignment, and whether padding is zeros."""


def how_rows_lie(by_source: bool, packed: int | None, zero_spare: bool) -> tuple[int, bool] | None:
    """What a caller says of it, checked."""
    by_source, zero_spare = _limits.flag("by_source", by_source), _limits.flag("zero_spare", zero_spare)
    if packed is None:
        if zero_spare:
            raise errors.InvalidArgument("zero_spare is True, allowed: with packed only")
        return BY_SOURCE if by_source else None
    if by_source:
        raise errors.InvalidArgument("by_source is True, allowed: without packed only")
    return _limits.number("packed", packed, 1), zero_spare


class LowLatency:
    """The calls of :class:`Communicator` by the same names. ``stats``: int32 ``[local experts]``, to which the counts are
    added. ``repeats``: whether a token may name an expert more than once; it gets the row once, and its result counts each time."""

    def __init__(self, native: _native.Endpoint, order: Order, shape: Shape) -> None:
        self.native, self.order, self.shape = native, order, shape

    def early(self, rows: int, multiprocessors: int | None = None) -> Early:
        rows = _limits.number("rows", rows, 1, MOST)
        few = _limits.some("multiprocessors", multiprocessors, 1, MOST)
        return Early(self.native.early(rows, few), rows, self.order)

    def send_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        stats: torch.Tensor | None = None,
        repeats: bool = False,
        early: Early | None = None,
    ) -> LowDispatch:
        if early is not None and not isinstance(early, Early):
            raise _check.invalid("early", f"a {type(early).__name__}", "what Communicator.early gave")
        tokens, rows, choices, weights = self._batch(x, topk_idx, topk_weights)
        if stats is not None:
            self._added(stats, x, topk_idx, topk_weights)
        # The receiving half may read the rows again.
        kept, added = self.order.hold("x", x, early is not None), None if stats is None else Held("stats", stats)
        batch = ((rows, tokens, None), choices, weights, (repeats, None, False, None))
        counters = None if early is None else early.native
        sent, into = self.native.send_dispatch((self.order.current(), False), batch, counters, self._room(None))
        return LowDispatch(self, sent, kept, LowReceived(into, None, self.order), added)

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        stats: torch.Tensor | None = None,
        repeats: bool = False,
        lies: tuple[int, bool] | None = None,
        host_counts: bool = False,
        defer: bool = False,
        scales: torch.Tensor | None = None,
        most_rows: int | None = None,
    ) -> LowReceived:
        """``lies``: how rows are to lie. ``most_rows``: bound on the rows of ``x``, by source and packed, which all ranks keep: results of so many are
        enough."""
        order = self.order
        rows, scales = self._given(x, scales)
        choices, weights = self.shape.choices(rows[1], topk_idx, topk_weights)
        added = None if stats is None else self._added(stats, x, topk_idx, topk_weights)
        if defer:
            order.beyond(x, scales, topk_idx, topk_weights, stats)
        when, room = (order.current(), defer), self._room(lies, defer)
        try:
            asked = (repeats, lies, host_counts, most_rows)
            handle, into = self.native.low_dispatch(when, (rows, choices, weights, asked), None, added, room)
        except (TypeError, OverflowError):
            # Looked at only now: on the path of every call. What it is not the reason of may come of a signal handler, behind a call that was made.
            if isinstance(host_counts, bool):
                raise
            asked = (repeats, lies, _limits.flag("host_counts", host_counts), most_rows)
            handle, into = self.native.low_dispatch(when, (rows, choices, weights, asked), None, added, room)
        return LowReceived(into, handle, order)

    def redispatch(
        self,
        x: torch.Tensor,
        handle: _native.LowHandle,
        topk_weights: torch.Tensor | None = None,
        defer: bool = False,
        scales: torch.Tensor | None = None,
        zero_spare: bool = False,
    ) -> LowReceived:
        """Another batch by the choices of a handle, whose rows lie by source, or packed. ``zero_spare``: padding is zeros."""
        order, shape = self.order, self.shape
        if not isinstance(handle, _native.LowHandle):
            raise _check.invalid("handle", f"a {type(handle).__name__}", "one that a low-latency dispatch gave")
        rows, scales = self._given(x, scales)
        tokens = rows[1]
        if tokens != handle.tokens:
            raise _check.invalid("tokens of x", tokens, f"{handle.tokens}, those of the handle's dispatch")
        lies = None if handle.order is None else (handle.order[0], zero_spare)
        batch = (rows, 0, shape.weights(topk_weights, tokens), (False, lies, False, handle.result_rows))
        if defer:
            order.beyond(x, scales, topk_weights)
        room = self._room(lies, defer)
        made, into = self.native.low_dispatch((order.current(), defer), batch, handle, None, room)
        return LowReceived(into, made, order)

    def send_combine(
        self,
        y: torch.Tensor,
        handle: _native.LowHandle,
        topk_weights: torch.Tensor | None,
        out: torch.Tensor | None,
        ready: Ready | None = None,
    ) -> LowCombine:
        results, weights, out = self._sums(y, handle, topk_weights, out)
        when = None if ready is None else raw(ready, self.shape)
        # The receiving half may read the results again, and look whether they are ready.
        kept, into = [self.order.hold("y", y)], Held("out", out)
        if ready is not None and ready.signals is not None:
            kept.append(self.order.hold("signals of ready", ready.signals))
        sent = self.native.send_combine((self.order.current(), False), results, handle, weights, when)
        return LowCombine(self, sent, [held for held in kept if held is not None], into)

    def combine(
        self,
        y: torch.Tensor,
        handle: _native.LowHandle,
        topk_weights: torch.Tensor | None,
        out: torch.Tensor | None,
        defer: bool = False,
    ) -> torch.Tensor:
        results, weights, out = self._sums(y, handle, topk_weights, out)
        if defer:
            self.order.beyond(y, topk_weights, out)
        self.native.low_combine((self.order.current(), defer), results, handle, weights, out.data_ptr())
        return out

    def choices(self, handle: _native.LowHandle) -> torch.Tensor:
        """int64 ``[tokens, topk]``: those of the batch that a handle is of, as they were sent. Not the caller's tensor, and not to be written to."""
        return self.order.tensor(self.native.low_choices(handle))

    def _room(self, lies: tuple[int, bool] | None, defer: bool = False) -> Room | None:
        """Memory of the caller's framework for what a captured call brings; None where the native part has some: that of a graph would serve no other call
        for as long as the graph lives."""
        return self.order.room(self.native.low_sizes(lies), defer) if self.order.captures() else None

    def _batch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None
    ) -> tuple[int, int, int, int | None]:
        """Checks a batch; its tokens, and where rows, choices and weights lie."""
        tokens, rows = self.shape.results("x", x)
        return tokens, rows, *self.shape.choices(tokens, topk_idx, topk_weights)

    def _given(
        self, x: torch.Tensor, scales: torch.Tensor | None
    ) -> tuple[tuple[int, int, tuple[int, int, int] | None], torch.Tensor | None]:
        """Checks rows, bf16 or as they travel; where they lie, and the scales that must be kept for that."""
        if scales is None:
            tokens, rows = self.shape.results("x", x)
            return (rows, tokens, None), None
        tokens, rows = self.shape.rows("x", x, scales)
        scales = self.shape.by_row(x, scales)
        assert scales is not None
        return (rows, tokens, (scales.data_ptr(), scales.stride(0), scales.stride(1))), scales

    def _added(
        self, stats: torch.Tensor, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None
    ) -> int:
        """Checks what counts are added to; where it lies."""
        shape = self.shape
        at = _check.address("stats", stats, torch.int32, (shape.local_experts,), shape.device)
        _check.apart("stats", stats, x=x, topk_idx=topk_idx, topk_weights=topk_weights)
        return at

    def _sums(
        self, y: torch.Tensor, handle: _native.LowHandle, topk_weights: torch.Tensor | None, out: torch.Tensor | None
    ) -> tuple[int, int | None, torch.Tensor]:
        """Checks a combine; where results and weights lie, and where the sums go."""
        shape = self.shape
        if not isinstance(handle, _native.LowHandle):
            raise _check.invalid("handle", f"a {type(handle).__name__}", "one that a low-latency dispatch gave")
        if handle.result_rows is not None:
            _, results = shape.results("y", y, handle.result_rows)
        else:
            results = _check.address("y", y, torch.bfloat16, shape.low, shape.device)
        tokens, hidden = handle.tokens, shape.hidden
        weights = shape.weights(topk_weights, tokens)
        if out is None:
            out = self.order.empty((tokens, hidden), torch.bfloat16, shape.device)
        else:
            _check.address("out", out, torch.bfloat16, (tokens, hidden), shape.device)
            _check.apart("out", out, y=y, topk_weights=topk_weights)
        return results, weights, out


class LowDispatch:
    """A low-latency dispatch that was sent. Operations are received in the order in which they were sent."""

    def __init__(
        self,
        calls: LowLatency,
        pending: _native.Pending,
        x: Held | None,
        into: LowReceived,
        stats: Held | None,
    ) -> None:
        # Rows are kept: those for a rank that was late are read again by the receiving half.
        self._calls, self._pending, self._x, self._into, self._stats = calls, pending, x, into, stats

    @property
    def result(self) -> LowReceived:
        """Where results go; their contents are defined after :meth:`receive`."""
        return self._into

    @plain
    def receive(self, *, beside: bool = False) -> LowReceived:
        """Waits for what the others sent. ``beside``: on GPUs the current stream does not wait, and what is enqueued there runs beside this half: it
        learns of rows by an :class:`Early`. Its own results come behind both when the next call is made.

        Raises:
            errors.OperationFailed: a peer did not deliver. Mask it (:meth:`Communicator.mask_rank`) and receive again.
            errors.InvalidArgument: it was received already; or the storage of ``x`` (on GPUs and NPUs) was resized since it was sent, or (on NPUs) that
                of a result which was asked for before.
        """
        into, calls, beside = self._into, self._calls, _limits.flag("beside", beside)
        if self._x is not None:
            self._x.check()
        into.check()
        stats = None if self._stats is None else self._stats.check()
        into.received(calls.native.receive_dispatch((calls.order.current(), beside), self._pending, stats))
        return into


class LowCombine:
    """A low-latency combine that was sent."""

    def __init__(self, calls: LowLatency, pending: _native.Pending, kept: list[Held], into: Held) -> None:
        # Results are kept: those for a rank that was late are read again by the receiving half.
        self._calls, self._pending, self._kept, self._into = calls, pending, kept, into

    @property
    def result(self) -> torch.Tensor:
        """Where the sums go; defined after :meth:`receive`."""
        return self._into.tensor

    @plain
    def receive(self) -> torch.Tensor:
        """Waits for the results of this rank's tokens: bf16 ``[tokens, hidden]``.

        Raises:
            errors.OperationFailed, errors.InvalidArgument: as for :meth:`LowDispatch.receive`, or ``out`` shows other memory than when
                it was sent.
        """
        calls = self._calls
        for held in self._kept:
            held.check()
        into = self._into.check(whole=True)
        calls.native.receive_combine((calls.order.current(), False), self._pending, into)
        return self._into.tensor
