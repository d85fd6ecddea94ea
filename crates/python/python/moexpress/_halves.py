"""Low-latency operations that were sent and are to be received."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from . import _native
from ._plain import plain
from ._results import LowReceived

if TYPE_CHECKING:
    from ._communicator import Communicator


class Landing:
    """Where what a dispatch brings is written. GPUs bring FP8 rows of odd sizes as they travel; codes and scales are taken apart then."""

    def __init__(self, communicator: Communicator, into: LowReceived) -> None:
        self._communicator, self._into = communicator, into
        is_odd = communicator.device.type == "cuda" and into.scales is not None and communicator.hidden % 16 != 0
        self._rows = communicator._travelling() if is_odd else None

    def places(self) -> tuple[int, _native._Scales3, int, int, int]:
        """Addresses: rows; scales and their strides; counts, segments, tokens."""
        into, rows = self._into, self._rows
        scales: Any = None
        if into.scales is not None and rows is None:
            scales = (into.scales.data_ptr(), *into.scales.stride())
        x = into.x if rows is None else rows
        return (
            x.data_ptr(),
            scales,
            into.expert_counts.data_ptr(),
            into.segments.data_ptr(),
            into.source_token.data_ptr(),
        )

    def landed(self) -> None:
        """After the call."""
        into, rows = self._into, self._rows
        if rows is not None and into.scales is not None:
            at, wide = self._communicator.native.row_layout()[1], into.scales.shape[2]
            into.x.view(torch.uint8).copy_(rows[..., : self._communicator.hidden])
            into.scales.copy_(rows[..., at : at + 4 * wide].view(into.scales.dtype))


class LowDispatch:
    """A low-latency dispatch that was sent. Operations are received in the order in which they were sent."""

    def __init__(
        self, communicator: Communicator, pending: _native.Pending, x: torch.Tensor, into: LowReceived
    ) -> None:
        # Rows are kept: those for a rank that was late are read again by the receiving half.
        self._communicator, self._pending, self._x, self._into = communicator, pending, x, into

    @property
    def result(self) -> LowReceived:
        """Where results go; their contents are defined after :meth:`receive`."""
        return self._into

    @plain
    def receive(self) -> LowReceived:
        """Waits for what the others sent.

        Raises:
            errors.OperationFailed: a peer did not deliver. Mask it (:meth:`Communicator.mask_rank`) and receive again.
        """
        into, communicator = self._into, self._communicator
        rows = Landing(communicator, into)
        order = communicator.order.on(into.x, into.scales, into.expert_counts, into.segments, into.source_token)
        into.handle = communicator.native.receive_dispatch(order, self._pending, *rows.places(), self._x.shape[0])
        rows.landed()
        return into


class LowCombine:
    """A low-latency combine that was sent."""

    def __init__(
        self, communicator: Communicator, pending: _native.Pending, y: torch.Tensor, into: torch.Tensor
    ) -> None:
        # Results are kept: those for a rank that was late are read again by the receiving half.
        self._communicator, self._pending, self._y, self._into = communicator, pending, y, into

    @property
    def result(self) -> torch.Tensor:
        """Where the sums go; defined after :meth:`receive`."""
        return self._into

    @plain
    def receive(self) -> torch.Tensor:
        """Waits for the results of this rank's tokens: bf16 ``[tokens, hidden]``.

        Raises:
            errors.OperationFailed: as for :meth:`LowDispatch.receive`.
        """
        order = self._communicator.order.on(self._into)
        self._communicator.native.receive_combine(order, self._pending, self._into.data_ptr())
        return self._into
