"""Coded rows as frameworks hand them over: codes and scales of their own choosing."""

from __future__ import annotations

from typing import Any

import torch
from moexpress import Communicator, errors
from moexpress.adapter import GROUP, Element

from . import _checks
from ._previous import NONE, Previous
from .utils.math import align

SCALES_ALIGN = 4
"""Columns of scales begin at multiples of so many, which are 16 bytes: what a GPU's bulk copies ask for."""

BULK = 16
"""Bytes of such a copy. Beneath, scales of rows that do not lie at multiples of it may be copied before they are sent."""


class Rows:
    """What a dispatch sends."""

    __slots__ = ("columns", "dtype", "element", "scales", "x")

    def __init__(
        self,
        x: torch.Tensor,
        scales: torch.Tensor | None = None,
        element: Element = "bf16",
        columns: int = 0,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.x, self.scales = x, scales
        self.element: Element = element
        self.columns = columns
        """Scales of a row that the caller gave."""
        self.dtype = dtype
        """Theirs."""

    @staticmethod
    def of(x: Any, previous: Previous = NONE) -> Rows:
        """Takes ``x`` or ``(x, scales)``, as DeepEP does.

        Scales travel in the places that moexpress has for them, one f32 for each 128 elements, or one byte each where packed UE8M0
        scales fit exactly; fewer are filled up. Their bits are not looked at. ``previous``: what they may come behind.
        """
        if isinstance(x, torch.Tensor):
            _checks.whole("x", x)
            if x.dtype is not torch.bfloat16:
                raise errors.InvalidArgument(
                    f"dtype of x is {x.dtype}, allowed: torch.bfloat16, or a tuple of torch.float8_e4m3fn or torch.int8 and its scales"
                )
            _rows(x)
            return Rows(x)
        if not isinstance(x, tuple) or len(x) != 2 or not all(isinstance(one, torch.Tensor) for one in x):
            raise errors.InvalidArgument(
                f"x is a {type(x).__name__}, allowed: a tensor, or a tuple of codes and scales"
            )
        codes, scales = x
        _checks.whole("x[0]", codes)
        _checks.whole("x[1]", scales)
        if codes.dtype == torch.int8:
            return _int8(codes, scales)
        if codes.dtype != torch.float8_e4m3fn:
            raise errors.InvalidArgument(f"dtype of x[0] is {codes.dtype}, allowed: torch.float8_e4m3fn or torch.int8")
        _rows(codes)
        if scales.dtype not in (torch.float32, torch.int32):
            raise errors.InvalidArgument(f"dtype of x[1] is {scales.dtype}, allowed: torch.float32 or torch.int32")
        if scales.dim() != 2 or scales.shape[0] != codes.shape[0]:
            raise errors.InvalidArgument(f"shape of x[1] is {list(scales.shape)}, allowed: [{codes.shape[0]}, scales]")
        groups, columns = -(-codes.shape[1] // GROUP), scales.shape[1]
        if not 1 <= columns <= groups:
            raise errors.Unsupported(
                f"{columns} scales a row are not supported: use 1 to {groups}, at most one for each {GROUP} elements"
            )
        fits = scales.dtype == torch.int32 and 4 * columns == groups
        if (columns < groups and not fits) or codes.shape[1] % BULK or codes.data_ptr() % BULK:
            # They are filled up here, or laid by row beneath.
            previous.here()
        if fits:
            return Rows(codes, scales, "fp8-ue8m0", columns, torch.int32)
        dtype = scales.dtype
        scales = scales.view(torch.float32) if dtype == torch.int32 else scales
        if columns < groups:
            scales = torch.nn.functional.pad(scales, (0, groups - columns))
        return Rows(codes, scales, "fp8", columns, dtype)

    @staticmethod
    def quantized(x: torch.Tensor, communicator: Communicator) -> Rows:
        """INT8 rows of bf16 ones, made by the NPU."""
        codes, scales = communicator.quantize(x)
        return Rows(codes, scales, "int8", 0, torch.float32)

    def lie(self, x: torch.Tensor, scales: torch.Tensor | None) -> bool:
        """Whether what was received lies as it is handed over, so that nothing is copied."""
        return x.is_contiguous() and (scales is None or scales.shape[1] == self.columns)

    def received(self, x: torch.Tensor, scales: torch.Tensor | None) -> Any:
        """What was received, in the form of what was sent."""
        x = x.contiguous()
        if self.element == "int8" and scales is not None:
            return x, scales if self.columns else scales.squeeze(1)
        if scales is None or self.dtype is None:
            return x
        if scales.dtype != self.dtype:
            scales = scales.view(self.dtype)
        return x, scales if scales.shape[1] == self.columns else scales[:, : self.columns].contiguous()


def _int8(codes: torch.Tensor, scales: torch.Tensor) -> Rows:
    """INT8 rows: scales ``[tokens]``, as sgl-kernel-npu has them, or ``[tokens, 1]``."""
    if codes.dim() != 2:
        raise errors.InvalidArgument(f"shape of x is {list(codes.shape)}, allowed: [tokens, hidden]")
    tokens = codes.shape[0]
    if scales.dtype != torch.float32 or list(scales.shape) not in ([tokens], [tokens, 1]):
        raise errors.InvalidArgument(
            f"x[1] is {list(scales.shape)} of {scales.dtype}, allowed: [{tokens}] or [{tokens}, 1] of torch.float32"
        )
    return Rows(codes, scales.view(tokens, 1), "int8", scales.dim() - 1, torch.float32)


def _rows(x: torch.Tensor) -> None:
    if x.dim() != 2:
        raise errors.InvalidArgument(f"shape of x is {list(x.shape)}, allowed: [tokens, hidden]")
    if not x.is_contiguous():
        raise errors.InvalidArgument(f"strides of x are {list(x.stride())}, allowed: contiguous; call .contiguous()")


def column_major(scales: torch.Tensor) -> torch.Tensor:
    """``[rows, scales]`` column by column, each column at a multiple of 16 bytes."""
    rows, columns = scales.shape
    strides = (1, align(rows, SCALES_ALIGN))
    return torch.empty_strided((rows, columns), strides, dtype=scales.dtype, device=scales.device).copy_(scales)
