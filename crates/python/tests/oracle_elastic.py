"""What V2's dispatch and combine must give, row by row, from all ranks' inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from oracle import Arrived, Batch, Layer, arrived


@dataclass
class Expanded:
    """What a rank must receive expanded."""

    choices: list[tuple[int, int] | None]
    """For each expanded row the received row and choice that it is of; None for a gap."""
    psum: list[int]
    """Behind each expert's last row."""

    @property
    def is_row(self) -> torch.Tensor:
        """bool ``[expanded rows]``: False for gaps."""
        return torch.tensor([choice is not None for choice in self.choices], dtype=torch.bool)

    def slots(self, rows: Arrived) -> torch.Tensor:
        """int32 ``[rows, topk]``: the expanded row of each choice, or -1."""
        slots = torch.full(rows.topk_idx.shape, -1, dtype=torch.int32)
        for slot, choice in enumerate(self.choices):
            if choice is not None:
                slots[choice] = slot
        return slots

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Received rows ``[rows, ...]`` expanded, 0 in gaps."""
        picked = [torch.zeros_like(x[:1]) if choice is None else x[choice[0]][None] for choice in self.choices]
        return torch.cat([x[:0], *picked])

    def weights(self, rows: Arrived) -> torch.Tensor:
        """f32 ``[expanded rows]``."""
        return torch.tensor([0.0 if one is None else float(rows.topk_weights[one]) for one in self.choices])


def expanded(layer: Layer, rows: Arrived, alignment: int) -> Expanded:
    """Expert-major, each expert's first row at a multiple of the alignment."""
    choices: list[tuple[int, int] | None] = []
    psum = []
    for expert in range(layer.local):
        for row, token in enumerate(rows.topk_idx.tolist()):
            choices += [(row, choice) for choice, one in enumerate(token) if one == expert]
        psum.append(len(choices))
        choices += [None] * (-len(choices) % alignment)
    return Expanded(choices, psum)


def results(layer: Layer, source: int, token: int, choice: int) -> torch.Tensor:
    """bf16 ``[hidden]``: what the expert of a choice gives, which any rank knows."""
    generator = torch.Generator().manual_seed(1 + (source * 1000 + token) * 100 + choice)
    return torch.randn(layer.hidden, generator=generator).bfloat16()


def summed(
    layer: Layer, all_batches: list[Batch], rank: int, bias: list[torch.Tensor], reduces_twice: bool
) -> torch.Tensor:
    """bf16 ``[tokens, hidden]``: the sums of a rank's tokens: biases, then ranks ascending, each rank's sum rounded; or biases, then
    choices, rounded once."""
    batch = all_batches[rank]
    sums = torch.zeros(batch.x.shape)
    for one in bias:
        sums += one.float()
    for token, choices in enumerate(batch.topk_idx.tolist()):
        got = {choice: results(layer, rank, token, choice) for choice, expert in enumerate(choices) if expert >= 0}
        if not reduces_twice:
            for choice in got:
                sums[token] += got[choice].float()
            continue
        for other in range(layer.world):
            there = [choice for choice in got if choices[choice] // layer.local == other]
            of_rank = torch.zeros(layer.hidden)
            for choice in there:
                of_rank += got[choice].float()
            sums[token] += of_rank.bfloat16().float()
    return sums.bfloat16()


def metadata(layer: Layer, rows: Arrived, most_tokens: int, slots: torch.Tensor | None) -> torch.Tensor:
    """int32 ``[rows, topk + 2]``: what V2's handle says of each row."""
    told = torch.full((len(rows.source_rank), layer.topk + 2), -1, dtype=torch.int32)
    for row, (source, token) in enumerate(zip(rows.source_rank.tolist(), rows.source_token.tolist(), strict=True)):
        first = next(choice for choice, one in enumerate(rows.topk_idx[row].tolist()) if one >= 0)
        told[row, 0], told[row, 1] = source * most_tokens + token, source * layer.topk + first
    if slots is not None:
        told[:, 2:] = slots
    return told


def from_each(layer: Layer, all_batches: list[Batch], rank: int) -> list[int]:
    """Rows from each rank and those before it."""
    sources = arrived(layer, all_batches, rank).source_rank
    return [int((sources <= source).sum()) for source in range(layer.world)]
