"""What arguments must be, said before anything moves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from moexpress import errors
from moexpress.adapter import check

from .config import Config
from .utils import EventHandle, EventOverlap

if TYPE_CHECKING:
    from ._members import Members


def told(what: object) -> str:
    return str(list(what.shape)) if isinstance(what, torch.Tensor) else f"a {type(what).__name__}"


tensor = check.address
"""Refuses what is no contiguous tensor of exactly this dtype, shape and device."""


def whole(name: str, given: object) -> None:
    """Refuses a tensor that torch cannot look at, as it is more, or less, than memory with a shape."""
    check.dense(name, given)
    assert isinstance(given, torch.Tensor)
    check.memory(name, given)


def topk_idx(topk_idx: object) -> torch.Tensor:
    """The choices as int64. Refuses all but int64 and int32 ``[tokens, topk]``."""
    if isinstance(topk_idx, torch.Tensor):
        whole("topk_idx", topk_idx)
    if not isinstance(topk_idx, torch.Tensor) or topk_idx.dim() != 2:
        raise errors.InvalidArgument(f"topk_idx is {told(topk_idx)}, allowed: [tokens, topk]")
    if topk_idx.dtype is torch.int64:
        return topk_idx
    if topk_idx.dtype is torch.int32:
        return topk_idx.long()
    raise errors.InvalidArgument(
        f"dtype of topk_idx is {topk_idx.dtype}, allowed: torch.int64 (deep_ep.topk_idx_t) or torch.int32"
    )


def membership(topk_idx: torch.Tensor, in_rank: torch.Tensor, experts: int, members: Members) -> None:
    """Refuses choices that no expert has, and a membership that is not that of the choices."""
    if not torch.equal(members.of(topk_idx, experts)[2], in_rank):
        raise errors.InvalidArgument(
            "is_token_in_rank is not that of topk_idx, allowed: what get_dispatch_layout returned for it"
        )


def rank(name: str, rank: object, ranks: int) -> None:
    if not isinstance(rank, int) or not 0 <= rank < ranks:
        raise errors.InvalidArgument(f"{name} is {rank}, allowed: 0 to {ranks - 1}")


def config(config: object) -> None:
    if not isinstance(config, Config):
        raise errors.InvalidArgument(f"config is a {type(config).__name__}, allowed: a deep_ep.Config, or None")


def asynchrony(previous_event: object, async_finish: bool, allocate_on_comm_stream: bool) -> None:
    if previous_event is not None and not isinstance(previous_event, EventOverlap | EventHandle):
        raise errors.InvalidArgument(f"previous_event is a {type(previous_event).__name__}, allowed: an EventOverlap")
    if allocate_on_comm_stream and (previous_event is None or not async_finish):
        raise errors.InvalidArgument(
            "allocate_on_comm_stream is True, allowed: with previous_event and async_finish only"
        )


def hook(async_finish: bool, return_recv_hook: bool) -> None:
    if async_finish and return_recv_hook:
        raise errors.InvalidArgument("async_finish and return_recv_hook are both True, allowed: one of them")
