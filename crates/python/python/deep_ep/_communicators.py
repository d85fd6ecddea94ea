"""Communicators of a buffer. DeepEP's buffer knows no sizes before the first call; moexpress's communicators are made
for sizes, so each new combination makes one, which all ranks do in the same call."""

from __future__ import annotations

import weakref
from ast import literal_eval
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from moexpress import Communicator, Meeting, errors
from moexpress.adapter import Element

from . import _arena
from ._arena import LOG, Arena, Room, Sizes
from ._former import Former
from ._lent import Lent
from ._previous import NONE, Previous
from ._telling import Failure, failure_of_any, told_by_all

WORST_TOKENS = 1 << 20
"""Bound on ``num_worst_tokens``, a rank. It takes no memory."""

OUTBOX_CHANNELS = 64
"""Bound on outboxes a rank: each has a block of a multiprocessor."""

WAYS = ("rows_placed", "rows_through_rings", "results_pulled", "results_through_rings")
"""What is counted of throughput mode."""

RowsTo = Callable[[], list[int]]
"""Says how many rows of the batch at hand this rank sends to each rank. On GPUs that waits, so it is asked only when
sizes are new."""


class Communicators:
    """Makes and keeps them.

    Args:
        meeting: the ranks.
        num_nvl_bytes: hint for the arena's size.
        timeout: seconds that an operation may take.
        low_ranks_per_node: ranks of a node as low latency sees them: fewer than there are send more rows far.
        low_waits: whether calls of low latency wait for their kernels on GPUs, and so hear of a rank that does not deliver.
    """

    def __init__(
        self,
        meeting: Meeting,
        num_nvl_bytes: int,
        timeout: float,
        low_ranks_per_node: int | None = None,
        low_waits: bool = False,
    ) -> None:
        self.meeting, self.timeout = meeting, timeout
        self.low_ranks_per_node, self.low_waits = low_ranks_per_node, low_waits
        self.num_nvl_bytes = num_nvl_bytes
        self.multiprocessors = 20
        # False once a system could not map memory piece by piece.
        self._arenas_grow = True
        self._normal: dict[Sizes, Arena] = {}
        self._low: dict[tuple[Sizes, int], Communicator] = {}
        self._former = Former()
        # Those that only some ranks have, after a failure: to free one is for all ranks together, so they stay.
        self._apart: list[Communicator] = []
        # Each is known to all ranks by a number, one more than the highest that any of them knew when it was made.
        self._made = 0
        self._numbers: weakref.WeakKeyDictionary[Communicator, int] = weakref.WeakKeyDictionary()
        # What each has counted when it was last asked.
        self._counted: dict[int, dict[str, int]] = {}
        self.lent = Lent()
        """The stream that callers have."""
        # Which made the last call.
        self._last: Communicator | None = None
        self._masked: set[int] = set()
        self._lost: list[int] = []
        self.device: torch.device | None = None
        self.generation = 0
        """Recoveries: handles of before one are refused."""
        self.closed = False
        self._failed: errors.Poisoned | None = None

    def normal(self, device: torch.device, rows: Sizes, rows_to: RowsTo, least: int = 0) -> Arena:
        """For throughput mode. ``least``: rows of a batch for which there is to be room in any case."""
        self.check(device)
        arena = self._normal.get(rows)
        if arena is None:
            self.refuse_first(device)
            room = self._room(device, rows, rows_to(), least)
            arena = self._normal[rows] = Arena(self._throughput(device, rows, room), room, rows)
        elif arena.grows or arena.room.is_all or self._lost:
            pass
        elif least > arena.room.rows and not _arena.is_capturing(device):
            # All ranks name the same worst case, so all come here.
            arena = self._replaced(rows, arena, self._agreed(device, rows, least))
        return arena

    def like(self, device: torch.device, hidden: int, element: Element, topk: int | None, rows_to: RowsTo) -> Arena:
        """One for throughput mode whose rows are such, whatever its experts; ``topk``: None for any."""
        world = self.meeting.world
        for rows, arena in self._normal.items():
            if (rows.hidden, rows.element) == (hidden, element) and topk in (None, rows.topk):
                self.check(device)
                return arena
        # No communicator has more choices than experts.
        experts = world * -(-(topk or 1) // world)
        return self.normal(device, Sizes(experts, topk or 1, hidden, element), rows_to)

    def enlarge(self, rows: Sizes, arena: Arena, received: int) -> None:
        """Makes a larger arena for later dispatches, in place of one that does not grow: where a rank has received more rows than it was made
        for (``received``, the same on all ranks, which call this together), or where results were kept for which it had no room. Handles
        of before keep what they were made with."""
        try:
            if self._former.is_due():
                self._free_former()
            self._enlarge(rows, arena, received)
        except errors.Error as failed:
            # The dispatch brought its rows: who cannot meet now is heard of by the next call that needs it.
            LOG.warning("rank %d: the arena stays as it is, as the ranks did not meet: %s", self.meeting.rank, failed)

    def _enlarge(self, rows: Sizes, arena: Arena, received: int) -> None:
        room, device = arena.room, arena.communicator.device
        if self._lost or arena.grows or room.is_all or self._normal.get(rows) is not arena:
            return
        is_due = arena.is_due()
        if received > room.rows:
            larger = self._agreed(device, rows, received + received // 4)
        elif is_due:
            larger = _arena.agreed_for_kept(self.meeting, arena)
        else:
            return
        self._replaced(rows, arena, larger)

    def _free_former(self, every: bool = False) -> None:
        """Closes what was replaced, and of which no rank has handles any more; or every one."""
        for number, communicator in self._former.agreed(self.meeting, every).items():
            self._count(number, communicator)
            communicator.close()

    def _agreed(self, device: torch.device, rows: Sizes, least: int) -> Room:
        """The arena for batches of so many rows."""
        return self._room(device, rows, [0] * self.meeting.world, least)

    def _room(self, device: torch.device, rows: Sizes, rows_to: list[int], least: int) -> Room:
        others = [arena for sizes, arena in self._normal.items() if sizes != rows and not arena.has_outboxes]
        taken = sum(arena.room.bytes for arena in others)
        return _arena.agreed(self.meeting, device, rows, rows_to, least, self.num_nvl_bytes, taken)

    def _replaced(self, rows: Sizes, arena: Arena, larger: Room) -> Arena:
        """An arena in the place of this one, where all ranks have memory for it; else this one."""
        room, device = arena.room, arena.communicator.device
        # A larger one that is not to be had: with outboxes what has no room goes on at speed.
        if larger.bytes <= room.bytes and not _arena.has_outboxes(device, larger, self.meeting.nodes):
            arena.room = Room(larger.rows, room.bytes, larger.is_all)
            return arena
        # Where one has no memory for it, found early or late, all go on with what they have.
        try:
            made = self._throughput(device, rows, larger)
        except (errors.Unsupported, errors.Broken, errors.InvalidArgument):
            arena.room = Room(larger.rows, room.bytes, True)
            return arena
        self._former.add(self._numbers[arena.communicator], arena)
        arena = self._normal[rows] = Arena(made, larger, rows, arena.dispatches)
        return arena

    def low(self, device: torch.device, rows: Sizes, max_tokens: int, per_choice: bool = True) -> Communicator:
        """For low latency. ``per_choice``: all calls for such sizes say the same."""
        self.check(device)
        communicator = self._low.get((rows, max_tokens))
        if communicator is None:
            self.refuse_first(device)
            communicator = self._low[rows, max_tokens] = self._make(
                device,
                rows,
                max_tokens,
                low_latency=True,
                low_latency_per_choice=per_choice,
                placement="ring",
                arena_bytes=0,
                ranks_per_node=self.low_ranks_per_node,
                wait_for_kernels=self.low_waits,
            )
            for rank in sorted(self._masked):
                communicator.mask_rank(rank)
        return communicator

    def in_turn(self, communicator: Communicator, previous: Previous = NONE) -> Communicator:
        """It, for its next call, which comes behind ``previous`` and behind the last call of any other one. In DeepEP all calls of a buffer are of one
        stream: an event says that all calls before have ended, and what one call brought may be given to the next and let go of. Low latency of
        ``Buffer`` does not come here: it is of the current stream."""
        last, self._last = self._last, communicator
        if last is not None and last is not communicator:
            communicator.order.follow(last.order)
        self.lent.lead(communicator)
        previous.lead(communicator)
        return communicator

    def is_called(self) -> None:
        """A call that :meth:`in_turn` began has been made."""
        if self._last is not None:
            self.lent.follow(self._last)

    def all_low(self) -> list[Communicator]:
        """Those for low latency, in the order in which they were made."""
        return list(self._low.values())

    def all_normal(self) -> list[Communicator]:
        """Those for throughput mode, likewise."""
        return [arena.communicator for arena in self._normal.values()]

    def recover(self, mask: Sequence[int]) -> None:
        """Goes on after a failure, without the nodes that have ranks of ``mask``. Nobody is masked beyond that."""
        self.check_open()
        size = self.meeting.ranks_per_node
        if self.meeting.nodes > 1:
            # Each communicator is to go on without the same ranks, whatever its nodes are.
            lost = {rank // size for rank in mask}
            mask = [rank for rank in range(self.meeting.world) if rank // size in lost]
        self._lost = self._meet(mask)
        for communicator in self._in_order([*self.all_normal(), *self.all_low()]):
            communicator.recover(self._lost)
        self._masked = set(self._lost)
        self.generation += 1
        self._failed = None
        # No handle of what was replaced is taken any more; all ranks have the same of it.
        if self._former.all():
            self._free_former(every=True)

    def rejoin(self, gone: Sequence[int]) -> None:
        """Brings all ranks but those of ``gone``, whose processes have ended, together again in low latency: all of them call it."""
        self.check_open()
        self._lost = self._meet([*self._lost, *gone])
        for communicator in self._in_order(self.all_low()):
            communicator.recover(self._lost)
        self._masked = set(self._lost)

    def mask(self, rank: int) -> None:
        """Goes on without a rank in low latency."""
        self._masked.add(rank)
        for communicator in self.all_low():
            communicator.mask_rank(rank)

    def masked(self) -> set[int]:
        """The ranks left out of low latency: masked here, or given up."""
        return self._masked.union(*(communicator.low_latency_mask for communicator in self.all_low()))

    def _meet(self, mask: Collection[int]) -> list[int]:
        """Brings the ranks together after a failure, whatever it was and whatever each has made. They go on with the communicators that all
        have, and say the same of their arenas. Returns all ranks that are given up."""
        lost = self.meeting.recover(sorted(set(mask)))
        rooms = {self._numbers[one.communicator]: (one.room.rows, one.room.is_all) for one in self._normal.values()}
        low = [self._numbers[one] for one in self.all_low()]
        told = told_by_all(self.meeting, "made", repr((rooms, low, self._former.numbers(), self._arenas_grow)))
        all_rooms, *others, all_grow = zip(*map(literal_eval, told), strict=True)
        self._arenas_grow = all(all_grow)
        common_normal, common_low, common_former = (
            set.intersection(*map(set, all_of)) for all_of in (all_rooms, *others)
        )
        for rows, arena in list(self._normal.items()):
            number = self._numbers[arena.communicator]
            if number in common_normal:
                said = [rooms[number] for rooms in all_rooms]
                arena.goes_on(min(rows for rows, _ in said), all(is_all for _, is_all in said))
            else:
                self._apart.append(self._normal.pop(rows).communicator)
        for sizes, communicator in list(self._low.items()):
            if self._numbers[communicator] not in common_low:
                self._apart.append(self._low.pop(sizes))
        self._apart += self._former.take_others(common_former)
        return lost

    def _in_order(self, communicators: list[Communicator]) -> list[Communicator]:
        """As they were made, which is the same on all ranks."""
        return sorted(communicators, key=lambda one: self._numbers[one])

    def _all(self) -> list[Communicator]:
        return [*self.all_low(), *self.all_normal(), *self._former.all()]

    def goes_with(self, buffer: object) -> None:
        """Closes all of them when ``buffer`` is gone, whoever has handles still: these keep communicators, but not their memory."""
        # What is there at exit is closed in an order of its own.
        weakref.finalize(buffer, _let_go, self).atexit = False

    def destroy(self) -> None:
        """Closes all of them, when all ranks have come to it."""
        try:
            if not self.closed:
                self.meeting.barrier()
        finally:
            # Also where a rank did not come: it is this rank's memory.
            self.close()

    def close(self) -> None:
        """Closes all of them, and leaves the meeting."""
        self.closed = True
        # The first failure is raised when all are closed.
        with ExitStack() as closing:
            closing.callback(self.meeting.close)
            for communicator in reversed([*self._all(), *self._apart]):
                closing.callback(communicator.close)
            self._low, self._normal, self._former, self._apart, self._last = {}, {}, Former(), [], None

    def stream(self) -> torch.Stream:
        """That which callers have, the same each time."""
        self.check_open()
        return self.lent.stream(self.device, self._all())

    def stats(self) -> dict[str, int]:
        """Received rows by the way they took, and bytes of arenas, of all communicators that are used. What came by low latency are rows of dispatches
        and results alike."""
        for communicator in [*self._all(), *self._apart]:
            self._count(self._numbers[communicator], communicator)
        sums = {
            name: sum(counted[name] for counted in self._counted.values()) for name in (*WAYS, "rows_by_low_latency")
        }
        return sums | {"arena_bytes": sum(arena.bytes() for arena in self._normal.values())}

    def trim(self) -> None:
        for communicator in [*self._all(), *self._apart]:
            communicator.trim()

    def _count(self, number: int, communicator: Communicator) -> None:
        stats = communicator.stats()
        by_low_latency = sum(stats["rows_received"]) if communicator.low_latency else 0
        self._counted[number] = {name: stats[name] for name in WAYS} | {"rows_by_low_latency": by_low_latency}

    def poison(self, failure: errors.OperationFailed) -> None:
        """An operation failed: whatever communicator it was of, none goes on before :meth:`recover`."""
        poisoned = errors.Poisoned(f"an operation failed, and recover was not called since: {failure}")
        for name in ("op", "culprit", "reporter", "peer"):
            setattr(poisoned, name, getattr(failure, name, None))
        self._failed = poisoned

    def check_usable(self) -> None:
        """Refuses to go on after :meth:`close`, or as :meth:`poison` says."""
        self.check_open()
        if self._failed is not None:
            raise self._failed.with_traceback(None)

    def check_open(self) -> None:
        """Refuses to go on after :meth:`close`."""
        if self.closed:
            raise errors.Closed("the buffer was destroyed; make a new one")

    def has_low(self, rows: Sizes, max_tokens: int) -> bool:
        """Whether there is one for low latency of such sizes."""
        return (rows, max_tokens) in self._low

    def has_normal(self, rows: Sizes) -> bool:
        """Whether there is one for throughput mode of such sizes."""
        return rows in self._normal

    @property
    def has_lost(self) -> bool:
        """Whether ranks were given up, so that none can be made for new sizes."""
        return bool(self._lost)

    def refuse_first(self, device: torch.device) -> None:
        """A communicator is about to be made: not in a capture, nor of another device."""
        self.check(device)
        if _arena.is_capturing(device):
            raise errors.Unsupported(
                "the first call with new sizes is not supported in a capture: make one such call before, with the same experts, "
                "topk, hidden size and type of rows"
            )
        if self._lost:
            raise errors.Unsupported(
                f"a first call with new sizes is not supported after ranks {self._lost} were given up: make a buffer of a group of those that "
                "are left, or make one such call before; sizes of before go on"
            )

    def check(self, device: torch.device) -> None:
        """Refuses tensors of a device that no communicator can be made for, or of another than those of earlier calls."""
        self.check_open()
        if self.device is None and _arena.kind(device) not in ("cpu", "cuda", "npu"):
            raise errors.InvalidArgument(f"device of the tensors is {device}, allowed: a CPU, a GPU or an NPU")
        if self.device is not None and device != self.device:
            raise errors.InvalidArgument(
                f"device of the tensors is {device}, allowed: {self.device}, as in earlier calls"
            )

    def _throughput(self, device: torch.device, rows: Sizes, room: Room) -> Communicator:
        if self.meeting.nodes > 1 or _arena.kind(device) == "npu":
            placement = "direct" if room.bytes else "ring"
            return self._make(device, rows, WORST_TOKENS, placement=placement, arena_bytes=room.bytes)
        # On CPUs a copy takes as long whichever way it goes: one channel, as rings have.
        channels = min(self.multiprocessors, OUTBOX_CHANNELS) if device.type == "cuda" else 1
        if _arena.has_outboxes(device, room, self.meeting.nodes):
            return self._make(device, rows, WORST_TOKENS, placement="pulled", channels=channels)
        direct = {"placement": "direct", "outboxes": channels}
        if device.type == "cuda" and self._arenas_grow:
            grows = {"arena_bytes": _arena.MOST, "arena_at_first": room.bytes}
            try:
                return self._make(device, rows, WORST_TOKENS, **direct, **grows)
            except errors.Unsupported as refused:
                # All ranks hear of it, and go on alike.
                self._arenas_grow = False
                LOG.info(
                    "rank %d: arenas have a fixed size, as memory cannot be mapped: %s", self.meeting.rank, refused
                )
        return self._make(device, rows, WORST_TOKENS, arena_bytes=room.bytes, **direct)

    def _make(self, device: torch.device, rows: Sizes, max_tokens: int, **settings: Any) -> Communicator:
        # One more than any rank knows: whoever fails from here on, others have it by no number that is another's.
        self._made = 1 + max(int(count) for count in told_by_all(self.meeting, "make", str(self._made)))
        number = self._made
        made: Communicator | None = None
        mine: Failure | None = None
        try:
            made = Communicator(
                self.meeting,
                experts=rows.experts,
                topk=rows.topk,
                hidden=rows.hidden,
                max_tokens=max_tokens,
                element=rows.element,
                device=_arena.named(device),
                timeout=self.timeout,
                multiprocessors=self.multiprocessors if device.type == "cuda" else None,
                **settings,
            )
            self._numbers[made] = number
        except (errors.Unsupported, errors.Broken, errors.InvalidArgument) as error:
            mine = error
        try:
            failed = failure_of_any(self.meeting, mine)
        except BaseException:
            # Nobody knows who else has it: it is not to be freed alone.
            self._apart += [] if made is None else [made]
            raise
        if failed is not None:
            if made is not None:
                made.close()
            elif device.type == "cuda":
                # Who frees memory that others may still read waits for all.
                self.meeting.barrier()
            raise failed
        assert made is not None
        self.device = device
        # Another thread may close it.
        with suppress(errors.Closed):
            LOG.info(
                "rank %d: %s of rows of %d elements takes %d MiB of %s, %d of them its arena",
                *(made.rank, "low latency" if made.low_latency else "throughput mode", rows.hidden),
                *(made.window_bytes >> 20, device, made.stats()["arena_bytes"] >> 20),
            )
        return made


def _let_go(communicators: Communicators) -> None:
    # Nobody is left to be told: a rank may be gone, and in a forked child nothing of it is ours.
    with suppress(errors.Error):
        if not communicators.closed:
            communicators.close()
