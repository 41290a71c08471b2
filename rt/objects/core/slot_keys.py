"""Numbers as row keys: base-62 text, digits `0-9a-zA-Z`, most significant digit first, no padding.

    9 -> 9   10 -> a   36 -> A   61 -> Z   62 -> 10   3844 -> 100   -1 -> -1

Text order is not numeric order: readers of rows sort by the number.
"""

from __future__ import annotations

import string
from typing import Final

NUMBER_MAX: Final = 2**63 - 1
"""The greatest number that a stored key or size may have."""

_DIGITS: Final = string.digits + string.ascii_lowercase + string.ascii_uppercase
_BASE: Final = len(_DIGITS)
_PAIRS: Final[list[str]] = [high + low for high in _DIGITS for low in _DIGITS]
_SHORT: Final[list[str]] = [*_DIGITS, *_PAIRS[_BASE:]]
_VALUES: Final = {digit: value for value, digit in enumerate(_DIGITS)}
_PAIR_VALUES: Final = {pair: value for value, pair in enumerate(_PAIRS)}


def encode(number: int) -> str:
    if number < 0:
        return "-" + encode(-number)
    text = ""
    while number >= _BASE * _BASE:
        number, pair = divmod(number, _BASE * _BASE)
        text = _PAIRS[pair] + text
    return _SHORT[number] + text


def decode(key: str) -> int:
    """The number of a key; `ValueError` if the key is not canonical."""
    digits = key[1:] if key[:1] == "-" else key
    number = 0
    try:
        # Two digits at a time; if their count is odd, the first one alone.
        if odd := len(digits) % 2:
            number = _VALUES[digits[0]]
        for at in range(odd, len(digits), 2):
            number = number * _BASE * _BASE + _PAIR_VALUES[digits[at : at + 2]]
    except KeyError:
        raise _not_a_number(key) from None
    if number > NUMBER_MAX or not digits or (digits[0] == "0" and key != "0"):
        raise _not_a_number(key)
    return number if digits is key else -number


def _not_a_number(key: str) -> ValueError:
    return ValueError(f"expected a base-62 number up to {NUMBER_MAX}, got {key[:40]!r}")
