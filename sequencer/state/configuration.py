"""The settings on which the nodes of a cluster agree: their defaults and their ranges. Pure."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from rt.log.format.constants import NUMBER_MAX

DISK_PERCENT: Final = 90
SESSIONS_PER_NAME_MAX: Final = 1_000


class Configuration(Struct, frozen=True):
    roll_bytes: int = 1 << 30
    """Roll the merged log to the next segment at this size."""
    roll_minutes: int = 0
    """Also roll the merged log at this age; 0: never by age."""
    session_bytes_max: int = 16 << 20
    """Maximum number of bytes of one session in one instruction. A single batch may be larger."""
    retention_minutes: int = 7 * 24 * 60
    """Trim merged segments this long after they were sealed; 0: never by age."""
    retention_bytes: int = 0
    """Trim the oldest segments while the merged log is larger than this; 0: never by size."""
    retention_disk_percent: int = DISK_PERCENT
    """Trim the oldest segments while the disks of a majority are fuller than this; 0: never to free disk
    space.
    """
    hold_bytes_max: int = 10 << 30
    """Maximum number of bytes that are kept only for holds; 0: holds keep nothing."""
    sessions_max: int = 10_000
    """Maximum number of open sessions."""
    sessions_per_name_max: int = SESSIONS_PER_NAME_MAX
    """Maximum number of open sessions of certificates with one name."""
    session_idle_minutes: int = 7 * 24 * 60
    """Close a session if its publisher was away for this time; 0: never."""


CONFIGURABLE: Final = {
    "roll_bytes": (1, NUMBER_MAX),
    "roll_minutes": (0, 1 << 32),
    "session_bytes_max": (1, NUMBER_MAX),
    "retention_minutes": (0, 1 << 32),
    "retention_bytes": (0, NUMBER_MAX),
    "retention_disk_percent": (0, 101),
    "hold_bytes_max": (0, NUMBER_MAX),
    "sessions_max": (1, 1 << 20),
    "sessions_per_name_max": (1, 1 << 20),
    "session_idle_minutes": (0, 1 << 32),
}
"""For each setting of `Configuration`: its minimum, and one past its maximum."""
