"""What arguments must be, said before anything moves."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from moexpress import errors
from moexpress.adapter import check, limits

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


def mask(given: Collection[int], ranks: int) -> list[int]:
    """The ranks of a mask."""
    return limits.numbers("mask", given, ranks, 0, ranks - 1)


def config(config: object) -> None:
    if not isinstance(config, Config):
        raise errors.InvalidArgument(f"config is a {type(config).__name__}, allowed: a deep_ep.Config, or None")


def asynchrony(previous_event: object, async_finish: Any, allocate_on_comm_stream: Any) -> bool:
    """Whether a call is asynchronous. Refuses what does not go together."""
    is_async = limits.flag("async_finish", async_finish)
    allocates = limits.flag("allocate_on_comm_stream", allocate_on_comm_stream)
    if previous_event is not None and not isinstance(previous_event, EventOverlap | EventHandle):
        raise errors.InvalidArgument(f"previous_event is a {type(previous_event).__name__}, allowed: an EventOverlap")
    if allocates and (previous_event is None or not is_async):
        raise errors.InvalidArgument(
            "allocate_on_comm_stream is True, allowed: with previous_event and async_finish only"
        )
    return is_async


def hook(async_finish: Any, return_recv_hook: Any) -> tuple[bool, bool]:
    """Both, as Python has them. Refuses them together."""
    async_finish = limits.flag("async_finish", async_finish)
    return_recv_hook = limits.flag("return_recv_hook", return_recv_hook)
    if async_finish and return_recv_hook:
        raise errors.InvalidArgument("async_finish and return_recv_hook are both True, allowed: one of them")
    return async_finish, return_recv_hook
