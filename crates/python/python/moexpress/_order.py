"""How a communicator's work is ordered with the caller's: the one place that knows about streams."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

import torch

from . import _native
from ._check import Held
from ._npu import Npu, Packed
from ._results import tensor_of


def _slow_current_stream(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _slow_current_stream)
"""The current stream of a GPU, by the driver's handle: without an object, where this torch can do so."""
_is_capturing: Callable[[], bool] = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Contiguous, of undefined elements."""
    return torch.empty(shape, dtype=dtype, device=device)


Room = list[tuple[int, int, Any]]
"""Blocks for what a call brings: address, bytes, and what keeps them."""


def _in_place(given: Any) -> tuple[torch.Tensor, None]:
    return tensor_of(given), None


class HostOrder:
    """CPUs: a call has done its work when it returns."""

    stream: Any = None
    packed: Packed | None = None
    """How INT8 rows lie, if not codes and scales apart."""

    tensor = staticmethod(tensor_of)
    """A tensor of what the native part brought."""
    unfilled = staticmethod(_in_place)
    """The same of what is still to come, and what fills it then, if something has to."""
    empty = staticmethod(_empty)
    """A new tensor."""

    def current(self) -> int:
        """The caller's stream, by the driver's handle."""
        return 0

    def beyond(self, *tensors: torch.Tensor | None) -> None:
        """Keeps the memory of ``tensors`` for work that comes after the call."""

    def hold(self, name: str, tensor: torch.Tensor, beside: bool = False) -> Held | None:
        """Keeps the memory of ``tensor`` for a call to come that reads it again; None where none does: what was sent was copied. ``beside``: the current
        stream may not wait for that call."""
        return None

    def captures(self) -> bool:
        """Whether a call that is made now is captured into a graph."""
        return False

    def room(self, sizes: list[int], defer: bool) -> Room:
        """Memory for what a captured call brings."""
        raise NotImplementedError

    def follow(self, other: Order) -> None:
        """Lets later calls come behind those that ``other`` has now."""

    def last(self) -> int | None:
        """A stream that may read results that are gone when a communicator ends, beside those that calls were made on: the caller's, by the driver's handle;
        None where that is not known, or nothing reads them."""
        return None

    def event(self) -> torch.cuda.Event | None:
        """What the completion of the last call is waited for by; None where it is complete."""
        return None

    def behind(self) -> AbstractContextManager[Any]:
        """What is enqueued inside comes behind the last call, whether the current stream waits for that or not."""
        return nullcontext()


class CudaOrder:
    """GPUs: calls enqueue to a stream of the communicator.

    It waits for what the caller's current stream holds when the call is made; unless the caller defers that, the current stream then
    waits for it, so that the memory of arguments may be used again in its order. Where the caller defers, ``record_stream`` keeps it: torch's
    allocator gives the block to nobody before the communicator's stream is done, even if the storage is freed by a resize. Memory that
    torch's allocator does not own (from DLPack, from a pool of another library) is the caller's to keep until the event has come.
    Memory of results is given back on the communicator's stream when their last view is gone, and used again by calls made after that:
    so whatever reads them must have been enqueued to the stream that is current in the next call, or to one that this stream waits for.
    """

    packed: Packed | None = None
    tensor = staticmethod(tensor_of)
    unfilled = staticmethod(_in_place)
    empty = staticmethod(_empty)

    def __init__(self, native: _native.Endpoint, device: torch.device) -> None:
        self._native = native
        self.stream = torch.cuda.ExternalStream(native.stream(), device=device)
        self._current = partial(current_stream, self.stream.device_index)
        self._met: set[int] = set()

    def current(self) -> int:
        raw = self._current()
        if raw not in self._met:
            self._meet(raw)
        return raw

    def _meet(self, raw: int) -> None:
        """Says of a stream that is torch's own that it lives as long as the process; one of another library (``ExternalStream``) may not, and torch names it
        by its handle."""
        stream = torch.cuda.current_stream(self.stream.device_index)
        if stream.cuda_stream == raw and (raw == 0 or stream.stream_id != raw):
            self._native.lasts(raw)
        self._met.add(raw)

    def beyond(self, *tensors: torch.Tensor | None) -> None:
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(self.stream)

    def hold(self, name: str, tensor: torch.Tensor, beside: bool = False) -> Held | None:
        # The current stream waits for the call that sends, and for the one that reads again, up to which the tensor is held. In a capture a block that was
        # recorded is not used again before the capture has ended.
        if beside or not self.captures():
            self.beyond(tensor)
        return Held(name, tensor)

    def captures(self) -> bool:
        return _is_capturing()

    def room(self, sizes: list[int], defer: bool) -> Room:
        """Torch's memory: its allocator has a pool for a graph, or for several, and uses it again within and among them, in the order of the stream that it was
        taken on. That is the current one, or where this does not wait for the call the communicator's, which all calls follow."""
        if defer:
            # From here on it is captured, too.
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device_index))
        with torch.cuda.stream(self.stream) if defer else nullcontext():
            blocks = [torch.empty(size, dtype=torch.uint8, device=self.stream.device) for size in sizes]
        return [(block.data_ptr(), size, block) for block, size in zip(blocks, sizes, strict=True)]

    def follow(self, other: Order) -> None:
        if other.stream is not None:
            self.stream.wait_stream(other.stream)

    def last(self) -> int | None:
        with suppress(RuntimeError), torch.cuda.device(self.stream.device_index):
            if not torch.cuda.is_current_stream_capturing():
                return self._current()
        return None

    def event(self) -> torch.cuda.Event | None:
        event = torch.cuda.Event()
        event.record(self.stream)
        return event

    def behind(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.stream)


class NpuOrder:
    """NPUs: kernels come behind what the caller's current stream holds when the call is made, and a call ends when they have. So whatever is
    enqueued after it finds its results, and nothing need be kept for it.

    Results lie in memory of the native part. torch cannot take that over: torch_npu's operators expect storages that its own allocator made.
    So they are copied, when they are asked for, to tensors that torch makes.
    """

    stream: Any = None

    def __init__(self, npu: Npu, packed: Packed | None) -> None:
        self._npu, self.packed = npu, packed
        self.current = npu.current

    def tensor(self, away: Any) -> torch.Tensor:
        tensor, fill = self.unfilled(away)
        fill()
        return tensor

    def unfilled(self, away: _native.Away) -> tuple[torch.Tensor, Callable[[], None]]:
        tensor = self._npu.empty(tuple(away.shape), getattr(torch, away.dtype))
        # Behind what may still use the memory that torch has handed out.
        return tensor, lambda: away.copy_to(tensor.data_ptr(), self.current())

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._npu.empty(shape, dtype)

    def beyond(self, *tensors: torch.Tensor | None) -> None:
        """Nothing: a call has used its arguments when it ends."""

    def hold(self, name: str, tensor: torch.Tensor, beside: bool = False) -> Held | None:
        return Held(name, tensor)

    def captures(self) -> bool:
        return False

    def room(self, sizes: list[int], defer: bool) -> Room:
        raise NotImplementedError

    def follow(self, other: Order) -> None:
        """Nothing: its calls have ended."""

    def last(self) -> int | None:
        return None

    def event(self) -> None:
        return None

    def behind(self) -> AbstractContextManager[Any]:
        return nullcontext()


Order = HostOrder | CudaOrder | NpuOrder
