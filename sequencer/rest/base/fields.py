"""Query parameters and fields of bodies: their kinds, and how they are parsed. Pure.

Invariant: an unknown, duplicate, malformed or missing one is an error that names it. Nothing is ignored or
guessed. No library is used here, because none refuses duplicate names or says what it got.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from rt.errors import InvalidName
from rt.names import SESSION_NAME_BYTES_MAX, check_session_name, is_name
from rt.units import parse_size
from sequencer.rest.base.errors import BadRequest
from sequencer.rest.base.rfc3339 import parse_rfc3339

BODY_BYTES_MAX: Final = 2**14
"""Ten times what the longest body needs."""
POSITION_MAX: Final = 2**63 - 1
LIMIT_MAX: Final = 100_000
_NAME: Final = "[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_SIZE: Final = (
    r"([1-9][0-9]{0,17}|[1-9][0-9]{0,14}(\.[0-9]{1,9})?(k|Ki)|[1-9][0-9]{0,11}(\.[0-9]{1,9})?(M|Mi)"
    r"|[1-9][0-9]{0,8}(\.[0-9]{1,9})?(G|Gi)|[1-9][0-9]{0,5}(\.[0-9]{1,9})?(T|Ti))"
)
"""The texts that `parse_size` accepts, bounded below 2**62 by the number of digits."""

Schema: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Field:
    """A query parameter, or a field of a body."""

    name: str
    description: str
    schema: Schema
    """Without the description."""
    expected: str
    """What errors say about it."""
    parse: Callable[[Any], Any]
    """Returns the value, or raises `ValueError`."""
    is_required: bool = False


@dataclass(frozen=True, slots=True)
class TimeParameter:
    """A bound given as a time; a position is an `int`."""

    ns: int


def body_schema(fields: Sequence[Field]) -> Schema:
    return {
        "type": "object",
        "properties": {one.name: {**one.schema, "description": one.description} for one in fields},
        "required": [one.name for one in fields if one.is_required],
        "additionalProperties": False,
    }


def parse_query(pairs: Iterable[tuple[str, str]], fields: Sequence[Field]) -> dict[str, Any]:
    """The values by name. Raises `BadRequest`."""
    return _parse(pairs, fields, "query", "parameter", repr)


def parse_body(content: bytes, fields: Sequence[Field]) -> dict[str, Any]:
    """The values by name. Raises `BadRequest`."""
    try:
        members = _decoder.decode(content.decode())
    except RecursionError:
        raise _not_json("nested too deeply") from None
    except ValueError as error:
        raise _not_json(str(error)) from None
    if not isinstance(members, dict):
        got = type(members).__name__
        raise BadRequest("the body is not an object", where="body", got=got, expected="a JSON object")
    return _parse(members.items(), fields, "body", "field", json.dumps)


def _parse(
    pairs: Iterable[tuple[str, Any]],
    fields: Sequence[Field],
    where: str,
    kind: str,
    shown: Callable[[Any], str],
) -> dict[str, Any]:
    known = {one.name: one for one in fields}
    found: dict[str, Any] = {}
    for name, value in pairs:
        field = known.get(name)
        if field is None:
            expected = ", ".join(known) or "none"
            raise BadRequest(f"unknown {kind}", where=where, got=repr(name)[:200], expected=expected)
        if name in found:
            raise BadRequest(f"the {kind} occurs twice", where=f"{kind} {name}")
        try:
            found[name] = field.parse(_from_text(value, field.schema) if where == "query" else value)
        except ValueError:
            raise BadRequest(
                f"the {kind} is malformed",
                where=f"{kind} {name}",
                got=shown(value)[:200],
                expected=field.expected,
                hint="Encode + as %2B." if where == "query" and " " in value else None,
            ) from None
    for one in fields:
        if one.is_required and one.name not in found:
            raise BadRequest(
                f"a required {kind} is missing", where=f"{kind} {one.name}", expected=one.description
            )
    return found


def _from_text(text: str, schema: Schema) -> Any:
    """The value that a parameter with this schema has in JSON; the text itself if it is none."""
    if schema.get("type") == "integer":
        number = _digits(text)
        return text if number is None else number
    return {"true": True, "false": False}.get(text, text) if schema.get("type") == "boolean" else text


def _not_json(why: str) -> BadRequest:
    expected = "a JSON object in UTF-8"
    return BadRequest("the body is not valid JSON", where="body", got=why[:200], expected=expected)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a name occurs twice")
    return members


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not valid JSON")


_decoder = json.JSONDecoder(object_pairs_hook=_once, parse_constant=_refuse)


# Kinds of fields


def whole(
    name: str, description: str, *, low: int = 0, high: int = POSITION_MAX, is_required: bool = False
) -> Field:
    """An integer from `low` to `high`."""
    schema, expected = _integer(low, high), f"a whole number from {low} to {high}"
    return Field(name, description, schema, expected, lambda value: _bounded(value, low, high), is_required)


def size(name: str, description: str, *, low: int, high: int) -> Field:
    """A number of bytes, or a string such as "90Gi"."""
    pattern = _SIZE if low else f"(0|{_SIZE})"

    def parse(value: Any) -> int:
        is_text = isinstance(value, str) and re.fullmatch(pattern, value, re.ASCII)
        return _bounded(parse_size(value) if is_text else value, low, high)

    kinds = [_integer(low, high), {"type": "string", "pattern": f"^{pattern}$"}]
    schema = {"anyOf": kinds, "examples": [2**30, "90Gi"]}
    expected = f'bytes from {low} to {high}, as a number or a string such as "90Gi"'
    return Field(name, description, schema, expected, parse)


def flag(name: str, description: str) -> Field:
    """True or false."""

    def parse(value: Any) -> bool:
        if isinstance(value, bool):
            return value
        raise ValueError

    return Field(name, description, {"type": "boolean"}, "true or false", parse)


def choice(name: str, description: str, options: Sequence[str]) -> Field:
    def parse(value: Any) -> Any:
        if value in options:
            return value
        raise ValueError

    schema = {"type": "string", "enum": list(options)}
    return Field(name, description, schema, " or ".join(options), parse)


def name_of(field: str, description: str, kind: str, *, is_required: bool = True) -> Field:
    """The name of a `kind`."""
    schema = {"type": "string", "pattern": f"^{_NAME}$"}

    def parse(value: Any) -> str:
        if isinstance(value, str) and is_name(value):
            return value
        raise ValueError

    return Field(field, description, schema, f"the name of a {kind}", parse, is_required)


def session_of(field: str, description: str, *, is_required: bool = True) -> Field:
    """A session name: one name, or two joined by "~"."""
    schema = {"type": "string", "pattern": f"^{_NAME}(~{_NAME})?$", "maxLength": SESSION_NAME_BYTES_MAX}

    def parse(value: Any) -> str:
        try:
            if isinstance(value, str):
                return check_session_name(value)
        except InvalidName:
            pass
        raise ValueError

    return Field(field, description, schema, "the name of a session", parse, is_required)


def bound(name: str, description: str) -> Field:
    """A query parameter: a position (`int`) or a time (`TimeParameter`)."""

    def parse(text: str) -> int | TimeParameter:
        position = _digits(text)
        if position is not None and position <= POSITION_MAX:
            return position
        return TimeParameter(parse_rfc3339(text))

    kinds = [_integer(0, POSITION_MAX), {"type": "string", "format": "date-time"}]
    schema = {"anyOf": kinds, "examples": ["0", "2026-01-31T12:00:00Z"]}
    return Field(name, description, schema, "a position, or a time such as 2026-01-31T12:00:00Z", parse)


def page(items: Sequence[Any], query: Mapping[str, Any]) -> Sequence[Any]:
    """The items that `limit` and `offset` select."""
    start = query.get("offset", 0)
    limit = query.get("limit")
    return items[start:] if limit is None else items[start : start + limit]


def _integer(low: int, high: int) -> Schema:
    return {"type": "integer", "format": "int64", "minimum": low, "maximum": high}


def _bounded(value: Any, low: int, high: int) -> int:
    """An integer as JSON Schema defines it: 1.0 is one, true is not."""
    number = int(value) if isinstance(value, float) and value.is_integer() else value
    if type(number) is int and low <= number <= high:
        return number
    raise ValueError


def _digits(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 19 else None


LIMIT: Final = whole("limit", "Maximum number of entries. Default: all.", low=1, high=LIMIT_MAX)
OFFSET: Final = whole("offset", "Number of entries to skip. Default: 0.")
