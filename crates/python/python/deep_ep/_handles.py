"""What dispatches leave behind: sequences with the entries of DeepEP's tuples, which also know the handle beneath.

Callers take tuples apart and put them together again, of saved tensors for instance. So what is beneath is found again
by the memory of one of the tensors. A copy of that tensor has other memory; then a throughput handle is made anew of
what the tuple says, as DeepEP does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

import torch
from moexpress import LowReceived, adapter, errors
from torch.multiprocessing.reductions import StorageWeakRef

from . import _checks
from ._arena import Arena, Sizes
from ._under_way import UnderWay

T = TypeVar("T")

OF_HANDLES = ("segments", "source_token")
"""What a handle of low latency has of the dispatch."""

LOOKS = 4
"""Tensors that are looked at, whether they are gone, at a time."""


class Known(Generic[T]):
    """What belongs to tensors, as long as their memory is used by anybody."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[StorageWeakRef, T]] = {}
        # Their numbers, in the order in which they are looked at next.
        self._turn: deque[int] = deque()

    def remember(self, tensor: torch.Tensor, what: T) -> None:
        """Notes that ``what`` belongs to the memory of ``tensor``."""
        storage = StorageWeakRef(tensor.untyped_storage())
        # As long as the reference is held, no other storage has this number.
        if storage.cdata not in self._of:
            self._turn.append(storage.cdata)
        self._of[storage.cdata] = (storage, what)
        self.look()

    def look(self) -> None:
        """Looks at some of what is noted: what is gone is soon forgotten, and with it the communicator that it was of."""
        for _ in range(LOOKS):
            try:
                number = self._turn.popleft()
            except IndexError:
                return
            known = self._of.get(number)
            if known is not None and known[0].expired():
                del self._of[number]
            elif known is not None:
                self._turn.append(number)

    def find(self, tensor: object) -> T | None:
        """What belongs to the memory of ``tensor``."""
        if not isinstance(tensor, torch.Tensor):
            return None
        try:
            known = self._of.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # sparse, fake and other tensors without memory of their own
            return None
        return None if known is None else known[1]


class _Lazy(Sequence[Any]):
    """A tuple's entries, of which those that are None are computed when they are asked for: nothing here needs them. No tuple itself:
    torch.compile takes one apart in C, and would find None."""

    def __init__(self, held: tuple[Any, ...]) -> None:
        self._held = held

    def __len__(self) -> int:
        return len(self._held)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self)[index]
        held = self._held[index]
        return self._handed_over(index % len(self), held)

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy is a tuple of tensors, of which the handle is found or made again.
        return tuple, (tuple(self),)

    def _handed_over(self, index: int, held: Any) -> Any:
        raise NotImplementedError


class Routing:
    """What a throughput dispatch leaves behind, without any of its tensors."""

    __slots__ = (
        "arena",
        "channels",
        "generation",
        "has_choices",
        "is_copy",
        "native",
        "others",
        "room",
        "rows",
        "worst",
    )

    def __init__(
        self,
        arena: Arena,
        rows: Sizes,
        native: adapter.Handle,
        channels: int,
        generation: int,
        worst: int = 0,
        has_choices: bool = True,
        is_copy: bool = False,
    ) -> None:
        self.arena, self.rows, self.native, self.channels, self.generation = arena, rows, native, channels, generation
        self.worst = worst
        """Rows that there was room for, whatever came; 0 where there was room for those that came."""
        self.has_choices = has_choices
        """Whether the dispatch may have had choices, so that weights can be asked back."""
        self.is_copy = is_copy
        """Whether it was learnt of a copy of a handle, which does not say how many choices its tokens had."""
        self.room = 0
        """Rows that a copy of a handle with ``num_worst_tokens`` has room for: what came is filled up to so many, here alone. Else 0."""
        # The same routing in communicators of other rows, made when a call asks for one.
        self.others: list[tuple[Arena, adapter.Handle]] = []

    def along(
        self, hidden: int, element: str | None = None, topk: int | None = None
    ) -> tuple[Arena, adapter.Handle] | None:
        """It in a communicator of such rows, if there is one; None: of any element type, or number of choices."""
        for arena, native in ((self.arena, self.native), *self.others):
            rows = arena.rows
            if rows.hidden == hidden and element in (None, rows.element) and topk in (None, rows.topk):
                return arena, native
        return None


