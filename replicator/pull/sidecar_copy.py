"""The local copy of `rt pull`. It exchanges files with the subscribers that read the copy.

Invariants:
- The end of the log at the first node that answers is reported once: a copy that reaches it has caught up.
- With retention "own" the subscriber writes to `TRIMMABLE_FILE` the position up to which the copy may be
  trimmed. Sealed segments before that position are trimmed at the next sync.
- Each named subscriber keeps its acknowledged position, or the position where it began, in a file. The nodes
  receive the position of the subscriber that is named in the certificate: they hold the log for it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from replicator.protocol.handshake import Acknowledged, HoldRejected, PullStart
from replicator.pull.local_copy import LocalCopy
from rt.client.cursor import TRIMMABLE, TRIMMABLE_FILE, read_needed, read_position
from rt.errors import FormatError
from rt.log.format.segment_table import TrimReason
from rt.sidecar.protocol import HoldDenied, NodeReached, NodesUnreached, NoGoodBytes, TimeResolved

logger = logging.getLogger("replicator")


class SidecarCopy(LocalCopy):
    """`report` is called in any thread. `subscriber`: the name in the certificate of a subscriber."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        stream: str,
        *,
        report: Callable[[NodeReached | NodesUnreached | HoldDenied | NoGoodBytes], None],
        subscriber: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(path, stream, **options)
        self._report, self._subscriber = report, subscriber
        self._is_error_logged = False
        self._was_node_reached = False
        self._trimmed_to = 0

    def start(self, start: PullStart) -> None:
        super().start(start)
        if not self._was_node_reached:
            self._was_node_reached = True
            found = start.found
            resolved = None if found is None else TimeResolved(found.position, found.is_message)
            self._report(NodeReached(start.end, resolved))

    def on_hold_refused(self, refused: HoldRejected) -> None:
        super().on_hold_refused(refused)
        self._report(HoldDenied(refused.name, refused.why))

    def on_corrupt(self, start: int, end: int | None, why: str) -> None:
        super().on_corrupt(start, end, why)
        self._report(NoGoodBytes(start, end, why))

    def on_unreached(self, why: str) -> None:
        self._report(NodesUnreached(why))

    def acknowledged(self) -> Acknowledged | None:
        """As in the base class. None if the file is unreadable: that is logged once here, and the subscriber
        raises the error.
        """
        if self._subscriber is None:
            return None
        try:
            position = read_needed(self._disk, self.path, self._subscriber)
        except FormatError as error:
            if not self._is_error_logged:
                self._is_error_logged = True
                logger.error("acknowledgement_unreadable error=%r", str(error))
            return None
        self._is_error_logged = False
        return None if position is None else Acknowledged(self._subscriber, position)

    def tidy(self) -> None:
        if self._retention != "own":
            return
        receiver = self.receiver
        stored = read_position(self._disk, os.path.join(self.path, TRIMMABLE_FILE), TRIMMABLE)
        if receiver is None or stored is None or stored.position <= self._trimmed_to:
            return
        position = stored.position
        trimmable = [segment.id for segment in receiver.writer.table.segments if segment.end <= position]
        if trimmable:
            receiver.trim(trimmable[-1]._replace(roll=trimmable[-1].roll + 1), TrimReason.REQUEST)
        self._trimmed_to = position
