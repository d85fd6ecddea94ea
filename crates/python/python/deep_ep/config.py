"""DeepEP's settings, and what a call's settings come to here: docs/python.md has it size by size."""

from __future__ import annotations

from typing import Any

from moexpress.adapter import limits

from .utils.math import align, ceil_div

# Chunks that DeepEP's documentation recommends: NVLink send and receive, RDMA send and receive, by ranks.
_DISPATCH = {
    2: (24, 256, 6, 128),
    4: (6, 256, 6, 128),
    8: (6, 256, 6, 128),
    16: (36, 288, 20, 128),
    24: (32, 288, 8, 128),
    32: (32, 288, 8, 128),
    48: (32, 288, 8, 128),
    64: (32, 288, 8, 128),
    96: (20, 480, 12, 128),
    128: (20, 560, 12, 128),
    144: (32, 720, 12, 128),
    160: (28, 720, 12, 128),
}
_COMBINE = {
    2: (10, 256, 6, 128),
    4: (9, 256, 6, 128),
    8: (4, 256, 6, 128),
    16: (4, 288, 12, 128),
    24: (1, 288, 8, 128),
    32: (1, 288, 8, 128),
    48: (1, 288, 8, 128),
    64: (1, 288, 8, 128),
    96: (1, 480, 8, 128),
    128: (1, 560, 8, 128),
    144: (2, 720, 8, 128),
    160: (2, 720, 8, 128),
}

NVLINK_RANKS = 8
"""Ranks of one of DeepEP's nodes."""


USUAL_PIECE = 8
"""Rows that are handed over at a time where nothing is said. With fewer a call takes longer (docs/cuda-tried.md)."""
PIECES = 8
"""Of an outbox: a warp takes one at a time, and several warps are to have one."""


class Config:
    """Multiprocessors and chunk sizes of a call.

    Args:
        num_sms: multiprocessors; an even number.
        num_max_nvl_chunked_send_tokens: rows sent at a time over NVLink.
        num_max_nvl_chunked_recv_tokens: rows of a ring over NVLink, more than are sent at a time.
        num_max_rdma_chunked_send_tokens: rows sent at a time over RDMA.
        num_max_rdma_chunked_recv_tokens: rows of a ring over RDMA, more than are sent at a time.

    Raises:
        moexpress.errors.InvalidArgument: a size that DeepEP refuses, too.
    """

    def __init__(
        self,
        num_sms: int = 20,
        num_max_nvl_chunked_send_tokens: int = 6,
        num_max_nvl_chunked_recv_tokens: int = 256,
        num_max_rdma_chunked_send_tokens: int = 6,
        num_max_rdma_chunked_recv_tokens: int = 256,
    ) -> None:
        self.num_sms = multiprocessors(num_sms)
        self.num_max_nvl_chunked_send_tokens, self.num_max_nvl_chunked_recv_tokens = _chunks(
            "nvl", num_max_nvl_chunked_send_tokens, num_max_nvl_chunked_recv_tokens
        )
        self.num_max_rdma_chunked_send_tokens, self.num_max_rdma_chunked_recv_tokens = _chunks(
            "rdma", num_max_rdma_chunked_send_tokens, num_max_rdma_chunked_recv_tokens
        )

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of rings for rows of ``hidden_bytes`` from each of the ranks of a node, on each of ``num_sms / 2`` channels."""
        hidden_bytes, num_ranks = _row(hidden_bytes, num_ranks)
        rings = self.num_sms // 2 * min(num_ranks, NVLINK_RANKS)
        row = hidden_bytes + METADATA
        heads = (2 * max(num_ranks // NVLINK_RANKS, 1) + 3) * INT
        return align(rings * (self.num_max_nvl_chunked_recv_tokens * row + heads), ALIGN)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """The same for rings between nodes, there and back; 0 on one node."""
        hidden_bytes, num_ranks = _row(hidden_bytes, num_ranks)
        if num_ranks <= NVLINK_RANKS:
            return 0
        rings = 2 * (self.num_sms // 2) * ceil_div(num_ranks, NVLINK_RANKS)
        rows = align(self.num_max_rdma_chunked_recv_tokens, self.num_max_rdma_chunked_send_tokens)
        row, heads = hidden_bytes + METADATA + BLOCK, (2 * NVLINK_RANKS + 2) * INT
        return align(rings * (rows * row + heads), ALIGN)

    def outbox(self, slots: int) -> tuple[int, int] | None:
        """Rows that a call hands over at a time, and rows for each reader that lie in an outbox with ``slots`` of them; None where there is
        none. Not of DeepEP."""
        if slots == 0:
            return None
        held = min(self.num_max_nvl_chunked_recv_tokens, slots)
        return max(USUAL_PIECE, min(self.num_max_nvl_chunked_send_tokens, held // PIECES)), held

    def __repr__(self) -> str:
        return (
            f"Config({self.num_sms}, {self.num_max_nvl_chunked_send_tokens}, {self.num_max_nvl_chunked_recv_tokens}, "
            f"{self.num_max_rdma_chunked_send_tokens}, {self.num_max_rdma_chunked_recv_tokens})"
        )


def multiprocessors(num_sms: Any) -> int:
    """Checks how many a call is to have."""
    number = limits.number("num_sms", num_sms)
    if number < 2 or number % 2:
        raise limits.invalid("num_sms", number, "an even number, 2 or more")
    return number


def _chunks(link: str, send: Any, recv: Any) -> tuple[int, int]:
    """Checks rows that are sent at a time, and those of a ring."""
    name = f"num_max_{link}_chunked_recv_tokens"
    send, recv = limits.number(f"num_max_{link}_chunked_send_tokens", send, 1), limits.number(name, recv)
    if recv <= send:
        raise limits.invalid(name, recv, f"more than the {send} that are sent at a time")
    return send, recv


def _row(hidden_bytes: Any, num_ranks: Any) -> tuple[int, int]:
    """Checks what size hints are asked for: bytes of a row, and ranks."""
    return limits.number("hidden_bytes", hidden_bytes), limits.number("num_ranks", num_ranks, 1)


INT = 4
METADATA = 8 + 128 * (8 + 4 + 4)
"""Bytes that DeepEP reckons beside a row: its source, and 128 choices, weights and scales."""
BLOCK = 16
"""Bytes more beside a row of a ring between nodes."""
ALIGN = 128


def _of(table: dict[int, tuple[int, int, int, int]], num_ranks: int, num_sms: int) -> Config:
    num_ranks = limits.number("num_ranks", num_ranks, 1)
    # Any number of ranks will do here: the next larger that DeepEP names, or its largest.
    known = next((ranks for ranks in sorted(table) if ranks >= num_ranks), max(table))
    return Config(num_sms, *table[known])


def dispatch_config(num_ranks: int, num_sms: int) -> Config:
    """What DeepEP recommends for a dispatch of so many ranks."""
    return _of(_DISPATCH, num_ranks, num_sms)


def combine_config(num_ranks: int, num_sms: int) -> Config:
    """What DeepEP recommends for a combine of so many ranks."""
    return _of(_COMBINE, num_ranks, num_sms)
