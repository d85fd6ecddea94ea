"""Dispatch and combine with gradients: the backward of a dispatch is a combine, that of a combine a cached dispatch.

Rows travel as bf16, gradients too; sums are f32, ranks ascending, rounded once. All ranks run forward and backward in the same order, so
each rank must use the results (or none of them): a rank whose backward leaves one out keeps the others waiting until the timeout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from ._limits import invalid

if TYPE_CHECKING:
    from ._communicator import Communicator
    from ._native import Handle
    from ._results import Received


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_idx: torch.Tensor,
        communicator: Communicator,
        layout: dict[str, Any],
        into: list[Received],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        received = communicator.dispatch(x, topk_idx, topk_weights, **layout)
        assert received.topk_idx is not None and received.topk_weights is not None
        into.append(received)
        ctx.communicator, ctx.handle = communicator, received.handle
        # Tensors of their own: the caller may write to choices and slots.
        ctx.is_elsewhere = received.topk_idx < 0
        told = received.by_expert
        if told is None or told.weights is None:
            return received.x, received.topk_weights, None
        ctx.slots = told.slots.clamp(min=0).long()
        return received.x, received.topk_weights, told.weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weights, of_slots = gradients
        if of_slots is not None:
            weights = weights + of_slots[ctx.slots]
        # The weight of a choice that is on another rank came as 0, whatever it was: what this rank made of it is no gradient of the caller's, and a
        # combine sums those of all ranks.
        weights = weights.masked_fill(ctx.is_elsewhere, 0).contiguous()
        back = ctx.communicator.combine(rows.contiguous(), ctx.handle, topk_weights=weights)
        return back.x, back.topk_weights, None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, handle: Handle, communicator: Communicator) -> torch.Tensor:
        ctx.communicator, ctx.handle, ctx.rows = communicator, handle, y.shape[0]
        return communicator.combine(y, handle).x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        received = ctx.communicator.redispatch(gradients[0].contiguous(), ctx.handle)
        rows = received.x
        if received.by_expert is not None:
            _zero_padding(rows, received.by_expert.slots)
        further = ctx.rows - rows.shape[0]
        if further > 0:
            # Results that the combine left out.
            rows = torch.cat([rows, rows.new_zeros((further, rows.shape[1]))])
        return rows[: ctx.rows], None, None


def _zero_padding(rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Makes zeros of all ``rows`` by expert that are no slot of a choice: what lay there may be no number, which a product with zeros stays."""
    count = rows.shape[0]
    is_padding = torch.ones(count + 1, dtype=torch.bool, device=rows.device)
    is_padding.scatter_(0, torch.where(slots < 0, count, slots).flatten().long(), False)
    rows.masked_fill_(is_padding[:count].unsqueeze(1), 0)


def dispatch(
    communicator: Communicator,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    alignment: int = 1,
    by_expert: bool = False,
) -> Received:
    """:meth:`Communicator.dispatch` whose ``x`` and ``topk_weights`` have gradients, and ``by_expert.weights`` where there are some.

    Args:
        x: bf16 ``[tokens, hidden]``.
        topk_idx: int64 ``[tokens, topk]``, -1 for a dropped choice.
        topk_weights: f32 ``[tokens, topk]``.
        alignment: as of :meth:`Communicator.dispatch`.
        by_expert: rows ready for a grouped GEMM. Padding is zeros, as gradients of the experts' parameters are products with it.
    """
    if topk_weights is None:  # whose gradient would have nowhere to go
        raise invalid("topk_weights", None, "a tensor; without gradients, call Communicator.dispatch")
    into: list[Received] = []
    layout = {"alignment": alignment, "by_expert": by_expert, "zero_spare": by_expert}
    rows, weights, of_slots = _Dispatch.apply(x, topk_weights, topk_idx, communicator, layout, into)
    received = into[0]
    received.x, received.topk_weights = rows, weights
    if received.by_expert is not None:
        received.by_expert.weights = of_slots
    return received


def combine(communicator: Communicator, y: torch.Tensor, handle: Handle) -> torch.Tensor:
    """:meth:`Communicator.combine` with gradients: bf16 ``[rows, hidden]`` to the sums ``[tokens, hidden]``.

    Padding of rows by expert, and rows beyond those of the handle, have zeros for gradients. Along a handle of ``device_counts`` whose rows are not
    by expert, nobody here knows how many rows came: gradients of the others are zeros if its dispatch had ``zero_spare``, else undefined.
    """
    result: torch.Tensor = _Combine.apply(y, handle, communicator)
    return result
