"""What frameworks ask DeepEP's ``buffer.runtime``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .buffer import Buffer


class Runtime:
    """One NVLink domain."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer

    def is_available(self) -> bool:
        """Whether calls can be made."""
        return not self._buffer._communicators.closed

    def get_num_rdma_ranks(self) -> int:
        """Nodes."""
        return 1

    def get_rdma_rank(self) -> int:
        """This node."""
        return 0

    def get_root_rdma_rank(self, get_global: bool) -> int:
        """The rank of each node that others look for first."""
        return self._buffer.rank if get_global else 0

    def get_local_device_id(self) -> int:
        """The GPU of this process; 0 on CPUs."""
        return torch.cuda.current_device() if torch.cuda.is_available() else 0
