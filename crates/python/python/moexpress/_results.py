"""What calls return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.dlpack import from_dlpack

from . import _native
from ._check import Held

if TYPE_CHECKING:
    from ._order import Order

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


class _Rows:
    """Rows that came, of throughput mode or of low latency."""

    def __init__(self, out: _native.Dispatched | _native.LowDispatched, order: Order) -> None:
        self._rows_of, self._order = out, order

    @cached_property
    def _packed(self) -> torch.Tensor:
        """Codes with their scales behind them."""
        return self._tensor(self._rows_of.x(False))

    def _tensor(self, given: _native._Capsule) -> torch.Tensor:
        return self._order.tensor(given)

    def _x(self) -> torch.Tensor:
        packed = self._order.packed
        if packed is not None:
            return packed.codes(self._packed)
        x = self._tensor(self._rows_of.x(KNOWS_FP8))
        return x.view(torch.float8_e4m3fn) if x.dtype is torch.uint8 else x

    def _scales(self) -> torch.Tensor | None:
        packed = self._order.packed
        return self._maybe(self._rows_of.scales()) if packed is None else packed.scales(self._packed)

    def _maybe(self, given: _native._Capsule | None) -> torch.Tensor | None:
        return None if given is None else self._tensor(given)


@dataclass(slots=True)
class ByExpert:
    """Where rows by expert stand. *Slots* are rows of :attr:`Received.x`."""

    first: list[int]
    """``[local experts + 1]``: the first slot of each expert, a multiple of the alignment; last, behind all of their slots. Empty with
    ``device_counts``."""
    counts: list[int]
    """``[local experts]``: rows of each expert, padding not counted. Empty with ``device_counts``."""
    slots: torch.Tensor
    """int32 ``[received rows, topk]``: the slot of each choice, or -1."""
    offsets: torch.Tensor | None
    """int32 ``[ranks, local experts]``: the first slot of each source at each expert. Its rows there end where those of the next source
    begin. None in low latency, whose :attr:`LowReceived.segments` say the same."""
    device_counts: tuple[torch.Tensor, torch.Tensor] | None = None
    """With ``device_counts``, also along its handle: int32 ``first`` and ``counts``, where the host does not know them. ``x`` has room for more
    slots than the last of ``first``: padding."""
    weights: torch.Tensor | None = None
    """f32 ``[slots]``: the weight of each slot's choice, 0 where the slot is no choice's. None along a handle, where weights do not travel again, in
    low latency, and on NPUs."""


class Received(_Rows):
    """What a rank received from a dispatch. Rows are ordered by source rank, then by token; of a dispatch by expert ``x`` and ``scales`` are by
    expert, and all else stays by received row.

    Tensors are made of the memory they lie in when they are asked for.
    """

    def __init__(self, out: _native.Dispatched, order: Order) -> None:
        super().__init__(out, order)
        self._out = out

    @cached_property
    def rows(self) -> int:
        """Rows received; ``x`` may have room for more (``worst_rows``). With ``device_counts`` the bound."""
        return self._out.rows

    @cached_property
    def expert_counts(self) -> list[int]:
        """``[local experts]``: received choices, rounded up to the alignment. Empty for a cached dispatch, and with ``device_counts``."""
        return self._out.expert_counts

    @cached_property
    def handle(self) -> _native.Handle:
        """For combine and cached dispatches."""
        return self._out.handle

    @cached_property
    def x(self) -> torch.Tensor:
        """``[rows, hidden]``: the rows, bf16, float8_e4m3fn or int8, contiguous where a row is a multiple of 16 bytes and none of INT8 on an
        NPU. May lie in the communicator's arena, which gets the memory back when this tensor and its views are gone."""
        return self._x()

    @cached_property
    def scales(self) -> torch.Tensor | None:
        """``[rows, scales]`` of FP8 rows, contiguous: f32, or int32 with four UE8M0 bytes each. Beyond a row's last scale bytes are
        undefined. f32 ``[rows, 1]`` of INT8 rows. Lies as ``x`` does, and holds the same memory."""
        return self._scales()

    @cached_property
    def topk_idx(self) -> torch.Tensor | None:
        """int64 ``[rows, topk]``: expert on this rank, or -1. None where choices did not travel."""
        return self._maybe(self._out.topk_idx())

    @cached_property
    def topk_weights(self) -> torch.Tensor | None:
        """f32 ``[rows, topk]``: weight of each choice, 0 where ``topk_idx`` is -1."""
        return self._maybe(self._out.topk_weights())

    @cached_property
    def source_token(self) -> torch.Tensor:
        """int32 ``[rows]``: token in its rank's batch."""
        return self._tensor(self._out.source_token())

    @cached_property
    def source_rank(self) -> torch.Tensor:
        """int32 ``[rows]``: rank that the row came from."""
        return self._tensor(self._out.source_rank())

    @cached_property
    def by_expert(self) -> ByExpert | None:
        """Where the rows of ``x`` stand, of a dispatch by expert and of cached ones along its handle; else None."""
        slots, offsets = self._maybe(self._out.slots()), self._maybe(self._out.offsets())
        if slots is None or offsets is None:
            return None
        weights = self._maybe(self._out.slot_weights())
        if self._out.by_expert is not None:
            return ByExpert(*self._out.by_expert, slots, offsets, weights=weights)
        first, counts = self._maybe(self._out.first_slots()), self._maybe(self._out.slot_counts())
        assert first is not None and counts is not None
        return ByExpert([], [], slots, offsets, (first, counts), weights)

    @cached_property
    def device_counts(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """int32 ``[1]``, rows received, and int32 ``[local experts]``, as ``expert_counts``: where they were asked for."""
        rows, counts = self._maybe(self._out.device_rows()), self._maybe(self._out.device_counts())
        return None if rows is None or counts is None else (rows, counts)


@dataclass(slots=True)
class Combined:
    """What a combine gave back."""

    x: torch.Tensor
    """bf16 ``[tokens, hidden]``: bias plus the sum over the ranks that got the token."""
    topk_weights: torch.Tensor | None
    """f32 ``[tokens, topk]``: sums of the weights that travelled back."""


class LowReceived(_Rows):
    """What a rank received from a low-latency dispatch: for each local expert rows packed from the first on; by source each row once, and packed
    one behind the other: no local experts in the shapes below. Defined once it was received.

    Tensors are made of the memory they lie in when they are asked for; it is given back as that of :class:`Received` is.
    """

    handle: _native.LowHandle | None
    """For combines. None until it was received."""

    def __init__(self, out: _native.LowDispatched, handle: _native.LowHandle | None, order: Order) -> None:
        super().__init__(out, order)
        self._out, self.handle = out, handle
        self._unfilled: list[tuple[Held, Callable[[], None]]] = []

    def check(self) -> None:
        """Refuses to receive where what was asked for before has been taken away since."""
        for held, _ in self._unfilled:
            held.check(whole=True)

    def received(self, handle: _native.LowHandle) -> None:
        """What was asked for before gets its contents."""
        self.handle = handle
        while self._unfilled:
            held, fill = self._unfilled[-1]
            held.check(whole=True)
            fill()
            self._unfilled.pop()

    def _tensor(self, given: _native._Capsule) -> torch.Tensor:
        if self.handle is not None:
            return self._order.tensor(given)
        tensor, fill = self._order.unfilled(given)
        if fill is not None:
            self._unfilled.append((Held("results asked for before they came", tensor), fill))
        return tensor

    @cached_property
    def x(self) -> torch.Tensor:
        """``[local experts, ranks * max_tokens, hidden]``, bf16, float8_e4m3fn or int8. Undefined beyond each expert's rows."""
        return self._x()

    @cached_property
    def scales(self) -> torch.Tensor | None:
        """``[local experts, ranks * max_tokens, scales]`` of FP8 rows, column-major; on GPUs row-major where rows are no multiple of 16
        elements. Of INT8 rows f32 ``[local experts, ranks * max_tokens, 1]``."""
        return self._scales()

    @cached_property
    def expert_counts(self) -> torch.Tensor:
        """int32 ``[local experts]``: rows of each."""
        return self._tensor(self._out.expert_counts())

    @cached_property
    def first_of(self) -> torch.Tensor | None:
        """By source, and packed, int32 ``[ranks + 1]``: the first row of each source rank; last, how many there are."""
        return self._maybe(self._out.first_of())

    @cached_property
    def topk_idx(self) -> torch.Tensor | None:
        """By source, and packed, int64 ``[ranks * max_tokens, topk]``: expert on this rank, or -1; -1 beyond the rows that came."""
        return self._maybe(self._out.topk_idx())

    @cached_property
    def topk_idx_too(self) -> torch.Tensor | None:
        """``topk_idx`` in other memory, for whoever gives that away."""
        return self._maybe(self._out.topk_idx_too())

    @cached_property
    def topk_weights(self) -> torch.Tensor | None:
        """By source, and packed, f32 ``[ranks * max_tokens, topk]``: weight of each choice, 0 where ``topk_idx`` is -1."""
        return self._maybe(self._out.topk_weights())

    @cached_property
    def source_rank(self) -> torch.Tensor | None:
        """By source, and packed, int32 ``[ranks * max_tokens]``: rank that the row came from. Undefined beyond the rows that came."""
        return self._maybe(self._out.source_rank())

    @cached_property
    def first_slots(self) -> torch.Tensor | None:
        """Packed int32 ``[local experts + 1]``: the first slot, a row of ``x``, of each expert; last, behind all of their slots."""
        return self._maybe(self._out.first_slots())

    @cached_property
    def slots(self) -> torch.Tensor | None:
        """Packed int32 ``[ranks * max_tokens, topk]``: the slot of each choice of each received row, or -1."""
        return self._maybe(self._out.slots())

    @cached_property
    def slot_weights(self) -> torch.Tensor | None:
        """Packed f32 ``[slots]``: weight of the choice that stands there, 0 of padding."""
        return self._maybe(self._out.slot_weights())

    @cached_property
    def segments(self) -> torch.Tensor:
        """int64 ``[local experts, ranks]``: rows of each source, ``first << 32 | rows``."""
        return self._tensor(self._out.segments())

    @cached_property
    def source_token(self) -> torch.Tensor:
        """int32 ``[local experts, ranks * max_tokens]``: token at its source."""
        return self._tensor(self._out.source_token())
