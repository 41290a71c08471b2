"""How a publisher batches, writes, syncs and deletes: settings, checked on creation. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rt.log.format.batch import CODECS
from rt.log.format.constants import BATCH_BYTES_MAX

FsyncPolicy = Literal["batch", "interval", "never"]


@dataclass(frozen=True, slots=True)
class PublisherSettings:
    """Options of `Publisher`, described there. Raises `ValueError` if one is out of range."""

    batch_bytes: int
    linger_ms: float
    roll_bytes: int
    fsync: FsyncPolicy
    compression: Literal["zstd"] | None
    local_persistence: float
    """Seconds."""

    def __post_init__(self) -> None:
        _check_range("batch_bytes", self.batch_bytes, 4096, BATCH_BYTES_MAX)
        _check_range("linger_ms", self.linger_ms, 0, 60_000)
        _check_range("roll_bytes", self.roll_bytes, 4096, 2**40)
        if self.fsync not in {"batch", "interval", "never"}:
            raise ValueError(f"fsync={self.fsync!r}: use 'batch', 'interval' or 'never'")
        if self.compression not in CODECS:
            raise ValueError(f"compression={self.compression!r}: use None or 'zstd'")
        _check_range("local_persistence", self.local_persistence, 0, 10 * 366 * 86_400)

    @property
    def persistence_ns(self) -> int:
        """How long a merged segment stays, in ns."""
        return int(self.local_persistence * 1e9)


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name}={value} is out of range: use {low} to {high}")
