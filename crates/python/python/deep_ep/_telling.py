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
