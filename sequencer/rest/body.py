"""The body of a request that changes something: a JSON object with the fields that the path knows.

Pure. Law: a field that is not known, said twice or malformed is an error that names it, as is one that is
missing; nothing is passed over, and nothing is guessed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from archiver.units import parse_size
from rt.errors import InvalidName
from rt.names import check_name
from sequencer.rest.errors import BadRequest
from sequencer.rest.query import NAME_PATTERN
from sequencer.rest.schema_kinds import Schema

BODY_BYTES_MAX: Final = 2**14
"""Ten times what the longest body needs."""
_SIZE: Final = (
    r"([1-9][0-9]{0,17}|[1-9][0-9]{0,14}(\.[0-9]{1,9})?(k|Ki)|[1-9][0-9]{0,11}(\.[0-9]{1,9})?(M|Mi)"
    r"|[1-9][0-9]{0,8}(\.[0-9]{1,9})?(G|Gi)|[1-9][0-9]{0,5}(\.[0-9]{1,9})?(T|Ti))"
)
"""What `parse_size` takes, as long as it stays below 2**62; JSON Schema has no other way to say so."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field. `parse` makes its value of what JSON says, or raises `ValueError` with what is wanted."""

    name: str
    description: str
    schema: Schema
    """As OpenAPI has it, without the description."""
    parse: Callable[[Any], Any]
    is_required: bool = False


def body_schema(fields: Sequence[Field]) -> Schema:
    """The body as JSON Schema."""
    return {
        "type": "object",
        "properties": {one.name: {**one.schema, "description": one.description} for one in fields},
        "required": [one.name for one in fields if one.is_required],
        "additionalProperties": False,
    }


def parse_body(content: bytes, fields: Sequence[Field]) -> dict[str, Any]:
    """The values of a body by name; `BadRequest`."""
    told = _members(content)
    known = {one.name: one for one in fields}
    for name in told:
        if name not in known:
            raise BadRequest(
                "no such field", where="body", got=repr(name)[:200], wanted=", ".join(known) or "none"
            )
    found = {}
    for one in fields:
        if one.name in told:
            found[one.name] = _value(one, told[one.name])
        elif one.is_required:
            raise BadRequest("a field is missing", where=f"field {one.name}", wanted=one.description)
    return found


def _members(content: bytes) -> dict[str, Any]:
    """The members of the JSON object that `content` is."""
    try:
        said = _decoder.decode(content.decode())
    except RecursionError:
        raise _no_json("nested too deep") from None
    except ValueError as error:
        raise _no_json(str(error)) from None
    if not isinstance(said, dict):
        raise BadRequest("the body is no object", where="body", got=type(said).__name__, wanted="{…}")
    return said


def _no_json(why: str) -> BadRequest:
    return BadRequest("the body is no JSON", where="body", got=why[:200], wanted="a JSON object in UTF-8")


def _value(one: Field, said: Any) -> Any:
    try:
        return one.parse(said)
    except ValueError as error:
        raise BadRequest(
            "the field cannot be read",
            where=f"field {one.name}",
            got=json.dumps(said)[:200],
            wanted=str(error),
        ) from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a name is there twice")
    return members


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


_decoder = json.JSONDecoder(object_pairs_hook=_once, parse_constant=_refuse)


# Kinds of fields


def whole(name: str, description: str, *, low: int, high: int, is_required: bool = False) -> Field:
    """A whole number from `low` to `high`."""

    def parse(said: Any) -> int:
        number = _whole(said)
        if number is None or not low <= number <= high:
            raise ValueError(f"a whole number from {low} to {high}")
        return number

    schema = {"type": "integer", "minimum": low, "maximum": high}
    return Field(name, description, schema, parse, is_required)


def size(name: str, description: str, *, low: int, high: int) -> Field:
    """A number of bytes, or a text as "90Gi"."""
    pattern = _SIZE if low else f"(0|{_SIZE})"

    def parse(said: Any) -> int:
        is_text = isinstance(said, str) and re.fullmatch(pattern, said, re.ASCII)
        found = parse_size(said) if is_text else _whole(said)
        if found is None or not low <= found <= high:
            raise ValueError(f'bytes from {low} to {high}, as a number or as "90Gi"')
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
    """True or false; false if it is not there."""

    def parse(said: Any) -> bool:
        if said is True or said is False:
            return said is True
        raise ValueError("true or false")

    return Field(name, description, {"type": "boolean", "default": False}, parse)


def name_of(kind: str, description: str, *, field: str) -> Field:
    """A name that must be there; `kind` says of what."""

    def parse(said: Any) -> str:
        try:
            if isinstance(said, str):
                return check_name(said, kind=kind)
        except InvalidName:
            pass
        raise ValueError(f"the name of a {kind}")

    return Field(field, description, {"type": "string", "pattern": NAME_PATTERN}, parse, is_required=True)


def _whole(said: Any) -> int | None:
    """A whole number as JSON Schema has it: 1.0 is one, true is none."""
    if isinstance(said, float) and said.is_integer():
        return int(said)
    return said if type(said) is int else None
