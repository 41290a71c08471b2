"""Sizes as people write them: a number of bytes, or one with a unit.

Pure. The law: what `format_size` writes `parse_size` reads back as the same number.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

SIZE_FORM: Final = 'bytes, or a number with a unit, as "90Gi" or "500M"'
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


def parse_size(text: str) -> int:
    """The bytes that `text` names, rounded down; units as in Kubernetes, a B behind them is allowed.

    `ValueError` if it is no size, or one of 2**62 bytes or more.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"no size: {text[:50]!r}, wanted {SIZE_FORM}")
    whole, part, unit = found.groups()
    size = int(Fraction(whole + (part or "")) * _UNITS[unit])
    if size >= SIZE_END:
        raise ValueError(f"too large a size: {text[:50]!r}")
    return size


def format_size(size_bytes: int) -> str:
    """A size in the largest unit of 2**10 that leaves a whole number."""
    for unit in ("Pi", "Ti", "Gi", "Mi", "Ki"):
        if size_bytes and size_bytes % _UNITS[unit] == 0:
            return f"{size_bytes // _UNITS[unit]}{unit}"
    return str(size_bytes)
