r"""Logging of a node's processes: one line for each event on stderr.

    time=2026-01-31T12:00:00.123Z level=info process=control logger=sequencer.raft event=became_leader term=3
    {"time":...,"level":...,"process":...,"logger":...,"event":"became_leader","message":"leads term=3"}

Invariant: a record is one line of printable characters, written with one write. Other characters are escaped
as in Python (`\n`, `\x1b`). A record of another library has no event, but a `message` in quotes.
"""

from __future__ import annotations

import json
import logging
import os
import re
from datetime import UTC, datetime
from typing import Final

from rt.cli.formats.tables import escape

_OURS: Final = ("archiver", "replicator", "rt", "sequencer")
_EVENT: Final = re.compile(r"[a-z][a-z0-9_]*(?= |$)")
_STDERR: Final = 2


def configure(process: str, level: str, style: str) -> None:
    """Send records of `level` and above to stderr, as "text" or "json". Replaces earlier handlers."""
    handler = _Handler()
    handler.setFormatter(JsonLines(process) if style == "json" else TextLines(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(capture=True)


class TextLines(logging.Formatter):
    """`key=value`, for people and grep."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        said = f"event={_unbroken(message)}" if event_of(record) else f"message={json.dumps(message)}"
        line = (
            f"time={_time(record)} level={record.levelname.lower()} process={self._process} "
            f"logger={_unbroken(record.name)} {said}"
        )
        return f"{line} exception={json.dumps(trace)}" if (trace := self._trace(record)) else line

    def _trace(self, record: logging.LogRecord) -> str:
        return self.formatException(record.exc_info) if record.exc_info else ""


class JsonLines(TextLines):
    """One JSON object for each record."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "event": event_of(record),
            "message": record.getMessage(),
        }
        if trace := self._trace(record):
            entry["exception"] = trace
        return json.dumps(entry)


def event_of(record: logging.LogRecord) -> str | None:
    """The event name with which a record of rt starts."""
    if record.name.partition(".")[0] not in _OURS:
        return None
    event = _EVENT.match(record.getMessage())
    return event[0] if event else None


class _Handler(logging.Handler):
    """Writes to the file descriptor without a buffer, so that nothing is lost when the process
    ends at once.
    """

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = memoryview((self.format(record) + "\n").encode())
            while line:
                line = line[os.write(_STDERR, line) :]
        except Exception:  # noqa: BLE001  # Nobody may be reading stderr any more.
            self.handleError(record)


def _unbroken(text: str) -> str:
    """`text` if it is printable. Its values were formatted with `%r`, so backslashes are not
    escaped again.
    """
    return text if text.isprintable() else escape(text)


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return f"{moment:%FT%T}.{int(record.msecs):03d}Z"
