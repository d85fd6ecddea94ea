"""Memory for what a low-latency dispatch brings."""

from __future__ import annotations

import torch

from . import _native
from ._results import LowReceived
from ._shape import UNIT, Shape

Places = tuple[int, "_native._Scales3", int, int, int]
"""Addresses: rows; scales and their strides; counts, segments, tokens."""


class Room:
    """Takes it, and says where it is. GPUs bring FP8 rows of odd sizes as they travel; codes and scales are taken apart then.

    Args:
        row_layout: bytes from one FP8 row to the next as they travel, and from the start of a row to its scales.
    """

    def __init__(self, shape: Shape, row_layout: tuple[int, int]) -> None:
        self.device, self.hidden = shape.device, shape.hidden
        self._stride, self._scales_at = row_layout
        experts, rows, hidden = shape.low
        is_fp8 = shape.element != "bf16"
        self._travels = shape.device.type == "cuda" and is_fp8 and hidden % UNIT != 0
        # Sizes, strides and types: said in full, memory comes soonest.
        self._x = (shape.low, (rows * hidden, hidden, 1), torch.float8_e4m3fn if is_fp8 else torch.bfloat16)
        self._scales = (
            ((experts, rows, shape.scales), (shape.scales * rows, 1, rows), shape.scale_type) if is_fp8 else None
        )
        self._expert_counts = ((experts,), (1,), torch.int32)
        self._segments = ((experts, shape.ranks), (shape.ranks, 1), torch.int64)
        self._source_token = ((experts, rows), (rows, 1), torch.int32)

    def take(self) -> LowReceived:
        """Undefined contents."""
        return LowReceived(
            self._empty(self._x),
            None if self._scales is None else self._empty(self._scales),
            self._empty(self._expert_counts),
            self._empty(self._segments),
            self._empty(self._source_token),
            None,
        )

    def travelling(self) -> torch.Tensor | None:
        """Memory for rows as they travel, codes and scales side by side, where they must be taken apart later."""
        if not self._travels:
            return None
        experts, rows, _ = self._x[0]
        return torch.empty((experts, rows, self._stride), dtype=torch.uint8, device=self.device)

    def places(self, into: LowReceived, travelling: torch.Tensor | None) -> Places:
        """Where a call writes."""
        x, scales = into.x if travelling is None else travelling, None
        if self._scales is not None and into.scales is not None and travelling is None:
            scales = (into.scales.data_ptr(), *self._scales[1])
        return (
            x.data_ptr(),
            scales,
            into.expert_counts.data_ptr(),
            into.segments.data_ptr(),
            into.source_token.data_ptr(),
        )

    def landed(self, into: LowReceived, travelling: torch.Tensor | None) -> None:
        """After the call."""
        if travelling is not None and into.scales is not None:
            at, wide = self._scales_at, into.scales.shape[2]
            into.x.view(torch.uint8).copy_(travelling[..., : self.hidden])
            into.scales.copy_(travelling[..., at : at + 4 * wide].view(into.scales.dtype))

    def _empty(self, of: tuple[tuple[int, ...], tuple[int, ...], torch.dtype]) -> torch.Tensor:
        return torch.empty_strided(of[0], of[1], dtype=of[2], device=self.device)
