"""A batch published undecodable is reported as a bad message, not as disk corruption."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from batches import CLUSTER, Said, batch, columns, forge
from click.testing import CliRunner

import rt
from rt.cli.main import cli
from rt.errors import Gap
from rt.events import BadMessage
from rt.log.check.compare import compare
from rt.log.check.verify import verify
from rt.log.format.checksum import batch_seed
from rt.log.format.segment import LogKind, SegmentId
from rt.log.format.segment_table import LogIdentity
from rt.log.write.writer import BatchFrames, LogWriter
from rt.spark.export.audit_job import SegmentCopy, audit_segment
from rt.testing.merged import MergedLogBuilder

BAD = columns([0, 8], [5], [], [0, 1], b"t")
"""Columns of a batch whose header gives another time range."""


@pytest.fixture
def logs(tmp_path: Path) -> list[str]:
    """Return two copies of a merged log of three messages. The second message is bad."""
    session, merged, twin = (str(tmp_path / name) for name in ("session", "merged", "twin"))
    writer = LogWriter.open(session, LogIdentity(LogKind.SESSION, bytes(16), "feed"))
    writer.start(SegmentId(0, 0), first=0)
    assert writer.active is not None
    for number in range(3):
        seed = batch_seed(writer.active.seed, writer.offset)
        good = batch([Said("t", b"%d" % number)], first=number, seed=seed)
        bad = forge(BAD, b"8 bytes.", seed=seed, first=1, timestamp_low_ns=6, timestamp_high_ns=6)
        writer.append([BatchFrames([bad if number == 1 else good], number + 1, 0, 2**62)])
    writer.sync()
    writer.close()
    with MergedLogBuilder(merged, cluster_id=CLUSTER, stream="s") as log:
        log.merge_all([session])
    shutil.copytree(merged, twin)
    return [merged, twin]


def test_reader_reports_bad_message_and_continues(logs: list[str]) -> None:
    told: list[object] = []
    with rt.LogReader(logs[0], on_event=told.append) as reader:
        assert [message.value for message in reader] == [b"0", b"2"]
    (event,) = told
    assert isinstance(event, BadMessage)
    assert (event.start, event.end) == (1, 2)


def test_reader_without_event_handler_raises_gap_blaming_no_disk(logs: list[str]) -> None:
    with rt.LogReader(logs[0]) as reader, pytest.raises(Gap, match=r"cannot be decoded.*No disk is at fault"):
        list(reader)


def test_verify_reports_bad_message_and_no_corruption(logs: list[str]) -> None:
    report = verify(logs[0])
    assert not report.is_damaged
    (bad,) = report.bad_messages
    assert str(bad).startswith("bad message: ")
    result = CliRunner().invoke(cli, ["log", "verify", "--quiet", logs[0]])
    assert result.exit_code == 0
    assert "intact" in result.output
    assert "(1 batches cannot be decoded)" in result.output


def test_compare_and_audit_find_no_difference_in_copies_with_bad_message(logs: list[str]) -> None:
    assert compare(logs).differences == ()
    copies = [SegmentCopy(log, (Path(log) / "log.0.0").stat().st_size) for log in logs]
    found = audit_segment(SegmentId(0, 0), copies)
    assert found is not None
    assert found.problems == []
    assert len(found.bad_messages) == 1
