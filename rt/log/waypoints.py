"""Places along a log, as an outline of it has them."""

from __future__ import annotations

from typing import NamedTuple


class Waypoint(NamedTuple):
    """A block begins with `position`, and `log_bytes` lie before it, counted from some place before all of
    them.

    `timestamp_high_ns` is the highest timestamp of all messages from the waypoint before up to this one, or a
    higher one; None where neither table nor index tell.
    """

    position: int
    log_bytes: int
    timestamp_high_ns: int | None = None
