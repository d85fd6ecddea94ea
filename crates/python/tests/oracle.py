"""What must come out, computed from all ranks' inputs with plain tensor operations."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Batch:
    """One rank's input."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor


@dataclass
class Layer:
    """Sizes."""

    world: int
    experts: int
    topk: int
    hidden: int
    ranks_per_node: int | None = None
    """None: one node."""

    @property
    def nodes(self) -> list[list[int]]:
        """The ranks of each node."""
        size = self.ranks_per_node or self.world
        return [list(range(first, first + size)) for first in range(0, self.world, size)]

    @property
    def local(self) -> int:
        """Experts of a rank."""
        return self.experts // self.world


def batches(layer: Layer, tokens: list[int], seed: int = 0, drop: float = 0.1) -> list[Batch]:
    """Random inputs of all ranks, the same wherever this is called. ``drop``: share of choices that are dropped."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for count in tokens:
        scores = torch.rand(count, layer.experts, generator=generator)
        topk_idx = scores.topk(layer.topk, dim=1).indices
        topk_idx[torch.rand(count, layer.topk, generator=generator) < drop] = -1
        made.append(
            Batch(
                x=torch.randn(count, layer.hidden, generator=generator).bfloat16(),
                topk_idx=topk_idx,
                topk_weights=torch.rand(count, layer.topk, generator=generator),
            )
        )
    return made


def members(layer: Layer, topk_idx: torch.Tensor) -> torch.Tensor:
    """bool ``[tokens, ranks]``."""
    of_rank = torch.where(topk_idx < 0, -1, topk_idx // layer.local)
    return torch.stack([(of_rank == rank).any(1) for rank in range(layer.world)], dim=1)


@dataclass
class Arrived:
    """What a rank must receive in throughput mode."""

    source_rank: torch.Tensor
    source_token: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    counts: list[int]


def arrived(layer: Layer, all_batches: list[Batch], rank: int) -> Arrived:
    """Rows in order of (source rank, token)."""
    source_rank, source_token, idx, weights = [], [], [], []
    for source, batch in enumerate(all_batches):
        tokens = members(layer, batch.topk_idx)[:, rank].nonzero()[:, 0]
        mine = batch.topk_idx[tokens]
        here = (mine >= 0) & (mine // layer.local == rank)
        source_rank.append(torch.full((len(tokens),), source, dtype=torch.int32))
        source_token.append(tokens.int())
        idx.append(torch.where(here, mine % layer.local, -1))
        weights.append(torch.where(here, batch.topk_weights[tokens], 0.0))
    topk_idx = torch.cat(idx)
    counts = [int((topk_idx == expert).sum()) for expert in range(layer.local)]
    return Arrived(torch.cat(source_rank), torch.cat(source_token), topk_idx, torch.cat(weights), counts)


def gathered(per_rank: list[torch.Tensor], rows: Arrived) -> torch.Tensor:
    """The rows of ``per_rank[source][token]`` that a rank receives."""
    picked = [
        per_rank[source][token]
        for source, token in zip(rows.source_rank.tolist(), rows.source_token.tolist(), strict=True)
    ]
    return torch.stack(picked) if picked else per_rank[0][:0]


def combined(
    layer: Layer,
    all_batches: list[Batch],
    rank: int,
    results: list[torch.Tensor],
    bias: list[torch.Tensor] | None = None,
) -> torch.Tensor:
    """The sums of the tokens of ``rank``, where ``results[r]`` are the rows that rank ``r`` returns: bias first, then ranks
    ascending, in f32, rounded once; over several nodes bias first, then nodes ascending, each node's sum rounded before."""
    batch = all_batches[rank]
    total = torch.zeros(batch.x.shape)
    for number, one in enumerate(bias or []):
        total = one.float() if number == 0 else total + one.float()
    for node in layer.nodes:
        partial = total if len(layer.nodes) == 1 else torch.zeros(batch.x.shape)
        for other in node:
            rows = arrived(layer, all_batches, other)
            mine = rows.source_rank == rank
            added = torch.zeros_like(partial)
            added[rows.source_token[mine].long()] = results[other][mine].float()
            partial = partial + added
        total = partial if len(layer.nodes) == 1 else total + partial.bfloat16().float()
    return total.bfloat16()
