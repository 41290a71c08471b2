"""Logging of the `rt` command: one line a record on stderr, as text or JSON."""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime

_EVENT = re.compile(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)+(?= |$)")
"""The start of a record of rt; records of other libraries have no event name."""


def configure(level: str, style: str) -> None:
    """Send records of `level` and above to stderr, as "text" or "json"; replaces an earlier handler."""
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, _StderrHandler)]:
        root.removeHandler(handler)
    handler = _StderrHandler()
    handler.setFormatter(_JsonFormatter() if style == "json" else _TextFormatter())
    root.addHandler(handler)
    root.setLevel(level.upper())


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
        return f"{_time(record)} {record.levelname.lower()} {record.name} {super().format(record)}"


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        event = _EVENT.match(message)
        entry = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": event[0] if event else None,
            "message": message,
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return f"{moment:%FT%T}.{int(record.msecs):03d}Z"
