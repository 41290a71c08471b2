"""The protocol between a process with publishers and its push processes: lines of JSON.

    {"serve": 3, "directory": ..., "stream": ..., "endpoints": [...], "ca": ..., "cert": ..., "key": ...}
                        push this session; the number identifies this request
    {"finish": 3}       its publisher was closed: push the rest, then end
    {"ended": 3}        (from the push process) it is not pushed any more; do not request it again

The end of the stream finishes all sessions. Pure.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class PushRequested:
    """Push the session in `directory` to the nodes at `endpoints`; `ca`, `cert`, `key` are PEM files."""

    serve: int
    directory: str
    stream: str
    endpoints: tuple[str, ...]
    ca: str
    cert: str
    key: str


@dataclass(frozen=True, slots=True)
class FinishRequested:
    """The publisher of this session has ended."""

    finish: int


@dataclass(frozen=True, slots=True)
class PushEnded:
    """All is replicated, another client serves the directory, or the nodes reject further data."""

    ended: int


PushLine: TypeAlias = PushRequested | FinishRequested | PushEnded


def encode_line(message: PushLine) -> bytes:
    """Returns the line with its newline."""
    return json.dumps(asdict(message)).encode() + b"\n"


def decode_line(line: bytes) -> PushLine | None:
    """The message in a line; None if it is unknown."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    match found:
        case {
            "serve": int(number),
            "directory": str(directory),
            "stream": str(stream),
            "endpoints": [*endpoints],
            "ca": str(ca),
            "cert": str(cert),
            "key": str(key),
        } if all(isinstance(endpoint, str) for endpoint in endpoints):
            return PushRequested(number, directory, stream, tuple(endpoints), ca, cert, key)
        case {"finish": int(number)}:
            return FinishRequested(number)
        case {"ended": int(number)}:
            return PushEnded(number)
        case _:
            return None


class LineBuffer:
    """Splits received bytes into lines."""

    def __init__(self) -> None:
        self._rest = b""

    def take(self, data: bytes) -> list[bytes]:
        """Add `data` and return the lines that are complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines
