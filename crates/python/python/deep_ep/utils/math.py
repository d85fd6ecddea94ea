"""Comparisons and casts that DeepEP's tests use."""

from __future__ import annotations

import torch

GROUP = 128
"""Elements that share a scale."""
LARGEST = 448.0
"""The largest E4M3 value."""


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    """``1 - 2 <x, y> / (|x|^2 + |y|^2)``, of both plus one, in f64: 0 for equal tensors."""
    x, y = x.double() + 1, y.double() + 1
    norms = (x * x + y * y).sum()
    return (1 - 2 * (x * y).sum() / norms).item()


def inplace_unique(x: torch.Tensor, num_slots: int) -> None:
    """Leaves in each row of ``x [rows, columns]`` its distinct numbers from 0 to ``num_slots`` - 1, descending, then -1."""
    if x.dim() != 2:
        raise ValueError(f"x has {x.dim()} dimensions, allowed: 2")
    if x.numel() and int(x.max()) >= num_slots:
        raise ValueError(f"largest number of x is {int(x.max())}, allowed: less than {num_slots}")
    ordered = x.clamp(min=-1).sort(dim=1, descending=True).values
    repeated = torch.zeros_like(ordered, dtype=torch.bool)
    repeated[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    x.copy_(ordered.masked_fill(repeated, -1).sort(dim=1, descending=True).values)


def per_token_cast_to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``x [rows, columns]`` as E4M3 codes and f32 scales ``[rows, columns / 128]``; columns a multiple of 128."""
    rows, columns = x.shape
    if columns % GROUP:
        raise ValueError(f"columns of x are {columns}, allowed: a multiple of {GROUP}")
    groups = x.float().view(rows, columns // GROUP, GROUP)
    largest = groups.abs().amax(dim=2).clamp(min=1e-4)
    codes = (groups * (LARGEST / largest.unsqueeze(2))).to(torch.float8_e4m3fn)
    return codes.view(rows, columns), largest / LARGEST


def per_token_cast_back(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """bf16 of codes ``[rows, columns]`` and scales ``[rows, columns / 128]``: f32, or int32 with four UE8M0 bytes each. Scales may have
    another shape that holds the same numbers in the same order."""
    if x.numel() == 0:
        return x.to(torch.bfloat16)
    if scales.dtype == torch.int32:
        # A single column is contiguous whatever its strides are, but cannot be viewed as bytes.
        packs = scales.clone(memory_format=torch.contiguous_format)
        exponents = packs.view(torch.uint8).to(torch.int32)
        scales = (exponents << 23).view(torch.float32)
    rows, columns = x.shape
    groups = x.float().view(rows, columns // GROUP, GROUP)
    scales = scales.reshape(rows, -1)[:, : groups.shape[1]]
    return (groups * scales.unsqueeze(2)).view(rows, columns).to(torch.bfloat16)


def hash_tensor(t: torch.Tensor) -> int:
    """A sum of the bytes of ``t``, taken eight at a time: differs when bits do, mostly."""
    data = t.contiguous().view(-1).view(torch.uint8)
    rest = (-data.numel()) % 8
    if rest:
        data = torch.cat([data, data.new_zeros(rest)])
    return int(data.view(torch.int64).sum().item())
