"""Which ranks and experts a batch goes to, from the router's choices."""

from __future__ import annotations

import torch
from moexpress import adapter, errors
from moexpress.adapter import current_stream, limits, load_kernels, plain

from . import _checks

MOST_EXPERTS = 1 << 16
"""Bound on experts."""

Membership = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""int32 ``[ranks]``: tokens for each rank, counted once a rank. int32 ``[experts]``: choices of each expert. bool ``[tokens, ranks]``:
whether the token goes to the rank."""


class Members:
    """Computes them for so many ranks, nodes of ``ranks_per_node`` each or else one: on GPUs one kernel on the current stream, which no
    host waits for."""

    def __init__(self, ranks: int, ranks_per_node: int | None = None) -> None:
        self.ranks, self.ranks_per_node = ranks, ranks_per_node or ranks
        self.nodes = ranks // self.ranks_per_node
        self._of: dict[torch.device, adapter.Members] = {}

    @plain
    def of(self, topk_idx: torch.Tensor, experts: int) -> Membership:
        """That of int64 ``[tokens, topk]``, -1 for a dropped choice."""
        topk_idx = _checks.topk_idx(topk_idx)
        ranks = self.ranks
        experts = limits.number("num_experts", experts, 1, MOST_EXPERTS)
        if experts % ranks:
            raise errors.InvalidArgument(f"num_experts is {experts}, allowed: a multiple of the {ranks} ranks")
        device, (tokens, topk) = topk_idx.device, topk_idx.shape
        if device.type == "npu":
            # Counted by the host, which waits for the choices.
            numbers, experts_of, in_rank = self.of(topk_idx.cpu(), experts)
            return numbers.to(device), experts_of.to(device), in_rank.to(device)
        native = self._of.get(device)
        if native is None:
            native = self._of[device] = _on(device)
        topk_idx = topk_idx.contiguous()
        numbers = torch.empty_strided((ranks + experts,), (1,), dtype=torch.int32, device=device)
        in_rank = torch.empty_strided((tokens, ranks), (ranks, 1), dtype=torch.bool, device=device)
        stream = current_stream(device.index) if device.type == "cuda" else 0
        batch = (topk_idx.data_ptr(), tokens, topk, ranks, experts)
        native.compute(stream, batch, numbers.data_ptr(), in_rank.data_ptr())
        return numbers[:ranks], numbers[ranks:], in_rank

    def of_nodes(self, in_rank: torch.Tensor) -> torch.Tensor | None:
        """int32 ``[nodes]``: tokens for each node, counted once a node; None on one."""
        if self.nodes == 1:
            return None
        return in_rank.view(-1, self.nodes, self.ranks_per_node).any(2).sum(0, dtype=torch.int32)


def _on(device: torch.device) -> adapter.Members:
    if device.type == "cpu":
        return adapter.Members()
    if device.type != "cuda":
        raise errors.InvalidArgument(f"device of topk_idx is {device}, allowed: cpu, cuda or npu")
    load_kernels()
    return adapter.Members(device.index)
