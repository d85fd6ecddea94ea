"""What V2 has beside dispatch and combine, and is not offered here. Each call says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from moexpress import errors

Shapes = tuple[int, ...] | torch.Size | Sequence[tuple[int, ...] | torch.Size]


def _refuse(name: str, what: str, instead: str) -> NoReturn:
    raise errors.Unsupported(f"{name} is not supported: {what} is not offered here; use {instead}")


class NotOffered:
    """Engram's storage, transfers of pipelines, all-gather and reduce-scatter: all of them raise ``NotImplementedError``."""

    @staticmethod
    def get_engram_storage_size_hint(
        num_entries: int, hidden: int, num_max_tokens_per_rank: int, dtype: torch.dtype = torch.bfloat16
    ) -> tuple[int, int]:
        """Not supported."""
        _refuse("get_engram_storage_size_hint", "Engram's storage", "DeepEP for it")

    def engram_write(self, storage: torch.Tensor, sf: torch.Tensor | None = None) -> None:
        """Not supported."""
        _refuse("engram_write", "Engram's storage", "DeepEP for it")

    def engram_fetch(
        self, indices: torch.Tensor, num_qps: int = 0, use_tma_aligned_col_major_sf: bool = False
    ) -> Callable[[], Any]:
        """Not supported."""
        _refuse("engram_fetch", "Engram's storage", "DeepEP for it")

    @staticmethod
    def get_pp_buffer_size_hint(num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> int:
        """Not supported."""
        _refuse("get_pp_buffer_size_hint", "the transfer between stages of a pipeline", "torch.distributed.send")

    def pp_set_config(self, num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> None:
        """Not supported."""
        _refuse("pp_set_config", "the transfer between stages of a pipeline", "torch.distributed.send")

    def pp_send(self, t: torch.Tensor, dst_rank_idx: int, num_sms: int = 0) -> None:
        """Not supported."""
        _refuse("pp_send", "the transfer between stages of a pipeline", "torch.distributed.send")

    def pp_recv(self, t: torch.Tensor, src_rank_idx: int, num_sms: int = 0) -> None:
        """Not supported."""
        _refuse("pp_recv", "the transfer between stages of a pipeline", "torch.distributed.recv")

    @staticmethod
    def get_agrs_num_max_session_bytes(group: Any, shapes: Shapes, dtype: torch.dtype) -> int:
        """Not supported."""
        _refuse("get_agrs_num_max_session_bytes", "all-gather", "torch.distributed.all_gather")

    @staticmethod
    def get_agrs_buffer_size_hint(group: Any, num_max_session_bytes: int) -> int:
        """Not supported."""
        _refuse("get_agrs_buffer_size_hint", "all-gather", "torch.distributed.all_gather")

    def create_agrs_session(self) -> None:
        """Not supported."""
        _refuse("create_agrs_session", "all-gather", "torch.distributed.all_gather")

    def destroy_agrs_session(self) -> None:
        """Not supported."""
        _refuse("destroy_agrs_session", "all-gather", "torch.distributed.all_gather")

    @contextmanager
    def agrs_new_session(self, enabled: bool = True) -> Iterator[None]:
        """Does nothing when it is not ``enabled``; else not supported."""
        if enabled:
            _refuse("agrs_new_session", "all-gather", "torch.distributed.all_gather")
        yield

    def agrs_set_config(self, num_max_session_bytes: int, num_max_all_gathers_per_session: int) -> None:
        """Not supported."""
        _refuse("agrs_set_config", "all-gather", "torch.distributed.all_gather")

    def agrs_get_inplace_tensor(self, shapes: Shapes, dtype: torch.dtype) -> Any:
        """Not supported."""
        _refuse("agrs_get_inplace_tensor", "all-gather", "torch.distributed.all_gather")

    def all_gather(self, t: torch.Tensor | Sequence[torch.Tensor]) -> Any:
        """Not supported."""
        _refuse("all_gather", "all-gather", "torch.distributed.all_gather")
