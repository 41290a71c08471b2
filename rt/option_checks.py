"""Checks of options that many public calls share. Each returns the value, or raises `rt.InvalidOption`.

A wrong value must fail in the call that passes it: a comparison with NaN is never true, and a wait with NaN
never ends.
"""

from __future__ import annotations

import errno
import math
import operator
import os
import stat
from typing import Final

from rt.errors import InvalidOption

TIMEOUT_SECONDS_MAX: Final = 10 * 366 * 86_400
"""A longer wait counts as no limit, because waits of the system overflow after about 292 years."""

SETTINGS_BYTES_MAX: Final = 2**20
"""Far above any file of settings. Protects memory from a wrong path (a log, a device)."""


def check_timeout(timeout: float | None, *, name: str = "timeout") -> float | None:
    """A duration in seconds, or None for no limit. Below 0 counts as 0, and infinity as no limit."""
    if timeout is None:
        return None
    if not _is_number(timeout) or math.isnan(timeout):
        raise InvalidOption("not a duration", where=name, got=repr(timeout), expected="seconds, or None")
    if timeout > TIMEOUT_SECONDS_MAX:
        return None
    return max(0.0, float(timeout))


def check_count(count: int, *, name: str, least: int = 0) -> int:
    """A whole number of at least `least`."""
    try:
        number = operator.index(count)
    except TypeError:
        number = least - 1
    if number < least or isinstance(count, bool):
        expected = f"a whole number of at least {least}"
        raise InvalidOption("not a valid count", where=name, got=repr(count), expected=expected)
    return number


def check_position(position: int) -> int:
    """A whole number; the caller knows its bounds."""
    try:
        return operator.index(position)
    except TypeError:
        expected = "a whole number"
        raise InvalidOption("not a position", got=repr(position)[:200], expected=expected) from None


def check_time(timestamp_ns: int, *, name: str) -> int:
    """A time as a whole number of nanoseconds since 1970. No other number compares with all of them."""
    try:
        return operator.index(timestamp_ns)
    except TypeError:
        expected = "a whole number of nanoseconds since 1970"
        got = repr(timestamp_ns)[:200]
        raise InvalidOption("not a time", where=name, got=got, expected=expected) from None


def check_range(value: float, low: float, high: float, *, name: str, is_whole: bool = False) -> float:
    """A number from `low` to `high`."""
    if is_whole and isinstance(value, float):
        raise InvalidOption(f"{name}={value!r} is not a whole number: use {low} to {high}")
    if not _is_number(value) or not low <= value <= high:
        raise InvalidOption(f"{name}={value!r} is out of range: use {low} to {high}")
    return value


def check_path(path: str | os.PathLike[str], *, name: str = "path") -> str:
    """A path as text, not empty and without a zero byte."""
    try:
        text = os.fspath(path)
    except TypeError:
        text = None
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidOption(
            "not a path", where=name, got=repr(path)[:200], expected="the path of a directory or file"
        )
    return text


def read_settings(path: str | os.PathLike[str], *, is_regular: bool = False) -> str:
    """The text of a file of settings. `OSError` and `ValueError` say why it cannot be read.

    With `is_regular` it must be a regular file. A FIFO is an error, because this function would wait for it.
    """
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_NONBLOCK if is_regular else 0)), "rb") as file:
        if is_regular and not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        content = file.read(SETTINGS_BYTES_MAX + 1)
    if len(content) > SETTINGS_BYTES_MAX:
        raise OSError(errno.EFBIG, f"more than {SETTINGS_BYTES_MAX} bytes")
    return content.decode()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
