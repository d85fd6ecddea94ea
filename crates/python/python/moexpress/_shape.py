"""The sizes of a communicator, and what tensors must be for them."""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn import Parameter

from . import _check

Tensor = torch.Tensor

Element = Literal["bf16", "fp8", "fp8-pow2", "fp8-ue8m0", "int8"]
"""How rows of a dispatch travel. The FP8 forms have a scale for every 128 elements: f32; f32 powers of two; UE8M0 bytes. INT8 has one f32 a
row, on CPUs and NPUs."""

GROUP = 128
"""Elements that share a scale."""

UNIT = 16
"""Bytes that a GPU's rows are moved in."""


class Shape:
    """Sizes, what rows are made of, and where tensors lie."""

    def __init__(
        self, ranks: int, experts: int, topk: int, hidden: int, max_tokens: int, element: Element, device: torch.device
    ) -> None:
        self.ranks, self.experts, self.topk = ranks, experts, topk
        self.hidden, self.max_tokens = hidden, max_tokens
        self.element: Element = element
        self.device = device
        self.codes = torch.int8 if element == "int8" else torch.float8_e4m3fn
        """Elements of coded rows."""
        self.takes_strides = False
        """Whether coded rows need not be contiguous."""
        self.local_experts = experts // ranks
        groups, packed = -(-hidden // GROUP), element == "fp8-ue8m0"
        self.scales = 1 if element == "int8" else -(-groups // 4) if packed else groups
        """Scales of a coded row, or words of four."""
        self.scale_type = torch.int32 if packed else torch.float32
        self.low = (self.local_experts, ranks * max_tokens, hidden)
        """Of what low latency brings, and of experts' results."""

    def results(self, name: str, y: torch.Tensor, least: int = 0) -> tuple[int, int]:
        """Checks bf16 rows, at least so many; how many, and where they lie."""
        # On the path of every call, as in _check.address.
        try:
            if type(y) is Tensor or type(y) is Parameter:
                rows, hidden = y.shape
                if (
                    rows >= least
                    and hidden == self.hidden
                    and y.dtype is torch.bfloat16
                    and y.device == self.device
                    and y.is_contiguous()
                    and not y.is_neg()
                    and (y.storage_offset() + rows * hidden) * 2 <= y.untyped_storage().nbytes()
                ):
                    at = y.data_ptr()
                    if at and not at & 1:
                        return rows, at
        except (RuntimeError, ValueError):  # has no strides, no storage, not two sizes, ...
            pass
        _check.tensor(name, y, torch.bfloat16, ("rows", self.hidden), self.device)
        rows = y.shape[0]
        if rows < least:
            raise _check.invalid(f"rows of {name}", rows, f"at least {least}, those of the handle")
        return rows, 0

    def rows(self, name: str, x: torch.Tensor, scales: torch.Tensor | None) -> tuple[int, int]:
        """Checks rows as they travel, and their scales; how many, and where the rows lie."""
        if self.element == "bf16":
            if scales is not None:
                raise _check.invalid("scales", "given", "None, as the communicator was made for bf16")
            return self.results(name, x)
        _check.tensor(name, x, self.codes, ("tokens", self.hidden), self.device, contiguous=not self.takes_strides)
        rows = x.shape[0]
        _check.tensor("scales", scales, self.scale_type, (rows, self.scales), self.device, contiguous=False)
        return rows, x.data_ptr()

    def choices(self, tokens: int, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None) -> tuple[int, int | None]:
        """Checks the router's choices, and weights where there are some; where they lie."""
        shape, device = (tokens, self.topk), self.device
        at = _check.address("topk_idx", topk_idx, torch.int64, shape, device)
        if topk_weights is None:
            return at, None
        return at, _check.address("topk_weights", topk_weights, torch.float32, shape, device)

    def weights(self, topk_weights: torch.Tensor | None, rows: int) -> int | None:
        """Checks weights where there are some; where they lie."""
        if topk_weights is None:
            return None
        return _check.address("topk_weights", topk_weights, torch.float32, (rows, self.topk), self.device)

    def by_row(self, x: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor | None:
        """Scales as the backend takes them: on GPUs those of a row side by side, and rows one behind the other, where codes do not lie at
        multiples of 16 bytes."""
        if (
            scales is None
            or self.device.type == "cpu"
            or (scales.stride(1) == 1 and scales.stride(0) >= scales.shape[1])
        ):
            return scales
        if self.hidden % UNIT == 0 and x.data_ptr() % UNIT == 0:
            return scales
        return scales.clone(memory_format=torch.contiguous_format)
