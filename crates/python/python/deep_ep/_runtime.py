"""What frameworks ask DeepEP's ``buffer.runtime``, and memory that they take from it for themselves."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from moexpress import errors
from moexpress.adapter import limits

if TYPE_CHECKING:
    from .buffer import Buffer


MOST_BYTES = (1 << 63) - 1
"""The largest size hint: DeepEP's are int64."""


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
        name, bytes_of = ("num_rdma_bytes" if rdma else "num_nvl_bytes"), self._sizes[bool(rdma)]
        width = torch.empty((), dtype=dtype, device="meta").element_size()
        if not 0 <= offset <= bytes_of or offset % width:
            raise errors.InvalidArgument(f"offset is {offset}, allowed: multiples of {width}, 0 to {name}, {bytes_of}")
        memory = self._taken.get(bool(rdma))
        if memory is None:
            if device is None:
                device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
            memory = torch.empty(bytes_of, dtype=torch.uint8, device=device or "cpu")
            self._taken[bool(rdma)] = memory
        all_of_it = memory[offset : offset + (bytes_of - offset) // width * width].view(dtype)
        if size is None:
            return all_of_it
        wanted = torch.Size(size)
        if wanted.numel() > all_of_it.numel():
            raise errors.InvalidArgument(
                f"size is {list(wanted)}, allowed: at most {all_of_it.numel()} elements, as {name} is {bytes_of}"
            )
        return all_of_it[: wanted.numel()].view(wanted)

    def free(self) -> None:
        """Forgets it: what the caller still holds lives on."""
        self._taken.clear()
