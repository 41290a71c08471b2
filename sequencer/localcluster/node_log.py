"""What the log of a node says of it, read as it grows: whether it leads, whether a part of it failed."""

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
    """A node's log file; `read` takes in what is new in it, `begin` comes before each start of the node."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.term = 0
        """The last term in which this node led."""
        self.leads = 0
        """That term if it leads still, else 0."""
        self.has_failed = False
        """Whether a part of it has failed since it was started."""
        self._at = 0

    def begin(self) -> None:
        """What is written from now on is another life's."""
        self.read()
        self.leads, self.has_failed = 0, False

    def read(self) -> None:
        """Take in the whole lines that are new."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._at)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._at += len(whole)
        for line in whole.splitlines():
            self._take(line)

    def _take(self, line: bytes) -> None:
        if leads := _LEADS.search(line):
            self.term = self.leads = int(leads[1])
        elif _LEADS_NO_MORE.search(line):
            self.leads = 0
        self.has_failed = self.has_failed or _FAILED.search(line) is not None

    def last_words(self, lines: int) -> str:
        """Its last lines."""
        try:
            with self.path.open("rb") as file:
                file.seek(max(0, self.path.stat().st_size - _TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.splitlines()[-lines:])
