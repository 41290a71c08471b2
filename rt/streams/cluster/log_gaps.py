"""The missing messages of a queue's log, as its readers report them."""

from __future__ import annotations

import logging
from collections import deque
from typing import Final

from rt.events import BadMessage, CorruptPositions, Event, HoldRefused, Reset, SkipForward
from rt.streams.core.stream_id import SequenceToken
from rt.streams.queue.adapter import QueueGap

logger = logging.getLogger("rt.streams")

_REASON_MAX: Final = 2000
"""Maximum number of characters in the reasons of one gap."""


class LogGaps:
    """The handler of a reader's events. A gap is kept until it is passed on.

    With `keeps_skips` a skip is not a gap: the reader's log is a copy in which these messages are missing,
    and the nodes may have them. The skip stays in `skips`.
    """

    def __init__(self, where: str, *, keeps_skips: bool = False) -> None:
        self._where = where
        self._keeps_skips = keeps_skips
        self._met: deque[QueueGap] = deque()
        self.skips: deque[SkipForward] = deque()
        self.run = 0
        """The last run of the log that began while it was read; 0 if none did."""

    def __call__(self, event: Event) -> None:
        match event:
            case SkipForward() if self._keeps_skips:
                self.skips.append(event)
            case SkipForward(wanted, resumed, reason):
                self.add(wanted, resumed, f"trimmed: {reason}")
            case BadMessage(start, end, path, offset, reason):
                self.add(start, end, f"{path}, offset {offset}: {reason}")
            case Reset(position, merged_run):
                self.run = merged_run
                self.add(position, position, f"the stream was reset: epoch {merged_run}", is_reset=True)
            case CorruptPositions(start, end, reason):
                logger.error("queue_waits queue=%s start=%d end=%s why=%r", self._where, start, end, reason)
            case HoldRefused(name, why):
                logger.warning("hold_refused queue=%s name=%s why=%r", self._where, name, why)
            case _:
                logger.info("queue_event queue=%s event=%r", self._where, event)

    def add(self, wanted: int, resumed: int, reason: str, *, is_reset: bool = False) -> None:
        logger.warning("queue_gap queue=%s wanted=%d resumed=%d why=%r", self._where, wanted, resumed, reason)
        self._met.append(QueueGap(SequenceToken(wanted), SequenceToken(resumed), reason, is_reset))

    def take(self) -> list[QueueGap]:
        """The gaps since the last call, in order. Gaps that touch are joined."""
        met = sorted(self._met, key=lambda gap: (gap.wanted, gap.resumed))
        self._met.clear()
        found = list[QueueGap]()
        for gap in met:
            if found and gap.wanted <= found[-1].resumed:
                found[-1] = _joined(found[-1], gap)
            else:
                found.append(gap)
        return found


def _joined(gap: QueueGap, later: QueueGap) -> QueueGap:
    reasons = gap.reason if later.reason in gap.reason else f"{gap.reason}; {later.reason}"
    is_reset = gap.is_reset or later.is_reset
    return QueueGap(gap.wanted, max(gap.resumed, later.resumed), reasons[:_REASON_MAX], is_reset)
