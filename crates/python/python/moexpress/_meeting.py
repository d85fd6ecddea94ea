"""How the processes of a group meet: any group that can gather objects will do."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from . import _exit, _limits, _native, _nodes, errors
from ._gather import Gather

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

TIMEOUT = 100.0
"""Seconds, unless ``MOEXPRESS_TIMEOUT`` says otherwise."""


def default_timeout() -> float:
    """Seconds that meetings and operations may take."""
    text = os.environ.get("MOEXPRESS_TIMEOUT")
    if text is None:
        return TIMEOUT
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise errors.InvalidArgument(f"MOEXPRESS_TIMEOUT is {text!r}, allowed: seconds, more than 0")
    return seconds


class Meeting:
    """The ranks of a group, met: communicators of the same group may share one.

    Args:
        group: a ``torch.distributed`` process group of any backend, or None for the default one. Its object collectives carry an
            address and a secret once; after that the ranks speak to each other directly.
        comm: an MPI communicator (``Get_rank``, ``Get_size``, ``allgather``) instead, where there is no group.
        timeout: seconds within which all ranks must have come, and that each later wait may take. Default: ``MOEXPRESS_TIMEOUT``; where that is not set
            ranks may come as late as the group's own calls allow, and a later wait takes 100 seconds at most.
        ranks_per_node: ranks that reach each other's memory, in blocks: a node is on one host. Default: by ``LOCAL_WORLD_SIZE`` and
            ``RANK``, which torchrun sets; without, the ranks of a host.

    Raises:
        errors.MeetingFailed: a rank did not come, or is gone. The group's gather may wait on then: the group is not to be used any more.
        errors.InvalidArgument: nodes that are not the same size, or not on one host.
    """

    rank: int
    """This rank, in the group."""
    world: int
    """Ranks of the group."""
    ranks_per_node: int
    """Ranks of each node: rank ``r`` is on node ``r // ranks_per_node``."""

    def __init__(
        self,
        group: ProcessGroup | None = None,
        *,
        comm: Any = None,
        timeout: float | None = None,
        ranks_per_node: int | None = None,
    ) -> None:
        self.timeout = default_timeout() if timeout is None else _limits.seconds("timeout", timeout)
        self.group = group
        is_bound = timeout is not None or "MOEXPRESS_TIMEOUT" in os.environ
        gather = Gather(group, comm, self.timeout if is_bound else None)
        self.rank, self.world = gather.rank, gather.world
        places = gather("where they are", _nodes.told(self.rank, ranks_per_node))
        self.ranks_per_node = _nodes.agreed(places)
        host = _nodes.meeting_host(places, gather)
        place, told = None, {}
        if self.rank == 0:
            try:
                place = _native.Place(host)
                told = {"address": place.address, "secret": place.secret}
            except (OSError, errors.Error) as error:  # told to the others, so that nobody waits
                told = {"error": str(error)}
        first = gather("where they meet", told)[0]
        if "error" in first:
            raise errors.MeetingFailed(f"rank 0 could not open a meeting place: {first['error']}")
        self._native = _native.Meeting(
            self.rank, self.world, first["address"], first["secret"], gather.left(self.timeout), place
        )
        _exit.remember(self)

    @property
    def nodes(self) -> int:
        """Nodes of the group."""
        return self.world // self.ranks_per_node

    def all_gather(self, told: bytes) -> list[bytes | None]:
        """Gives ``told`` to all ranks and returns what each told; None for a rank that ``recover`` went on without."""
        if not isinstance(told, bytes):
            raise _limits.invalid("what is told", _limits.told(told), "bytes")
        return self._native.all_gather(told, self.timeout)

    def barrier(self) -> None:
        """Returns when all ranks have called it."""
        self._native.barrier(self.timeout)

    def lost(self) -> list[int]:
        """The ranks whose processes are gone."""
        return self._native.lost()

    def recover(self, mask: Sequence[int] = ()) -> list[int]:
        """Goes on after a meeting that failed, without the ranks of ``mask``: all others call it. Communicators of the meeting are
        recovered each by its own call. Returns all ranks that are given up.

        Raises:
            errors.Excluded: the others gave up on this rank.
        """
        ranks = _limits.numbers("mask", mask, self.world, most=self.world - 1)
        return self._native.recover(ranks, self.timeout)

    def agree(self, what: dict[str, object]) -> None:
        """Refuses to go on unless all ranks call this with the same values.

        Raises:
            errors.InvalidArgument: names what differs, on all ranks.
            errors.MeetingFailed: a rank makes another call.
        """
        told = "\n".join(f"{name}={value}" for name, value in what.items()).encode()
        everybody = self.all_gather(told)
        first = next(other for other in everybody if other is not None)
        for rank, other in enumerate(everybody):
            if other is not None and other != first:
                try:
                    mine, theirs = (
                        dict(line.split("=", 1) for line in text.decode().split("\n")) for text in (first, other)
                    )
                except ValueError:  # no text, or not of this kind
                    raise errors.MeetingFailed(
                        f"rank {rank} makes another call than rank {everybody.index(first)}, allowed: the same calls in the same order; recover, on "
                        "all ranks, brings them together"
                    ) from None
                name = next(name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name))
                raise errors.InvalidArgument(
                    f"{name} is {theirs.get(name)} on rank {rank}, allowed: {mine.get(name)}, as on rank "
                    f"{everybody.index(first)}"
                )

    def close(self) -> None:
        """Leaves. The others are told that this rank is gone, once its communicators are closed, too."""
        native = getattr(self, "_native", None)
        if native is not None:
            native.close()
