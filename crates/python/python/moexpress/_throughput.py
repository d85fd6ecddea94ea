"""Throughput mode of one rank: what arguments must be, and the calls beneath."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import _check, _limits, _native, errors
from ._order import Order
from ._results import Combined, Received
from ._shape import Shape

OutboxUse = tuple[int | None, int | None] | None
"""Rows that a call hands over at a time, and rows for each reader that lie in an outbox. None: what is usual."""


def outbox(piece: int | None, slots: int | None) -> OutboxUse:
    """What a call says of outboxes, checked."""
    if piece is None and slots is None:
        return None
    return (
        _limits.some("outbox_piece", piece, 1),
        _limits.some("outbox_slots", slots, 1),
    )


class Throughput:
    """The calls of :class:`Communicator` by the same names. ``defer``: the caller waits for the call himself, by an event; else his current
    stream does."""

    def __init__(self, native: _native.Endpoint, order: Order, shape: Shape) -> None:
        self.native, self.order, self.shape = native, order, shape

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        *,
        scales: torch.Tensor | None,
        alignment: int,
        worst_rows: int,
        device_counts: bool,
        zero_spare: bool = False,
        by_expert: bool = False,
        repeats: bool = False,
        outbox: OutboxUse = None,
        defer: bool = False,
    ) -> Received:
        shape, order = self.shape, self.order
        tokens, rows, x, scales = self._rows(x, scales)
        choices, weights = shape.choices(tokens, topk_idx, topk_weights)
        if defer:
            order.beyond(x, scales, topk_idx, topk_weights)
        when, batch, routing = (order.current(), defer), (rows, tokens, _scales(scales)), (choices, weights)
        try:
            asked = (alignment, by_expert, (worst_rows, zero_spare), device_counts, repeats, outbox)
            out = self.native.dispatch(when, batch, routing, asked)
        except (TypeError, OverflowError):
            # Looked at only now: on the path of every call.
            alignment = _limits.number("alignment", alignment)
            worst_rows = _limits.number("worst_rows", worst_rows)
            if all(isinstance(flag, bool) for flag in (by_expert, zero_spare, device_counts)):
                # What is right is not the reason: a signal handler may have raised it, behind a call that was made.
                raise
            room = worst_rows, _limits.flag("zero_spare", zero_spare)
            device_counts = _limits.flag("device_counts", device_counts)
            asked = (alignment, _limits.flag("by_expert", by_expert), room, device_counts, repeats, outbox)
            out = self.native.dispatch(when, batch, routing, asked)
        return Received(out, order)

    def dispatch_members(
        self,
        x: torch.Tensor,
        in_rank: torch.Tensor,
        tokens_per_expert: Sequence[int],
        *,
        scales: torch.Tensor | None,
        alignment: int,
        worst_rows: int,
        device_counts: bool = False,
        outbox: OutboxUse = None,
        defer: bool = False,
    ) -> Received:
        shape, order = self.shape, self.order
        alignment, worst_rows = _limits.number("alignment", alignment), _limits.number("worst_rows", worst_rows)
        counts = _limits.numbers("tokens_per_expert", tokens_per_expert, shape.experts)
        tokens, rows, x, scales = self._rows(x, scales)
        _check.tensor("in_rank", in_rank, (torch.bool, torch.uint8), (tokens, shape.ranks), shape.device)
        if defer:
            order.beyond(x, scales, in_rank)
        return Received(
            self.native.dispatch(
                (order.current(), defer),
                (rows, tokens, _scales(scales)),
                (in_rank.data_ptr(), counts),
                (alignment, False, (worst_rows, False), device_counts, False, outbox),
            ),
            order,
        )

    def redispatch(
        self,
        x: torch.Tensor,
        handle: _native.Handle,
        scales: torch.Tensor | None,
        defer: bool = False,
        outbox: OutboxUse = None,
    ) -> _native.Dispatched:
        """What was received, not made into tensors yet."""
        order = self.order
        if not isinstance(handle, _native.Handle):
            raise _not_a_handle(handle)
        tokens, rows, x, scales = self._rows(x, scales)
        if tokens != handle.tokens:
            raise _check.invalid("tokens of x", tokens, f"{handle.tokens}, those of the handle's dispatch")
        if defer:
            order.beyond(x, scales)
        strided = None if scales is None else _scales(scales)
        return self.native.redispatch((order.current(), defer), (rows, tokens, strided), handle, outbox)

    def quantize(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        order = self.order
        rows, at = self.shape.results("x", x)
        if order.packed is None:
            raise errors.Unsupported(
                "quantize is not supported here: use a communicator with device='npu' and element='int8'"
            )
        packed = order.tensor(self.native.quantize((order.current(), False), (at, rows, None)))
        return order.packed.codes(packed), order.packed.scales(packed)

    def combine(
        self,
        y: torch.Tensor,
        handle: _native.Handle,
        *,
        topk_weights: torch.Tensor | None,
        bias: torch.Tensor | Sequence[torch.Tensor | None] | None,
        outbox: OutboxUse = None,
        remainder: bool = False,
        defer: bool = False,
    ) -> Combined:
        shape, order = self.shape, self.order
        if not isinstance(handle, _native.Handle):
            raise _not_a_handle(handle)
        rows, results = shape.results("y", y, handle.result_rows)
        # Weights are by received row, whatever the results are by.
        weights = shape.weights(topk_weights, handle.rows if handle.is_by_expert else rows)
        starts = [] if bias is None else self._starts(bias, handle.tokens)
        if defer:
            order.beyond(y, topk_weights, *starts)
        x, sums = self.native.combine(
            (order.current(), defer),
            results,
            handle,
            (weights, [start.data_ptr() for start in starts], outbox, _limits.flag("remainder", remainder)),
        )
        return Combined(order.tensor(x), None if sums is None else order.tensor(sums))

    def _rows(self, x: torch.Tensor, scales: torch.Tensor | None) -> tuple[int, int, torch.Tensor, torch.Tensor | None]:
        """Checks rows as they travel: how many, where they lie, and the tensors that must be kept for that."""
        tokens, rows = self.shape.rows("x", x, scales)
        packed = self.order.packed
        if packed is not None and scales is not None:
            x, scales = packed.of(x, scales)
            return tokens, x.data_ptr(), x, scales
        if scales is not None:
            scales = self.shape.by_row(x, scales)
        return tokens, rows, x, scales

    def _starts(self, bias: torch.Tensor | Sequence[torch.Tensor | None], tokens: int) -> list[torch.Tensor]:
        """What the sums start from, checked."""
        if not isinstance(bias, (torch.Tensor, list, tuple)):
            raise _check.invalid("bias", f"a {type(bias).__name__}", "a tensor, or a tuple of at most 2")
        given = (bias,) if isinstance(bias, torch.Tensor) else tuple(bias)
        if len(given) > 2:
            raise _check.invalid("number of biases", len(given), "at most 2")
        shape, device = (tokens, self.shape.hidden), self.shape.device
        return [
            _check.tensor(f"bias {number}", one, torch.bfloat16, shape, device)
            for number, one in enumerate(given)
            if one is not None
        ]


def _scales(scales: torch.Tensor | None) -> tuple[int, int, int] | None:
    return None if scales is None else (scales.data_ptr(), *scales.stride())  # type: ignore[return-value]


def _not_a_handle(handle: object) -> errors.InvalidArgument:
    return _check.invalid("handle", f"a {type(handle).__name__}", "one that a dispatch gave")
