"""Reports of `rt pull --attached` to the subscriber that started it: lines of JSON on stdout.

    {"reached": 1234}                                         a node was reached; the end of its log then
    {"refused": {"name": "sub", "why": "..."}}                the nodes hold back no data for the subscriber
    {"corrupt": {"start": 7, "end": 90, "why": "..."}}        no node has valid bytes for these positions
    {"failed": {"class": "Diverged", "what": ..., ...}}       the permanent error with which it ends

Pure. A line creates only errors of `rt.errors`. An unknown line is ignored.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, assert_never

from rt import errors
from rt.errors import Corrupt, RtError

LINE_BYTES_MAX: Final = 64 * 1024

_TEXTS: Final = ("what", "where", "got", "expected", "hint")
_TEXT_CHARACTERS_MAX: Final = 2000


@dataclass(frozen=True, slots=True)
class NodeReached:
    """A node was reached for the first time. Its log ended at `end`."""

    end: int


@dataclass(frozen=True, slots=True)
class HoldDenied:
    """The nodes hold back no data for the subscriber of that name."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class NoGoodBytes:
    """No node has valid bytes for positions `start` to `end` (exclusive); None: the end is not known."""

    start: int
    end: int | None
    why: str


@dataclass(frozen=True, slots=True)
class PullFailed:
    error: RtError


PullReport: TypeAlias = NodeReached | HoldDenied | NoGoodBytes | PullFailed


def encode_report(report: PullReport) -> bytes:
    """Returns the line with its newline."""
    fields: dict[str, Any]
    match report:
        case NodeReached(end):
            fields = {"reached": end}
        case HoldDenied(name, why):
            fields = {"refused": {"name": name, "why": why}}
        case NoGoodBytes(start, end, why):
            fields = {"corrupt": {"start": start, "end": end, "why": why[:_TEXT_CHARACTERS_MAX]}}
        case PullFailed(error):
            fields = {"failed": _fields_of(error)}
        case _:
            assert_never(report)
    return json.dumps(fields).encode() + b"\n"


def decode_report(line: bytes) -> PullReport | None:
    """The report in a line; None if it is unknown."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    match found:
        case {"reached": int(end)} if end >= 0:
            return NodeReached(end)
        case {"refused": {"name": str(name), "why": str(why)}}:
            return HoldDenied(name, why)
        case {"corrupt": {"start": int(start), "end": int() | None as end, "why": str(why)}} if start >= 0:
            return NoGoodBytes(start, end, why)
        case {"failed": {"class": str(name), "what": str()} as fields}:
            return PullFailed(_error_from(name, fields))
        case _:
            return None


def _fields_of(error: RtError) -> dict[str, Any]:
    texts = {name: getattr(error, name) for name in _TEXTS}
    fields: dict[str, Any] = {
        name: str(text)[:_TEXT_CHARACTERS_MAX] for name, text in texts.items() if text is not None
    }
    if isinstance(error, Corrupt):
        fields |= {"path": error.path, "offset": error.offset}
    return {"class": type(error).__name__, **fields}


def _error_from(name: str, fields: dict[str, Any]) -> RtError:
    """An error of the named class; `rt.RtError` if that class cannot be made of texts."""
    kind = getattr(errors, name, None)
    texts = {text: fields[text] for text in _TEXTS if isinstance(fields.get(text), str)}
    match fields:
        case {"path": str(path), "offset": int(offset)} if kind is Corrupt:
            return Corrupt(**texts, path=path, offset=offset)
    has_texts_only = isinstance(kind, type) and issubclass(kind, RtError) and kind not in _WITH_MORE
    return kind(**texts) if has_texts_only and kind is not None else RtError(**texts)


_WITH_MORE: Final = (Corrupt, errors.Gap)
"""Classes with fields that are not texts."""
