"""Places along a log, as listed in its outline."""

from __future__ import annotations

from typing import NamedTuple


class Waypoint(NamedTuple):
    """A block starts with `position`, and `log_bytes` precede it, counted from a common origin.

    `timestamp_high_ns` is an upper bound of the timestamps of all messages from the previous waypoint up to
    this one; None if neither table nor index has it.
    """

    position: int
    log_bytes: int
    timestamp_high_ns: int | None = None
