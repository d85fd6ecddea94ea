"""NPUs as torch_npu has them: their tensors, and their streams. Nothing of torch_npu is imported unless a communicator asks for ``device="npu"``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from . import _limits, _native, errors


class Npu:
    """One NPU: what torch gives of it."""

    ordinal: int
    """Its number, as CANN counts."""
    device: torch.device
    """That of its tensors."""

    def current(self) -> int:
        """The current stream, by CANN's own name."""
        raise NotImplementedError

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor of undefined elements."""
        raise NotImplementedError


class _OfTorch(Npu):
    def __init__(self, ordinal: int | None) -> None:
        # torch_npu names itself torch.npu.
        self._npu: Any = torch.npu  # type: ignore[attr-defined]
        self.ordinal = int(self._npu.current_device()) if ordinal is None else ordinal
        self.device = torch.device("npu", self.ordinal)

    def current(self) -> int:
        return int(self._npu.current_stream(self.ordinal).npu_stream)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)


def _torch_npu() -> str | None:
    """Imports torch_npu; why that cannot be."""
    try:
        importlib.import_module("torch_npu")
    except ImportError as error:
        return f"torch_npu cannot be imported ({error}); install the release of torch_npu for torch {torch.__version__}"
    return None


def found(ordinal: int | None) -> Npu:
    """The NPU of this number, or else the current one.

    Raises:
        errors.Unsupported: all that is missing: torch_npu, CANN, an NPU, or the kernels.
    """
    missing = [why for why in (_torch_npu(), _native.npu_is_available()) if why is not None]
    if missing:
        raise errors.Unsupported(f"device npu is not supported: {'; '.join(missing)}")
    return _OfTorch(ordinal)


finds: Callable[[int | None], Npu] = found
"""Finds an NPU by its number. Tests put a twin's in its place."""


def asked_for(device: object) -> tuple[bool, int | None]:
    """Whether ``device`` names an NPU, and which. torch does not know the name before torch_npu was imported."""
    if isinstance(device, torch.device):
        return device.type == "npu", device.index
    if not isinstance(device, str) or device.split(":")[0] != "npu":
        return False, None
    _, colon, number = device.partition(":")
    if not colon:
        return True, None
    if not number.isdecimal() or int(number) >= 1 << 15:
        raise _limits.invalid("device", device, "npu, or npu:0 and so on")
    return True, int(number)


class Packed:
    """INT8 rows as NPUs have them: bytes ``[rows, row bytes]``, of each row its codes and behind them its scale."""

    def __init__(self, npu: Npu, hidden: int) -> None:
        self._npu, self._hidden = npu, hidden
        self.row_bytes, self._scale_at = _native.int8_row(hidden)

    def codes(self, rows: torch.Tensor) -> torch.Tensor:
        """int8 ``[.., hidden]``, a view."""
        return rows[..., : self._hidden].view(torch.int8)

    def scales(self, rows: torch.Tensor) -> torch.Tensor:
        """f32 ``[.., 1]``, a view."""
        return rows[..., self._scale_at : self._scale_at + 4].view(torch.float32)

    def of(self, x: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales, checked, that lie so: themselves, or views of a copy."""
        if (
            x.stride() == (self.row_bytes, 1)
            and scales.stride(0) * 4 == self.row_bytes
            and scales.data_ptr() == x.data_ptr() + self._scale_at
        ):
            return x, scales
        rows = self._npu.empty((x.shape[0], self.row_bytes), torch.uint8)
        codes, behind = self.codes(rows), self.scales(rows)
        codes.copy_(x)
        behind.copy_(scales)
        return codes, behind
