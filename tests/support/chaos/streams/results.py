"""The results of a consumer that keeps its token: a log to which several processes may append.

    prev token:event token:event … .

Each line starts with the last token that its writer knew. The line counts only if that is the last token of
the lines before it. Therefore a writer that does not know the newest line changes nothing, as with `UPDATE …
WHERE token = …` in a database. A line without its end was torn by a kill, and does not count either.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

NOTHING: Final = -1
"""The token before the first one."""


class Results:
    """The results of one consumer on one stream."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        self._read = 0
        self._left = b""
        self.last = NOTHING
        """The token of the last event."""
        self.rows: list[tuple[int, str]] = []
        """Tokens and events read since this was opened."""
        self.refresh()

    def append(self, rows: Sequence[tuple[int, str]]) -> bool:
        """Append the rows after `last` in one write. Return False if another process was faster; see
        `last`.
        """
        text = " ".join(f"{token}:{event}" for token, event in rows)
        os.write(self._file, f"\n{self.last} {text} .\n".encode())
        self.refresh()
        return self.last == rows[-1][0]

    def refresh(self) -> None:
        """Read what other processes have appended."""
        while data := os.pread(self._file, 2**20, self._read):
            self._read += len(data)
            *lines, self._left = (self._left + data).split(b"\n")
            for line in lines:
                self._take(line.decode())

    def _take(self, line: str) -> None:
        if line.endswith(" ."):
            previous, *words = line.removesuffix(" .").split(" ")
            if int(previous) == self.last:
                rows = [(int(token), event) for token, _, event in (word.partition(":") for word in words)]
                self.rows += rows
                self.last = rows[-1][0]

    def close(self) -> None:
        os.close(self._file)


def read_rows(path: Path) -> list[tuple[int, str]]:
    """Return all tokens and events."""
    results = Results(path)
    results.close()
    return results.rows
