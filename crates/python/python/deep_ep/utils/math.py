"""Comparisons and casts that DeepEP's tests use."""

from __future__ import annotations

from typing import Any

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


def ceil_div(x: int, y: int) -> int:
    """``x / y``, rounded up."""
    return -(-x // y)


def align(x: int, y: int) -> int:
    """``x``, rounded up to a multiple of ``y``."""
    return ceil_div(x, y) * y


def safe_div(a: float, b: float) -> float:
    """``a / b``, and 0 for 0 / 0."""
    return 0 if a == 0 and b == 0 else a / b


def per_token_cast_to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``x [rows, columns]`` as E4M3 codes and f32 scales ``[rows, columns / 128]``, rounded up."""
    if x.dim() != 2:
        raise ValueError(f"x has {x.dim()} dimensions, allowed: 2")
    groups = _groups(x.float())
    largest = groups.abs().amax(dim=2).clamp(min=1e-4)
    codes = (groups * (LARGEST / largest.unsqueeze(2))).to(torch.float8_e4m3fn)
    return codes.flatten(1)[:, : x.shape[1]].contiguous(), largest / LARGEST


def per_token_cast_back(x_fp8: torch.Tensor, x_scales: torch.Tensor) -> torch.Tensor:
    """bf16 of codes ``[rows, columns]`` and scales ``[rows, columns / 128]``, rounded up: f32, or int32 with four UE8M0 bytes each.
    Scales may have another shape that holds the same numbers in the same order."""
    x, scales = x_fp8, x_scales
    if x.numel() == 0:
        return x.to(torch.bfloat16)
    if scales.dtype == torch.int32:
        # A single column is contiguous whatever its strides are, but cannot be viewed as bytes.
        packs = scales.clone(memory_format=torch.contiguous_format)
        exponents = packs.view(torch.uint8).to(torch.int32)
        scales = (exponents << 23).view(torch.float32)
    rows, columns = x.shape
    groups = _groups(x.float())
    scales = scales.reshape(rows, -1)[:, : groups.shape[1]]
    return (groups * scales.unsqueeze(2)).flatten(1)[:, :columns].to(torch.bfloat16).contiguous()


def _groups(x: torch.Tensor) -> torch.Tensor:
    """``[rows, groups, 128]``, the last group filled up with zeros."""
    rows, columns = x.shape
    groups = ceil_div(columns, GROUP)
    return torch.nn.functional.pad(x, (0, groups * GROUP - columns)).view(rows, groups, GROUP)


def create_grouped_scores(scores: torch.Tensor, group_idx: torch.Tensor, num_groups: int) -> torch.Tensor:
    """``scores [tokens, experts]``, 0 where an expert's group is not among the token's ``group_idx [tokens, groups]``."""
    tokens, experts = scores.shape
    chosen = torch.zeros((tokens, num_groups), dtype=torch.bool, device=scores.device).scatter_(1, group_idx, True)
    return scores * chosen.repeat_interleave(experts // num_groups, dim=1)


def count_bytes(*tensors: Any) -> int:
    """Bytes of the elements of tensors, in tuples and lists too; None counts nothing."""
    return sum(
        count_bytes(*one) if isinstance(one, (tuple, list)) else one.numel() * one.element_size()
        for one in tensors
        if one is not None
    )


def hash_tensors(*tensors: Any) -> int:
    """:func:`hash_tensor` of all of them together, in tuples and lists too; None counts nothing."""
    value = 0
    for one in tensors:
        if isinstance(one, (tuple, list)):
            value ^= hash_tensors(*one)
        elif one is not None:
            value ^= hash_tensor(one)
    return value


def hash_tensor(t: torch.Tensor) -> int:
    """A sum of the bytes of ``t``, taken eight at a time: differs when bits do, mostly."""
    data = t.contiguous().view(-1).view(torch.uint8)
    rest = (-data.numel()) % 8
    if rest:
        data = torch.cat([data, data.new_zeros(rest)])
    return int(data.view(torch.int64).sum().item())
