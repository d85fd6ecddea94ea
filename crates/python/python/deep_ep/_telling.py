"""What ranks tell each other of a call that they make together."""

from __future__ import annotations

from moexpress import Meeting, errors


def told_by_all(meeting: Meeting, name: str, what: str) -> list[str]:
    """Tells ``what``, and returns what each rank tells; of ranks that were given up nothing. ``name``: of what is told.

    Raises:
        errors.MeetingFailed: a rank tells something else, and so makes another call.
    """
    mark = f"{name}="
    everybody = [one for one in meeting.all_gather(f"{mark}{what}".encode()) if one is not None]
    if not all(one.startswith(mark.encode()) for one in everybody):
        raise errors.MeetingFailed(
            "the ranks make different calls, allowed: the same calls in the same order; recover, on all ranks, brings them together"
        )
    return [one.decode().removeprefix(mark) for one in everybody]


MOST_TALKS = 8
"""Rounds until all ranks know that one has failed: more than it takes to make a communicator."""

Failure = errors.InvalidArgument | errors.Unsupported | errors.Broken
"""What a rank may find when it makes its part of something."""


def failure_of_any(meeting: Meeting, mine: Failure | None) -> Failure | None:
    """What all ranks are to raise for what they have made together, this one with the outcome ``mine``: None where all have made their parts.

    Who has failed early meets the others in the midst of making theirs: they fail by what it tells, and come here, too. So a failure of a rank's own
    arguments or memory counts before one of something beneath.

    Raises:
        errors.MeetingFailed: a rank did not come.
    """
    told = "" if mine is None else f"{type(mine).__name__}:{mine}"
    for talk in range(MOST_TALKS):
        try:
            everybody = [one.partition(":") for one in told_by_all(meeting, "outcome", told)]
            break
        except errors.MeetingFailed as failed:
            if mine is None or talk == MOST_TALKS - 1:
                raise failed from mine
    for kind in (errors.InvalidArgument, errors.Unsupported, errors.Broken):
        for rank, (name, _, text) in enumerate(everybody):
            if name == kind.__name__:
                return mine if isinstance(mine, kind) else kind(f"{text} (rank {rank})")
    return None
