"""Who hears what a reader finds that is no message: a callback, or the log and `rt.Gap`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import astuple
from typing import TypeAlias

from rt.errors import Gap
from rt.events import BadTail, Event, Reset

logger = logging.getLogger("rt.log")

EventHandler: TypeAlias = Callable[[Event], None]


class Teller:
    """Tells `on_event`. Without it, missing messages raise `rt.Gap`, and what loses none is logged."""

    def __init__(self, path: str, on_event: EventHandler | None) -> None:
        self._path, self._on_event = path, on_event
        self._told_tail: BadTail | None = None

    def tell(self, event: Event) -> None:
        """Something happened at the place that is read."""
        if self._on_event is not None:
            self._on_event(event)
        elif isinstance(event, BadTail):
            logger.warning(
                "bad_tail path=%s offset=%d torn_bytes=%d", event.path, event.offset, event.torn_bytes
            )
        elif isinstance(event, Reset):
            logger.warning("stream_was_reset path=%s position=%d x=%d", self._path, *astuple(event))
        else:
            raise Gap(
                "messages are missing",
                event=event,
                where=self._path,
                got=event,
                hint="Give on_event to be told instead.",
            )

    def tell_tail(self, tail: BadTail) -> None:
        """The log ends in bytes that are no batch: told once, however often the end is looked at."""
        if tail != self._told_tail:
            self._told_tail = tail
            self.tell(tail)
