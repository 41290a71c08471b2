"""What a process with publishers and its push processes tell each other: a line of JSON each.

    {"serve": 3, "directory": ..., "stream": ..., "endpoints": [...], "ca": ..., "cert": ..., "key": ...}
                        push this session; the number is the publishers' process's, for this request alone
    {"finish": 3}       its publisher was closed: push what is left, then end
    {"ended": 3}        (said by the push process) it is pushed no more, nor is it to be asked for again

The end of the stream finishes all. Pure.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Serve:
    """Push the session in `directory` to the nodes at `endpoints`; `ca`, `cert`, `key` are PEM files."""

    serve: int
    directory: str
    stream: str
    endpoints: tuple[str, ...]
    ca: str
    cert: str
    key: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The publisher of this session has ended."""

    finish: int


@dataclass(frozen=True, slots=True)
class Ended:
    """All is replicated, another client serves the directory, or the nodes take no more of it."""

    ended: int


PushLine: TypeAlias = Serve | Finish | Ended


def encode_line(said: PushLine) -> bytes:
    """The line, newline included."""
    return json.dumps(asdict(said)).encode() + b"\n"


def decode_line(line: bytes) -> PushLine | None:
    """What a line says; None if it says nothing that is known here."""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return None
    match said:
        case {
            "serve": int(number),
            "directory": str(directory),
            "stream": str(stream),
            "endpoints": [*endpoints],
            "ca": str(ca),
            "cert": str(cert),
            "key": str(key),
        } if all(isinstance(endpoint, str) for endpoint in endpoints):
            return Serve(number, directory, stream, tuple(endpoints), ca, cert, key)
        case {"finish": int(number)}:
            return Finish(number)
        case {"ended": int(number)}:
            return Ended(number)
        case _:
            return None


class Lines:
    """Cuts what is received into lines."""

    def __init__(self) -> None:
        self._rest = b""

    def take(self, data: bytes) -> list[bytes]:
        """The lines that are whole now."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines
