"""What calls return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from . import _native

tensor_of: Callable[[Any], torch.Tensor] = getattr(torch._C, "_from_dlpack", from_dlpack)
"""A tensor of a capsule, for which the public function would first look for a protocol that capsules do not have."""


def _knows_fp8() -> bool:
    try:
        return (
            tensor_of(torch.empty(1, dtype=torch.float8_e4m3fn, device="cpu").__dlpack__()).dtype is torch.float8_e4m3fn
        )
    except (BufferError, RuntimeError):
        return False


KNOWS_FP8 = _knows_fp8()
"""Whether this torch takes FP8 over by name. Else it gets bytes, and looks at them as FP8."""


class Received:
    """What a rank received from a dispatch. Rows are ordered by source rank, then by token.

    Tensors are made of the memory they lie in when they are asked for.
    """

    def __init__(self, out: _native.Dispatched) -> None:
        self._out = out

    @cached_property
    def rows(self) -> int:
        """Rows received; ``x`` may have room for more (``worst_rows``). With ``device_counts`` the bound."""
        return self._out.rows

    @cached_property
    def expert_counts(self) -> list[int]:
        """``[local experts]``: received choices, rounded up to the alignment. Empty for a cached dispatch."""
        return self._out.expert_counts

    @cached_property
    def handle(self) -> _native.Handle:
        """For combine and cached dispatches."""
        return self._out.handle

    @cached_property
    def x(self) -> torch.Tensor:
        """``[rows, hidden]``: the rows, bf16 or float8_e4m3fn, contiguous where a row is a multiple of 16 bytes. May lie in the
        communicator's arena, which gets the memory back when this tensor and its views are gone."""
        x = tensor_of(self._out.x(KNOWS_FP8))
        return x.view(torch.float8_e4m3fn) if x.dtype is torch.uint8 else x

    @cached_property
    def scales(self) -> torch.Tensor | None:
        """``[rows, scales]`` of FP8 rows, contiguous: f32, or int32 with four UE8M0 bytes each. Beyond a row's last scale bytes are
        undefined. Lies as ``x`` does, and holds the same memory."""
        return _maybe(self._out.scales())

    @cached_property
    def topk_idx(self) -> torch.Tensor | None:
        """int64 ``[rows, topk]``: expert on this rank, or -1. None where choices did not travel."""
        return _maybe(self._out.topk_idx())

    @cached_property
    def topk_weights(self) -> torch.Tensor | None:
        """f32 ``[rows, topk]``: weight of each choice, 0 where ``topk_idx`` is -1."""
        return _maybe(self._out.topk_weights())

    @cached_property
    def source_token(self) -> torch.Tensor:
        """int32 ``[rows]``: token in its rank's batch."""
        return tensor_of(self._out.source_token())

    @cached_property
    def source_rank(self) -> torch.Tensor:
        """int32 ``[rows]``: rank that the row came from."""
        return tensor_of(self._out.source_rank())

    @cached_property
    def device_counts(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """int32 ``[1]``, rows received, and int32 ``[local experts]``, as ``expert_counts``: where they were asked for."""
        rows, counts = self._out.device_rows(), self._out.device_counts()
        return None if rows is None or counts is None else (tensor_of(rows), tensor_of(counts))


def _maybe(capsule: _native._Capsule | None) -> torch.Tensor | None:
    return None if capsule is None else tensor_of(capsule)


@dataclass(slots=True)
class Combined:
    """What a combine gave back."""

    x: torch.Tensor
    """bf16 ``[tokens, hidden]``: bias plus the sum over the ranks that got the token."""
    topk_weights: torch.Tensor | None
    """f32 ``[tokens, topk]``: sums of the weights that travelled back."""


class LowReceived:
    """What a rank received from a low-latency dispatch: for each local expert rows packed from the first on. Defined once it was received.

    Tensors are made of the memory they lie in when they are asked for; it is given back as that of :class:`Received` is.
    """

    handle: _native.LowHandle | None
    """For combines. None until it was received."""

    def __init__(self, out: _native.LowDispatched, handle: _native.LowHandle | None) -> None:
        self._out, self.handle = out, handle

    @cached_property
    def x(self) -> torch.Tensor:
        """``[local experts, ranks * max_tokens, hidden]``, bf16 or float8_e4m3fn. Undefined beyond each expert's rows."""
        x = tensor_of(self._out.x(KNOWS_FP8))
        return x.view(torch.float8_e4m3fn) if x.dtype is torch.uint8 else x

    @cached_property
    def scales(self) -> torch.Tensor | None:
        """``[local experts, ranks * max_tokens, scales]`` of FP8 rows, column-major; on GPUs row-major where rows are no multiple of 16
        elements."""
        return _maybe(self._out.scales())

    @cached_property
    def expert_counts(self) -> torch.Tensor:
        """int32 ``[local experts]``: rows of each."""
        return tensor_of(self._out.expert_counts())

    @cached_property
    def segments(self) -> torch.Tensor:
        """int64 ``[local experts, ranks]``: rows of each source, ``first << 32 | rows``."""
        return tensor_of(self._out.segments())

    @cached_property
    def source_token(self) -> torch.Tensor:
        """int32 ``[local experts, ranks * max_tokens]``: token at its source."""
        return tensor_of(self._out.source_token())
