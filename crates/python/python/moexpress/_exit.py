"""What is still open when the interpreter ends is closed: communicators before the meetings they came from."""

from __future__ import annotations

import atexit
import contextlib
import weakref
from typing import Protocol


class Closeable(Protocol):
    def close(self) -> None: ...


_open: list[weakref.ref[Closeable]] = []


def remember(what: Closeable) -> None:
    """Closes ``what`` at exit, if it is there then. The last to come is the first to go."""
    _open[:] = [reference for reference in _open if reference() is not None]
    _open.append(weakref.ref(what))


def _close_all() -> None:
    for reference in reversed(_open):
        what = reference()
        if what is not None:
            # Whoever ends has nobody left to tell; in a forked child nothing of it is ours.
            with contextlib.suppress(Exception):
                what.close()


atexit.register(_close_all)
