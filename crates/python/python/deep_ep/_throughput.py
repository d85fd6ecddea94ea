"""Throughput mode beneath a buffer: DeepEP's arguments and results."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from moexpress import Received, adapter, errors
from moexpress.adapter import Element, limits, plain

from . import _checks
from . import _npus as npus
from ._arena import Arena, Sizes
from ._communicators import WORST_TOKENS, Communicators
from ._handles import DispatchHandle, Handle, Known, Parts, Routing, rows_between
from ._internode_handle import InternodeHandle
from ._lent import followed
from ._members import Members
from ._previous import NONE, Previous
from ._scales import Rows
from ._taking import Rows_t, copy, taken, with_room
from ._taking import event as event_after
from .config import Config
from .utils import EventOverlap

Dispatched = tuple[
    Rows_t,
    torch.Tensor | None,
    torch.Tensor | None,
    list[int] | None,
    Sequence[Any] | None,
    EventOverlap,
]
"""Rows, choices, weights, counts, handle, event; of a cached dispatch only rows and event."""


class Throughput:
    """The calls of :class:`Buffer` by the same names, with checked options. ``defer``: asynchronous. ``previous``: what it comes behind then."""

    def __init__(self, communicators: Communicators, members: Members) -> None:
        self.communicators, self.members = communicators, members
        self._known: Known[Routing] = Known()
        self._of_others: weakref.WeakKeyDictionary[DispatchHandle, Routing] = weakref.WeakKeyDictionary()
        self._parts = Parts.ONE_NODE if members.nodes == 1 else Parts.SEVERAL_NODES

    @followed
    @plain
    def dispatch(
        self,
        x: Rows_t,
        num_tokens_per_rank: torch.Tensor | None,
        num_tokens_per_rdma_rank: torch.Tensor | None,
        is_token_in_rank: torch.Tensor | None,
        num_tokens_per_expert: torch.Tensor | None,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        expert_alignment: int,
        num_worst_tokens: int,
        num_sms: int,
        config: Config | None,
        defer: bool,
        previous: Previous = NONE,
    ) -> Dispatched:
        rows = Rows.of(x, previous)
        quantizes = rows.element == "bf16" and npus.quantizes(rows.x)
        element: Element = "int8" if quantizes else rows.element
        if num_tokens_per_rank is None or is_token_in_rank is None or num_tokens_per_expert is None:
            raise errors.InvalidArgument(
                "num_tokens_per_rank, is_token_in_rank or num_tokens_per_expert is None, allowed: what get_dispatch_layout returned"
            )
        if (topk_idx is None) != (topk_weights is None):
            raise errors.InvalidArgument("one of topk_idx and topk_weights is None, allowed: both or neither")
        (tokens, hidden), device, ranks = rows.x.shape, rows.x.device, self.members.ranks
        num_worst_tokens = limits.number("num_worst_tokens", num_worst_tokens, 0, ranks * WORST_TOKENS)
        if num_worst_tokens and topk_idx is None:
            raise errors.InvalidArgument("num_worst_tokens is given without topk_idx, allowed: with it")
        if not isinstance(num_tokens_per_expert, torch.Tensor):
            raise limits.invalid("num_tokens_per_expert", _checks.told(num_tokens_per_expert), "a tensor")
        experts = num_tokens_per_expert.numel()
        _checks.tensor("num_tokens_per_rank", num_tokens_per_rank, torch.int32, (ranks,), device)
        if num_tokens_per_rdma_rank is not None and self.members.nodes > 1:
            nodes = (self.members.nodes,)
            _checks.tensor("num_tokens_per_rdma_rank", num_tokens_per_rdma_rank, torch.int32, nodes, device)
        _checks.tensor("num_tokens_per_expert", num_tokens_per_expert, torch.int32, (experts,), device)
        _checks.tensor("is_token_in_rank", is_token_in_rank, torch.bool, (tokens, ranks), device)
        per_rank, dtype = num_tokens_per_rank, None

        def rows_to() -> list[int]:
            previous.here()
            numbers: list[int] = per_rank.tolist()
            return numbers

        if topk_idx is None or topk_weights is None:
            of = Sizes(experts, 1, hidden, element)
            arena = self.communicators.normal(device, of, rows_to)
            rows = Rows.quantized(rows.x, arena.communicator) if quantizes else rows
            previous.here()
            per_expert = num_tokens_per_expert.tolist()
            received = self.communicators.in_turn(arena.communicator, previous).throughput.dispatch_members(
                rows.x,
                is_token_in_rank,
                per_expert,
                scales=rows.scales,
                alignment=expert_alignment,
                worst_rows=num_worst_tokens,
                outbox=arena.outbox(config),
                defer=defer,
            )
        else:
            if isinstance(topk_idx, torch.Tensor) and topk_idx.dtype is torch.int32:
                previous.here()
            topk_idx, dtype = _checks.topk_idx(topk_idx), topk_idx.dtype
            topk = topk_idx.shape[1]
            _checks.tensor("topk_idx", topk_idx, torch.int64, (tokens, topk), device)
            _checks.tensor("topk_weights", topk_weights, torch.float32, (tokens, topk), device)
            if device.type == "cpu":
                _checks.membership(topk_idx, is_token_in_rank, experts, self.members)
            of = Sizes(experts, topk, hidden, element)
            arena = self.communicators.normal(device, of, rows_to, num_worst_tokens)
            rows = Rows.quantized(rows.x, arena.communicator) if quantizes else rows
            received = self.communicators.in_turn(arena.communicator, previous).throughput.dispatch(
                rows.x,
                topk_idx,
                topk_weights,
                scales=rows.scales,
                alignment=expert_alignment,
                worst_rows=num_worst_tokens,
                # No count comes to the host, so that a GPU's calls can be captured.
                device_counts=num_worst_tokens > 0,
                # A token that names an expert twice is the expert's business, as with DeepEP.
                repeats=True,
                outbox=arena.outbox(config),
                defer=defer,
            )
        # Before anything else may fail on this rank alone: the ranks count together.
        if not num_worst_tokens:
            self.communicators.enlarge(of, arena, received.handle.most_rows())
        self._known.look()
        channels, generation = num_sms // 2, self.communicators.generation
        routing = Routing(
            arena, of, received.handle, channels, generation, num_worst_tokens, has_choices=topk_idx is not None
        )
        made = self._handle(routing, received, is_token_in_rank)
        handed, choices = taken(rows, received, arena, defer), received.topk_idx
        if dtype == torch.int32 and choices is not None:
            with arena.communicator.order.behind() if defer else nullcontext():
                choices = choices.int()
        event = event_after(arena.communicator, defer)
        counts = [] if num_worst_tokens else received.expert_counts
        return handed, choices, received.topk_weights, counts, made, event

    @followed
    @plain
    def redispatch(
        self, x: Rows_t, handle: object, config: Config | None, defer: bool, previous: Previous = NONE
    ) -> Dispatched:
        made = self._routing(handle, x, None, previous)
        if (
            isinstance(x, torch.Tensor)
            and x.dtype is torch.bfloat16
            and made.rows.element == "bf16"
            and _width(x) == made.rows.hidden
            and not made.room
        ):
            # The way of almost every call: rows are looked at once, by the communicator, and leave as they came.
            arena = made.arena
            communicator = self.communicators.in_turn(arena.communicator, previous)
            out = communicator.throughput.redispatch(x, made.native, None, defer, arena.outbox(config))
            received = communicator.order.tensor(out.x(False))
            if received.is_contiguous() and (not arena.has_placed() or arena.keeps(received)):
                event = event_after(communicator, True) if defer else EventOverlap()
                return received, None, None, None, None, event
            copied = copy(received, communicator, defer)
            arena.copied(copied)
            return copied, None, None, None, None, event_after(communicator, defer)
        rows = Rows.of(x, previous)
        known = made.along(rows.x.shape[1], rows.element)
        if known is None:
            # Rows of another type or width travel in a communicator of their own, which has to learn the routing once.
            in_rank = handle[self._parts.in_rank]  # type: ignore[index]
            arena, brought = self._learn(rows, made, in_rank, defer, previous)
            made.others.append((arena, brought.handle))
        else:
            arena, native = known
            communicator = self.communicators.in_turn(arena.communicator, previous)
            out = communicator.throughput.redispatch(rows.x, native, rows.scales, defer, arena.outbox(config))
            brought = Received(out, communicator.order)
        handed = taken(rows, brought, arena, defer)
        if made.room > brought.rows:
            with arena.communicator.order.behind() if defer else nullcontext():
                handed = with_room(handed, made.room)
        return handed, None, None, None, None, event_after(arena.communicator, defer)

    @followed
    @plain
    def combine(
        self,
        x: torch.Tensor,
        handle: object,
        topk_weights: torch.Tensor | None,
        bias: torch.Tensor | tuple[torch.Tensor | None, torch.Tensor | None] | None,
        config: Config | None,
        defer: bool,
        previous: Previous = NONE,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        made = self._routing(handle, x, topk_weights, previous)
        if topk_weights is not None and not made.has_choices:
            raise errors.InvalidArgument(
                "topk_weights is given, allowed: None along this handle, which has no choices: its dispatch was given no topk_idx"
            )
        arena, native = made.arena, made.native
        if _width(x) != made.rows.hidden or (made.is_copy and _width(topk_weights) not in (None, made.rows.topk)):
            arena, native = self._of_results(x, topk_weights, made, handle, previous)
        communicator = self.communicators.in_turn(arena.communicator, previous)
        combined = communicator.throughput.combine(
            x, native, topk_weights=topk_weights, bias=bias, outbox=arena.outbox(config), defer=defer
        )
        arena.look_at_results()
        event = event_after(communicator, True) if defer else EventOverlap()
        return combined.x, combined.topk_weights, event

    def _handle(self, routing: Routing, received: Received, in_rank: torch.Tensor) -> DispatchHandle:
        """What a dispatch leaves behind."""
        if self.members.nodes == 1:
            return Handle.of(routing, self._known, received.source_token, in_rank)
        source = received.source_rank, received.source_token
        return InternodeHandle.of(routing, self._known, source, in_rank, self.members.ranks_per_node)

    def _routing(self, handle: object, x: object, topk_weights: torch.Tensor | None, previous: Previous) -> Routing:
        """What a handle stands for. One that was put together again is found by the memory of its tensors, or learnt
        by a dispatch of the membership that it holds, if they are copies: all ranks come here with handles of the same
        dispatch, and rows ``x``."""
        self.communicators.check_open()
        if isinstance(handle, DispatchHandle):
            return self._of_now(self._own(handle, previous))
        source, in_rank, told = self._parts.of(handle, self.members.ranks)
        routing = self._known.find(source)
        if routing is None:
            previous.here()
            first = x[0] if isinstance(x, tuple) and x else x
            hidden = _width(first)
            if hidden is None:
                raise errors.InvalidArgument(f"x is {_checks.told(first)}, allowed: [rows, hidden]")
            in_rank, topk = in_rank.contiguous(), _width(topk_weights)
            arena = self.communicators.like(in_rank.device, hidden, "bf16", topk, in_rank.sum(0).tolist)
            routing = self._learnt(arena, in_rank, is_copy=True)
            self._check_learnt(routing.native, told.cpu())
            # Whether there was room for more than came, other ranks cannot be told: it is for this one to fill up.
            routing.room = source.shape[0] if source.shape[0] > routing.native.rows else 0
            self._known.remember(source, routing)
        return self._of_now(routing)

    def _own(self, handle: DispatchHandle, previous: Previous) -> Routing:
        """The routing of a handle in communicators of this buffer. Of a handle of another one it is learnt, once, as of copies: callers make a larger
        buffer between the ways there and back."""
        made = handle.routing
        if made.arena.communicator.meeting is self.communicators.meeting:
            return made
        routing = self._of_others.get(handle)
        if routing is None:
            previous.here()
            parts = Parts.ONE_NODE if isinstance(handle, Handle) else Parts.SEVERAL_NODES
            in_rank, device = handle[parts.in_rank], made.arena.communicator.device
            shape = (made.native.tokens, self.members.ranks)
            # The tensor is the caller's, who may have resized it since.
            _checks.tensor("is_token_in_rank of the handle", in_rank, torch.bool, shape, device)
            sizes = made.rows._replace(element="bf16")
            arena = self.communicators.normal(device, sizes, in_rank.sum(0).tolist, made.worst)
            routing = self._learnt(arena, in_rank, made.worst, made.has_choices)
            self._check_like(routing.native, made)
            self._of_others[handle] = routing
        return routing

    def _of_results(
        self, x: object, topk_weights: object, made: Routing, handle: object, previous: Previous
    ) -> tuple[Arena, adapter.Handle]:
        """A routing where results ``x`` and their weights can go back, of another width, or of as many choices as a copy of a handle did not tell. It is
        learnt once, by all ranks."""
        hidden, topk = _width(x), _width(topk_weights) if made.is_copy else made.rows.topk
        is_result = isinstance(x, torch.Tensor) and x.dtype is torch.bfloat16 and len(x) >= made.native.result_rows
        if hidden is None or not is_result:
            # Refused by the call, before anything moves.
            return made.arena, made.native
        known = made.along(hidden, None, topk)
        if known is None:
            previous.here()
            in_rank, device = handle[self._parts.in_rank], made.arena.communicator.device  # type: ignore[index]
            shape = (made.native.tokens, self.members.ranks)
            _checks.tensor("is_token_in_rank of the handle", in_rank, torch.bool, shape, device)
            arena = self.communicators.like(device, hidden, "bf16", topk, in_rank.sum(0).tolist)
            known = arena, self._learnt(arena, in_rank, made.worst).native
            self._check_like(known[1], made)
            made.others.append(known)
        return known

    def _learnt(
        self,
        arena: Arena,
        in_rank: torch.Tensor,
        worst: int = 0,
        has_choices: bool = True,
        is_copy: bool = False,
    ) -> Routing:
        """The routing of a membership, by a dispatch of nothing. ``worst``: rows to make room for, in calls along it, too."""
        shape = (in_rank.shape[0], arena.rows.hidden)
        nothing = torch.zeros(shape, dtype=torch.bfloat16, device=in_rank.device)
        received = self._members(arena, nothing, None, in_rank, False, worst)
        return Routing(
            arena, arena.rows, received.handle, 1, self.communicators.generation, worst, has_choices, is_copy
        )

    def _of_now(self, routing: Routing) -> Routing:
        if routing.generation != self.communicators.generation:
            raise errors.InvalidArgument("handle is of before a recovery, allowed: one of after it")
        return routing

    def _learn(
        self, rows: Rows, made: Routing, in_rank: torch.Tensor, defer: bool, previous: Previous
    ) -> tuple[Arena, Received]:
        """A cached dispatch whose rows are of another type or width than the handle's, for the first time."""
        # The tensor is the caller's, who may have resized it since; torch sums it up without a look at its storage.
        shape = (rows.x.shape[0], self.members.ranks)
        _checks.tensor("is_token_in_rank of the handle", in_rank, torch.bool, shape, rows.x.device)

        def rows_to() -> list[int]:
            previous.here()
            numbers: list[int] = in_rank.sum(0).tolist()
            return numbers

        hidden, topk = rows.x.shape[1], made.rows.topk
        # Rows of the handle's width bring no weights back: their results go along the handle.
        sizes = Sizes(made.rows.experts, 1 if hidden == made.rows.hidden else topk, hidden, rows.element)
        arena = self.communicators.normal(rows.x.device, sizes, rows_to)
        received = self._members(arena, rows.x, rows.scales, in_rank, defer, made.worst, previous)
        self._check_like(received.handle, made)
        return arena, received

    def _check_like(self, learnt: adapter.Handle, made: Routing) -> None:
        """Refuses a learnt routing that is not the one it stands for. Where counts stay on the GPU nobody looks: that would wait for it."""
        if not made.worst:
            self._check_learnt(learnt, rows_between(made.native, self.members.ranks))

    def _check_learnt(self, learnt: adapter.Handle, told: torch.Tensor) -> None:
        """Refuses a membership that brought other rows than the handle says. All ranks know the rows between all of them, and come to the same. Over
        several nodes a handle's tensors say only what came here.

        Args:
            told: int32 ``[ranks, ranks]``, as :func:`rows_between`; or this rank's column.
        """
        between = rows_between(learnt, self.members.ranks)
        between = between if told.dim() == 2 else between[:, self.communicators.meeting.rank]
        if told.dtype != torch.int32 or not torch.equal(between, told):
            raise errors.InvalidArgument(
                "is_token_in_rank of the handle brings other rows than its dispatch did, allowed: what it was then, on all ranks; "
                "it has been written to since, or was not that of topk_idx"
            )

    def _members(
        self,
        arena: Arena,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        in_rank: torch.Tensor,
        defer: bool,
        worst: int = 0,
        previous: Previous = NONE,
    ) -> Received:
        """A dispatch of a membership that says nothing of experts. ``worst``: rows to make room for, in calls along its handle, too."""
        nobody = [0] * arena.communicator.experts
        return self.communicators.in_turn(arena.communicator, previous).throughput.dispatch_members(
            x, in_rank, nobody, scales=scales, alignment=1, worst_rows=worst, device_counts=worst > 0, defer=defer
        )


def _width(x: object) -> int | None:
    """Columns of a matrix; None of whatever else."""
    if not isinstance(x, torch.Tensor):
        return None
    try:
        _, columns = x.shape
    except (RuntimeError, ValueError):  # nested; not two sizes
        return None
    return columns
