"""When the leader is told what this node holds: at once if there is news, and in a while if there is none.

The consensus thread alone uses it. The law: a report that was lost is followed by a full one; so is one that
went to another leader.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from rt.v1 import sequencer_pb2 as pb
from sequencer.control.holdings import Holdings, Standings
from sequencer.control.telling import Telling
from sequencer.orders import SessionEnd

REPORT_NS: Final = 200 * 10**6
"""So soon behind a report with news another one follows at the latest: the leader finds out what was lost."""
DISK_NS: Final = 6 * 10**9
"""What the data process said of its disk counts for so long, several times what it takes to say it again."""
IDLE_REPORT_NS: Final = 10**9
"""And so soon behind one without: the leader needs the clock."""


class Reporting:
    """What this node's data process holds, and the reports of it. `on_due` hears when the next one is due."""

    def __init__(self, telling: Telling, on_due: Callable[[int], None]) -> None:
        self._telling, self._on_due = telling, on_due
        self._holdings = Holdings(b"")
        self._disk_ns = 0
        """When the data process told of its disk."""
        self.due_ns = 0
        """On the monotonic clock, as what `on_due` hears."""

    @property
    def standings(self) -> Standings:
        """What the data process said last of merging and of its disk."""
        return self._holdings.standings

    def attach(self, boot: bytes) -> None:
        """A data process begins: nothing is known of what it holds. Nothing is reported before."""
        self._holdings = Holdings(boot)

    def take(self, report: pb.DataReport) -> None:
        """What is new with the data process; `rt.FormatError`."""
        self._holdings.take(report)
        if report.disk_bytes:
            self._disk_ns = time.monotonic_ns()

    def forget_below(self, end: SessionEnd) -> None:
        """That is merged."""
        self._holdings.forget_below(end)

    def begin(self) -> None:
        """The leader knows nothing of this node: tell it all."""
        self._holdings.begin()
        self.report()

    def report_news(self) -> None:
        """Tell the leader what it can plan with; the rest goes with that, or in a while."""
        if self._holdings.has_news:
            self.report()

    def report(self) -> None:
        """Tell the leader what it does not know yet."""
        holdings = self._holdings
        if time.monotonic_ns() - self._disk_ns > DISK_NS:
            holdings.forget_disk()
        self.due_ns = time.monotonic_ns() + (REPORT_NS if holdings.has_news else IDLE_REPORT_NS)
        self._on_due(self.due_ns)
        if self._telling.leader is None or not holdings.boot:
            return
        while True:
            if not self._telling.report(holdings.report(time.time_ns())):
                holdings.begin()
                return
            if not holdings.has_news:
                return
