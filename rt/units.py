"""Sizes as people write them: bytes, or a number with a unit. Pure.

Invariants:
- `parse_size` reads the output of `format_size` back as the same number.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

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
