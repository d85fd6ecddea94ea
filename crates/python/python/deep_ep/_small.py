"""Small batches of V2, by low latency: one launch a call, where throughput mode takes up to six. Rows lie as throughput mode would have brought
them, expanded or not, and sums are the same bit for bit, but for those of GPUs that are rounded once."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
from moexpress import ByExpert, Communicator, LowReceived, adapter, errors
from moexpress.adapter import BY_SOURCE

from . import _arena, _checks
from ._arena import Sizes
from ._communicators import Communicators
from ._elastic_terms import Combined, Counting, Dispatched, Layout, behind, expanded
from ._ep_handle import ElasticRouting, EPHandle
from ._previous import NONE, Previous
from ._scales import Rows, column_major
from ._taking import Rows_t, event
from .utils.math import align

LOG = logging.getLogger("deep_ep")

LEAST_BOUND = 128
MOST_ROWS = 512


def most_small(world: int) -> int:
    """Bound on the tokens of a rank, of so many ranks: as many as send 512 rows to others, and 128 at least. Larger batches are as fast in throughput
    mode, whose rows take three quarters of the bytes on the links, and which takes less memory for them."""
    return max(LEAST_BOUND, MOST_ROWS // max(world - 1, 1))


MOST_SLOTS = 1 << 16
"""Bound on the expanded rows that there is room for: large alignments are for batches that fill them."""


class Told(NamedTuple):
    """What a small dispatch brought, cut to the rows that there are, or that there is room for."""

    x: Rows_t
    choices: torch.Tensor | None
    """int64 ``[rows, topk]``, for the caller; none with expanded rows."""
    own_choices: torch.Tensor
    """The same, for the handle."""
    weights: torch.Tensor
    """f32 ``[rows, topk]``, or ``[expanded rows]``."""
    source_rank: torch.Tensor
    source_token: torch.Tensor
    first_of: torch.Tensor
    """int32 ``[ranks + 1]``."""
    counts: torch.Tensor
    """int32 ``[local experts]``."""
    by_expert: ByExpert | None
    """Where expanded rows stand."""

    @staticmethod
    def of(sent: Rows, received: LowReceived, rows: int, slots: int, layout: Layout) -> Told:
        """Its first ``rows`` rows, of expanded ones the first ``slots``, in the form of what was sent."""
        scales, lying = received.scales, slots if layout.expand else rows
        x = sent.received(received.x[:lying], None if scales is None else scales[:lying])
        if layout.columns_first and isinstance(x, tuple):
            x = x[0], column_major(x[1])
        own, source_rank, first_of = received.topk_idx_too, received.source_rank, received.first_of
        assert own is not None and source_rank is not None and first_of is not None
        choices = None if layout.expand else received.topk_idx
        weights = received.slot_weights if layout.expand else received.topk_weights
        assert weights is not None
        by_expert = None
        if layout.expand:
            places, first = received.slots, received.first_slots
            assert places is not None and first is not None
            by_expert = ByExpert([], [], places[:rows], None, (first, received.expert_counts))
        return Told(
            x,
            None if choices is None else choices[:rows],
            own[:rows],
            weights[:lying],
            source_rank[:rows],
            received.source_token[:rows],
            first_of,
            received.expert_counts,
            by_expert,
        )


class Small:
    """Which batches are small, and the communicators that carry them.

    Args:
        communicators: of the buffer.
        most_tokens: the buffer's bound on the tokens of a rank, 0 for none.
        by_choice: whether expanded results come back choice by choice, and are rounded once.
    """

    def __init__(self, communicators: Communicators, most_tokens: int, by_choice: bool) -> None:
        self.communicators, self.by_choice = communicators, by_choice
        bound = most_small(communicators.meeting.world)
        self.most_tokens = min(most_tokens or bound, bound)
        self._too_large: set[Sizes] = set()
        # Those of which both communicators were made.
        self._made: set[Sizes] = set()
        self._bounds: set[tuple[int, int]] = set()
        # Weights of results that come back choice by choice, each as it is: f32 ``[most_tokens, topk]``, by topk and device.
        self._ones: dict[tuple[int, torch.device], torch.Tensor] = {}
        self._generation = 0

    def takes(self, sizes: Sizes, counting: Counting, layout: Layout, device: torch.device) -> bool:
        """Whether batches of these sizes go this way: the same on all ranks, of what all of them name alike."""
        most_tokens, alignment = counting.most_tokens, counting.alignment if layout.expand else 0
        return (
            most_tokens <= self.most_tokens
            and sizes.element in ("bf16", "fp8", "fp8-ue8m0")
            and self.communicators.meeting.nodes == 1
            and _arena.kind(device) != "npu"
            and self._is_agreed(most_tokens, alignment, device)
            and (not alignment or self._slots(sizes, self.most_tokens, alignment) <= MOST_SLOTS)
            and self._is_made(sizes, device)
        )

    def communicator(self, sizes: Sizes, device: torch.device) -> Communicator:
        """The one that carries them."""
        return self.communicators.low(device, sizes, self.most_tokens, per_choice=self.by_choice)

    def dispatch(
        self,
        rows: Rows,
        given: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
        sizes: Sizes,
        counting: Counting,
        worst: int,
        num_sms: int,
        copies_choices: bool,
        layout: Layout,
        defer: bool,
        previous: Previous = NONE,
    ) -> Dispatched:
        """``given``: choices, weights, and what counts are added to."""
        topk_idx, topk_weights, stats = given
        communicator = self.communicator(sizes, rows.x.device)
        slots = self._slots(sizes, counting.most_tokens, counting.alignment)
        lies, most = ((counting.alignment, layout.zeros), slots) if layout.expand else (BY_SOURCE, worst)
        calls = self.communicators.in_turn(communicator, previous).in_low_latency
        received = calls.dispatch(
            rows.x,
            topk_idx,
            topk_weights,
            stats,
            lies=lies,
            host_counts=counting.sync,
            defer=defer,
            scales=rows.scales,
            most_rows=most or None,
        )
        native = received.handle
        assert native is not None
        counts = [] if worst else [align(count, counting.alignment) for count in native.expert_counts]
        slots = slots if worst else sum(counts)
        with behind(communicator, defer):
            told = Told.of(rows, received, worst or native.rows or 0, slots, layout)
            # What is beneath reads its own once more: the caller may write to his.
            kept = calls.choices(native).clone() if copies_choices else topk_idx
        handle = EPHandle(
            do_expand=layout.expand,
            num_experts=sizes.experts,
            expert_alignment=counting.alignment,
            num_max_tokens_per_rank=counting.most_tokens,
            num_sms=num_sms,
            topk_idx=kept,
            num_recv_tokens=len(told.own_choices),
            num_expanded_tokens=slots,
            num_recv_tokens_per_expert_list=counts,
            psum_num_recv_tokens_per_scaleup_rank=told.first_of[1:],
            psum_num_recv_tokens_per_expert=None,
            num_unaligned_recv_tokens_per_expert=told.counts,
            recv_src_metadata=None,
            dst_buffer_slot_idx=None,
            token_metadata_at_forward=None,
            channel_linked_list=None,
        )
        source, generation = (told.source_rank, told.source_token), self.communicators.generation
        handle._routing = ElasticRouting(
            communicator, None, sizes, native, told.own_choices, *source, worst, told.by_expert, generation
        )
        weights = None if topk_weights is None else told.weights
        return told.x, told.choices, weights, handle, event(communicator, defer)

    def redispatch(
        self,
        rows: Rows,
        handle: EPHandle,
        topk_weights: torch.Tensor | None,
        layout: Layout,
        defer: bool,
        previous: Previous = NONE,
    ) -> Dispatched:
        """A cached dispatch. Weights travel, if there are some."""
        routing = handle.routing
        communicator, native = routing.communicator, routing.native
        assert isinstance(native, adapter.LowHandle)
        if topk_weights is not None:
            shape = (native.tokens, routing.sizes.topk)
            _checks.tensor("topk_weights", topk_weights, torch.float32, shape, rows.x.device)
        calls = self.communicators.in_turn(communicator, previous).in_low_latency
        received = calls.redispatch(rows.x, native, topk_weights, defer, rows.scales, layout.zeros)
        with behind(communicator, defer):
            told = Told.of(rows, received, handle.num_recv_tokens, handle.num_expanded_tokens, layout)
        weights = None if topk_weights is None else told.weights
        return told.x, told.choices, weights, handle, event(communicator, defer)

    def combine(
        self, x: torch.Tensor, handle: EPHandle, by_choice: bool, defer: bool, previous: Previous = NONE
    ) -> Combined:
        """Of rows alone, without weights and bias. ``by_choice``: expanded results come back choice by choice."""
        routing = handle.routing
        communicator, native = routing.communicator, routing.native
        assert isinstance(native, adapter.LowHandle)
        weights = None
        if by_choice:
            weights = self._ones[routing.sizes.topk, x.device][: native.tokens]
        calls = self.communicators.in_turn(communicator, previous).in_low_latency
        sums = calls.combine(x, native, weights, None, defer)
        return sums, None, event(communicator, defer)

    def _slots(self, sizes: Sizes, most_tokens: int, alignment: int) -> int:
        """Expanded rows that there is room for."""
        world = self.communicators.meeting.world
        return expanded([], world * most_tokens, sizes, sizes.experts // world, alignment)

    def _is_agreed(self, most_tokens: int, alignment: int, device: torch.device) -> bool:
        """Refuses bounds, and alignments of expanded rows, that are not the same on all ranks: they say how batches go, and how many rows there is room
        for. ``alignment``: 0 for rows that are not expanded."""
        if self._generation != self.communicators.generation:
            # What failed may have been agreed on some ranks alone.
            self._bounds, self._made, self._too_large = set(), set(), set()
            self._generation = self.communicators.generation
        if (most_tokens, alignment) not in self._bounds:
            self.communicators.check(device)
            self.communicators.meeting.agree(
                {"num_max_tokens_per_rank": most_tokens, "expert_alignment of expanded rows": alignment}
            )
            self._bounds.add((most_tokens, alignment))
        return True

    def _is_made(self, sizes: Sizes, device: torch.device) -> bool:
        communicators = self.communicators
        if sizes in self._made and communicators.has_low(sizes, self.most_tokens):
            communicators.check(device)
            return True
        in_throughput = sizes._replace(element="bf16")
        if communicators.has_low(sizes, self.most_tokens) and communicators.has_normal(in_throughput):
            self._made.add(sizes)
            return True
        if sizes in self._too_large or communicators.has_lost:
            return False
        communicators.refuse_first(device)
        if self.by_choice and (sizes.topk, device) not in self._ones:
            shape = (self.most_tokens, sizes.topk)
            self._ones[sizes.topk, device] = torch.ones(shape, dtype=torch.float32, device=device)
            if device.type == "cuda":
                # Any stream may read them later.
                torch.cuda.current_stream(device).synchronize()
        # What differs between ranks is an error of this call, and is not remembered.
        communicators.meeting.agree({"device": device.type, **sizes._asdict()})
        try:
            self.communicator(sizes, device)
        except errors.InvalidArgument as error:
            # Sizes that low latency does not have, or for which some rank has no memory: all ranks are told alike.
            LOG.info("small batches go by throughput mode: %s", error)
            self._too_large.add(sizes)
            return False
        # What low latency does not bring back goes by throughput mode, perhaps in a capture, or when a rank is gone: neither can make one then.
        communicators.normal(device, in_throughput, lambda: [0] * communicators.meeting.world, self._room())
        self._made.add(sizes)
        return True

    def _room(self) -> int:
        """Rows of a rank's largest batch."""
        return self.communicators.meeting.world * self.most_tokens
