"""JSON that keeps types: a value is restored with its type, or `NotSerializable` is raised before any write.

A value that JSON cannot express becomes an object with the mark "$" and its parts:

    {"$": "tuple", "of": [1, 2]}          also "set", "frozenset"
    {"$": "bytes", "of": "<base64>"}
    {"$": "dict", "of": [[1, "one"]]}     a dict with keys that are not str, or with the key "$"
    {"$": "float", "of": "nan"}           "inf", "-inf"

Subclasses are refused, because they would be restored as their base. Cyclic values are refused too.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Collection
from json.scanner import make_scanner
from typing import Any, Final, cast

from rt.objects.core.errors import NotSerializable, StateDamaged

INTEGER_BITS_MAX: Final = 14_284
"""Integers of at most 4,300 decimal digits: Python does not parse longer integers."""

NESTING_MAX: Final = 100
"""Maximum levels of nested collections in a value. So a saved value can also be loaded when the call stack is
deeper.
"""

_HINT: Final = "Register a serializer for the type, or store its parts."
_to_text: Final = json.JSONEncoder(separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode
_scan: Final[Any] = make_scanner(cast(Any, json.JSONDecoder()))
"""Faster than `JSONDecoder.decode`, which searches for white space around the value: there is none."""
_NO_CHECK: Final = frozenset({str, bool, float, bytes, type(None)})
_ZERO: Final = ord("0")
_PLAIN: Final = frozenset({str, bool, int, type(None)})
_STR: Final = frozenset({str})
_INT: Final = frozenset({int})
_LARGE: Final = 16
"""From this size on, the types in a collection are collected first: they are usually sufficient, and this is
faster.
"""


def check(value: object) -> None:
    """Raise `NotSerializable` unless `decode(encode(value))` restores `value`."""
    if type(value) not in _NO_CHECK:
        _check(value, NESTING_MAX)


def encode(value: Any) -> bytes:
    kind = type(value)
    try:
        if kind is int:
            return b"%d" % value
        return encode_plain(value if kind is str else plain(value))
    except (RecursionError, ValueError) as error:
        raise NotSerializable("the value cannot be stored", got=str(error)[:200], hint=_HINT) from None


def encode_plain(value: Any) -> bytes:
    """A value from `plain` as JSON text in UTF-8. A surrogate is kept, also beside another surrogate."""
    return _to_text(value).encode("utf-8", "surrogatepass")


def decode(data: bytes) -> Any:
    """The encoded value; `StateDamaged` for other bytes."""
    if len(data) < 19 and data.isdigit() and data[0] != _ZERO:
        return int(data)  # three times as fast
    try:
        text = data.decode("utf-8", "surrogatepass")
        value, end = _scan(text, 0)
        if end != len(text):
            raise ValueError(f"more after the value, which ends at {end}")
        return from_plain(value) if b'"$"' in data else value
    except (ValueError, RecursionError, StopIteration) as error:
        raise StateDamaged(
            "not a stored JSON value", got=repr(data[:60]), expected=str(error)[:200]
        ) from None


def plain(value: Any) -> Any:
    """`value` as values that JSON can express: a new object, or `value` itself."""
    kind = type(value)
    if kind is float:
        return value if math.isfinite(value) else {"$": "float", "of": repr(value)}
    if kind in _PLAIN:
        return value
    if kind is list:
        return value if _PLAIN.issuperset(map(type, value)) else [plain(each) for each in value]
    if kind is dict:
        if "$" in value or not _STR.issuperset(map(type, value)):
            return {"$": "dict", "of": [[plain(key), plain(each)] for key, each in value.items()]}
        if _PLAIN.issuperset(map(type, value.values())):
            return value
        return {key: plain(each) for key, each in value.items()}
    if kind is bytes:
        return {"$": "bytes", "of": base64.b64encode(value).decode()}
    if kind is tuple:
        return {"$": "tuple", "of": [plain(each) for each in value]}
    if kind in {set, frozenset}:
        # Sorted, so that equal sets give equal bytes in every process.
        return {"$": kind.__name__, "of": sorted(map(plain, value), key=_to_text)}
    raise _refused(value)


def from_plain(value: Any) -> Any:
    """The inverse of `plain`; `ValueError` for other values."""
    if type(value) is list:
        return [from_plain(each) for each in value]
    if type(value) is not dict:
        return value
    if "$" not in value:
        return {key: from_plain(each) for key, each in value.items()}
    if value.keys() != {"$", "of"}:
        raise ValueError('an object with the key "$" must have the key "of" and no others')
    return _marked(value["$"], value["of"])


def key_of(value: Any) -> Any:
    """The value as a key. NaN, although not equal to itself, is always the same key, also after a load."""
    if type(value) is float and math.isnan(value):
        return math.nan
    if type(value) is tuple or type(value) is frozenset:
        return type(value)(map(key_of, value))
    return value


def _marked(mark: object, of: Any) -> Any:
    if type(of) is str and mark in ("bytes", "float"):
        try:
            return base64.b64decode(of, validate=True) if mark == "bytes" else _float(of)
        except binascii.Error as error:
            raise ValueError(str(error)) from None
    if type(of) is not list:
        raise ValueError(f"the value of {mark!r} must be a list, got {type(of).__name__}")
    try:
        match mark:
            case "tuple":
                return tuple(map(from_plain, of))
            case "set":
                return set(map(from_plain, of))
            case "frozenset":
                return frozenset(map(from_plain, of))
            case "dict":
                return {from_plain(key): from_plain(each) for key, each in of}
            case _:
                raise ValueError(f"unknown mark {mark!r}")
    except TypeError as error:
        raise ValueError(str(error)) from None


def _float(text: str) -> float:
    """NaN is always the object `math.nan`, so that it is found as a dictionary key."""
    found = float(text)
    return math.nan if math.isnan(found) else found


def _check(value: Any, levels: int) -> None:
    """`levels`: how deep collections may be nested in the value."""
    kind = type(value)
    if kind in _NO_CHECK:
        return
    if kind is int:
        if value.bit_length() > INTEGER_BITS_MAX:
            raise NotSerializable("the integer has too many bits", expected=INTEGER_BITS_MAX)
    elif kind is dict:
        _check_each(value, levels - 1)
        _check_each(value.values(), levels - 1)
    elif kind in {list, tuple, set, frozenset}:
        _check_each(value, levels - 1)
    else:
        raise _refused(value)


def _check_each(values: Collection[Any], levels: int) -> None:
    if levels < 0:
        expected = f"at most {NESTING_MAX} levels"
        raise NotSerializable("the value is nested too deeply, or contains itself", expected=expected)
    if len(values) >= _LARGE:
        kinds = set(map(type, values))
        if kinds <= _NO_CHECK:
            return
        if kinds == _INT:
            _check(max(values), levels)
            _check(min(values), levels)
            return
    for each in values:
        if type(each) not in _NO_CHECK:
            _check(each, levels)


def _refused(value: object) -> NotSerializable:
    kind = type(value)
    got = f"{kind.__module__}.{kind.__qualname__}"
    return NotSerializable("the value would not be restored unchanged", got=got, hint=_HINT)
