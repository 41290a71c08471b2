"""Query parameters: kinds and parsing. Pure.

Invariant: an unknown, duplicate or malformed parameter is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rt.errors import InvalidName
from rt.names import SESSION_NAME_BYTES_MAX, check_session_name, is_name
from sequencer.rest.base.errors import BadRequest
from sequencer.rest.base.rfc3339 import parse_rfc3339

POSITION_MAX: Final = 2**63 - 1
LIMIT_MAX: Final = 100_000
_NAME: Final = "[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
NAME_PATTERN: Final = f"^{_NAME}$"
_BOUND: Final = "a position, or a time such as 2026-01-31T12:00:00Z"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter. `parse` returns its value, or raises `ValueError` with the expected form."""

    name: str
    description: str
    schema: Mapping[str, Any]
    parse: Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class TimeParameter:
    """A bound given as a time; a position is an `int`."""

    ns: int


def parse_query(pairs: Iterable[tuple[str, str]], parameters: Sequence[Parameter]) -> dict[str, Any]:
    """The values by name. Raises `BadRequest`."""
    known = {parameter.name: parameter for parameter in parameters}
    found: dict[str, Any] = {}
    for name, text in pairs:
        parameter = known.get(name)
        if parameter is None:
            raise BadRequest(
                "unknown parameter",
                where="query",
                got=repr(name)[:200],
                expected=", ".join(known) or "none",
            )
        if name in found:
            raise BadRequest("the parameter occurs twice", where=f"parameter {name}")
        try:
            found[name] = parameter.parse(text)
        except ValueError as error:
            hint = "Encode + as %2B." if " " in text else None
            raise BadRequest(
                "the parameter is malformed",
                where=f"parameter {name}",
                got=repr(text)[:200],
                expected=str(error),
                hint=hint,
            ) from None
    return found


def whole_number(name: str, description: str, *, low: int = 0, high: int = POSITION_MAX) -> Parameter:
    def parse(text: str) -> int:
        number = _digits(text)
        if number is None or not low <= number <= high:
            raise ValueError(f"a whole number from {low} to {high}")
        return number

    return Parameter(name, description, _number_schema(low, high), parse)


def choice(name: str, description: str, options: Sequence[str]) -> Parameter:
    def parse(text: str) -> str:
        if text not in options:
            raise ValueError(" or ".join(options))
        return text

    return Parameter(name, description, {"type": "string", "enum": list(options)}, parse)


def session_name(name: str, description: str) -> Parameter:
    def parse(text: str) -> str:
        try:
            return check_session_name(text)
        except InvalidName:
            raise ValueError("the name of a session") from None

    pattern = f"^{_NAME}(~{_NAME})?$"
    schema = {"type": "string", "pattern": pattern, "maxLength": SESSION_NAME_BYTES_MAX}
    return Parameter(name, description, schema, parse)


def certificate_name(name: str, description: str) -> Parameter:
    def parse(text: str) -> str:
        if not is_name(text):
            raise ValueError("a name")
        return text

    return Parameter(name, description, {"type": "string", "pattern": NAME_PATTERN}, parse)


def truth(name: str, description: str) -> Parameter:
    def parse(text: str) -> bool:
        if text not in {"true", "false"}:
            raise ValueError("true or false")
        return text == "true"

    return Parameter(name, description, {"type": "boolean"}, parse)


def bound(name: str, description: str) -> Parameter:
    """A position (`int`) or a time (`TimeParameter`)."""

    def parse(text: str) -> int | TimeParameter:
        position = _digits(text)
        if position is not None and position <= POSITION_MAX:
            return position
        try:
            return TimeParameter(parse_rfc3339(text))
        except ValueError:
            raise ValueError(_BOUND) from None

    kinds = [_number_schema(0, POSITION_MAX), {"type": "string", "format": "date-time"}]
    schema = {"anyOf": kinds, "examples": ["0", "2026-01-31T12:00:00Z"]}
    return Parameter(name, description, schema, parse)


def page(items: Sequence[Any], query: Mapping[str, Any]) -> Sequence[Any]:
    """The items that `limit` and `offset` select."""
    start = query.get("offset", 0)
    limit = query.get("limit")
    return items[start:] if limit is None else items[start : start + limit]


def _number_schema(low: int, high: int) -> dict[str, Any]:
    return {"type": "integer", "format": "int64", "minimum": low, "maximum": high}


def _digits(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 19 else None


LIMIT: Final = whole_number("limit", "Maximum number of entries. Default: all.", low=1, high=LIMIT_MAX)
OFFSET: Final = whole_number("offset", "Number of entries to skip. Default: 0.")
