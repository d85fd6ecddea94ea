"""What ranks tell each other before they have met: by the gather of their group, within a deadline."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from threading import TIMEOUT_MAX, Event, Thread
from typing import TYPE_CHECKING, Any

from . import _limits, errors

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

LEAST = 1.0
"""Seconds that are left, at least, to those who have told each other where they are."""

_given_up: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()
"""Groups in which a gather of this process is still waiting, or has met what it was not for."""


class Gather:
    """Gathers objects of all ranks, one after the other, all within ``timeout`` seconds; None: each as long as the group's own calls wait, as ranks may have much to do
    before they come.

    Args:
        group: a process group, or None for the default one.
        comm: an MPI communicator instead, where there is no group. It waits as MPI does, since a thread of ours may not be allowed to call it.
    """

    rank: int
    """This rank."""
    world: int
    """Ranks of the group."""

    def __init__(self, group: ProcessGroup | None, comm: Any, timeout: float | None) -> None:
        self._timeout = timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout
        if group is None and comm is not None:
            self.rank, self.world, self._all = comm.Get_rank(), comm.Get_size(), comm.allgather
            return
        import torch.distributed as dist

        if not dist.is_initialized():
            raise errors.InvalidArgument(
                "torch.distributed is not initialised, allowed: a group of processes; call init_process_group"
            )
        try:
            self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        except (AttributeError, TypeError, ValueError, RuntimeError):
            allowed = "a torch.distributed process group, a Meeting, or None"
            raise _limits.invalid("group", _limits.told(group), allowed) from None
        if self.rank < 0:
            raise errors.InvalidArgument("group has not this process, allowed: a group that this process is part of")
        self._group: Any = dist.group.WORLD if group is None else group
        self._all = self._by_group

    def left(self, otherwise: float) -> float:
        """Seconds until the deadline, ``otherwise`` where there is none."""
        return otherwise if self._deadline is None else max(self._deadline - time.monotonic(), LEAST)

    def __call__(self, what: str, told: object) -> list[Any]:
        """Tells ``told``, which is ``what``, and returns what each rank told.

        Raises:
            errors.MeetingFailed: a rank did not come, is gone, or tells something else.
        """
        try:
            everybody = self._all((what, told))
        except errors.Error:
            raise
        except Exception as error:
            raise errors.MeetingFailed(
                f"the ranks did not tell each other {what}: the group's gather failed: {error}"
            ) from error
        for rank, one in enumerate(everybody):
            if not isinstance(one, tuple) or len(one) != 2 or one[0] != what:
                raise errors.MeetingFailed(
                    f"rank {rank} did not tell {what}, but made another call of the group, allowed: the same calls in the same order"
                )
        return [one[1] for one in everybody]

    def _by_group(self, told: tuple[str, object]) -> list[Any]:
        """Its gather waits as long as the group was made to, half an hour perhaps, and no signal ends that: so a thread makes it, which is waited for."""
        import torch.distributed as dist

        if self._group in _given_up:
            raise errors.MeetingFailed(
                "an earlier meeting of this group was given up, and its gather may wait there still, allowed: another group"
            )
        everybody: list[Any] = [None] * self.world
        done, failed, devices = Event(), list[BaseException](), list(_current_devices())

        def gather() -> None:
            try:
                for make_current in devices:
                    make_current()
                dist.all_gather_object(everybody, told, group=self._group)
            except BaseException as error:
                failed.append(error)
            finally:
                done.set()

        Thread(target=gather, name="moexpress gather", daemon=True).start()
        has_come = False
        try:
            left = TIMEOUT_MAX if self._deadline is None else self._deadline - time.monotonic()
            has_come = done.wait(min(max(left, 0.0), TIMEOUT_MAX))
        finally:
            # By its deadline, or by Ctrl-C.
            if not has_come or failed:
                _given_up.add(self._group)
        if not has_come:
            raise errors.MeetingFailed(
                f"not all {self.world} ranks of the group told {told[0]} within {self._timeout} s, the timeout. This rank's gather still waits in the "
                "group, and would take part in another call: end the processes, or make a new group and use this one no more"
            )
        if failed:
            raise failed[0]
        return everybody


def _current_devices() -> Iterator[Callable[[], object]]:
    """Makes the devices that are current here current in another thread: groups of NCCL and HCCL gather on them."""
    import torch

    for name in ("cuda", "npu"):
        module = getattr(torch, name, None)
        if module is not None and getattr(module, "is_initialized", lambda: False)():
            yield partial(module.set_device, module.current_device())
