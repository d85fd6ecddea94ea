"""How large the arena of a communicator is, into which rows are placed directly, and what happens when it is full.

A batch for which it has no room goes through outboxes of some 64 MiB, which on GPUs are slower by a quarter, and so do all calls along its
handle. DeepEP's ``num_nvl_bytes`` is a size
of rings and says little of it, so the arena is made for batches of the size that is seen:

- three batches of dispatched rows and two of results, each as large as that of the rank that received most, and a
  quarter more;
- at most an eighth of the memory that is free on the rank that has least: the caller's model is still to fit;
- but never less than ``num_nvl_bytes``, of which 64 MiB to 1 GiB count whatever is free, and more up to that eighth. That is for all arenas of a
  buffer together: what the others have of it counts only as far as a batch asks for it.

On GPUs of one node that is what there is at first. Where results are kept, those of many layers for the backward pass, or batches become larger,
memory comes as it is needed, a piece at a time, while a sixteenth of the GPU's is left free; and goes two seconds after nobody has it any more.

On CPUs and over several nodes the first results that are kept lie in the arena. The others are copied
to memory of torch's allocator, where DeepEP would have put them, so that the next batch has room. After 8, 64, 512, ...
dispatches the ranks make an arena in which all that they kept at a time has room, of an eighth of what is free then.

On GPUs with too little free memory for that there is no arena: rows go through outboxes of some 64 MiB, slower by a quarter. Over several
nodes there are no outboxes: rows for which an arena has no room go through rings, and so do all results. On NPUs there is no arena, either.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from moexpress import Communicator, Meeting
from moexpress.adapter import Element, OutboxUse, block_bytes

from ._telling import told_by_all
from .config import Config

_expired, _free = torch.UntypedStorage._expired, torch.UntypedStorage._free_weak_ref

LOG = logging.getLogger("deep_ep")
"""Says once what makes a buffer slow. ``logging.getLogger("deep_ep").setLevel("ERROR")`` silences it."""

LEAST, HINTED = 1 << 26, 1 << 30
"""Least bytes of an arena, and those of ``num_nvl_bytes`` that count however little memory is free."""
DISPATCHES, RESULTS = 3, 2
"""Batches of dispatched rows, and of results, for which there is room."""
SHARE = 8
"""An arena made for batches takes at most one part of so many of the free memory."""
ALIGN = 128
"""Bytes that the edges of an arena may cost."""
MOST = 1 << 39
"""Addresses of an arena that grows: more than any GPU has memory."""


class Sizes(NamedTuple):
    """What rows of a communicator are made of."""

    experts: int
    topk: int
    hidden: int
    element: Element

    def blocks(self, rows: int) -> tuple[int, int]:
        """Bytes of so many dispatched rows in an arena, and of as many results."""
        return block_bytes(self.experts, self.topk, self.hidden, self.element, rows)


@dataclass(frozen=True)
class Room:
    """The size of an arena. All ranks know it, and it is the same for all of them."""

    rows: int
    """Rows of a batch for which it is made."""
    bytes: int
    """0: there is none, and all rows go through rings."""
    is_all: bool
    """Whether free memory is the limit, so that a larger one is not to be had."""


def named(device: torch.device) -> torch.device | str:
    """The device of a communicator whose tensors are on ``device``. A test makes CPUs look like NPUs by it."""
    return device


def kind(device: torch.device) -> str:
    """``cpu``, ``cuda`` or ``npu``."""
    return str(named(device)).partition(":")[0]


def agreed(
    meeting: Meeting, device: torch.device, rows: Sizes, rows_to: list[int], least: int, hint: int, taken: int
) -> Room:
    """Finds the size of an arena. All ranks call it.

    Args:
        rows_to: rows that this rank sends to each rank in the batch at hand.
        least: rows of a batch for which there is to be room in any case.
        hint: ``num_nvl_bytes``.
        taken: bytes of it that other arenas have.
    """
    told = ",".join(map(str, (least, hint, taken, free_bytes(device, meeting.world), *rows_to)))
    # [ranks]: what each told.
    numbers = [[int(number) for number in one.split(",")] for one in told_by_all(meeting, "arena", told)]
    leasts, hints, takens, frees, *to = zip(*numbers, strict=True)
    received = max(map(sum, to))
    batch = max(received + received // 4, *leasts)
    if kind(device) == "npu":
        return Room(batch, 0, True)
    limit = min(frees) // SHARE
    there, back = rows.blocks(batch)
    wanted = DISPATCHES * there + RESULTS * back + ALIGN
    left = max(max(hints) - max(takens), min(max(hints), wanted))
    hinted = max(LEAST, min(left, max(limit, HINTED)))
    return Room(batch, max(hinted, min(wanted, limit)), wanted > max(hinted, limit))


def agreed_for_kept(meeting: Meeting, arena: Arena) -> Room:
    """Finds the size of an arena for what was kept. All ranks call it."""
    device, room = arena.communicator.device, arena.room
    told = f"{arena.needed()},{free_bytes(device, meeting.world)}"
    numbers = [one.split(",") for one in told_by_all(meeting, "kept", told)]
    needed, free = max(int(one[0]) for one in numbers), min(int(one[1]) for one in numbers)
    return Room(room.rows, max(room.bytes, min(needed, free // SHARE)), False)


def free_bytes(device: torch.device, ranks: int) -> int:
    """Memory that is free where a rank's tensors are; of a host the share of one rank."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as file:
            available = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return available // ranks


