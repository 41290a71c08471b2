"""The protocol between a process with publishers and its push processes: see `rt.line_protocol`.

The end of the stream finishes all sessions. Pure.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from msgspec import Struct

PUSH_LOG: Final = "push.log"
"""The log records of the push processes that concern a session: a file in its directory."""


class PushRequested(Struct, frozen=True, tag="push"):
    """Push the session in `directory` to the nodes at `endpoints`; `ca`, `cert`, `key` are PEM files.

    `number` identifies this request.
    """

    number: int
    directory: str
    stream: str
    endpoints: tuple[str, ...]
    ca: str
    cert: str
    key: str


class FinishRequested(Struct, frozen=True, tag="finish"):
    """The publisher of this session was closed: push the rest, then end."""

    number: int


class PushEnded(Struct, frozen=True, tag="ended"):
    """From the push process: do not request this session again.

    All is replicated, another client serves the directory, or the nodes reject further data.
    """

    number: int


PushLine: TypeAlias = PushRequested | FinishRequested | PushEnded
