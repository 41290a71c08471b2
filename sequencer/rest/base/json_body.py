"""Parses the body of an action: a JSON object with known fields. Pure.

Invariant: an unknown, duplicate, malformed or missing field is an error that names it. Nothing is ignored or
guessed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rt.errors import InvalidName
from rt.names import SESSION_NAME_BYTES_MAX, check_name, check_session_name
from rt.units import parse_size
from sequencer.rest.base.errors import BadRequest
from sequencer.rest.base.query_params import NAME_PATTERN
from sequencer.rest.base.schema_kinds import Schema

BODY_BYTES_MAX: Final = 2**14
"""Ten times what the longest body needs."""
_SIZE: Final = (
    r"([1-9][0-9]{0,17}|[1-9][0-9]{0,14}(\.[0-9]{1,9})?(k|Ki)|[1-9][0-9]{0,11}(\.[0-9]{1,9})?(M|Mi)"
    r"|[1-9][0-9]{0,8}(\.[0-9]{1,9})?(G|Gi)|[1-9][0-9]{0,5}(\.[0-9]{1,9})?(T|Ti))"
)
"""The texts that `parse_size` accepts, bounded below 2**62 by the number of digits."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field. `parse` converts the JSON value, or raises `ValueError` with the expected form."""

    name: str
    description: str
    schema: Schema
    """Without the description."""
    parse: Callable[[Any], Any]
    is_required: bool = False


def body_schema(fields: Sequence[Field]) -> Schema:
    return {
        "type": "object",
        "properties": {one.name: {**one.schema, "description": one.description} for one in fields},
        "required": [one.name for one in fields if one.is_required],
        "additionalProperties": False,
    }


def parse_body(content: bytes, fields: Sequence[Field]) -> dict[str, Any]:
    """The values by field name. Raises `BadRequest`."""
    members = _members(content)
    known = {one.name: one for one in fields}
    for name in members:
        if name not in known:
            raise BadRequest(
                "unknown field", where="body", got=repr(name)[:200], expected=", ".join(known) or "none"
            )
    found = {}
    for one in fields:
        if one.name in members:
            found[one.name] = _value(one, members[one.name])
        elif one.is_required:
            raise BadRequest(
                "a required field is missing", where=f"field {one.name}", expected=one.description
            )
    return found


def _members(content: bytes) -> dict[str, Any]:
    try:
        value = _decoder.decode(content.decode())
    except RecursionError:
        raise _not_json("nested too deeply") from None
    except ValueError as error:
        raise _not_json(str(error)) from None
    if not isinstance(value, dict):
        raise BadRequest(
            "the body is not an object", where="body", got=type(value).__name__, expected="a JSON object"
        )
    return value


def _not_json(why: str) -> BadRequest:
    return BadRequest(
        "the body is not valid JSON", where="body", got=why[:200], expected="a JSON object in UTF-8"
    )


def _value(one: Field, value: Any) -> Any:
    try:
        return one.parse(value)
    except ValueError as error:
        raise BadRequest(
            "the field is malformed",
            where=f"field {one.name}",
            got=json.dumps(value)[:200],
            expected=str(error),
        ) from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a name occurs twice")
    return members


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not valid JSON")


_decoder = json.JSONDecoder(object_pairs_hook=_once, parse_constant=_refuse)


# Kinds of fields


def whole(name: str, description: str, *, low: int, high: int, is_required: bool = False) -> Field:
    """An integer from `low` to `high`."""

    def parse(value: Any) -> int:
        number = _whole(value)
        if number is None or not low <= number <= high:
            raise ValueError(f"a whole number from {low} to {high}")
        return number

    schema = {"type": "integer", "minimum": low, "maximum": high}
    return Field(name, description, schema, parse, is_required)


def size(name: str, description: str, *, low: int, high: int) -> Field:
    """A number of bytes, or a string such as "90Gi"."""
    pattern = _SIZE if low else f"(0|{_SIZE})"

    def parse(value: Any) -> int:
        is_text = isinstance(value, str) and re.fullmatch(pattern, value, re.ASCII)
        found = parse_size(value) if is_text else _whole(value)
        if found is None or not low <= found <= high:
            raise ValueError(f'bytes from {low} to {high}, as a number or a string such as "90Gi"')
        return found

    schema = {
        "anyOf": [
            {"type": "integer", "minimum": low, "maximum": high},
            {"type": "string", "pattern": f"^{pattern}$"},
        ],
        "examples": [2**30, "90Gi"],
    }
    return Field(name, description, schema, parse)


def flag(name: str, description: str) -> Field:
    """True or false. Default: false."""

    def parse(value: Any) -> bool:
        if value is True or value is False:
            return value is True
        raise ValueError("true or false")

    return Field(name, description, {"type": "boolean", "default": False}, parse)


def name_of(kind: str, description: str, *, field: str) -> Field:
    """A required name of a `kind`."""

    def parse(value: Any) -> str:
        try:
            if isinstance(value, str):
                return check_name(value, kind=kind)
        except InvalidName:
            pass
        raise ValueError(f"the name of a {kind}")

    return Field(field, description, {"type": "string", "pattern": NAME_PATTERN}, parse, is_required=True)


def session_of(description: str, *, field: str) -> Field:
    """A required session name: one name, or two joined by "~"."""

    def parse(value: Any) -> str:
        try:
            if isinstance(value, str):
                return check_session_name(value)
        except InvalidName:
            pass
        raise ValueError("the name of a session")

    pattern = NAME_PATTERN.removeprefix("^").removesuffix("$")
    schema = {
        "type": "string",
        "pattern": f"^{pattern}(~{pattern})?$",
        "maxLength": SESSION_NAME_BYTES_MAX,
    }
    return Field(field, description, schema, parse, is_required=True)


def _whole(value: Any) -> int | None:
    """An integer as JSON Schema defines it: 1.0 is one, true is not."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if type(value) is int else None
