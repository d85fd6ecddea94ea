"""Events that a call comes behind (``previous_event``)."""

from __future__ import annotations

from moexpress import Communicator

from .utils import EventHandle, EventOverlap


class Previous:
    """Those of an asynchronous call. The communicator's stream waits for them, and the caller's goes on: their hooks are not called, and what he
    enqueues next overlaps."""

    __slots__ = ("_events",)

    def __init__(self, events: tuple[EventHandle, ...] = ()) -> None:
        self._events = events

    @staticmethod
    def taken(defer: bool, *given: EventHandle | EventOverlap | None) -> Previous:
        """Those of a call, from its checked arguments. Makes the current stream wait at once, unless the call is asynchronous (``defer``): then they
        are what the call still has to come behind."""
        # What a call that was not asynchronous returned is an event without content: there is nothing to wait for.
        events = tuple(one for one in map(_content, given) if one is not None)
        if not events:
            return NONE
        previous = Previous(events)
        if defer:
            return previous
        previous.here()
        return NONE

    def here(self) -> None:
        """Makes the current stream wait for them: torch's operations are about to read arguments there."""
        for event in self._events:
            event.current_stream_wait()

    def lead(self, communicator: Communicator) -> None:
        """Makes the next call of a communicator wait for them."""
        if not self._events:
            return
        stream = communicator.order.stream
        for event in self._events:
            if stream is not None and event.event is not None:
                stream.wait_event(event.event)


def _content(given: EventHandle | EventOverlap | None) -> EventHandle | None:
    return given.event if isinstance(given, EventOverlap) else given


NONE = Previous()
"""Nothing to wait for."""
