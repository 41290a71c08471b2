"""The output of `rt pushes` for a push, and the unsent messages of its session."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct

from rt.cli.formats.tables import count_of, escape, format_age, format_size, table
from rt.errors import RtError
from rt.log.check.status import LogStatus, read_status
from rt.sidecar.cluster_file import read_cluster
from rt.sidecar.progress_file import NO_LEVEL, Level, read_progress
from rt.sidecar.push_control import PushSummary

_COLUMNS = ("session", "stream", "pid", "ended", "unsent", "stuck", "endpoints", "directory")


class Unsent(Struct, frozen=True):
    """Messages of a session that no majority of the nodes has synced, as far as it is known."""

    messages: int
    bytes_max: int
    """Size of the files that hold them."""

    def __str__(self) -> str:
        if not self.messages:
            return "nothing"
        return f"{count_of(self.messages, 'message')}, up to {format_size(self.bytes_max)}"


class Push(Struct, frozen=True):
    """A session that a push process serves. If the unsent messages cannot be read, `unsent` is the reason."""

    pid: int
    summary: PushSummary
    unsent: Unsent | str


def read_unsent(directory: str) -> Unsent | str:
    """The messages that the session in `directory` still has to send; the reason if they cannot be read."""
    try:
        status, record = read_status(directory), read_progress(directory)
        cluster = read_cluster(directory).id
    except (RtError, OSError) as error:
        return str(error)
    if record is None or not record.is_of(status.identity.origin, cluster):
        return count_unsent(status, NO_LEVEL)
    return count_unsent(status, record.replicated)


def count_unsent(status: LogStatus, replicated: Level) -> Unsent:
    """Count the messages after `replicated`. Pure."""
    messages = bytes_max = 0
    for segment in status.kept:
        if segment.id.run < replicated.run:
            continue
        start = max(segment.first, replicated.number) if segment.id.run == replicated.run else segment.first
        if segment.end > start:
            messages += segment.end - start
            bytes_max += segment.size_bytes
    return Unsent(messages, bytes_max)


def push_lines(pushes: Sequence[Push]) -> Iterator[str]:
    """A table; only its header if there is no push."""
    now_s = time.time()
    rows = [
        [
            escape(push.summary.session),
            escape(push.summary.stream),
            str(push.pid),
            _ended(push.summary.ended_at, now_s),
            escape(str(push.unsent)),
            escape(push.summary.stuck or "no"),
            escape(",".join(push.summary.endpoints)),
            escape(push.summary.directory),
        ]
        for push in pushes
    ]
    yield from table(_COLUMNS, rows, right=frozenset({"pid"}))


def push_object(push: Push) -> dict[str, Any]:
    """The push as a JSON object.

    `ended_ns` is in ns since the Unix epoch; None if the publisher is open. Unknown values are None.
    """
    summary = push.summary
    unsent = push.unsent if isinstance(push.unsent, Unsent) else None
    return {
        "session": summary.session,
        "stream": summary.stream,
        "directory": summary.directory,
        "pid": push.pid,
        "endpoints": list(summary.endpoints),
        "ended_ns": None if summary.ended_at is None else int(summary.ended_at * 1e9),
        "unsent_messages": None if unsent is None else unsent.messages,
        "unsent_bytes_max": None if unsent is None else unsent.bytes_max,
        "stuck": summary.stuck or None,
        "problem": None if unsent is not None else push.unsent,
    }


def _ended(at_s: float | None, now_s: float) -> str:
    return "no" if at_s is None else f"{format_age(int((now_s - at_s) * 1e9))} ago"
