"""What dispatches leave behind: DeepEP's tuples, which also know the handle beneath."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from moexpress import Communicator, LowReceived, _native, errors
from moexpress._shape import Element


class _Lazy(tuple[Any, ...]):
    """A tuple whose entries that are None are computed when they are asked for: nothing here needs them."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self)[index]
        held = super().__getitem__(index)
        return self._computed(index % len(self)) if held is None else held

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def _computed(self, index: int) -> torch.Tensor:
        raise NotImplementedError


class Handle(_Lazy):
    """A throughput dispatch's: rank_prefix_matrix int32 ``[ranks, ranks]``, channel_prefix_matrix int32 ``[ranks, channels]``,
    recv_channel_prefix_matrix int32 ``[ranks, channels]``, recv_src_idx int32 ``[rows]``, is_token_in_rank bool ``[tokens, ranks]``,
    send_head int32 ``[tokens, ranks]``.
    """

    communicator: Communicator
    native: _native.Handle
    channels: int
    element: Element
    """How its rows travel."""
    # The same routing in communicators of other element types, made when a cached dispatch asks for one.
    others: dict[str, tuple[Communicator, _native.Handle]]

    @classmethod
    def of(
        cls,
        communicator: Communicator,
        native: _native.Handle,
        source_token: torch.Tensor,
        in_rank: torch.Tensor,
        channels: int,
    ) -> Handle:
        """Of a dispatch with so many channels."""
        handle = cls((None, None, None, source_token, in_rank, None))
        handle.communicator, handle.native, handle.channels, handle.others = communicator, native, channels, {}
        handle.element = communicator.element
        return handle

    def _computed(self, index: int) -> torch.Tensor:
        native, ranks, channels = self.native, self.communicator.ranks, self.channels
        if index == 0:
            return self._filled(ranks, ranks, native.rank_prefix)
        if index == 1:
            return self._filled(ranks, channels, partial(native.channel_prefix, channels))
        if index == 5:
            return self._filled(native.tokens, ranks, partial(native.send_head, channels))
        source_token = self[3].cpu()
        return self._filled(ranks, channels, partial(native.source_channel_prefix, channels, source_token.data_ptr()))

    def _filled(self, rows: int, columns: int, fill: Callable[[int, int], None]) -> torch.Tensor:
        matrix = torch.empty((rows, columns), dtype=torch.int32, device="cpu")
        fill(matrix.data_ptr(), matrix.numel())
        return matrix.to(self.communicator.device)


class LowLatencyHandle(_Lazy):
    """A low-latency dispatch's: src_info int32 ``[local experts, ranks * max_tokens]``, layout_range int64 ``[local experts, ranks]``
    with ``begin << 32 | count``, the most tokens of a rank, hidden, experts.
    """

    communicator: Communicator
    received: LowReceived
    topk_idx: torch.Tensor

    @classmethod
    def of(cls, communicator: Communicator, received: LowReceived, topk_idx: torch.Tensor) -> LowLatencyHandle:
        """Of a dispatch that may be still to be received."""
        handle = cls((None, None, communicator.max_tokens, communicator.hidden, communicator.experts))
        handle.communicator, handle.received, handle.topk_idx = communicator, received, topk_idx
        return handle

    def _computed(self, index: int) -> torch.Tensor:
        return self.received.segments if index else self.received.source_token

    @property
    def native(self) -> _native.LowHandle:
        """The handle beneath, once the dispatch was received."""
        if self.received.handle is None:
            raise errors.InvalidArgument(
                "handle is of a dispatch that has not been received, allowed: one whose hook was called"
            )
        return self.received.handle


def normal(handle: object) -> Handle:
    """Refuses everything but a throughput dispatch's handle."""
    if not isinstance(handle, Handle):
        raise errors.InvalidArgument(f"handle is a {type(handle).__name__}, allowed: the tuple that dispatch returned")
    return handle


def low_latency(handle: object) -> LowLatencyHandle:
    """Refuses everything but a low-latency dispatch's handle."""
    if not isinstance(handle, LowLatencyHandle):
        raise errors.InvalidArgument(
            f"handle is a {type(handle).__name__}, allowed: the tuple that low_latency_dispatch returned"
        )
    return handle
