"""Checked options: how a publisher batches, writes, syncs and deletes, and the nodes of a client. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal

from msgspec import Struct

from rt.endpoints import check_endpoints
from rt.errors import InvalidOption
from rt.log.format.batch import CODECS
from rt.log.format.constants import BATCH_BYTES_MAX
from rt.option_checks import TIMEOUT_SECONDS_MAX, check_range

if TYPE_CHECKING:
    from rt.net.tls import TLS

FsyncPolicy = Literal["batch", "interval", "never"]

SILENCE_SECONDS_MIN: Final = 1.0
"""Nodes check every second, and report a silent publisher a few seconds late."""


class PublisherSettings(Struct, frozen=True):
    """Options of `Publisher`, described there. Raises `rt.InvalidOption` if one is out of range."""

    batch_bytes: int
    linger_ms: float
    roll_bytes: int
    fsync: FsyncPolicy
    compression: Literal["zstd"] | None
    local_persistence: float
    """Seconds."""
    max_silence: float | None = None
    """Seconds."""

    def __post_init__(self) -> None:
        check_range(self.batch_bytes, 4096, BATCH_BYTES_MAX, name="batch_bytes", is_whole=True)
        check_range(self.linger_ms, 0, 60_000, name="linger_ms")
        check_range(self.roll_bytes, 4096, 2**40, name="roll_bytes", is_whole=True)
        if self.fsync not in {"batch", "interval", "never"}:
            raise InvalidOption(f"fsync={self.fsync!r}: use 'batch', 'interval' or 'never'")
        if self.compression not in CODECS:
            raise InvalidOption(f"compression={self.compression!r}: use None or 'zstd'")
        check_range(self.local_persistence, 0, TIMEOUT_SECONDS_MAX, name="local_persistence")
        if self.max_silence is not None:
            check_range(self.max_silence, SILENCE_SECONDS_MIN, TIMEOUT_SECONDS_MAX, name="max_silence")

    @property
    def persistence_ns(self) -> int:
        """How long a merged segment stays, in ns."""
        return int(self.local_persistence * 1e9)

    @property
    def silence_ms_max(self) -> int | None:
        return None if self.max_silence is None else int(self.max_silence * 1000)


def check_endpoints_tls(endpoints: Sequence[str], tls: TLS | None) -> tuple[str, ...]:
    """Endpoints, "host:port" each, or none; with endpoints there must be certificates."""
    checked = check_endpoints(endpoints)
    if checked:
        from rt.net.tls import TLS  # Imported only here, because it loads cryptography.

        if not isinstance(tls, TLS):
            raise InvalidOption(
                "endpoints without tls: nodes require a client certificate",
                where="tls",
                got=repr(tls)[:200],
                expected="an rt.TLS",
            )
    return checked