class Kept:
    """Bytes of tensors whose memory is still used by anybody. On the path of every dispatch, where torch's class of
    weak references to storages would cost microseconds."""

    __slots__ = ("bytes", "numbers", "sweep_at")

    def __init__(self) -> None:
        self.numbers: deque[tuple[Any, int]] = deque()
        """Weak references, each with its bytes. They are this object's to free."""
        self.bytes = 0
        self.sweep_at = 256

    def add(self, tensor: torch.Tensor, size: int) -> None:
        """Counts ``tensor``."""
        self.numbers.append((tensor.untyped_storage()._weak_ref(), size))
        self.bytes += size

    def sweep(self) -> None:
        """Forgets what nobody uses any more."""
        # Other threads, and signal handlers, may do so in between: each reference is taken out by who looks at it.
        for _ in range(len(self.numbers)):
            try:
                number, size = self.numbers.popleft()
            except IndexError:
                break
            if _expired(number):
                _free(number)
                self.bytes -= size
            else:
                self.numbers.append((number, size))
        self.sweep_at = 256 + 2 * len(self.numbers)

    def __del__(self) -> None:
        for number, _ in self.numbers:
            _free(number)


def has_outboxes(device: torch.device, room: Room, nodes: int) -> bool:
    """Whether rows go through outboxes, as an arena for them would take too much of the memory."""
    return room.is_all and room.bytes > 0 and device.type == "cuda" and nodes == 1


