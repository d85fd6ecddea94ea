"""Dispatch and combine of V2 beneath a buffer, with checked options. ``defer``: asynchronous. ``previous``: what a call comes behind then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from moexpress import Received, adapter, errors
from moexpress.adapter import check, plain

from . import _checks
from ._arena import Arena, Sizes
from ._communicators import Communicators
from ._elastic_terms import Combined, Counting, Dispatched, Layout, behind, expanded
from ._ep_handle import ElasticRouting, EPHandle
from ._expanded import Expansion, Placed
from ._lent import followed
from ._members import Members
from ._previous import NONE, Previous
from ._scales import Rows, column_major
from ._small import Small
from ._taking import Rows_t, event, taken

P = ParamSpec("P")
R = TypeVar("R")


def _poisons(call: Callable[Concatenate[Elastic, P], R]) -> Callable[Concatenate[Elastic, P], R]:
    """``call``, whose failure is one of the whole buffer, whatever communicator carried it."""

    @wraps(call)
    def poisoning(calls: Elastic, /, *arguments: P.args, **named: P.kwargs) -> R:
        try:
            return call(calls, *arguments, **named)
        except errors.OperationFailed as failure:
            calls.communicators.poison(failure)
            raise

    return poisoning


class Elastic:
    """The calls of :class:`ElasticBuffer` by the same names."""

    def __init__(self, communicators: Communicators, members: Members, small: Small) -> None:
        self.communicators, self.members, self.small = communicators, members, small

    @_poisons
    @followed
    @plain
    @torch.no_grad()
    def dispatch(
        self,
        x: Rows_t,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        stats: torch.Tensor | None,
        experts: int,
        counting: Counting,
        num_sms: int,
        copies_choices: bool,
        layout: Layout,
        defer: bool,
        previous: Previous = NONE,
    ) -> Dispatched:
        rows = Rows.of(x, previous)
        tokens, device = rows.x.shape[0], rows.x.device
        topk = self._choices(rows, topk_idx, topk_weights)
        if tokens > counting.most_tokens:
            raise errors.InvalidArgument(
                f"tokens of x are {tokens}, allowed: at most {counting.most_tokens}, num_max_tokens_per_rank"
            )
        if stats is not None:
            local = experts // self.members.ranks
            _checks.tensor("cumulative_local_expert_recv_stats", stats, torch.int32, (local,), device)
        sizes = Sizes(experts, topk, rows.x.shape[1], rows.element)
        worst = 0 if counting.sync else self.members.ranks * counting.most_tokens
        if self.small.takes(sizes, counting, layout, device):
            of_batch = topk_idx, topk_weights, stats
            return self.small.dispatch(
                rows, of_batch, sizes, counting, worst, num_sms, copies_choices, layout, defer, previous
            )
        arena, received = self._sent(
            rows,
            (topk_idx, topk_weights),
            experts,
            counting.alignment,
            worst,
            defer,
            layout.expand,
            layout.zeros,
            previous,
        )
        # Before anything else may fail on this rank alone: the ranks count together.
        if not worst:
            self.communicators.enlarge(sizes, arena, received.handle.most_rows())
        if defer:
            for given in (stats, topk_idx):
                arena.communicator.order.beyond(given)
        with self._behind(arena, defer):
            kept = topk_idx.clone() if copies_choices else topk_idx
            handle = _handle(arena, received, sizes, kept, counting, worst, num_sms, layout.expand)
            handle._routing = self._routing_of(arena, received, sizes, worst, handed=not layout.expand)
            if stats is not None:
                counts = handle.num_unaligned_recv_tokens_per_expert
                with torch.inference_mode():  # where the caller may have made it
                    stats += counts
        handed, weights = self._handed(rows, received, arena, handle, layout, topk_weights is not None, defer)
        over = event(arena.communicator, defer)
        return handed, None if layout.expand else received.topk_idx, weights, handle, over

    @_poisons
    @followed
    @plain
    @torch.no_grad()
    def redispatch(
        self,
        x: Rows_t,
        handle: EPHandle,
        topk_weights: torch.Tensor | None,
        layout: Layout,
        defer: bool,
        previous: Previous = NONE,
    ) -> Dispatched:
        """A cached dispatch. Weights, and rows of another type or width than the handle's, do not travel along a handle: they
        are sent by the same choices once more, which brings them in the same order."""
        rows, routing = Rows.of(x, previous), handle.routing
        arena, sizes = routing.arena, routing.sizes
        are_alike = rows.element == sizes.element and rows.x.shape[1] == sizes.hidden
        if arena is None and are_alike and layout.expand == handle.do_expand:
            return self.small.redispatch(rows, handle, topk_weights, layout, defer, previous)
        if arena is not None and topk_weights is None and are_alike:
            communicator = self.communicators.in_turn(arena.communicator, previous)
            brought = communicator.throughput.redispatch(rows.x, _native(routing), rows.scales, defer)
            received = Received(brought, communicator.order)
            zeroed = False
        else:
            self._choices(rows, handle.topk_idx, topk_weights)
            of_batch, alignment = (handle.topk_idx, topk_weights), handle.expert_alignment
            by_expert, worst = routing.by_expert is not None, routing.worst_rows
            arena, received = self._sent(
                rows, of_batch, handle.num_experts, alignment, worst, defer, by_expert, layout.zeros, previous
            )
            if not routing.worst_rows and received.rows != handle.num_recv_tokens:
                raise _other_rows(received.rows, handle)
            zeroed = True
        if defer:
            # They are read behind the communicator's stream, and callers may let go of the handle before.
            arena.communicator.order.beyond(routing.choices)
        with_weights = topk_weights is not None
        handed, weights = self._handed(rows, received, arena, handle, layout, with_weights, defer, zeroed)
        with self._behind(arena, defer):
            choices = None if layout.expand else routing.choices.clone()
        return handed, choices, weights, handle, event(arena.communicator, defer)

    @_poisons
    @followed
    @plain
    @torch.no_grad()
    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None,
        bias: Any,
        reduces_twice: bool,
        defer: bool,
        previous: Previous = NONE,
    ) -> Combined:
        """``reduces_twice``: expanded results are summed, and rounded, at their rank, and then across ranks; else once."""
        routing, bias = handle.routing, _given(bias)
        hidden = x.shape[1] if isinstance(x, torch.Tensor) and x.dim() == 2 else routing.sizes.hidden
        if routing.arena is None or hidden != routing.sizes.hidden:
            # Before anything moves: what one rank is refused, the others would wait for.
            self._check_results(x, hidden, handle, topk_weights, bias)
            by_choice, is_alone = handle.do_expand and not reduces_twice, topk_weights is None and bias is None
            if is_alone and hidden == routing.sizes.hidden and self.small.by_choice >= by_choice:
                return self.small.combine(x, handle, by_choice, defer, previous)
            routing = self._by_throughput(handle, hidden)
        arena, weights = routing.arena, topk_weights
        assert arena is not None
        if handle.do_expand:
            is_placed = isinstance(handle.expansion, Placed)
            # The same on all ranks, whatever each sums beside.
            at_once = is_placed and x.device.type == "cuda" and self.communicators.meeting.nodes == 1
            if topk_weights is not None or not (at_once or (is_placed and reduces_twice)):
                # torch's operations fold them first.
                previous.here()
            weights = self._of_expanded(x, hidden, handle, topk_weights)
        self.communicators.in_turn(arena.communicator, previous)
        if handle.do_expand and not reduces_twice:
            sums, back = (self._once if at_once else self._by_choice)(x, handle, routing, weights, bias, defer)
        else:
            y = handle.expansion.reduced(x) if handle.do_expand else x
            throughput = arena.communicator.throughput
            combined = throughput.combine(y, _native(routing), topk_weights=weights, bias=bias, defer=defer)
            sums, back = combined.x, combined.topk_weights
        arena.look_at_results()
        return sums, back, event(arena.communicator, defer)

    @staticmethod
    def _check_results(
        x: torch.Tensor, hidden: int, handle: EPHandle, topk_weights: torch.Tensor | None, bias: Any
    ) -> None:
        """Refuses what are not results, weights and starts of a handle's batch."""
        routing, rows = handle.routing, handle.num_expanded_tokens if handle.do_expand else handle.num_recv_tokens
        device = routing.choices.device
        check.tensor("x", x, torch.bfloat16, ("rows", hidden), device)
        if x.shape[0] < rows:
            of = "expanded rows of the handle" if handle.do_expand else "those of the handle"
            raise errors.InvalidArgument(f"rows of x are {x.shape[0]}, allowed: at least {rows}, {of}")
        if topk_weights is not None:
            shape = (x.shape[0],) if handle.do_expand else (x.shape[0], routing.sizes.topk)
            _checks.tensor("topk_weights", topk_weights, torch.float32, shape, device)
        _starts(bias, (routing.native.tokens, hidden), device)

    def _by_throughput(self, handle: EPHandle, hidden: int) -> ElasticRouting:
        """The routing in throughput mode, for results of this width: those that do not go along the handle itself. Once a handle, by all ranks."""
        made = handle._in_throughput.get(hidden)
        if made is None:
            routing = handle.routing
            sizes = routing.sizes._replace(hidden=hidden)
            tokens, device = routing.native.tokens, routing.choices.device
            _checks.tensor("topk_idx of the handle", handle.topk_idx, torch.int64, (tokens, sizes.topk), device)
            rows = Rows(torch.zeros((tokens, hidden), dtype=torch.bfloat16, device=device))
            worst, alignment = routing.worst_rows, handle.expert_alignment
            of_batch = handle.topk_idx, None
            arena, received = self._sent(rows, of_batch, handle.num_experts, alignment, worst, False, handle.do_expand)
            if not worst and received.rows != handle.num_recv_tokens:
                raise _other_rows(received.rows, handle)
            made = handle._in_throughput[hidden] = self._routing_of(arena, received, sizes, worst, handed=False)
        return made

    def _once(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        routing: ElasticRouting,
        weights: torch.Tensor | None,
        bias: Any,
        defer: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sums of f32, rounded once, by three combines: each rank's sums travel as two bf16 numbers, with 16 significant bits; and what rounding the sum
        of the first ones here leaves comes by bringing them once more, starting from what they came to. On one node."""
        arena, native = routing.arena, _native(routing)
        assert arena is not None
        throughput = arena.communicator.throughput
        starts = _starts(bias, (native.tokens, routing.sizes.hidden), routing.choices.device)
        first = throughput.combine(x, native, topk_weights=weights, bias=None, defer=defer)
        with self._behind(arena, defer):
            back = -first.x
        left = throughput.combine(x, native, topk_weights=None, bias=back, defer=defer)
        rest = throughput.combine(x, native, topk_weights=None, bias=None, remainder=True, defer=defer)
        with self._behind(arena, defer):
            small = left.x + rest.x
            if not starts:
                return first.x + small, first.topk_weights
            sums = first.x.float().add_(small)
            for start in starts:
                arena.communicator.order.beyond(start)
                sums += start
            return sums.to(torch.bfloat16), first.topk_weights

    def _by_choice(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        routing: ElasticRouting,
        weights: torch.Tensor | None,
        bias: Any,
        defer: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Each choice's results come back by themselves; their token's rank sums them in f32 and rounds once."""
        arena, topk = routing.arena, routing.sizes.topk
        assert arena is not None
        throughput, sums, back = arena.communicator.throughput, None, None
        tokens = (routing.native.tokens, routing.sizes.hidden)
        starts = _starts(bias, tokens, routing.choices.device)
        for choice in range(topk):
            y = handle.expansion.of_choice(x, choice)
            # Weights travel once.
            combined = throughput.combine(
                y, _native(routing), topk_weights=weights if choice == 0 else None, bias=None, defer=defer
            )
            back = combined.topk_weights if choice == 0 else back
            with self._behind(arena, defer):
                if sums is None:
                    sums = torch.zeros(tokens, dtype=torch.float32, device=y.device)
                    for start in starts:
                        arena.communicator.order.beyond(start)
                        sums += start
                sums += combined.x
        assert sums is not None
        with self._behind(arena, defer):
            return sums.to(torch.bfloat16), back

    def _choices(self, rows: Rows, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None) -> int:
        """Refuses choices and weights that are not those of the rows; choices of a token."""
        tokens, device = rows.x.shape[0], rows.x.device
        _checks.whole("topk_idx", topk_idx)
        topk = topk_idx.shape[1] if topk_idx.dim() == 2 else 1
        _checks.tensor("topk_idx", topk_idx, torch.int64, (tokens, topk), device)
        if topk_weights is not None:
            _checks.tensor("topk_weights", topk_weights, torch.float32, (tokens, topk), device)
        return topk

    def _sent(
        self,
        rows: Rows,
        of_batch: tuple[torch.Tensor, torch.Tensor | None],
        experts: int,
        alignment: int,
        worst: int,
        defer: bool,
        by_expert: bool,
        zeros: bool = False,
        previous: Previous = NONE,
    ) -> tuple[Arena, Received]:
        """A dispatch by choices: ``of_batch``, with their weights. ``worst``: rows to make room for, where counts are not to come to the host.
        ``zeros``: in what is no row of those by expert; there may be more of it than rows, so it is not touched unless asked for."""
        topk_idx, topk_weights = of_batch

        def rows_to() -> list[int]:
            previous.here()
            counts: list[int] = self.members.of(topk_idx, experts)[0].tolist()
            return counts

        sizes = Sizes(experts, topk_idx.shape[1], rows.x.shape[1], rows.element)
        arena = self.communicators.normal(rows.x.device, sizes, rows_to, worst)
        received = self.communicators.in_turn(arena.communicator, previous).throughput.dispatch(
            rows.x,
            topk_idx,
            topk_weights,
            scales=rows.scales,
            alignment=alignment,
            by_expert=by_expert,
            worst_rows=worst,
            device_counts=worst > 0,
            zero_spare=zeros if by_expert else worst > 0,
            defer=defer,
        )
        return arena, received

    def _handed(
        self,
        rows: Rows,
        received: Received,
        arena: Arena,
        handle: EPHandle,
        layout: Layout,
        with_weights: bool,
        defer: bool,
        zeroed: bool = True,
    ) -> tuple[Rows_t, torch.Tensor | None]:
        """Rows and weights as the caller wants them. ``zeroed``: what is to be zeros is, unless torch's operations order the rows."""
        weights = received.topk_weights if with_weights else None
        with self._behind(arena, defer):
            expansion = handle.expansion if layout.expand or handle.routing.by_expert is not None else None
            if expansion is not None:
                if defer:
                    expansion.kept_for(arena.communicator)
                arena.has_placed()
                x, scales = _parts(rows.received(received.x, received.scales))
                order = layout._replace(zeros=layout.zeros and not zeroed)
                x = _ordered(expansion, x, order)
                scales = None if scales is None else _ordered(expansion, scales, order)
                if layout.expand and weights is not None:
                    told = received.by_expert.weights if received.by_expert is not None else None
                    weights = told if told is not None else expansion.weights(weights)
            else:
                x, scales = _parts(taken(rows, received, arena, defer))
            if scales is not None and layout.columns_first:
                scales = column_major(scales)
        return x if scales is None else (x, scales), weights

    def _routing_of(self, arena: Arena, received: Received, sizes: Sizes, worst: int, handed: bool) -> ElasticRouting:
        """What lies beneath a handle of throughput mode. ``handed``: the caller gets the choices, too, and may write there."""
        assert received.topk_idx is not None
        source, choices = (received.source_rank, received.source_token), received.topk_idx
        choices = choices.clone() if handed else choices
        communicator, generation = arena.communicator, self.communicators.generation
        return ElasticRouting(
            communicator, arena, sizes, received.handle, choices, *source, worst, received.by_expert, generation
        )

    @staticmethod
    def _of_expanded(
        x: torch.Tensor, hidden: int, handle: EPHandle, topk_weights: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Refuses what are not the handle's expanded rows and weights; the weights as they travel."""
        device = handle.routing.choices.device
        check.tensor("x", x, torch.bfloat16, ("rows", hidden), device)
        room = handle.expansion.room
        if x.shape[0] < room:
            raise errors.InvalidArgument(
                f"rows of x are {x.shape[0]}, allowed: at least {room}, expanded rows of the handle"
            )
        if topk_weights is None:
            return None
        _checks.tensor("topk_weights", topk_weights, torch.float32, (x.shape[0],), device)
        return handle.expansion.folded(topk_weights)

    @staticmethod
    def _behind(arena: Arena, defer: bool) -> AbstractContextManager[Any]:
        return behind(arena.communicator, defer)


def _handle(
    arena: Arena,
    received: Received,
    sizes: Sizes,
    topk_idx: torch.Tensor,
    counting: Counting,
    worst: int,
    num_sms: int,
    expand: bool,
) -> EPHandle:
    """What a dispatch leaves behind. ``worst``: rows there is room for, where counts did not come to the host."""
    counts = [] if worst else received.expert_counts
    return EPHandle(
        do_expand=expand,
        num_experts=sizes.experts,
        expert_alignment=counting.alignment,
        num_max_tokens_per_rank=counting.most_tokens,
        num_sms=num_sms,
        topk_idx=topk_idx,
        num_recv_tokens=worst or received.rows,
        num_expanded_tokens=expanded(counts, worst, sizes, arena.communicator.local_experts, counting.alignment),
        num_recv_tokens_per_expert_list=counts,
        # Computed when they are read.
        psum_num_recv_tokens_per_scaleup_rank=None,
        psum_num_recv_tokens_per_expert=None,
        num_unaligned_recv_tokens_per_expert=None,
        recv_src_metadata=None,
        dst_buffer_slot_idx=None,
        token_metadata_at_forward=None,
        channel_linked_list=None,
    )


def _native(routing: ElasticRouting) -> adapter.Handle:
    assert isinstance(routing.native, adapter.Handle)
    return routing.native


def _other_rows(rows: int, handle: EPHandle) -> errors.InvalidArgument:
    return errors.InvalidArgument(
        f"rows received are {rows}, allowed: {handle.num_recv_tokens}, those of the handle; "
        "topk_idx of some rank has been written to since"
    )


def _ordered(expansion: Expansion | Placed, x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Received rows expanded, or by received row: as they come from dispatches of :class:`Placed` by expert, and of :class:`Expansion`
    by received row."""
    if not isinstance(expansion, Placed):
        return expansion.rows(x)
    if not layout.expand:
        return expansion.by_row(x)
    return expansion.zeroed(x) if layout.zeros else x


def _parts(rows: Rows_t) -> tuple[torch.Tensor, torch.Tensor | None]:
    return rows if isinstance(rows, tuple) else (rows, None)


def _given(bias: Any) -> Any:
    """``bias``, or None where there is nothing in it: such a combine goes as one without."""
    is_empty = isinstance(bias, (tuple, list)) and len(bias) <= 2 and all(start is None for start in bias)
    return None if is_empty else bias


def _starts(bias: Any, shape: tuple[int, int], device: torch.device) -> Sequence[torch.Tensor]:
    """What sums start from, checked."""
    given = () if bias is None else bias if isinstance(bias, (tuple, list)) else (bias,)
    if len(given) > 2:
        raise errors.InvalidArgument(f"number of biases is {len(given)}, allowed: at most 2")
    for number, start in enumerate(given):
        if start is not None:
            _checks.tensor(f"bias {number}", start, torch.bfloat16, shape, device)
    return [start for start in given if start is not None]
