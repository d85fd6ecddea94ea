"""Which ranks and experts a batch goes to, from the router's choices. Tensor operations only: no host is waited for."""

from __future__ import annotations

import torch


def dispatch_layout(
    topk_idx: torch.Tensor, ranks: int, experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Counts and membership.

    Args:
        topk_idx: int64 ``[tokens, topk]``, -1 for a dropped choice.

    Returns:
        int32 ``[ranks]``: tokens for each rank, counted once a rank. int32 ``[experts]``: choices of each expert.
        bool ``[tokens, ranks]``: whether the token goes to the rank.
    """
    tokens = topk_idx.shape[0]
    # Dropped choices land in a column beyond the last.
    expert = torch.where(topk_idx < 0, experts, topk_idx)
    rank = torch.where(topk_idx < 0, ranks, topk_idx // (experts // ranks))
    in_rank = torch.zeros((tokens, ranks + 1), dtype=torch.bool, device=topk_idx.device)
    in_rank.scatter_(1, rank, True)
    in_rank = in_rank[:, :ranks].contiguous()
    chosen = torch.zeros(experts + 1, dtype=torch.int32, device=topk_idx.device)
    chosen.scatter_add_(0, expert.flatten(), torch.ones_like(expert.flatten(), dtype=torch.int32))
    return in_rank.sum(0, dtype=torch.int32), chosen[:experts].contiguous(), in_rank
