"""What frameworks ask DeepEP's ``buffer.runtime``, and memory that they take from it for themselves."""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING

import torch
from moexpress import errors
from moexpress.adapter import limits

if TYPE_CHECKING:
    from .buffer import Buffer


MOST_BYTES = (1 << 63) - 1
"""The largest size hint: DeepEP's are int64."""
MOST_DIMENSIONS = 64
"""Dimensions of a tensor that torch has."""


class Runtime:
    """Where this rank is, and a buffer's calls by another name."""

    def __init__(self, buffer: Buffer) -> None:
        # A buffer that nobody uses is freed at once, without Python's search for cycles.
        self._of = weakref.ref(buffer)

    @property
    def _buffer(self) -> Buffer:
        buffer = self._of()
        if buffer is None:
            raise errors.Closed("the buffer of this runtime is gone; keep it as long as its runtime")
        return buffer

    def is_available(self) -> bool:
        """Whether calls can be made."""
        buffer = self._of()
        return buffer is not None and not buffer._communicators.closed

    def get_num_rdma_ranks(self) -> int:
        """Nodes."""
        return self._buffer._meeting.nodes

    def get_rdma_rank(self) -> int:
        """This node."""
        return self._buffer.rank // self._buffer._meeting.ranks_per_node

    def get_root_rdma_rank(self, get_global: bool) -> int:
        """The first node; ``get_global``: the rank there on this one's rail."""
        on_rail = self._buffer.rank % self._buffer._meeting.ranks_per_node
        return on_rail if limits.flag("get_global", get_global) else 0

    def get_local_device_id(self) -> int:
        """The GPU of this process; 0 on CPUs."""
        return torch.cuda.current_device() if torch.cuda.is_available() else 0

    def get_comm_stream(self) -> torch.Stream:
        """:meth:`Buffer.get_comm_stream`."""
        return self._buffer.get_comm_stream()

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, offset: int = 0, use_rdma_buffer: bool = False
    ) -> torch.Tensor:
        """:meth:`Buffer.get_local_buffer_tensor`."""
        return self._buffer.get_local_buffer_tensor(dtype, None, offset, use_rdma_buffer)

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """:meth:`Buffer.clean_low_latency_buffer`."""
        self._buffer.clean_low_latency_buffer(num_max_dispatch_tokens_per_rank, hidden, num_experts)

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """:meth:`Buffer.low_latency_update_mask_buffer`."""
        self._buffer.low_latency_update_mask_buffer(rank_to_mask, mask)

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """:meth:`Buffer.low_latency_query_mask_buffer`."""
        self._buffer.low_latency_query_mask_buffer(mask_status)

    def low_latency_clean_mask_buffer(self) -> None:
        """:meth:`Buffer.low_latency_clean_mask_buffer`."""
        self._buffer.low_latency_clean_mask_buffer()

    def destroy(self) -> None:
        """:meth:`Buffer.destroy`."""
        self._buffer.destroy()


class LocalMemory:
    """Memory of the sizes that DeepEP's buffers would have, for the caller's own use."""

    def __init__(self, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        self._sizes = {False: num_nvl_bytes, True: num_rdma_bytes}
        self._taken: dict[bool, torch.Tensor] = {}

    def tensor(
        self, device: torch.device | None, dtype: torch.dtype, size: torch.Size | None, offset: int, rdma: bool
    ) -> torch.Tensor:
        """A view. ``device``: that of the buffer's calls, if there were some; else the current one."""
        rdma = limits.flag("use_rdma_buffer", rdma)
        name, bytes_of = ("num_rdma_bytes" if rdma else "num_nvl_bytes"), self._sizes[rdma]
        if not isinstance(dtype, torch.dtype):
            raise limits.invalid("dtype", limits.told(dtype), "a torch.dtype")
        width, offset = dtype.itemsize, limits.number("offset", offset, 0, MOST_BYTES)
        if offset > bytes_of or offset % width:
            raise limits.invalid("offset", offset, f"multiples of {width}, 0 to {name}, {bytes_of}")
        most = (bytes_of - offset) // width
        wanted = [most] if size is None else limits.numbers("size", size, MOST_DIMENSIONS, 0, MOST_BYTES)
        count = math.prod(wanted)
        if count > most:
            raise limits.invalid("size", wanted, f"at most {most} elements, as {name} is {bytes_of}")
        return self._all_of(name, rdma, device)[offset : offset + count * width].view(dtype).view(wanted)

    def _all_of(self, name: str, rdma: bool, device: torch.device | None) -> torch.Tensor:
        memory = self._taken.get(rdma)
        if memory is None:
            if device is None:
                device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
            try:
                with torch.inference_mode(False):  # callers write to it outside, too
                    memory = torch.empty(self._sizes[rdma], dtype=torch.uint8, device=device or "cpu")
            except (RuntimeError, MemoryError) as error:
                raise errors.Broken(
                    f"memory of {name}, {self._sizes[rdma]} bytes, is not to be had: {error}"
                ) from error
            self._taken[rdma] = memory
        return memory

    def free(self) -> None:
        """Forgets it: what the caller still holds lives on."""
        self._taken.clear()
