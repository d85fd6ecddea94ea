"""Throughput mode beneath a buffer: DeepEP's arguments and results."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from moexpress import Communicator, Received, errors
from moexpress._plain import plain
from moexpress._results import tensor_of

from . import _checks, _handles
from ._communicators import Communicators
from ._layout import Layouts
from ._scales import Rows
from .utils import EventHandle, EventOverlap

Rows_t = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

Dispatched = tuple[
    Rows_t,
    torch.Tensor | None,
    torch.Tensor | None,
    list[int] | None,
    tuple[Any, ...] | None,
    EventOverlap,
]
"""Rows, choices, weights, counts, handle, event; of a cached dispatch only rows and event."""


class Throughput:
    """The calls of :class:`Buffer` by the same names, with checked options. ``defer``: asynchronous."""

    def __init__(self, communicators: Communicators, layouts: Layouts) -> None:
        self.communicators, self.layouts = communicators, layouts

    @plain
    def dispatch(
        self,
        x: Rows_t,
        num_tokens_per_rank: torch.Tensor | None,
        is_token_in_rank: torch.Tensor | None,
        num_tokens_per_expert: torch.Tensor | None,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        expert_alignment: int,
        num_worst_tokens: int,
        num_sms: int,
        defer: bool,
    ) -> Dispatched:
        rows = Rows.of(x)
        if num_tokens_per_rank is None or is_token_in_rank is None or num_tokens_per_expert is None:
            raise errors.InvalidArgument(
                "num_tokens_per_rank, is_token_in_rank or num_tokens_per_expert is None, allowed: what get_dispatch_layout returned"
            )
        if (topk_idx is None) != (topk_weights is None):
            raise errors.InvalidArgument("one of topk_idx and topk_weights is None, allowed: both or neither")
        if num_worst_tokens and topk_idx is None:
            raise errors.InvalidArgument("num_worst_tokens is given without topk_idx, allowed: with it")
        (tokens, hidden), device, ranks = rows.x.shape, rows.x.device, self.layouts.ranks
        experts = num_tokens_per_expert.numel()
        _checks.tensor("num_tokens_per_rank", num_tokens_per_rank, torch.int32, (ranks,), device)
        _checks.tensor("num_tokens_per_expert", num_tokens_per_expert, torch.int32, (experts,), device)
        _checks.tensor("is_token_in_rank", is_token_in_rank, torch.bool, (tokens, ranks), device)
        if topk_idx is None or topk_weights is None:
            communicator = self.communicators.normal(device, experts, 1, hidden, rows.element)
            received = communicator._throughput.dispatch_members(
                rows.x,
                is_token_in_rank,
                num_tokens_per_expert.tolist(),
                scales=rows.scales,
                alignment=expert_alignment,
                worst_rows=num_worst_tokens,
                defer=defer,
            )
        else:
            _checks.topk_idx(topk_idx)
            topk = topk_idx.shape[1]
            _checks.tensor("topk_idx", topk_idx, torch.int64, (tokens, topk), device)
            _checks.tensor("topk_weights", topk_weights, torch.float32, (tokens, topk), device)
            if device.type == "cpu":
                _checks.membership(topk_idx, is_token_in_rank, experts, self.layouts)
            communicator = self.communicators.normal(device, experts, topk, hidden, rows.element)
            received = communicator._throughput.dispatch(
                rows.x,
                topk_idx,
                topk_weights,
                scales=rows.scales,
                alignment=expert_alignment,
                worst_rows=num_worst_tokens,
                # No count comes to the host, so that a GPU's calls can be captured.
                device_counts=num_worst_tokens > 0,
                defer=defer,
            )
        source_token = received.source_token
        made = _handles.Handle.of(communicator, received.handle, source_token, is_token_in_rank, num_sms // 2)
        return (
            _taken(rows, received, communicator, defer),
            received.topk_idx,
            received.topk_weights,
            [] if num_worst_tokens else received.expert_counts,
            made,
            _event(communicator, defer),
        )

    @plain
    def redispatch(self, x: Rows_t, handle: object, defer: bool) -> Dispatched:
        made = _handles.normal(handle)
        if isinstance(x, torch.Tensor) and x.dtype is torch.bfloat16 and made.element == "bf16":
            # The way of almost every call: rows are looked at once, by the communicator, and leave as they came.
            communicator = made.communicator
            out = communicator._throughput.redispatch(x, made.native, None, defer)
            received = tensor_of(out.x(False))
            if received.is_contiguous():
                event = _event(communicator, True) if defer else EventOverlap()
                return received, None, None, None, None, event
            return _contiguous(received, communicator, defer), None, None, None, None, _event(communicator, defer)
        rows, communicator, native = Rows.of(x), made.communicator, made.native
        if rows.element != made.element:
            # Rows of another element type travel in a communicator of their own, which has to learn the routing once.
            known = made.others.get(rows.element)
            if known is None:
                return self._learn(rows, made, defer)
            communicator, native = known
        brought = Received(communicator._throughput.redispatch(rows.x, native, rows.scales, defer))
        return _taken(rows, brought, communicator, defer), None, None, None, None, _event(communicator, defer)

    @plain
    def combine(
        self,
        x: torch.Tensor,
        handle: object,
        topk_weights: torch.Tensor | None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None,
        defer: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        made = _handles.normal(handle)
        communicator = made.communicator
        combined = communicator._throughput.combine(x, made.native, topk_weights=topk_weights, bias=bias, defer=defer)
        event = _event(communicator, True) if defer else EventOverlap()
        return combined.x, combined.topk_weights, event

    def _learn(self, rows: Rows, made: _handles.Handle, defer: bool) -> Dispatched:
        """A cached dispatch whose rows are of another type than the handle's, for the first time."""
        of = made.communicator
        other = self.communicators.normal(rows.x.device, of.experts, 1, of.hidden, rows.element)
        received = other._throughput.dispatch_members(
            rows.x, made[4], [0] * of.experts, scales=rows.scales, alignment=1, worst_rows=0, defer=defer
        )
        made.others[rows.element] = (other, received.handle)
        return _taken(rows, received, other, defer), None, None, None, None, _event(other, defer)


def _taken(rows: Rows, received: Received, communicator: Communicator, defer: bool) -> Rows_t:
    """Received rows in the form of those that were sent: a copy, where they lie in another."""
    x, scales = received.x, received.scales
    with communicator.order.behind() if defer and not rows.lie(x, scales) else nullcontext():
        taken: Rows_t = rows.received(x, scales)
    return taken


def _contiguous(x: torch.Tensor, communicator: Communicator, defer: bool) -> torch.Tensor:
    """A copy of received rows."""
    with communicator.order.behind() if defer else nullcontext():
        return x.contiguous()


def _event(communicator: Communicator, defer: bool) -> EventOverlap:
    """After the last call of a communicator."""
    return EventOverlap(EventHandle(communicator.order.event()) if defer else None)
