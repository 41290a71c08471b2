"""What `rt pull --attached` tells the subscriber that started it: a line of JSON each, on stdout.

    {"reached": 1234}                                         a node was reached; where its log ended then
    {"refused": {"name": "sub", "why": "..."}}                nothing is held back for the subscriber
    {"failed": {"class": "Diverged", "what": ..., ...}}       why it ends, and no new start will mend it

Pure. Law: a line makes no other error than one of `rt.errors`; one that is not understood makes none.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, assert_never

from rt import errors
from rt.errors import Damaged, RtError

LINE_BYTES_MAX: Final = 64 * 1024

_TEXTS: Final = ("what", "where", "got", "wanted", "hint")
_TEXT_CHARACTERS_MAX: Final = 2000


@dataclass(frozen=True, slots=True)
class Reached:
    """A node was reached, for the first time. Its log ended at `end`."""

    end: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The nodes hold nothing back for the subscriber of that name."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The pull client ends with this error."""

    error: RtError


PullReport: TypeAlias = Reached | Refused | Failed


def encode_report(report: PullReport) -> bytes:
    """The line, newline included."""
    said: dict[str, Any]
    match report:
        case Reached(end):
            said = {"reached": end}
        case Refused(name, why):
            said = {"refused": {"name": name, "why": why}}
        case Failed(error):
            said = {"failed": _fields_of(error)}
        case _:
            assert_never(report)
    return json.dumps(said).encode() + b"\n"


def decode_report(line: bytes) -> PullReport | None:
    """What a line says; None if it says nothing that is known here."""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return None
    match said:
        case {"reached": int(end)} if end >= 0:
            return Reached(end)
        case {"refused": {"name": str(name), "why": str(why)}}:
            return Refused(name, why)
        case {"failed": {"class": str(name), "what": str()} as fields}:
            return Failed(_error_from(name, fields))
        case _:
            return None


def _fields_of(error: RtError) -> dict[str, Any]:
    texts = {name: getattr(error, name) for name in _TEXTS}
    fields: dict[str, Any] = {
        name: str(text)[:_TEXT_CHARACTERS_MAX] for name, text in texts.items() if text is not None
    }
    if isinstance(error, Damaged):
        fields |= {"path": error.path, "offset": error.offset}
    return {"class": type(error).__name__, **fields}


def _error_from(name: str, fields: dict[str, Any]) -> RtError:
    """An error of the class with that name; `rt.RtError` where it is not one that can be made of texts."""
    kind = getattr(errors, name, None)
    texts = {text: fields[text] for text in _TEXTS if isinstance(fields.get(text), str)}
    match fields:
        case {"path": str(path), "offset": int(offset)} if kind is Damaged:
            return Damaged(**texts, path=path, offset=offset)
    has_texts_only = isinstance(kind, type) and issubclass(kind, RtError) and kind not in _WITH_MORE
    return kind(**texts) if has_texts_only and kind is not None else RtError(**texts)


_WITH_MORE: Final = (Damaged, errors.Gap)
"""Classes that cannot be made of texts alone."""
