"""Reports of the data process: a long backlog reaches the control process in parts, whole and in order."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rt.v1 import sequencer_pb2 as pb
from sequencer.control.reporter import DurableEnds
from sequencer.ipc import data_reports
from sequencer.ipc.data_reports import DataReports
from sequencer.leader.replication_tracker import MARK, BatchBoundary, pack_boundaries, unpack_boundaries


class Link:
    def __init__(self) -> None:
        self.sent: list[pb.DataReport] = []

    def send(self, message: pb.ToControl) -> None:
        self.sent.append(message.report)


def marks_of(count: int) -> bytes:
    return pack_boundaries(BatchBoundary(64 + 8 * number, number, number) for number in range(count))


@pytest.mark.parametrize("counts", [(25,), (4, 8, 1), (1,) * 30, (0, 12, 0)], ids=str)
def test_long_report_reaches_control_in_bounded_parts(
    monkeypatch: pytest.MonkeyPatch, counts: tuple[int, ...]
) -> None:
    monkeypatch.setattr(data_reports, "PART_BOUNDARIES_MAX", 4)
    link: Any = Link()
    final = pb.SessionEnd(session_id=1, offset=64)

    async def main() -> None:
        reports = DataReports(link)
        for session_id, count in enumerate(counts):
            reports.segment(pb.SegmentReport(session_id=session_id, boundaries=marks_of(count), final=final))
        reports.joins(3)

    asyncio.run(main())
    *parts, last = link.sent
    assert (last.joins, list(last.segments)) == (3, []), "joins are reported after everything that is durable"
    holdings, found = DurableEnds(b"boot"), dict[int, bytes]()
    for part in parts:
        assert sum(len(one.boundaries) for one in part.segments) < 2 * 4 * MARK.size
        assert len(part.segments) <= 4
        holdings.handle_report(part)
        for one in part.segments:
            is_whole = (
                len(found.get(one.session_id, b"") + one.boundaries) == counts[one.session_id] * MARK.size
            )
            assert one.HasField("final") == is_whole
            found[one.session_id] = found.get(one.session_id, b"") + one.boundaries
    assert found == {session_id: marks_of(count) for session_id, count in enumerate(counts)}
    told = holdings.report(1)
    assert {one.session_id: len(unpack_boundaries(one.boundaries)) for one in told.segments} == dict(
        enumerate(counts)
    )
