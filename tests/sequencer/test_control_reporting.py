"""What a node reports of its data process once that says nothing more."""

from __future__ import annotations

from typing import Any

import pytest
from shadowing import shadow

from rt.v1 import sequencer_pb2 as pb
from sequencer.control import reporting
from sequencer.control.reporting import DISK_NS, Reporting


class Telling:
    """The way to a leader that takes every report."""

    leader = "n1"

    def __init__(self) -> None:
        self.reports: list[pb.Report] = []

    def report(self, report: pb.Report) -> bool:
        self.reports.append(report)
        return True


def test_a_disk_of_which_nothing_was_heard_for_long_is_not_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = [10**12]
    shadow(monkeypatch, reporting, "time", monotonic_ns=lambda: now_ns[0])
    telling: Any = Telling()
    told = Reporting(telling, lambda _: None)
    told.attach(b"boot")
    told.take(pb.DataReport(disk_bytes=100, disk_free_bytes=1))
    for passed_ns, known in ((DISK_NS, (100, 1)), (1, (0, 0)), (DISK_NS, (0, 0))):
        now_ns[0] += passed_ns
        told.report()
        assert (telling.reports[-1].disk_bytes, telling.reports[-1].disk_free_bytes) == known
    told.take(pb.DataReport(disk_bytes=100, disk_free_bytes=2))
    told.report()
    assert telling.reports[-1].disk_free_bytes == 2