class Arena:
    """A communicator of throughput mode, and what lies in its arena. With outboxes nothing does."""

    def __init__(self, communicator: Communicator, room: Room, rows: Sizes, dispatches: int = 0) -> None:
        self.communicator, self.room, self.rows = communicator, room, rows
        self.dispatches = dispatches
        """Whose routing was new, here and in the arenas before."""
        nodes = communicator.ranks // communicator.ranks_per_node
        self.has_outboxes = has_outboxes(communicator.device, room, nodes)
        if self.has_outboxes:
            LOG.warning(
                "rank %d: rows of %d elements go through outboxes of %d MiB, which is slower by about a quarter: an arena for them "
                "would take more than an %dth of the memory that was free. To change that, leave more free before the first dispatch.",
                communicator.rank,
                communicator.hidden,
                communicator.window_bytes >> 20,
                SHARE,
            )
        self.grows = communicator.arena_grows
        """Whether memory comes and goes: then it has room for whatever is kept, as long as the GPU has memory."""
        self._slots = communicator.outbox_slots
        self._uses: dict[tuple[int, int], OutboxUse] = {}
        self._is_there = room.bytes > 0 and not self.has_outboxes
        # Results that lie in it are pulled from there; else they return through rings in any case.
        self._is_pulled = communicator.device.type == "cuda" and nodes == 1
        there, back = rows.blocks(1 << 20)
        self._row, self._result = there >> 20, back >> 20
        self._kept, self._copies = Kept(), Kept()
        self._most_kept = 0
        self._through_rings, self._results_through_rings = 0, 0
        self._has_said = False

    def outbox(self, config: Config | None) -> OutboxUse:
        """What a call with this config uses of outboxes, if its rows go through some."""
        if config is None:
            return None
        asked = config.num_max_nvl_chunked_send_tokens, config.num_max_nvl_chunked_recv_tokens
        try:
            return self._uses[asked]
        except KeyError:
            use = self._uses[asked] = config.outbox(self._slots)
            LOG.debug(
                "rank %d: NVLink chunks of %d, %d: (rows at a time, slots for each reader) of outboxes are %s of %d slots",
                *(self.communicator.rank, *asked, use, self._slots),
            )
            return use

    def close(self) -> None:
        """Closes the communicator."""
        self.communicator.close()

    def has_placed(self) -> bool:
        """Whether the rows of the last dispatch lie in it."""
        if not self._is_there:
            return False
        rows, _ = self.communicator.through_rings()
        if rows == self._through_rings:
            return True
        self._say(rows - self._through_rings, "dispatched rows")
        self._through_rings = rows
        return False

    def look_at_results(self) -> None:
        """After a combine. On CPUs, and over several nodes, results always return through rings."""
        if not self._has_said and self._is_there and self._is_pulled:
            _, results = self.communicator.through_rings()
            if results != self._results_through_rings:
                self._say(results - self._results_through_rings, "rows of results")
                self._results_through_rings = results

    def keeps(self, x: torch.Tensor) -> bool:
        """Whether the rows of a dispatch may stay as long as the caller uses them, beside another such batch and its
        results."""
        if self.grows:
            return True
        rows = x.shape[0]
        mine = rows * self._row
        needed = 2 * (mine + rows * self._result)
        kept = self._kept
        if kept.bytes + needed > self.room.bytes or len(kept.numbers) >= kept.sweep_at:
            kept.sweep()
            if kept.bytes + needed > self.room.bytes and not is_capturing(x.device):
                return False
        kept.add(x, mine)
        return True

    def copied(self, x: torch.Tensor) -> None:
        """``x`` is a copy of rows of a dispatch that may not stay, as :meth:`keeps` has just said."""
        self._copies.add(x, x.shape[0] * self._row)
        self._copies.sweep()
        self._most_kept = max(self._most_kept, self._kept.bytes + self._copies.bytes)

    def bytes(self) -> int:
        """Bytes that it has now."""
        if self.grows:
            return int(self.communicator.stats()["arena_bytes"])
        return 0 if self.has_outboxes else self.room.bytes

    def is_due(self) -> bool:
        """After a dispatch whose routing was new: whether it is time to look at what was kept. The same on all ranks."""
        self.dispatches += 1
        return self.dispatches >= 8 and self.dispatches.bit_count() == 1 and self.dispatches.bit_length() % 3 == 1

    def goes_on(self, rows: int, is_all: bool) -> None:
        """After a failure, which some ranks may have met earlier than others: all say the same of it again."""
        self.room = Room(rows, self.room.bytes, is_all)
        self.dispatches = 0

    def needed(self) -> int:
        """Bytes in which all rows that were kept at a time would have had room, beside a batch and its results."""
        if self._most_kept == 0:
            return 0
        return self._most_kept + self._most_kept // 8 + 2 * self.room.rows * (self._row + self._result)

    def _say(self, rows: int, what: str) -> None:
        if self._has_said:
            return
        if not self.communicator.is_arena_full:
            LOG.info("rank %d: %d %s went another way while the arena grew", self.communicator.rank, rows, what)
            return
        self._has_said = True
        room, communicator = self.room, self.communicator
        if self.grows:
            remedy = "leave more of the GPU's memory free"
        elif room.is_all:
            remedy = f"it has an {SHARE}th of the memory that was free: leave more free before the first dispatch"
        else:
            remedy = "make the Buffer with a larger num_nvl_bytes"
        LOG.warning(
            "rank %d: %d %s of %d elements were not placed, which is slower: the arena of %d MiB had no room for them. To change "
            "that, %s, or keep fewer results of dispatches. This is said once; Buffer.stats() goes on counting.",
            communicator.rank,
            rows,
            what,
            communicator.hidden,
            self.bytes() >> 20,
            remedy,
        )


def is_capturing(device: torch.device) -> bool:
    """Whether what is enqueued now goes into a CUDA graph, which keeps the arena's memory for itself."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
