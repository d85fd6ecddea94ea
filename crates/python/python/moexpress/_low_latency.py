"""Low latency of one rank: what arguments must be, the calls beneath, and operations that were sent and are to be received."""

from __future__ import annotations

import torch

from . import _check, _native
from ._order import Order
from ._plain import plain
from ._results import LowReceived
from ._shape import Shape, address


class LowLatency:
    """The calls of :class:`Communicator` by the same names. ``stats``: int32 ``[local experts]``, to which the counts are added."""

    def __init__(self, native: _native.Endpoint, order: Order, shape: Shape) -> None:
        self.native, self.order, self.shape = native, order, shape

    def send_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        stats: torch.Tensor | None = None,
    ) -> LowDispatch:
        tokens = self._batch(x, topk_idx, topk_weights)
        # The receiving half may read the rows again.
        self.order.beyond(x)
        sent, into = self.native.send_dispatch(
            self.order.current(), False, x.data_ptr(), tokens, topk_idx.data_ptr(), address(topk_weights)
        )
        return LowDispatch(self, sent, x, into, stats)

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        stats: torch.Tensor | None = None,
    ) -> LowReceived:
        tokens = self._batch(x, topk_idx, topk_weights)
        handle, into = self.native.low_dispatch(
            self.order.current(),
            False,
            x.data_ptr(),
            tokens,
            topk_idx.data_ptr(),
            address(topk_weights),
            address(stats),
        )
        return LowReceived(into, handle)

    def send_combine(
        self, y: torch.Tensor, handle: _native.LowHandle, topk_weights: torch.Tensor | None, out: torch.Tensor | None
    ) -> LowCombine:
        out = self._sums(y, handle, topk_weights, out)
        # The receiving half may read the results again.
        self.order.beyond(y)
        sent = self.native.send_combine(self.order.current(), False, y.data_ptr(), handle, address(topk_weights))
        return LowCombine(self, sent, y, out)

    def combine(
        self, y: torch.Tensor, handle: _native.LowHandle, topk_weights: torch.Tensor | None, out: torch.Tensor | None
    ) -> torch.Tensor:
        out = self._sums(y, handle, topk_weights, out)
        self.native.low_combine(
            self.order.current(), False, y.data_ptr(), handle, address(topk_weights), out.data_ptr()
        )
        return out

    def _batch(self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None) -> int:
        """Checks a batch; its tokens."""
        tokens = self.shape.results("x", x)
        self.shape.choices(tokens, topk_idx, topk_weights)
        return tokens

    def _sums(
        self, y: torch.Tensor, handle: _native.LowHandle, topk_weights: torch.Tensor | None, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Checks a combine; where the sums go."""
        shape = self.shape
        if not isinstance(handle, _native.LowHandle):
            raise _check.invalid("handle", f"a {type(handle).__name__}", "one that a low-latency dispatch gave")
        _check.tensor("y", y, torch.bfloat16, shape.low, shape.device)
        tokens, hidden = handle.tokens, shape.hidden
        if topk_weights is not None:
            _check.tensor("topk_weights", topk_weights, torch.float32, (tokens, shape.topk), shape.device)
        if out is None:
            return torch.empty_strided((tokens, hidden), (hidden, 1), dtype=torch.bfloat16, device=shape.device)
        return _check.tensor("out", out, torch.bfloat16, (tokens, hidden), shape.device)


class LowDispatch:
    """A low-latency dispatch that was sent. Operations are received in the order in which they were sent."""

    def __init__(
        self,
        calls: LowLatency,
        pending: _native.Pending,
        x: torch.Tensor,
        into: _native.LowDispatched,
        stats: torch.Tensor | None,
    ) -> None:
        # Rows are kept: those for a rank that was late are read again by the receiving half.
        self._calls, self._pending, self._x, self._out, self._stats = calls, pending, x, into, stats
        self._into = LowReceived(into, None)

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
        into, calls = self._into, self._calls
        into.handle = calls.native.receive_dispatch(
            calls.order.current(), False, self._pending, self._out, address(self._stats), self._x.shape[0]
        )
        return into


class LowCombine:
    """A low-latency combine that was sent."""

    def __init__(self, calls: LowLatency, pending: _native.Pending, y: torch.Tensor, into: torch.Tensor) -> None:
        # Results are kept: those for a rank that was late are read again by the receiving half.
        self._calls, self._pending, self._y, self._into = calls, pending, y, into

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
        calls = self._calls
        calls.native.receive_combine(calls.order.current(), False, self._pending, self._into.data_ptr())
        return self._into
