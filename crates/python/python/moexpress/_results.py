"""What calls return."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import _native


@dataclass
class Received:
    """What a rank received from a dispatch. Rows are ordered by source rank, then by token."""

    x: torch.Tensor
    """``[rows, hidden]``: the rows, bf16 or float8_e4m3fn. May lie in the communicator's arena, which gets the memory back when
    this tensor and its views are gone."""
    scales: torch.Tensor | None
    """``[rows, scales]`` of FP8 rows: f32, or int32 with four UE8M0 bytes each."""
    rows: int
    """Rows received; ``x`` may have room for more (``worst_rows``). With ``device_counts`` the bound."""
    topk_idx: torch.Tensor | None
    """int64 ``[rows, topk]``: expert on this rank, or -1. None where choices did not travel."""
    topk_weights: torch.Tensor | None
    """f32 ``[rows, topk]``: weight of each choice, 0 where ``topk_idx`` is -1."""
    source_token: torch.Tensor
    """int32 ``[rows]``: token in its rank's batch."""
    source_rank: torch.Tensor
    """int32 ``[rows]``: rank that the row came from."""
    expert_counts: list[int]
    """``[local experts]``: received choices, rounded up to the alignment. Empty for a cached dispatch."""
    handle: _native.Handle
    """For combine and cached dispatches."""
    device_counts: tuple[torch.Tensor, torch.Tensor] | None = None
    """int32 ``[1]``, rows received, and int32 ``[local experts]``, as ``expert_counts``: where they were asked for."""


@dataclass
class Combined:
    """What a combine gave back."""

    x: torch.Tensor
    """bf16 ``[tokens, hidden]``: bias plus the sum over the ranks that got the token."""
    topk_weights: torch.Tensor | None
    """f32 ``[tokens, topk]``: sums of the weights that travelled back."""


@dataclass
class LowReceived:
    """What a rank received from a low-latency dispatch: for each local expert rows packed from the first on."""

    x: torch.Tensor
    """``[local experts, ranks * max_tokens, hidden]``, bf16 or float8_e4m3fn. Undefined beyond each expert's rows."""
    scales: torch.Tensor | None
    """``[local experts, ranks * max_tokens, scales]`` of FP8 rows, column-major."""
    expert_counts: torch.Tensor
    """int32 ``[local experts]``: rows of each."""
    segments: torch.Tensor
    """int64 ``[local experts, ranks]``: rows of each source, ``first << 32 | rows``."""
    source_token: torch.Tensor
    """int32 ``[local experts, ranks * max_tokens]``: token at its source."""
    handle: _native.LowHandle | None
    """For combines. None until it was received."""
