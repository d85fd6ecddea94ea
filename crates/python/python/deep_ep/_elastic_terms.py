"""What the calls of V2 take and return, and sizes that both kinds of batches compute."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from moexpress import Communicator

from ._arena import Sizes
from ._ep_handle import EPHandle
from ._taking import Rows_t
from .utils import EventOverlap
from .utils.math import align

Dispatched = tuple[Rows_t, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap]
"""Rows, choices, weights, handle, event."""

Combined = tuple[torch.Tensor, torch.Tensor | None, EventOverlap]
"""Sums, weights, event."""


class Layout(NamedTuple):
    """How rows are handed over."""

    expand: bool
    """One for each choice, expert-major."""
    columns_first: bool
    """Scales column by column."""
    zeros: bool = False
    """What is no row of an expanded batch is zeros."""


class Counting(NamedTuple):
    """How rows are counted."""

    most_tokens: int
    """Bound on the tokens of each rank."""
    alignment: int
    sync: bool
    """Whether counts come to the host."""


def expanded(counts: Sequence[int], worst: int, sizes: Sizes, local: int, alignment: int) -> int:
    """Rows of an expanded batch, or those there is room for where counts did not come to the host."""
    room = worst * min(sizes.topk, local) + (alignment - 1) * local if worst else sum(counts)
    return align(room, alignment)


def behind(communicator: Communicator, defer: bool) -> AbstractContextManager[Any]:
    """What is enqueued inside comes behind the call."""
    return communicator.order.behind() if defer else nullcontext()
