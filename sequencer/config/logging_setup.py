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
from typing import Final

from rt.cli.formats.tables import escape
from rt.cli.logging_setup import JsonLines, event_of, time_of

_STDERR: Final = 2


def configure(process: str, level: str, style: str) -> None:
    """Send records of `level` and above to stderr, as "text" or "json". Replaces earlier handlers."""
    handler = _Handler()
    handler.setFormatter(JsonLines(process=process) if style == "json" else TextLines(process))
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
            f"time={time_of(record)} level={record.levelname.lower()} process={self._process} "
            f"logger={_unbroken(record.name)} {said}"
        )
        if not record.exc_info:
            return line
        return f"{line} exception={json.dumps(self.formatException(record.exc_info))}"


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
