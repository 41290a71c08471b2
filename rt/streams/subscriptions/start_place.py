"""Where a subscription starts: at an end of the queue, at a position, or at a time."""

from __future__ import annotations

import operator
from datetime import datetime
from typing import Final, Literal, TypeAlias

from rt.errors import InvalidOption
from rt.log.read.start_position import StartTime
from rt.streams.core.stream_id import QueueId, SequenceToken, StartPosition, checked_token
from rt.streams.queue.adapter import QueueAdapter

Start: TypeAlias = Literal["earliest", "latest"] | StartPosition | SequenceToken | int | datetime
"""`earliest`: the oldest event that the queue still has. `latest`: the next one that is published. A position
or a token: that event. A time, with its timezone: the first event of the queue with that timestamp or a later
one.
"""
CheckedStart: TypeAlias = StartPosition | SequenceToken | StartTime

_EXPECTED: Final = "'earliest', 'latest', a position, a SequenceToken, or a datetime with a timezone"


def check_start(start: Start) -> CheckedStart:
    """Check a start. `rt.InvalidOption` if it is not a valid start."""
    if isinstance(start, datetime):
        return StartTime.of(start)
    if isinstance(start, StartPosition):
        return start
    if isinstance(start, str) and start in {each.value for each in StartPosition}:
        return StartPosition(start)
    if isinstance(start, int) and not isinstance(start, bool):
        return checked_token(SequenceToken(operator.index(start)))
    if isinstance(start, SequenceToken):
        return checked_token(start)
    raise InvalidOption("not a start position", where="start", got=repr(start)[:200], expected=_EXPECTED)


async def known_start(
    adapter: QueueAdapter, queue: QueueId, start: CheckedStart
) -> StartPosition | SequenceToken:
    """Return `start`, with a time replaced by the token of its event. Raises errors of the queue."""
    return await adapter.token_at(queue, start.timestamp_ns) if isinstance(start, StartTime) else start
