"""Small batches of V2, by low latency: one launch a call, where throughput mode takes up to five. Rows lie as throughput mode would have brought
them, and sums are the same bit for bit."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
from moexpress import Communicator, LowReceived, adapter, errors
from moexpress.adapter import check

from . import _arena, _checks
from ._arena import Sizes
from ._communicators import Communicators
from ._elastic_terms import Combined, Counting, Dispatched, behind, expanded
from ._ep_handle import ElasticRouting, EPHandle
from ._taking import Rows_t, event
from .utils.math import align

LOG = logging.getLogger("deep_ep")

MOST_TOKENS = 128
"""Bound on the tokens of a rank. Larger batches are as fast in throughput mode, which takes less memory for them."""


class Told(NamedTuple):
    """What a small dispatch brought, cut to the rows that there are, or that there is room for."""

    x: torch.Tensor
    choices: torch.Tensor
    """int64 ``[rows, topk]``, for the caller."""
    own_choices: torch.Tensor
    """The same, for the handle."""
    weights: torch.Tensor
    source_rank: torch.Tensor
    source_token: torch.Tensor
    first_of: torch.Tensor
    """int32 ``[ranks + 1]``."""
    counts: torch.Tensor
    """int32 ``[local experts]``."""

    @staticmethod
    def of(received: LowReceived, rows: int) -> Told:
        """Its first ``rows`` rows."""
        choices, own, weights = received.topk_idx, received.topk_idx_too, received.topk_weights
        source_rank, first_of = received.source_rank, received.first_of
        assert choices is not None and own is not None and weights is not None
        assert source_rank is not None and first_of is not None
        return Told(
            received.x[:rows],
            choices[:rows],
            own[:rows],
            weights[:rows],
            source_rank[:rows],
            received.source_token[:rows],
            first_of,
            received.expert_counts,
        )


class Small:
    """Which batches are small, and the communicators that carry them.

    Args:
        communicators: of the buffer.
        most_tokens: the buffer's bound on the tokens of a rank, 0 for none.
    """

    def __init__(self, communicators: Communicators, most_tokens: int) -> None:
        self.communicators = communicators
        self.most_tokens = min(most_tokens or MOST_TOKENS, MOST_TOKENS)
        self._too_large: set[Sizes] = set()

    def takes(self, sizes: Sizes, most_tokens: int, device: torch.device) -> bool:
        """Whether batches of these sizes go this way: the same on all ranks, of what all of them name alike."""
        return (
            most_tokens <= self.most_tokens
            and sizes.element == "bf16"
            and self.communicators.meeting.nodes == 1
            and _arena.kind(device) != "npu"
            and self._is_made(sizes, device)
        )

    def communicator(self, sizes: Sizes, device: torch.device) -> Communicator:
        """The one that carries them."""
        return self.communicators.low(device, sizes, self.most_tokens)

    def dispatch(
        self,
        x: Rows_t,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        stats: torch.Tensor | None,
        sizes: Sizes,
        counting: Counting,
        worst: int,
        num_sms: int,
        copies_choices: bool,
        defer: bool,
    ) -> Dispatched:
        assert isinstance(x, torch.Tensor)
        communicator = self.communicator(sizes, x.device)
        received = communicator.in_low_latency.dispatch(
            x, topk_idx, topk_weights, stats, by_source=True, host_counts=counting.sync, defer=defer
        )
        assert received.handle is not None
        told = Told.of(received, worst or received.handle.rows or 0)
        counts = [] if worst else [align(count, counting.alignment) for count in received.handle.expert_counts]
        with behind(communicator, defer):
            kept = topk_idx.clone() if copies_choices else topk_idx
        handle = EPHandle(
            do_expand=False,
            num_experts=sizes.experts,
            expert_alignment=counting.alignment,
            num_max_tokens_per_rank=counting.most_tokens,
            num_sms=num_sms,
            topk_idx=kept,
            num_recv_tokens=len(told.choices),
            num_expanded_tokens=expanded(counts, worst, sizes, communicator.local_experts, counting.alignment),
            num_recv_tokens_per_expert_list=counts,
            psum_num_recv_tokens_per_scaleup_rank=told.first_of[1:],
            psum_num_recv_tokens_per_expert=None,
            num_unaligned_recv_tokens_per_expert=told.counts,
            recv_src_metadata=None,
            dst_buffer_slot_idx=None,
            token_metadata_at_forward=None,
            channel_linked_list=None,
        )
        source = told.source_rank, told.source_token
        handle._routing = ElasticRouting(
            communicator, None, sizes, received.handle, told.own_choices, *source, worst, None
        )
        weights = None if topk_weights is None else told.weights
        return told.x, told.choices, weights, handle, event(communicator, defer)

    def redispatch(self, x: Rows_t, handle: EPHandle, topk_weights: torch.Tensor | None, defer: bool) -> Dispatched:
        assert isinstance(x, torch.Tensor)
        routing = handle.routing
        communicator, native = routing.communicator, routing.native
        assert isinstance(native, adapter.LowHandle)
        if topk_weights is not None:
            shape = (native.tokens, routing.sizes.topk)
            _checks.tensor("topk_weights", topk_weights, torch.float32, shape, x.device)
        received = communicator.in_low_latency.redispatch(x, native, topk_weights, defer)
        told = Told.of(received, handle.num_recv_tokens)
        weights = None if topk_weights is None else told.weights
        return told.x, told.choices, weights, handle, event(communicator, defer)

    def combine(self, x: torch.Tensor, handle: EPHandle, defer: bool) -> Combined:
        routing = handle.routing
        communicator, native = routing.communicator, routing.native
        assert isinstance(native, adapter.LowHandle)
        check.tensor("x", x, torch.bfloat16, ("rows", routing.sizes.hidden), routing.choices.device)
        if x.shape[0] < handle.num_recv_tokens:
            raise errors.InvalidArgument(
                f"rows of x are {x.shape[0]}, allowed: at least {handle.num_recv_tokens}, those of the handle"
            )
        sums = communicator.in_low_latency.combine(x, native, None, None, defer)
        return sums, None, event(communicator, defer)

    def _is_made(self, sizes: Sizes, device: torch.device) -> bool:
        if sizes in self._too_large:
            return False
        try:
            self.communicator(sizes, device)
        except errors.InvalidArgument as error:
            # Sizes that low latency does not have, which all ranks find alike.
            LOG.info("small batches go by throughput mode: %s", error)
            self._too_large.add(sizes)
            return False
        return True
