"""How rows that came are handed to the caller, and what says that they are there."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from moexpress import Communicator, Received

from . import _checks
from ._arena import Arena
from ._previous import NONE, Previous
from ._scales import Rows
from .utils import EventHandle, EventOverlap

Rows_t = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""bf16 rows, or FP8 codes and their scales."""


def taken(rows: Rows, received: Received, arena: Arena, defer: bool) -> Rows_t:
    """Received rows in the form of those that were sent: a copy, where they lie in another, or where the arena is full
    of such."""
    x, scales, communicator = received.x, received.scales, arena.communicator
    placed, lies = arena.has_placed(), rows.lie(x, scales)
    if lies and placed and not arena.keeps(x):
        x, scales = copy(x, communicator, defer), None if scales is None else copy(scales, communicator, defer)
        arena.copied(x)
    with communicator.order.behind() if defer and not lies else nullcontext():
        handed: Rows_t = rows.received(x, scales)
    return handed


def with_room(handed: Rows_t, rows: int) -> Rows_t:
    """What is handed over, as the first of ``rows`` rows; the others are undefined."""
    if isinstance(handed, tuple):
        return _filled_up(handed[0], rows), _filled_up(handed[1], rows)
    return _filled_up(handed, rows)


def _filled_up(x: torch.Tensor, rows: int) -> torch.Tensor:
    larger = x.new_empty((rows, *x.shape[1:]))
    larger[: x.shape[0]] = x
    return larger


def copy(x: torch.Tensor, communicator: Communicator, defer: bool) -> torch.Tensor:
    """A contiguous copy of received rows, in memory of torch's allocator."""
    with communicator.order.behind() if defer else nullcontext():
        return x.clone(memory_format=torch.contiguous_format)


def event(communicator: Communicator, defer: bool) -> EventOverlap:
    """After the last call of a communicator, and what was enqueued behind it."""
    return EventOverlap(EventHandle(communicator.order.event()) if defer else None)


def ordered(
    previous_event: EventOverlap | None, async_finish: bool, allocate_on_comm_stream: bool
) -> tuple[bool, Previous]:
    """Whether a call is asynchronous, and what it is to come behind."""
    if previous_event is None and async_finish is False and allocate_on_comm_stream is False:
        return False, NONE
    defer = _checks.asynchrony(previous_event, async_finish, allocate_on_comm_stream)
    return defer, Previous.taken(defer, previous_event)
