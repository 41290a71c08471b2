"""RFC 3339 times with nanoseconds. Pure."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

NS_PER_S: Final = 10**9
NS_PER_MINUTE: Final = 60 * NS_PER_S
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MOMENT = re.compile(
    r"(\d{4}-\d\d-\d\d)[Tt]((?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d)(?:\.(\d{1,9}))?"
    r"([Zz]|[+-](?:[01]\d|2[0-3]):[0-5]\d)",
    re.ASCII,
)


def rfc3339(ns: int) -> str:
    """UTC with nine decimals, so that texts sort like times."""
    seconds, rest = divmod(ns, NS_PER_S)
    return f"{_EPOCH + timedelta(seconds=seconds):%Y-%m-%dT%H:%M:%S}.{rest:09d}Z"


def rfc3339_or_empty(ns: int) -> str:
    """Like `rfc3339`; "" for 0 (never)."""
    return rfc3339(ns) if ns else ""


def parse_rfc3339(text: str) -> int:
    """Nanoseconds since 1970. Raises `ValueError`."""
    found = _MOMENT.fullmatch(text)
    if found is None:
        raise ValueError("not an RFC 3339 time")
    day, time, fraction, zone = found.groups()
    offset = "+00:00" if zone in {"Z", "z"} else zone
    moment = datetime.fromisoformat(f"{day}T{time}{offset}")
    return (moment - _EPOCH) // timedelta(seconds=1) * NS_PER_S + int((fraction or "").ljust(9, "0"))
