"""Low-latency operations that were sent and are to be received."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from . import _native
from ._results import LowReceived

if TYPE_CHECKING:
    from ._communicator import Communicator


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

    def receive(self) -> LowReceived:
        """Waits for what the others sent.

        Raises:
            errors.OperationFailed: a peer did not deliver. Mask it (:meth:`Communicator.mask_rank`) and receive again.
        """
        into, communicator = self._into, self._communicator
        # GPUs bring FP8 rows as they travel; codes and scales are taken apart here.
        rows = communicator._travelling() if communicator.device.type == "cuda" and into.scales is not None else None
        scales = None if into.scales is None or rows is not None else (into.scales.data_ptr(), *into.scales.stride())
        x = into.x if rows is None else rows
        communicator.order.enter((x, into.scales, into.expert_counts, into.segments, into.source_token))
        into.handle = communicator.native.receive_dispatch(
            self._pending,
            x.data_ptr(),
            scales,  # type: ignore[arg-type]
            into.expert_counts.data_ptr(),
            into.segments.data_ptr(),
            into.source_token.data_ptr(),
            self._x.shape[0],
        )
        communicator.order.leave()
        if rows is not None and into.scales is not None:
            at, wide = communicator.native.row_layout()[1], into.scales.shape[2]
            into.x.view(torch.uint8).copy_(rows[..., : communicator.hidden])
            into.scales.copy_(rows[..., at : at + 4 * wide].view(into.scales.dtype))
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

    def receive(self) -> torch.Tensor:
        """Waits for the results of this rank's tokens: bf16 ``[tokens, hidden]``.

        Raises:
            errors.OperationFailed: as for :meth:`LowDispatch.receive`.
        """
        order = self._communicator.order
        order.enter((self._into,))
        self._communicator.native.receive_combine(self._pending, self._into.data_ptr())
        order.leave()
        return self._into
