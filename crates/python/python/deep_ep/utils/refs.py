"""What dispatch and combine must give, in plain tensor operations over ``torch.distributed``: what DeepEP's tests compare with."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from .envs import get_global_seed

Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

STRIDE = 131071
"""Of the seeds of choices: a prime, so that neighbours differ."""


def dispatch(
    x: Rows, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None, num_max_tokens_per_rank: int, num_experts: int
) -> tuple[Rows, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """All ranks of the default group call it.

    Args:
        x: ``[tokens, hidden]``, or with scales ``[tokens, scales]``.
        topk_idx: int64 ``[tokens, topk]``, -1 for a dropped choice.
        topk_weights: f32 ``[tokens, topk]``.

    Returns:
        Rows of this rank, by source rank and token; their choices, local experts or -1; their weights; int32 ``[rows]`` ``source rank *
        num_max_tokens_per_rank + token``; int32 ``[ranks]`` rows from each.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    local = num_experts // ranks
    parts = [*(x if isinstance(x, tuple) else (x,)), topk_idx, *(() if topk_weights is None else (topk_weights,))]
    tokens = _gathered(torch.tensor([[topk_idx.shape[0]]], device=topk_idx.device), [1] * ranks)
    counts = [int(one) for one in torch.cat(tokens)[:, 0]]
    everybody = list(zip(*(_gathered(part.contiguous(), counts) for part in parts), strict=True))
    received: list[list[torch.Tensor]] = []
    sources = []
    for source, theirs in enumerate(everybody):
        mine = (theirs[-1 if topk_weights is None else -2].div(local, rounding_mode="floor") == rank).any(1)
        token = mine.nonzero()[:, 0]
        received.append([part[token] for part in theirs])
        sources.append((source * num_max_tokens_per_rank + token).int())
    rows = [torch.cat(part) for part in zip(*received, strict=True)]
    weights = None if topk_weights is None else rows.pop()
    choices = rows.pop() - rank * local
    choices = choices.masked_fill((choices < 0) | (choices >= local), -1)
    from_each = torch.tensor([len(one) for one in sources], dtype=torch.int32, device="cpu")
    recv: Rows = (rows[0], rows[1]) if isinstance(x, tuple) else rows[0]
    return recv, choices, weights, torch.cat(sources), from_each


def _gathered(part: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
    """Everybody's rows, of which rank ``r`` has ``counts[r]``, byte by byte."""
    raw = part.view(torch.uint8) if part.numel() else part.new_zeros((0, part.shape[1])).view(torch.uint8)
    most, width = max(counts), raw.shape[1]
    mine = torch.zeros((most, width), dtype=torch.uint8, device=part.device)
    mine[: len(raw)] = raw
    theirs = [torch.empty_like(mine) for _ in counts]
    dist.all_gather(theirs, mine)
    return [one[:count].view(part.dtype) for one, count in zip(theirs, counts, strict=True)]


def generate_pre_combine_data(
    src_token_global_idx: torch.Tensor, num_max_tokens_per_rank: int, num_topk: int, hidden: int
) -> torch.Tensor:
    """bf16 ``[tokens, topk, hidden]``: results of experts, which any rank can compute for itself, from -1 to 1."""
    device = src_token_global_idx.device
    most = dist.get_world_size() * num_max_tokens_per_rank * num_topk
    seeds = src_token_global_idx.long().unsqueeze(1) * num_topk + torch.arange(num_topk, device=device)
    phase = ((seeds * STRIDE % most).float() + 1) / most
    columns = torch.arange(1, hidden + 1, dtype=torch.float32, device=device)
    return torch.sin(phase.unsqueeze(2) * columns + math.sin(float(get_global_seed()))).to(torch.bfloat16)


def ordered_accumulate(data: torch.Tensor, initial_value: torch.Tensor | None = None) -> torch.Tensor:
    """``initial_value [tokens, hidden]`` plus ``data [tokens, n, hidden]``, one after the other in f32, rounded to the type of ``data``."""
    sums = torch.zeros((data.shape[0], data.shape[2]), dtype=torch.float32, device=data.device)
    if initial_value is not None:
        sums += initial_value
    for number in range(data.shape[1]):
        sums += data[:, number]
    return sums.to(data.dtype)


def combine(
    y: torch.Tensor,
    topk_idx: torch.Tensor,
    num_scaleout_ranks: int,
    num_scaleup_ranks: int,
    num_experts: int,
    bias: Any,
    reduce_in_local: bool,
    reduce_in_scaleup: bool,
) -> torch.Tensor:
    """Sums of a token's results, choices ascending where they are summed by themselves, ranks ascending where by rank.

    Args:
        y: bf16 ``[tokens, topk, hidden]``, the result of each choice; 0 for a dropped one.
        topk_idx: int64 ``[tokens, topk]``.
        bias: None, or one or two bf16 ``[tokens, hidden]``.
        reduce_in_local: results of a rank are summed there and rounded.
        reduce_in_scaleup: and those sums in each domain.
    """
    if reduce_in_scaleup and not reduce_in_local:
        raise ValueError("reduce_in_scaleup is True, allowed: with reduce_in_local only")
    local = num_experts // (num_scaleout_ranks * num_scaleup_ranks)
    group = topk_idx.div(local, rounding_mode="floor")
    if reduce_in_local:
        y = _by_group(y, group, num_scaleout_ranks * num_scaleup_ranks)
    if reduce_in_scaleup:
        ranks = torch.arange(y.shape[1], device=y.device).expand(y.shape[0], -1)
        y = _by_group(y, ranks.div(num_scaleup_ranks, rounding_mode="floor"), num_scaleout_ranks)
    starts = () if bias is None else bias if isinstance(bias, tuple) else (bias,)
    start = None
    for one in starts:
        start = one.float() if start is None else start + one.float()
    return ordered_accumulate(y, start)


def _by_group(y: torch.Tensor, group: torch.Tensor, groups: int) -> torch.Tensor:
    """``[tokens, groups, hidden]``: sums of each group, rounded."""
    sums = []
    for one in range(groups):
        inside = (group == one).unsqueeze(2)
        sums.append(ordered_accumulate(y.masked_fill(~inside, 0)))
    return torch.stack(sums, dim=1)
