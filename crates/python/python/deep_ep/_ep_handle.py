"""What a dispatch of V2 leaves behind."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple, NoReturn

import torch
from moexpress import ByExpert, Communicator, adapter, errors

from . import _checks
from ._arena import Arena, Sizes
from ._expanded import Expansion, Placed, aligned, counted


class ElasticRouting(NamedTuple):
    """What lies beneath a handle."""

    communicator: Communicator
    arena: Arena | None
    """Of throughput mode; None for a small batch, which went by low latency."""
    sizes: Sizes
    native: adapter.Handle | adapter.LowHandle
    choices: torch.Tensor
    """int64 ``[rows, topk]``: expert on this rank, or -1. A copy: callers write to theirs."""
    source_rank: torch.Tensor
    """int32 ``[rows]``, defined for rows that came."""
    source_token: torch.Tensor
    """int32 ``[rows]``, likewise."""
    worst_rows: int
    """Rows that there is room for, where counts did not come to the host; else 0."""
    by_expert: ByExpert | None
    """Where the rows stand, where the dispatch brought them by expert."""
    generation: int
    """Recoveries of the buffer before."""


class EPHandle:
    """Of a dispatch, for combines and for cached dispatches. Tensors that no call needs are computed when they are read.

    Attributes:
        do_expand: whether the dispatch expanded its rows.
        num_experts: experts in all.
        expert_alignment: each expert's rows were aligned to this.
        num_max_tokens_per_rank: bound on the tokens of each rank; ``recv_src_metadata`` counts with it.
        num_sms: of the dispatch.
        topk_idx: int64 ``[tokens, topk]``: its choices.
        num_recv_tokens: rows received, or those that there is room for where counts did not come to the host.
        num_expanded_tokens: the same of expanded rows.
        num_recv_tokens_per_expert_list: choices of each local expert, rounded up to the alignment; empty where counts did not come to
            the host.
        psum_num_recv_tokens_per_scaleup_rank: int32 ``[ranks]``: rows from each rank and those before it.
        psum_num_recv_tokens_per_expert: int32 ``[local experts]``: choices of each expert and those before it, rounded up; of expanded
            rows the place behind each expert's last row.
        num_unaligned_recv_tokens_per_expert: int32 ``[local experts]``: choices of each expert.
        recv_src_metadata: int32 ``[rows, topk + 2]``: ``source rank * num_max_tokens_per_rank + token``; ``source rank * topk +`` the
            first choice that is of this rank; the expanded row of each choice, or -1. All of it -1 where no row came.
        dst_buffer_slot_idx: int32 ``[tokens, topk]``: the row's number among those that this rank sends to the choice's rank; -1 where
            an earlier choice of the token goes there, or for a dropped one.
        token_metadata_at_forward, channel_linked_list: None: nothing here needs them, on several nodes either.
    """

    def __init__(
        self,
        do_expand: bool,
        num_experts: int,
        expert_alignment: int,
        num_max_tokens_per_rank: int,
        num_sms: int,
        topk_idx: torch.Tensor,
        num_recv_tokens: int,
        num_expanded_tokens: int,
        num_recv_tokens_per_expert_list: list[int],
        psum_num_recv_tokens_per_scaleup_rank: torch.Tensor | None,
        psum_num_recv_tokens_per_expert: torch.Tensor | None,
        num_unaligned_recv_tokens_per_expert: torch.Tensor | None,
        recv_src_metadata: torch.Tensor | None,
        dst_buffer_slot_idx: torch.Tensor | None,
        token_metadata_at_forward: torch.Tensor | None,
        channel_linked_list: torch.Tensor | None,
    ) -> None:
        self.do_expand = do_expand
        self.num_experts = num_experts
        self.expert_alignment = expert_alignment
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_sms = num_sms
        self.topk_idx = topk_idx
        self.num_recv_tokens = num_recv_tokens
        self.num_expanded_tokens = num_expanded_tokens
        self.num_recv_tokens_per_expert_list = num_recv_tokens_per_expert_list
        self.token_metadata_at_forward = token_metadata_at_forward
        self.channel_linked_list = channel_linked_list
        given = {
            "psum_num_recv_tokens_per_scaleup_rank": psum_num_recv_tokens_per_scaleup_rank,
            "psum_num_recv_tokens_per_expert": psum_num_recv_tokens_per_expert,
            "num_unaligned_recv_tokens_per_expert": num_unaligned_recv_tokens_per_expert,
            "recv_src_metadata": recv_src_metadata,
            "dst_buffer_slot_idx": dst_buffer_slot_idx,
        }
        vars(self).update({name: tensor for name, tensor in given.items() if tensor is not None})
        self._routing: ElasticRouting | None = None
        self._in_throughput: dict[int, ElasticRouting] = {}
        """By the width of results, once some were to go back that do not go along :attr:`routing`: of another width than the rows, or of a small batch
        what low latency does not bring back."""

    def __reduce__(self) -> NoReturn:
        raise errors.Unsupported("a copy of an EPHandle is not supported: use the one that dispatch returned")

    @property
    def routing(self) -> ElasticRouting:
        """What lies beneath. Refuses a handle that no dispatch made."""
        if self._routing is None:
            raise errors.InvalidArgument("handle is put together by hand, allowed: one that dispatch returned")
        return self._routing

    @cached_property
    def expansion(self) -> Expansion | Placed:
        """Where its rows stand when they are expanded."""
        routing = self.routing
        if routing.by_expert is not None:
            return Placed(routing.by_expert, self.num_expanded_tokens)
        local = routing.communicator.local_experts
        return Expansion(routing.choices, local, self.expert_alignment, self.num_expanded_tokens)

    @cached_property
    def num_unaligned_recv_tokens_per_expert(self) -> torch.Tensor:
        """See the class."""
        return counted(self.routing.choices, self.routing.communicator.local_experts)

    @cached_property
    def psum_num_recv_tokens_per_expert(self) -> torch.Tensor:
        """See the class."""
        if self.do_expand:
            return self.expansion.psum
        return aligned(self.num_unaligned_recv_tokens_per_expert, self.expert_alignment).cumsum(0).int()

    @cached_property
    def psum_num_recv_tokens_per_scaleup_rank(self) -> torch.Tensor:
        """See the class."""
        ranks = self.routing.communicator.ranks
        source = self.routing.source_rank.long().masked_fill(self.absent, -1)
        return counted(source, ranks).cumsum(0).int()

    @cached_property
    def recv_src_metadata(self) -> torch.Tensor:
        """See the class."""
        choices, source = self.routing.choices, self.routing.source_rank
        rows, topk = choices.shape
        metadata = torch.full((rows, topk + 2), -1, dtype=torch.int32, device=choices.device)
        # What is first true is the least index of the largest.
        first = (choices >= 0).int().argmax(1).int() if rows else source
        metadata[:, 0] = source * self.num_max_tokens_per_rank + self.routing.source_token
        metadata[:, 1] = source * topk + first
        if self.do_expand:
            metadata[:, 2:] = self.expansion.slots
        return metadata.masked_fill_(self.absent.unsqueeze(1), -1)

    @cached_property
    def dst_buffer_slot_idx(self) -> torch.Tensor:
        """See the class."""
        ranks = self.routing.communicator.ranks
        local, topk_idx = self.num_experts // ranks, self.topk_idx
        # The caller's own, where the handle has no copy.
        shape = (self.routing.native.tokens, self.routing.sizes.topk)
        _checks.tensor("topk_idx of the handle", topk_idx, torch.int64, shape, self.routing.choices.device)
        to = torch.where(topk_idx < 0, ranks, topk_idx.div(local, rounding_mode="floor"))
        goes = torch.zeros((topk_idx.shape[0], ranks + 1), dtype=torch.int32, device=topk_idx.device).scatter_(1, to, 1)
        number = (goes.cumsum(0) - 1).gather(1, to)
        earlier = (to.unsqueeze(2) == to.unsqueeze(1)).tril(-1).any(2)
        return number.masked_fill((topk_idx < 0) | earlier, -1).int()

    @cached_property
    def absent(self) -> torch.Tensor:
        """bool ``[rows]``: rows that did not come, for which there was room."""
        return (self.routing.choices < 0).all(1)
