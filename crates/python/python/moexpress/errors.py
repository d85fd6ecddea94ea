"""What can go wrong. Every exception of this package is an :class:`Error`.

Messages name what was given and what is allowed; failures name the rank that the others could not go on without.
"""

from __future__ import annotations


class Error(Exception):
    """The base of all exceptions of moexpress."""


class InvalidArgument(Error, ValueError):
    """An argument outside its limits. Nothing moved, and the communicator is as it was."""


class Unsupported(Error, NotImplementedError):
    """Something that this machine or version cannot do. The message says what it takes, or what to use instead."""


class Broken(Error, RuntimeError):
    """Something beneath failed: a driver, the system, a network adapter, memory that is not to be had. The message says what to do."""


class MeetingFailed(Error, RuntimeError):
    """The ranks could not meet: one is missing, gone, or of another version."""


class OperationFailed(Error, RuntimeError):
    """An operation failed. In throughput mode the communicator is poisoned until ``recover``.

    Attributes:
        op: number of the operation, the same on all ranks.
        culprit: the rank that the others could not go on without.
        reporter: the rank whose verdict this is.
        peer: the rank that this rank waited for, if it waited for one.
    """

    op: int
    culprit: int
    reporter: int
    peer: int | None


class Poisoned(OperationFailed):
    """An earlier operation failed, and nobody has called ``recover`` since. Nothing moved."""


class TooManyInFlight(Error, RuntimeError):
    """Two low-latency operations were sent and not received. Nothing moved."""


class Excluded(Error, RuntimeError):
    """The other ranks go on without this one."""


class Closed(Error, RuntimeError):
    """A call on something that was closed, or that was closed while the call was under way."""


class Busy(Error, RuntimeError):
    """A call that came while another of the same communicator was under way: from a signal handler or a destructor that runs inside that
    call, or from another thread that waited for its turn as long as a call may take. Nothing moved."""


class Forked(Error, RuntimeError):
    """A call in a process that was forked from the one that made the object."""
