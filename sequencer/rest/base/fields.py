"""Query parameters and fields of bodies: their kinds, and how they are parsed. Pure.

Invariant: an unknown, duplicate, malformed or missing parameter or field is an error that names it. Nothing
is ignored or guessed. msgspec checks each value and makes its schema, but would accept a duplicate name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Final, TypeAlias, get_args

import msgspec
from msgspec import Meta, Struct

from rt.endpoints import parse_endpoint
from rt.names import (
    LEASE_NAME_BYTES_MAX,
    SESSION_NAME_BYTES_MAX,
    check_hold_name,
    check_lease_name,
    check_name,
    check_session_name,
)
from rt.units import parse_rfc3339, parse_size
from sequencer.rest.base.errors import BadRequest

BODY_BYTES_MAX: Final = 2**14
"""Ten times the size that the longest valid body needs."""
POSITION_MAX: Final = 2**63 - 1
LIMIT_MAX: Final = 100_000
_NAME: Final = "[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_SIZE: Final = (
    r"([1-9][0-9]{0,17}|[1-9][0-9]{0,14}(\.[0-9]{1,9})?(k|Ki)|[1-9][0-9]{0,11}(\.[0-9]{1,9})?(M|Mi)"
    r"|[1-9][0-9]{0,8}(\.[0-9]{1,9})?(G|Gi)|[1-9][0-9]{0,5}(\.[0-9]{1,9})?(T|Ti))"
)
"""The texts that `parse_size` accepts, bounded below 2**62 by the number of digits."""

_LABEL: Final = "[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_BYTE: Final = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_GROUP: Final = "[0-9A-Fa-f]{1,4}"
_SHORTENED: Final = "|".join(
    [f"({_GROUP}:){{1,7}}:", *(f"({_GROUP}:){{1,{7 - n}}}(:{_GROUP}){{1,{n}}}" for n in range(1, 7))]
)
_IPV6: Final = rf"(({_GROUP}:){{7}}{_GROUP}|{_SHORTENED}|:((:{_GROUP}){{1,7}}|:))"
_HOST: Final = (
    rf"(({_LABEL}\.)*[A-Za-z]([A-Za-z0-9_-]{{0,61}}[A-Za-z0-9_])?|{_BYTE}(\.{_BYTE}){{3}}|\[{_IPV6}\])"
)
_PORT: Final = "([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
_ADDRESS: Final = rf"^{_HOST}:{_PORT}$"
_ADDRESS_CHARACTERS_MAX: Final = 253

Schema: TypeAlias = dict[str, Any]


class Field(Struct, frozen=True):
    """A query parameter, or a field of a body."""

    name: str
    description: str
    kind: Any
    """The type of its JSON value."""
    expected: str
    """How errors describe the expected value."""
    is_required: bool = False
    read: Callable[[Any], Any] | None = None
    """Converts the JSON value to the value; raises `ValueError`. None: both are the same."""

    @property
    def schema(self) -> Schema:
        """The schema of the JSON value, without the description."""
        return msgspec.json.schema(self.kind)

    def parse(self, value: Any) -> Any:
        """Raises `ValueError` or `msgspec.ValidationError`."""
        if isinstance(value, float) and value.is_integer():  # An integer, as JSON Schema defines it.
            value = int(value)
        found = msgspec.convert(value, self.kind)
        return found if self.read is None else self.read(found)

    def parse_text(self, text: str) -> Any:
        """Like `parse`, for a text in a query."""
        try:
            return self.parse(text)
        except msgspec.ValidationError:
            if text.isascii() and text.isdecimal() and len(text) <= 19:
                return self.parse(int(text))
            return self.parse({"true": True, "false": False}.get(text, text))


class TimeParameter(Struct, frozen=True):
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
    return _parse(pairs, fields, "query")


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
    return _parse(members.items(), fields, "body")


def _parse(pairs: Iterable[tuple[str, Any]], fields: Sequence[Field], where: str) -> dict[str, Any]:
    is_query = where == "query"
    kind = "parameter" if is_query else "field"
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
            found[name] = field.parse_text(value) if is_query else field.parse(value)
        except (ValueError, msgspec.ValidationError):
            raise BadRequest(
                f"the {kind} is malformed",
                where=f"{kind} {name}",
                got=(repr(value) if is_query else json.dumps(value))[:200],
                expected=field.expected,
                hint="Encode + as %2B." if is_query and " " in value else None,
            ) from None
    for one in fields:
        if one.is_required and one.name not in found:
            raise BadRequest(
                f"a required {kind} is missing", where=f"{kind} {one.name}", expected=one.description
            )
    return found


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
    expected = f"a whole number from {low} to {high}"
    return Field(name, description, _integer(low, high), expected, is_required)


def size(name: str, description: str, *, low: int, high: int) -> Field:
    """A number of bytes, or a string such as "90Gi"."""
    number = _integer(low, high)

    def read(value: int | str) -> Any:
        return value if isinstance(value, int) else msgspec.convert(parse_size(value), number)

    text: Any = Annotated[str, Meta(pattern=f"^{_SIZE}$" if low else f"^(0|{_SIZE})$")]
    kind: Any = Annotated[number | text, Meta(examples=[2**30, "90Gi"])]
    expected = f'bytes from {low} to {high}, as a number or a string such as "90Gi"'
    return Field(name, description, kind, expected, read=read)


def flag(name: str, description: str) -> Field:
    return Field(name, description, bool, "true or false")


def choice(name: str, description: str, options: Any) -> Field:
    """One of the texts of `options`, a `Literal`."""
    return Field(name, description, options, " or ".join(get_args(options)))


def name_of(field: str, description: str, kind: str, *, is_required: bool = True) -> Field:
    """The name of a `kind`."""
    text = Annotated[str, Meta(pattern=f"^{_NAME}$")]
    read = partial(check_name, kind=kind)
    return Field(field, description, text, f"the name of a {kind}", is_required, read)


def address_of(field: str, description: str) -> Field:
    """host:port."""
    text: Any = Annotated[
        str, Meta(pattern=_ADDRESS, max_length=_ADDRESS_CHARACTERS_MAX, examples=["n4:7001"])
    ]
    return Field(field, description, text, "host:port", True, lambda address: str(parse_endpoint(address)))


def hold_of(field: str, description: str) -> Field:
    """The name of a hold: a subscriber's name, or a subscriber's name followed by "~" and a suffix."""
    text: Any = Annotated[str, Meta(pattern=f"^{_NAME}(~{_NAME})?$", max_length=SESSION_NAME_BYTES_MAX)]
    return Field(field, description, text, "the name of a hold", True, check_hold_name)


def lease_of(field: str, description: str) -> Field:
    """The name of a lease: a group, "/" and the rest."""
    text: Any = Annotated[
        str, Meta(pattern=f"^{_NAME}(/[A-Za-z0-9][A-Za-z0-9._~-]*)+$", max_length=LEASE_NAME_BYTES_MAX)
    ]
    return Field(field, description, text, "the name of a lease", True, check_lease_name)


def session_of(field: str, description: str, *, is_required: bool = True) -> Field:
    """A session name: one name, or two joined by "~"."""
    text: Any = Annotated[str, Meta(pattern=f"^{_NAME}(~{_NAME})?$", max_length=SESSION_NAME_BYTES_MAX)]
    return Field(field, description, text, "the name of a session", is_required, check_session_name)


def bound(name: str, description: str) -> Field:
    """A query parameter: a position (`int`) or a time (`TimeParameter`)."""
    time: Any = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
    kind: Any = Annotated[_integer(0, POSITION_MAX) | time, Meta(examples=["0", "2026-01-31T12:00:00Z"])]
    expected = "a position, or a time such as 2026-01-31T12:00:00Z"
    return Field(name, description, kind, expected, read=_position_or_time)


def _position_or_time(text: str) -> int | TimeParameter:
    is_position = text.isascii() and text.isdecimal() and len(text) <= 19 and int(text) <= POSITION_MAX
    return int(text) if is_position else TimeParameter(parse_rfc3339(text))


def page(items: Sequence[Any], query: Mapping[str, Any]) -> Sequence[Any]:
    start = query.get("offset", 0)
    limit = query.get("limit")
    return items[start:] if limit is None else items[start : start + limit]


def _integer(low: int, high: int) -> Any:
    return Annotated[int, Meta(ge=low, le=high, extra_json_schema={"format": "int64"})]


LIMIT: Final = whole("limit", "Maximum number of entries. Default: all.", low=1, high=LIMIT_MAX)
OFFSET: Final = whole("offset", "Number of entries to skip. Default: 0.")
