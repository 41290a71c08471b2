"""Reads the log of a node as it grows: whether the node leads, and whether a part of it failed."""

from __future__ import annotations

import re
from pathlib import Path

_LEADS = re.compile(rb" process=control .*event=became_leader term=(\d+)")
_LEADS_NO_MORE = re.compile(
    rb" event=(?:stepped_down|became_follower|child_started child=control|child_ended child=control)"
)
_FAILED = re.compile(rb" event=(?:process_failed|node_failed|node_diverged) ")
_TAIL_BYTES = 16384


class NodeLog:
    """A node's log file. Call `start` before each start of the node, `read` to process new lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.term = 0
        """The last term in which this node led."""
        self.leads = 0
        """The value of `term` if the node still leads, else 0."""
        self.has_failed = False
        """Whether a part of the node has failed since its start."""
        self._at = 0

    def start(self) -> None:
        """Prepare for another run of the node: the next lines belong to it."""
        self.read()
        self.leads, self.has_failed = 0, False

    def forget_terms(self) -> None:
        """Forget the terms, because the node lost its directory. A cluster that starts again without the
        directory may have lower terms.
        """
        self.read()
        self.term = self.leads = 0

    def read(self) -> None:
        """Process the complete new lines."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._at)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._at += len(whole)
        for line in whole.splitlines():
            self._parse(line)

    def _parse(self, line: bytes) -> None:
        if leads := _LEADS.search(line):
            self.term = self.leads = int(leads[1])
        elif _LEADS_NO_MORE.search(line):
            self.leads = 0
        self.has_failed = self.has_failed or _FAILED.search(line) is not None

    def last_words(self, lines: int) -> str:
        try:
            with self.path.open("rb") as file:
                file.seek(max(0, self.path.stat().st_size - _TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.splitlines()[-lines:])
