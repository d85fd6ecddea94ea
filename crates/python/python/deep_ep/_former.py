"""Communicators whose arenas were replaced by larger ones. Handles of before go on with them, so each stays until no rank has any. To close one
is for all ranks together: on GPUs none takes back memory that others still read."""

from __future__ import annotations

import weakref
from collections.abc import Collection

from moexpress import Communicator, Meeting

from ._arena import Arena
from ._telling import told_by_all

FIRST_LOOK, LAST_LOOK = 8, 512
"""Dispatches of new routing until the ranks ask each other who has handles still: twice as many after each look that closed nothing, up to
the last."""


class Former:
    """Keeps them."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[weakref.ref[Arena], Communicator]] = {}
        self._left = self._between = FIRST_LOOK

    def add(self, number: int, arena: Arena) -> None:
        """Keeps the communicator of this number, which all ranks know it by, as long as anybody has ``arena``."""
        self._of[number] = weakref.ref(arena), arena.communicator
        self._left = self._between = FIRST_LOOK

    def all(self) -> list[Communicator]:
        """Those that were not closed."""
        return [communicator for _, communicator in self._of.values()]

    def is_due(self) -> bool:
        """After a dispatch whose routing was new: whether it is time for :meth:`agreed`. The same on all ranks."""
        if not self._of:
            return False
        self._left -= 1
        return self._left <= 0

    def agreed(self, meeting: Meeting, every: bool) -> dict[int, Communicator]:
        """Those of which no rank has handles, or every one that all ranks have; taken out. All ranks call it."""
        mine = [number for number, (arena, _) in self._of.items() if every or arena() is None]
        everybody = told_by_all(meeting, "former", ",".join(map(str, mine)))
        common = set.intersection(*(set(one.split(",")) for one in everybody))
        found = {number: self._of.pop(number)[1] for number in mine if str(number) in common}
        self._between = FIRST_LOOK if found else min(2 * self._between, LAST_LOOK)
        self._left = self._between
        return found

    def numbers(self) -> list[int]:
        """Theirs."""
        return list(self._of)

    def take_others(self, numbers: Collection[int]) -> list[Communicator]:
        """Those of other numbers than these, taken out. The ranks count dispatches anew, as one may have missed some."""
        self._left = self._between = FIRST_LOOK
        return [self._of.pop(number)[1] for number in self.numbers() if number not in numbers]
