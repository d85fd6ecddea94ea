"""Mixture-of-experts layers in plain tensor operations of one process: what every rank's result is compared with.

All is in float32. The numbers are drawn from seeds, so each process has the batches and weights of all ranks without being told.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

Tensor = torch.Tensor


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer."""

    ranks: int
    experts: int = 16
    """Of all ranks."""
    topk: int = 3
    hidden: int = 256
    inner: int = 32
    """Width of an expert."""
    tokens: int = 40
    """The most that a rank has."""

    @property
    def local(self) -> int:
        """Experts of a rank."""
        return self.experts // self.ranks


@dataclass
class Routing:
    """Of one rank's tokens."""

    topk_idx: Tensor
    """int64 ``[tokens, topk]``; -1 for a dropped choice."""
    weights: Tensor
    """float32 ``[tokens, topk]``; 0 where a choice is dropped."""


def tokens(shape: Shape, step: int) -> list[int]:
    """Tokens of each rank: uneven, and in every step but the first one rank has none."""
    none = (step - 1) % shape.ranks if step else -1
    return [0 if rank == none else shape.tokens - (7 * rank + 5 * step) % 23 for rank in range(shape.ranks)]


def generator(*seed: int) -> torch.Generator:
    """Of these numbers alone."""
    value = 17
    for number in seed:
        value = value * 1_000_003 + number + 1
    return torch.Generator().manual_seed(value % (1 << 62))


def rows(shape: Shape, step: int, rank: int, count: int) -> Tensor:
    """float32 ``[count, hidden]`` that are exact in bf16."""
    return torch.randn(count, shape.hidden, generator=generator(1, step, rank)).bfloat16().float()


def routing(shape: Shape, step: int, layer: int, rank: int, count: int, dropped: bool = False) -> Routing:
    """Distinct experts for each token. In the third step all tokens go to the experts of the last rank; ``dropped`` drops some choices."""
    g = generator(2, step, layer, rank)
    logits = torch.randn(count, shape.experts, generator=g)
    if step == 2 and shape.local >= shape.topk:
        logits[:, : shape.experts - shape.local] -= 100
    weights, topk_idx = logits.softmax(-1).topk(shape.topk, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    if dropped:
        drop = torch.rand(count, shape.topk, generator=g) < 0.3
        weights, topk_idx = weights.masked_fill(drop, 0.0), topk_idx.masked_fill(drop, -1)
    return Routing(topk_idx, weights)


def experts(shape: Shape, layer: int) -> tuple[Tensor, Tensor]:
    """``[experts, hidden, inner]`` and ``[experts, inner, hidden]``, so large that rows keep their size."""
    g = generator(3, layer)
    w1 = torch.randn(shape.experts, shape.hidden, shape.inner, generator=g) * (2 / shape.hidden) ** 0.5
    w2 = torch.randn(shape.experts, shape.inner, shape.hidden, generator=g) * (1 / shape.inner) ** 0.5
    return w1, w2


def expert(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """One expert on rows of any float type: float32 ``[rows, hidden]``."""
    y: Tensor = torch.nn.functional.silu(x.float() @ w1) @ w2
    return y


def plain(x: Tensor, topk_idx: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """The layer on the rows of all ranks."""
    y: Tensor = torch.zeros_like(x)
    for number in range(w1.shape[0]):
        row, choice = (topk_idx == number).nonzero(as_tuple=True)
        y = y.index_add(0, row, weights[row, choice, None] * expert(x[row], w1[number], w2[number]))
    return y


def fp8_there_and_back(x: Tensor, power_of_two: bool = False, block: int = 128) -> Tensor:
    """What FP8 rows with a scale for every ``block`` elements leave of float32 rows."""
    return from_fp8(*fp8(x, power_of_two, block))


def fp8(x: Tensor, power_of_two: bool = False, block: int = 128) -> tuple[Tensor, Tensor]:
    """Codes ``[rows, hidden]`` and float32 scales ``[rows, hidden / block]``."""
    blocks = x.float().view(x.shape[0], x.shape[1] // block, block)
    scales = blocks.abs().amax(-1).clamp(min=1e-4) / 448
    if power_of_two:
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
    return (blocks / scales.unsqueeze(-1)).view_as(x).to(torch.float8_e4m3fn), scales


def ue8m0(scales: Tensor) -> Tensor:
    """Scales that are powers of two as bytes, uint8."""
    return (torch.log2(scales) + 127).round().to(torch.uint8)


def from_fp8(codes: Tensor, scales: Tensor) -> Tensor:
    """float32 rows of codes ``[.., rows, hidden]`` and scales, each for as many elements as the others: float32 ``[.., rows, scales]``, or
    UE8M0, one in a uint8 or four in an int32."""
    if scales.dtype in (torch.int32, torch.uint8):
        # A single column is contiguous with any strides.
        scales = torch.exp2(scales.clone(memory_format=torch.contiguous_format).view(torch.uint8).float() - 127)
    rows: Tensor = (codes.float().unflatten(-1, (scales.shape[-1], -1)) * scales.unsqueeze(-1)).flatten(-2)
    return rows


def rowwise(x: Tensor, topk_idx: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """The local experts on received rows: for each row the weighted sum over its local choices, bf16 ``[rows, hidden]``.

    ``topk_idx`` names local experts, -1 where another rank's expert was chosen.
    """
    y: Tensor = plain(x.float(), topk_idx, weights, w1, w2)
    return y.bfloat16()