def _filled_by(rows: int, columns: int, fill: Callable[[int, int], None]) -> torch.Tensor:
    matrix = torch.empty((rows, columns), dtype=torch.int32, device="cpu")
    fill(matrix.data_ptr(), matrix.numel())
    return matrix


def rows_between(native: adapter.Handle, ranks: int) -> torch.Tensor:
    """int32 ``[ranks, ranks]``, of the host: rows that rank ``column`` gets from ranks 0 to ``row``."""
    return _filled_by(ranks, ranks, native.rank_prefix)


class DispatchHandle(_Lazy):
    """A throughput dispatch's, on one node or several."""

    routing: Routing
    known: Known[Routing]

    def _filled(self, rows: int, columns: int, fill: Callable[[int, int], None]) -> torch.Tensor:
        return _filled_by(rows, columns, fill).to(self.routing.arena.communicator.device)

    def _rank_prefix(self) -> torch.Tensor:
        """int32 ``[ranks, ranks]``: rows that rank ``column`` gets from ranks 0 to ``row``."""
        communicator = self.routing.arena.communicator
        return rows_between(self.routing.native, communicator.ranks).to(communicator.device)

    def _channel_prefix(self) -> torch.Tensor:
        """int32 ``[ranks, channels]``: rows of channels 0 to ``column`` to rank ``row``."""
        ranks, channels = self.routing.arena.communicator.ranks, self.routing.channels
        return self._filled(ranks, channels, partial(self.routing.native.channel_prefix, channels))

    def _source_channel_prefix(self, source_token: torch.Tensor) -> torch.Tensor:
        """int32 ``[ranks, channels]``: where, among the rows of rank ``row``, those of channel ``column`` begin."""
        native, channels = self.routing.native, self.routing.channels
        source_token = source_token.cpu()
        fill = partial(native.source_channel_prefix, channels, source_token.data_ptr())
        return self._filled(self.routing.arena.communicator.ranks, channels, fill)


class Handle(DispatchHandle):
    """On one node: rank_prefix_matrix int32 ``[ranks, ranks]``, channel_prefix_matrix int32 ``[ranks,
    channels]``, recv_channel_prefix_matrix int32 ``[ranks, channels]``, recv_src_idx int32 ``[rows]``,
    is_token_in_rank bool ``[tokens, ranks]``, send_head int32 ``[tokens, ranks]``.
    """

    @classmethod
    def of(cls, routing: Routing, known: Known[Routing], source_token: torch.Tensor, in_rank: torch.Tensor) -> Handle:
        """Of a dispatch, to be found again in ``known``."""
        handle = cls((None, None, None, source_token, in_rank, None))
        handle.routing, handle.known = routing, known
        return handle

    def _handed_over(self, index: int, held: Any) -> Any:
        if index == Parts.ONE_NODE.source:
            # From here on the tuple may be put together again by whoever asks.
            self.known.remember(held, self.routing)
        if held is not None:
            return held
        native, channels = self.routing.native, self.routing.channels
        if index == 0:
            return self._rank_prefix()
        if index == 1:
            return self._channel_prefix()
        if index == 5:
            ranks = self.routing.arena.communicator.ranks
            return self._filled(native.tokens, ranks, partial(native.send_head, channels))
        source_token = self[Parts.ONE_NODE.source]
        adapter.check.tensor("recv_src_idx", source_token, torch.int32, (native.rows,), source_token.device)
        return self._source_channel_prefix(source_token)


