"""Logging of the `rt` command: one line a record on stderr, as text or JSON."""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Final

_OURS: Final = ("archiver", "replicator", "rt", "sequencer")
_EVENT: Final = re.compile(r"[a-z][a-z0-9]*(?:(?:_[a-z0-9]+)+(?= |$)|(?= [^ =]+=|$))")
"""A name of several words, or a word before `key=value`."""


def configure(level: str, style: str) -> None:
    """Send records of `level` and above to stderr, as "text" or "json"; replaces an earlier handler."""
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, _StderrHandler)]:
        root.removeHandler(handler)
    handler = _StderrHandler()
    handler.setFormatter(formatter(style))
    root.addHandler(handler)
    root.setLevel(level.upper())


def formatter(style: str) -> logging.Formatter:
    return JsonLines() if style == "json" else _TextFormatter()


class _StderrHandler(logging.Handler):
    """Writes to the current `sys.stderr`."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
        except (OSError, ValueError):
            self.handleError(record)


class _TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return f"{time_of(record)} {record.levelname.lower()} {record.name} {super().format(record)}"


class JsonLines(logging.Formatter):
    """One JSON object for each record, with `fields` in each."""

    def __init__(self, **fields: str) -> None:
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": time_of(record),
            "level": record.levelname.lower(),
            **self._fields,
            "logger": record.name,
            "event": event_of(record),
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def event_of(record: logging.LogRecord) -> str | None:
    """The event name with which a record of rt starts."""
    if record.name.partition(".")[0] not in _OURS:
        return None
    event = _EVENT.match(record.getMessage())
    return event[0] if event else None


def time_of(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return f"{moment:%FT%T}.{int(record.msecs):03d}Z"
