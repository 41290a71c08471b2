"""Sizes and times as people write them: bytes, or a number with a unit; RFC 3339 with nanoseconds. Pure.

Invariants:
- `parse_size` reads the output of `format_size` back as the same number, and `parse_rfc3339` that of
  `format_time`.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from functools import lru_cache
from typing import Final

NS_PER_S: Final = 10**9
NS_PER_MINUTE: Final = 60 * NS_PER_S
SILENCE_MS_END: Final = 10 * 366 * 86_400_000 + 1
"""The exclusive upper bound for limits of a publisher's silence: ten years, as for all durations that callers
may set.
"""

SIZE_FORM: Final = 'bytes, or a number with a unit such as "90Gi" or "500M"'
SIZE_END: Final = 1 << 62
_UNITS: Final = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "P": 10**15,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
    "Pi": 2**50,
}
_SIZE: Final = re.compile(r"([0-9]{1,20})(\.[0-9]{1,9})?(|[kMGTP]|[KMGTP]i)B?")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MOMENT: Final = re.compile(
    r"(\d{4}-\d\d-\d\d)[Tt]((?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d)(?:\.(\d{1,9}))?"
    r"([Zz]|[+-](?:[01]\d|2[0-3]):[0-5]\d)",
    re.ASCII,
)

_DATE: Final = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
_DURATION: Final = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s|m|h|d|w)", re.ASCII)
_DURATION_NS: Final = {
    "ms": 10**6,
    "s": NS_PER_S,
    "m": NS_PER_MINUTE,
    "h": 60 * NS_PER_MINUTE,
    "d": 24 * 60 * NS_PER_MINUTE,
    "w": 7 * 24 * 60 * NS_PER_MINUTE,
}


def parse_size(text: str) -> int:
    """The bytes that `text` names, rounded down. Units as in Kubernetes; a trailing B is allowed.

    Raises `ValueError` if it is not a size, or is 2**62 bytes or more.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"invalid size: got {text[:50]!r}, expected {SIZE_FORM}")
    whole, part, unit = found.groups()
    size = int(Fraction(whole + (part or "")) * _UNITS[unit])
    if size >= SIZE_END:
        raise ValueError(f"size too large: got {text[:50]!r}, expected less than 2**62 bytes")
    return size


def format_size(size_bytes: int) -> str:
    """A size in the largest binary unit that gives a whole number."""
    for unit in ("Pi", "Ti", "Gi", "Mi", "Ki"):
        if size_bytes and size_bytes % _UNITS[unit] == 0:
            return f"{size_bytes // _UNITS[unit]}{unit}"
    return str(size_bytes)


def format_time(time_ns: int, *, digits: int = 9) -> str:
    """Format nanoseconds since 1970 as RFC 3339 in UTC, with `digits` decimals. Texts with the same number of
    decimals sort like times.
    """
    seconds, rest = divmod(time_ns, NS_PER_S)
    fraction = f".{rest:09d}"[: digits + 1] if digits else ""
    return f"{_format_second(seconds)}{fraction}Z"


@lru_cache(maxsize=64)
def _format_second(seconds: int) -> str:
    return f"{_EPOCH + timedelta(seconds=seconds):%Y-%m-%dT%H:%M:%S}"


def parse_since(text: str, now_ns: int) -> int:
    """Nanoseconds since 1970 of a time: RFC 3339, a date (midnight UTC), a number of ns, or a duration before
    `now_ns`, such as "15m". Raises `ValueError`.
    """
    if (found := _DURATION.fullmatch(text)) is not None:
        number, unit = found.groups()
        return _checked_time(now_ns - int(Fraction(number) * _DURATION_NS[unit]), text)
    try:
        return parse_time(f"{text}T00:00:00Z" if _DATE.fullmatch(text) else text)
    except ValueError as error:
        raise ValueError(f"{error}. Also a date, as 2030-01-31, or a duration before now, as 15m") from error


def parse_time(text: str) -> int:
    """Nanoseconds since 1970, from a number of them or from RFC 3339; otherwise `ValueError`."""
    if re.fullmatch(r"-?\d{1,19}", text, re.ASCII):
        return _checked_time(int(text), text)
    try:
        time_ns = parse_rfc3339(text.replace(" ", "T", 1))
    except ValueError as error:
        raise ValueError(
            f"{text[:50]!r} is not a time: use RFC 3339, as 2030-01-31T12:00:00Z, or ns since 1970"
        ) from error
    return _checked_time(time_ns, text)


def _checked_time(time_ns: int, text: str) -> int:
    if not -(2**63) <= time_ns < 2**63:
        raise ValueError(f"the time {text[:50]} is out of range")
    return time_ns


def parse_rfc3339(text: str) -> int:
    """Nanoseconds since 1970. Raises `ValueError`."""
    found = _MOMENT.fullmatch(text)
    if found is None:
        raise ValueError("not an RFC 3339 time")
    day, time, fraction, zone = found.groups()
    offset = "+00:00" if zone in {"Z", "z"} else zone
    moment = datetime.fromisoformat(f"{day}T{time}{offset}")
    return (moment - _EPOCH) // timedelta(seconds=1) * NS_PER_S + int((fraction or "").ljust(9, "0"))
