"""The copy of a pull client that works for a subscriber beside it, or leaves trimming to one.

Invariants:
- It has caught up when everything is here that the first node had when it was asked. That is reported once.
- With retention "own" sealed segments are trimmed at the next sync after the subscriber allowed it
  (`rt.client.cursor.TRIMMABLE_FILE`).
- What the subscriber has acknowledged, or where it began, is in files as well. The nodes are sent that of the
  name in the certificate, whichever subscriber of the copy has that name.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from replicator.protocol.handshake import Acknowledged, HoldRejected, PullStart
from replicator.pull.local_copy import LocalCopy
from rt.client.cursor import TRIMMABLE, TRIMMABLE_FILE, read_needed, read_position
from rt.errors import Corrupt
from rt.log.format.segment_table import TrimReason

logger = logging.getLogger("replicator")


class SidecarCopy(LocalCopy):
    """`on_reached` is called, in any thread, with the end of the log that a node first reported; `on_refused`
    when a node says that it holds nothing for the subscriber; `on_no_good_bytes` when every node says that
    what comes next is corrupt. `subscriber` is the name in the certificate, if that is a subscriber's.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        stream: str,
        *,
        on_reached: Callable[[int], None],
        on_refused: Callable[[HoldRejected], None] = lambda _: None,
        on_no_good_bytes: Callable[[int, int | None, str], None] = lambda *_: None,
        subscriber: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(path, stream, **options)
        self._on_reached, self._on_refused = on_reached, on_refused
        self._on_no_good_bytes = on_no_good_bytes
        self._subscriber = subscriber
        self._is_unreadable = False
        self._has_reached = False
        self._trimmed_to = 0

    def start(self, start: PullStart) -> None:
        super().start(start)
        if not self._has_reached:
            self._has_reached = True
            self._on_reached(start.end)

    def on_hold_refused(self, refused: HoldRejected) -> None:
        super().on_hold_refused(refused)
        self._on_refused(refused)

    def on_corrupt(self, start: int, end: int | None, why: str) -> None:
        super().on_corrupt(start, end, why)
        self._on_no_good_bytes(start, end, why)

    def acknowledged(self) -> Acknowledged | None:
        """As the base class. A file that cannot be read is logged once, and holds nothing: its reader gets
        the error.
        """
        if self._subscriber is None:
            return None
        try:
            position = read_needed(self._disk, self.path, self._subscriber)
        except Corrupt as error:
            if not self._is_unreadable:
                self._is_unreadable = True
                logger.error("acknowledgement_unreadable error=%r", str(error))
            return None
        self._is_unreadable = False
        return None if position is None else Acknowledged(self._subscriber, position)

    def tidy(self) -> None:
        if self._retention != "own":
            return
        receiver = self.receiver
        position = read_position(self._disk, os.path.join(self.path, TRIMMABLE_FILE), TRIMMABLE)
        if receiver is None or position is None or position <= self._trimmed_to:
            return
        done = [segment.id for segment in receiver.writer.table.segments if segment.end <= position]
        if done:
            receiver.trim(done[-1]._replace(roll=done[-1].roll + 1), TrimReason.REQUEST)
        self._trimmed_to = position
