"""Rows ready for a grouped GEMM: one for each choice, those of an expert side by side.

A dispatch brings a row once to each rank. Expanded, it stands once for each expert that it is for: expert-major, the
first row of each expert at a multiple of the alignment, those of an expert ordered as they came: by source rank, token,
choice. What is no row is undefined, as DeepEP has it, or zeros where the call asks for that. Dispatch and combine do so
themselves where a call asks for it (:class:`Placed`). Of a handle whose rows came once, torch expands them
(:class:`Expansion`), with zeros in between. Everything in both has shapes that the host knows, so that nothing waits for
a GPU and all of it can be captured.
"""

from __future__ import annotations

from functools import cached_property

import torch
from moexpress import ByExpert, Communicator


def counted(choices: torch.Tensor, experts: int) -> torch.Tensor:
    """int32 ``[experts]``: choices of each expert. ``choices``: int64 of any shape, -1 for none."""
    return _bins(choices.reshape(-1), experts)[:experts]


def aligned(counts: torch.Tensor, alignment: int) -> torch.Tensor:
    """Counts rounded up to the alignment."""
    return (counts + (alignment - 1)).div(alignment, rounding_mode="floor") * alignment


class Placed:
    """Where each choice's row stands, of rows that a dispatch brought by expert."""

    def __init__(self, told: ByExpert, room: int) -> None:
        self._told = told
        self.slots = told.slots
        """int32 ``[rows, topk]``: the expanded row of each choice, or -1."""
        self.room = room
        """Expanded rows, or those that there is room for."""

    @cached_property
    def psum(self) -> torch.Tensor:
        """int32 ``[experts]``: behind the last row of each expert."""
        if self._told.device_counts is not None:
            first, counts = self._told.device_counts
            return first[:-1] + counts
        ends = [first + count for first, count in zip(self._told.first, self._told.counts, strict=False)]
        return torch.tensor(ends, dtype=torch.int32, device=self.slots.device)

    def weights(self, weights: torch.Tensor) -> torch.Tensor:
        """``[rows, topk]`` expanded: ``[room]``."""
        return weights.new_zeros(self.room + 1).scatter_(0, self._places, weights.reshape(-1))[: self.room]

    def folded(self, weights: torch.Tensor) -> torch.Tensor:
        """The way back of :meth:`weights`."""
        return _of_slots(weights, self.slots.reshape(-1)).view(self.slots.shape)

    def by_row(self, x: torch.Tensor) -> torch.Tensor:
        """``x [room, ...]`` by received row: each that came has a choice here, and the others are zeros."""
        raw = x.view(torch.uint8) if x.dtype is torch.float8_e4m3fn else x
        return _of_slots(raw, self.slots.amax(1)).view(x.dtype)

    def zeroed(self, x: torch.Tensor) -> torch.Tensor:
        """``x [room, ...]``, of which all that is no row becomes zeros."""
        raw = x.view(torch.uint8) if x.dtype is torch.float8_e4m3fn else x
        absent = torch.ones(self.room + 1, dtype=torch.bool, device=x.device).scatter_(0, self._places, False)
        return raw.masked_fill_(_beside(absent[: self.room], raw), 0).view(x.dtype)

    def of_choice(self, y: torch.Tensor, choice: int) -> torch.Tensor:
        """bf16 ``[room, hidden]``: results of one choice of each row, zeros elsewhere: combine sums them at this rank."""
        rows, topk = self.slots.shape
        column = torch.arange(topk, device=y.device).repeat(rows)
        columns = column.new_full((self.room + 1,), -1).scatter_(0, self._places, column)
        return y[: self.room].masked_fill(_beside(columns[: self.room] != choice, y), 0)

    def reduced(self, y: torch.Tensor) -> torch.Tensor:
        """``y`` as it is: combine sums each row's results at this rank."""
        return y

    def kept_for(self, communicator: Communicator) -> None:
        """Keeps what calls of a communicator read."""
        communicator.order.beyond(self.slots)

    @property
    def _places(self) -> torch.Tensor:
        """int64 ``[rows * topk]``: the slots, ``room`` for none."""
        return torch.where(self.slots < 0, self.room, self.slots).long().reshape(-1)


