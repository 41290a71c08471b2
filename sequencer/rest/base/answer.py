"""Bodies of responses: typed records. The OpenAPI document and the pages of the API come from their types.

Pure. Every field of a record is always present. An unknown value is "", 0 or null, as its description says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, TypeAlias

from msgspec import Meta, Struct

from rt.units import format_time


class Answer(Struct, rename="camel", forbid_unknown_fields=True):
    """One record, in camelCase. Its docstring and the descriptions of its fields are public."""


def doc(description: str) -> Meta:
    return Meta(description=description)


def one_of(options: Sequence[str]) -> Meta:
    return Meta(extra_json_schema={"enum": list(options)})


_INT64: Final = {"format": "int64"}
Count: TypeAlias = Annotated[int, Meta(ge=0, extra_json_schema=_INT64)]
CountOrNone: TypeAlias = Annotated[int, Meta(ge=-1, extra_json_schema=_INT64)]
"""-1: none."""
Digits: TypeAlias = Annotated[str, Meta(pattern="^[0-9]+$")]
"""A number that may exceed 2^53, which clients in JavaScript would round: decimal digits in a string."""
Amount: TypeAlias = Annotated[float, Meta(ge=0)]
TIME: Final = "RFC 3339 with nanoseconds. Empty: never."


def time_or_empty(ns: int) -> str:
    """The text of a time; "" for 0 (never)."""
    return format_time(ns) if ns else ""
