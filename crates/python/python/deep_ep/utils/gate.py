"""Router's scores of which one rank gets more than the others."""

from __future__ import annotations

import torch

HALVINGS = 20
"""Steps of the search for scores of a ratio."""


def get_unbalanced_scores(
    num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float, precise: bool
) -> torch.Tensor:
    """f32 ``[tokens, experts]`` on the default device, by whose largest ``num_topk`` rank 0 gets ``ratio`` times the tokens of each other.

    Args:
        ratio: 1 or more.
        precise: the ratio holds to a token, and ranks are dealt out in turns. Else experts of rank 0 are only more likely.
    """
    if not ratio >= 1:
        raise ValueError(f"ratio is {ratio}, allowed: 1 or more")
    if precise:
        return _dealt(num_tokens, num_experts, num_ranks, num_topk, ratio)
    if ratio == 1 or num_ranks == 1:
        return _likely(num_tokens, num_experts, num_ranks, 1.0)
    least, most = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (least + most) / 2
        scores = _likely(num_tokens, num_experts, num_ranks, middle)
        rank = scores.topk(num_topk, dim=1).indices.div(num_experts // num_ranks, rounding_mode="floor")
        tokens = torch.stack([(rank == one).any(1).sum() for one in range(num_ranks)]).float()
        least, most = (middle, most) if tokens[0] > tokens[1:].mean() * ratio else (least, middle)
    return _likely(num_tokens, num_experts, num_ranks, most)


def _likely(tokens: int, experts: int, ranks: int, others: float) -> torch.Tensor:
    """Random scores, those of other ranks than 0 at most ``others``."""
    scores = torch.rand((tokens, experts), dtype=torch.float32)
    scores[:, experts // ranks :] *= others
    return scores


def _dealt(tokens: int, experts: int, ranks: int, topk: int, ratio: float) -> torch.Tensor:
    """Each token goes to as many ranks, rank 0 being one of them for its share of the tokens; the others take turns."""
    local, others = experts // ranks, ranks - 1
    width = min(topk, max(others, 1), int((others + ratio) / ratio))
    if topk > width * local:
        raise ValueError(
            f"num_topk is {topk}, allowed: at most {width * local} for {ranks} ranks and a ratio of {ratio}"
        )
    first = min(tokens, round(tokens * width * ratio / (others + ratio))) if others else tokens
    goes = torch.zeros((tokens, ranks), dtype=torch.bool)
    goes[torch.randperm(tokens)[:first], 0] = True
    wanted = width - goes[:, 0].int()
    begins = wanted.cumsum(0) - wanted
    for number in range(width if others else 0):
        rank = 1 + (begins + number) % others
        goes[torch.arange(tokens), rank] |= number < wanted
    # One expert of each rank first, then any others of those ranks.
    at_least = torch.rand((tokens, ranks, local), dtype=torch.float32)
    certain = at_least == at_least.amax(dim=2, keepdim=True)
    return ((at_least + certain + goes.unsqueeze(2)) * goes.unsqueeze(2)).view(tokens, experts)