class Expansion:
    """Where each choice's row stands, of rows that a dispatch brought by source. Found by torch.

    Args:
        choices: int64 ``[rows, topk]``: local expert, or -1.
        experts: of this rank.
        alignment: of the first row of each expert.
        room: expanded rows there is room for, at least those that come.
    """

    def __init__(self, choices: torch.Tensor, experts: int, alignment: int, room: int) -> None:
        rows, topk = choices.shape
        device, flat = choices.device, choices.reshape(-1)
        bins = _bins(flat, experts)
        places = aligned(bins[:experts], alignment)
        begins = places.cumsum(0) - places
        self.psum = (begins + bins[:experts]).int()
        """int32 ``[experts]``: behind the last row of each expert."""
        # Choices in the order of their experts, those of none last. How far each expert's rows move is the same for all.
        ordered = torch.where(flat < 0, experts, flat).sort(stable=True)
        moved = torch.cat([begins - (bins.cumsum(0) - bins)[:experts], begins.new_zeros(1)])
        at = torch.arange(rows * topk, device=device) + moved[ordered.values]
        none = ordered.values == experts
        self.slots = torch.empty(rows * topk, dtype=torch.int32, device=device)
        """int32 ``[rows, topk]``: the expanded row of each choice, or -1."""
        self.slots = self.slots.scatter_(0, ordered.indices, at.masked_fill(none, -1).int()).view(rows, topk)
        choice = torch.full((room + 1,), -1, dtype=torch.int64, device=device)
        choice = choice.scatter_(0, at.masked_fill(none, room), ordered.indices)[:room]
        self._absent = choice < 0
        self._choice = choice.clamp(min=0)
        self._row = self._choice.div(topk, rounding_mode="floor")
        self.room = room

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """``x [rows, ...]`` expanded: ``[room, ...]``, contiguous."""
        return self._picked(x, self._row)

    def weights(self, weights: torch.Tensor) -> torch.Tensor:
        """``[rows, topk]`` expanded: ``[room]``."""
        return self._picked(weights.reshape(-1), self._choice)

    def folded(self, weights: torch.Tensor) -> torch.Tensor:
        """The way back of :meth:`weights`."""
        return _of_slots(weights, self.slots.reshape(-1)).view(self.slots.shape)

    def of_choice(self, y: torch.Tensor, choice: int) -> torch.Tensor:
        """bf16 ``[rows, hidden]``: results of one choice of each row, zeros where it is none of this rank's."""
        return _of_slots(y, self.slots[:, choice])

    def reduced(self, y: torch.Tensor) -> torch.Tensor:
        """bf16 ``[rows, hidden]``: sums of each row's results ``y [room, hidden]``, in f32, choices ascending, rounded once."""
        rows, topk = self.slots.shape
        sums = torch.zeros((rows, y.shape[1]), dtype=torch.float32, device=y.device)
        for choice in range(topk):
            sums += self.of_choice(y, choice)
        return sums.to(torch.bfloat16)

    def kept_for(self, communicator: Communicator) -> None:
        """Keeps what calls of a communicator read."""
        communicator.order.beyond(self.slots, self._absent, self._choice, self._row)

    def _picked(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        if not x.shape[0]:  # there is nothing to pick from
            return x.new_zeros((self.room, *x.shape[1:]))
        raw = x.view(torch.uint8) if x.dtype is torch.float8_e4m3fn else x
        picked = raw.index_select(0, index)
        return picked.masked_fill_(_beside(self._absent, picked), 0).view(x.dtype)


def _of_slots(y: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Those of ``y`` at ``slots``, zeros for -1."""
    if not slots.numel():
        return y.new_zeros((0, *y.shape[1:]))
    picked = y.index_select(0, slots.clamp(min=0))
    return picked.masked_fill_(_beside(slots < 0, picked), 0)


def _beside(mask: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``mask [rows]`` for all elements of the rows of ``x``."""
    return mask.view(-1, *[1] * (x.dim() - 1))


def _bins(flat: torch.Tensor, experts: int) -> torch.Tensor:
    """int32 ``[experts + 1]``: how often each expert stands in ``flat``, and last how often none does."""
    bins = torch.zeros(experts + 1, dtype=torch.int32, device=flat.device)
    which = torch.where(flat < 0, experts, flat)
    return bins.scatter_add_(0, which, torch.ones(flat.shape, dtype=torch.int32, device=flat.device))
