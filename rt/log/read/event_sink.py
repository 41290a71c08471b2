"""Where a reader sends its events: a callback, or the log and `rt.Gap`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import astuple
from typing import TypeAlias

from rt.errors import Gap
from rt.events import BadMessage, BadTail, Event, Reset

logger = logging.getLogger("rt.log")

EventHandler: TypeAlias = Callable[[Event], None]


class EventSink:
    """Calls `on_event`. Without it, events of missing messages raise `rt.Gap`; the others are logged."""

    def __init__(self, path: str, on_event: EventHandler | None) -> None:
        self._path, self._on_event = path, on_event
        self._told_tail: BadTail | None = None

    def tell(self, event: Event) -> None:
        """Report an event at the current read position."""
        if self._on_event is not None:
            self._on_event(event)
        elif isinstance(event, BadTail):
            logger.warning(
                "bad_tail path=%s offset=%d torn_bytes=%d", event.path, event.offset, event.torn_bytes
            )
        elif isinstance(event, Reset):
            logger.warning("stream_was_reset path=%s position=%d x=%d", self._path, *astuple(event))
        elif isinstance(event, BadMessage):
            raise Gap(
                f"messages {event.start} to {event.end - 1} cannot be decoded: {event.reason}",
                event=event,
                where=f"{event.path}, offset {event.offset}",
                hint="No disk is at fault: they were published so. Set on_event to receive an event.",
            )
        else:
            raise Gap(
                "messages are missing",
                event=event,
                where=self._path,
                got=event,
                hint="Set on_event to receive an event instead.",
            )

    def tell_tail(self, tail: BadTail) -> None:
        """Report that the log ends with an incomplete batch; once, however often the end is read."""
        if tail != self._told_tail:
            self._told_tail = tail
            self.tell(tail)
