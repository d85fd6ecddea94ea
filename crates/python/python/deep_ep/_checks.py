"""What arguments must be, said before anything moves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from moexpress import _check, errors

from .config import Config
from .utils import EventOverlap

if TYPE_CHECKING:
    from ._layout import Layouts


def told(what: object) -> str:
    return str(list(what.shape)) if isinstance(what, torch.Tensor) else f"a {type(what).__name__}"


tensor = _check.tensor


def topk_idx(topk_idx: object) -> None:
    if not isinstance(topk_idx, torch.Tensor) or topk_idx.dim() != 2:
        raise errors.InvalidArgument(f"topk_idx is {told(topk_idx)}, allowed: [tokens, topk]")
    if topk_idx.dtype != torch.int64:
        raise errors.InvalidArgument(
            f"dtype of topk_idx is {topk_idx.dtype}, allowed: torch.int64 (deep_ep.topk_idx_t)"
        )


def membership(topk_idx: torch.Tensor, in_rank: torch.Tensor, experts: int, layouts: Layouts) -> None:
    """Refuses choices that no expert has, and a membership that is not that of the choices."""
    if not torch.equal(layouts.of(topk_idx, experts)[2], in_rank):
        raise errors.InvalidArgument(
            "is_token_in_rank is not that of topk_idx, allowed: what get_dispatch_layout returned for it"
        )


def config(config: object) -> None:
    if not isinstance(config, Config):
        raise errors.InvalidArgument(f"config is a {type(config).__name__}, allowed: a deep_ep.Config, or None")


def asynchrony(previous_event: object, async_finish: bool, allocate_on_comm_stream: bool) -> None:
    if previous_event is not None and not isinstance(previous_event, EventOverlap):
        raise errors.InvalidArgument(f"previous_event is a {type(previous_event).__name__}, allowed: an EventOverlap")
    if allocate_on_comm_stream and (previous_event is None or not async_finish):
        raise errors.InvalidArgument(
            "allocate_on_comm_stream is True, allowed: with previous_event and async_finish only"
        )


def hook(async_finish: bool, return_recv_hook: bool) -> None:
    if async_finish and return_recv_hook:
        raise errors.InvalidArgument("async_finish and return_recv_hook are both True, allowed: one of them")