@dataclass(frozen=True)
class Parts:
    """What a handle that was put together again is looked at for."""

    entries: int
    source: int
    """By the memory of which what is beneath is found again: one row for each received row."""
    source_name: str
    source_type: torch.dtype
    source_shape: tuple[int, ...]
    """Without the rows."""
    in_rank: int
    """is_token_in_rank."""
    came: int
    """Rows that came, by their sources: rank_prefix_matrix, or recv_gbl_rank_prefix_sum."""

    ONE_NODE: ClassVar[Parts]
    SEVERAL_NODES: ClassVar[Parts]

    def of(self, handle: object, ranks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The tensor to find it by, is_token_in_rank, and the rows that came. Refuses what is no handle."""
        kind, entries = type(handle).__name__, self.entries
        if (
            not isinstance(handle, Sequence)
            or len(handle) != entries
            or not all(isinstance(one, torch.Tensor) for one in handle)
        ):
            count = {6: "six", 10: "ten"}[entries]
            raise errors.InvalidArgument(
                f"handle is a {kind}, allowed: the tuple that dispatch returned, or its {count} tensors"
            )
        source, in_rank, came = handle[self.source], handle[self.in_rank], handle[self.came]
        for index in (self.source, self.in_rank, self.came):
            _checks.whole(f"handle[{index}]", handle[index])
        if in_rank.dtype != torch.bool or in_rank.dim() != 2 or in_rank.shape[1] != ranks:
            raise errors.InvalidArgument(
                f"handle[{self.in_rank}] is {in_rank.dtype} {list(in_rank.shape)}, allowed: is_token_in_rank, torch.bool "
                f"[tokens, {ranks}]"
            )
        if source.dtype != self.source_type or source.shape[1:] != self.source_shape or source.dim() < 1:
            shape = ", ".join(["rows", *map(str, self.source_shape)])
            raise errors.InvalidArgument(
                f"handle[{self.source}] is {source.dtype} {list(source.shape)}, allowed: {self.source_name}, "
                f"{self.source_type} [{shape}]"
            )
        return source, in_rank, came


Parts.ONE_NODE = Parts(6, 3, "recv_src_idx", torch.int32, (), 4, 0)
Parts.SEVERAL_NODES = Parts(10, 7, "recv_src_meta", torch.uint8, (8,), 0, 6)


class LowRouting:
    """What a low-latency dispatch leaves behind, without any of its tensors."""

    __slots__ = ("handle", "under_way")

    def __init__(self, under_way: UnderWay) -> None:
        self.under_way = under_way
        self.handle: adapter.LowHandle | None = None
        """The handle beneath, once the dispatch was received."""

    @property
    def native(self) -> adapter.LowHandle:
        """It. Refuses a dispatch that was not received."""
        if self.handle is None:
            raise errors.InvalidArgument(
                "handle is of a dispatch that has not been received, allowed: one whose hook was called"
            )
        return self.handle


class LowLatencyHandle(_Lazy):
    """A low-latency dispatch's: src_info int32 ``[local experts, ranks * max_tokens]``, layout_range int64 ``[local
    experts, ranks]`` with ``begin << 32 | count``, the most tokens of a rank, hidden, experts.
    """

    routing: LowRouting
    received: LowReceived
    known: Known[LowRouting]

    @classmethod
    def of(cls, routing: LowRouting, received: LowReceived, known: Known[LowRouting]) -> LowLatencyHandle:
        """Of a dispatch that may be still to be received, to be found again in ``known``."""
        one = routing.under_way.communicator
        handle = cls((None, None, one.max_tokens, one.hidden, one.experts))
        handle.routing, handle.received, handle.known = routing, received, known
        return handle

    def _handed_over(self, index: int, held: Any) -> Any:
        if held is not None:
            return held
        tensor = self.received.segments if index else self.received.source_token
        self.known.remember(tensor, self.routing)
        return tensor


def let_go(received: LowReceived) -> None:
    """Leaves rows and counts, which were handed to the caller, to him: handles live longer. What is still to come stays, as it is written to."""
    held = vars(received)
    for name in [name for name, what in held.items() if isinstance(what, torch.Tensor) and name not in OF_HANDLES]:
        del held[name]


def low_latency(handle: object, known: Known[LowRouting]) -> LowRouting:
    """What a low-latency dispatch's handle stands for. Refuses everything else, and a handle of copied tensors."""
    if isinstance(handle, LowLatencyHandle):
        return handle.routing
    found = None
    if isinstance(handle, Sequence) and len(handle) == 5:
        found = known.find(handle[0]) or known.find(handle[1])
    if found is None:
        raise errors.InvalidArgument(
            f"handle is a {type(handle).__name__}, allowed: the tuple that low_latency_dispatch returned, or its entries, not copied"
        )
    return found
