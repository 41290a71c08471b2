"""Attempts of one Spark task against real nodes: killed midway, reordered, on another disk, or late."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sink_nodes import Sink
from sink_part import attempt, headers_of, rows_of

import rt
from rt.spark.sink import writer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).parents[1] / "support" / "sink_part.py"
COUNT = 700


@pytest.fixture(autouse=True)
def no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore Spark's task context after each test, because attempts replace it."""
    monkeypatch.setattr(writer, "_context", writer._context)


def asked(sink: Sink, disk: Path, **more: Any) -> dict[str, Any]:
    options = sink.options(more.pop("name"), path=str(disk))
    return {"options": options, "batch": 0, "partition": 0, "count": COUNT, **more}


def done(sink: Sink, disk: Path, **more: Any) -> list[int]:
    """Run an attempt to its end. Run it again if its session was ended meanwhile, as Spark does. Return the
    first number and the end.
    """
    for _ in range(3):
        with contextlib.suppress(rt.Fenced):
            return attempt(asked(sink, disk, **more))
    return attempt(asked(sink, disk, **more))


def dead(sink: Sink, disk: Path, **more: Any) -> None:
    """Run an attempt in a separate process that is killed half-way."""
    found = subprocess.run(
        [sys.executable, SCRIPT, json.dumps(asked(sink, disk, **more))],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parent)},
    )
    assert found.returncode == -signal.SIGKILL, found.stderr


def test_task_killed_midway_is_finished_on_another_disk_in_its_first_order(
    sink: Sink, tmp_path: Path
) -> None:
    rows = {"name": "half", "seed": 1}
    dead(sink, tmp_path / "one", **rows, die_at=300)
    assert len(sink.written("half", 0, 300)) >= 300

    assert done(sink, tmp_path / "two", **rows, shuffle=5, finish=True) == [0, COUNT]

    assert sink.written("half", 0, COUNT) == rows_of(1, COUNT)
    # The messages that the first attempt left behind arrive when its disk is back, with the next batch.
    more = done(sink, tmp_path / "one", **rows | {"seed": 2}, batch=1, finish=True)
    assert more == [COUNT, 2 * COUNT]
    assert sink.written("half", 0, 2 * COUNT) == rows_of(1, COUNT) + rows_of(2, COUNT)


def test_late_rows_of_dead_disk_are_not_published_again(sink: Sink, tmp_path: Path) -> None:
    rows = {"name": "late", "seed": 3, "partition": 1}
    dead(sink, tmp_path / "one", **rows, lost=True)
    assert done(sink, tmp_path / "two", **rows, shuffle=1) == [0, COUNT]

    assert done(sink, tmp_path / "one", **rows) == [0, COUNT]

    assert sink.written("late", 1, COUNT) == rows_of(3, COUNT)


def test_concurrent_attempts_publish_each_row_once_in_one_order(sink: Sink, tmp_path: Path) -> None:
    rows = {"name": "twins", "seed": 7, "partition": 2}
    with ThreadPoolExecutor(3) as pool:
        disks = [tmp_path / "one", tmp_path / "two", tmp_path / "one"]
        found = [pool.submit(done, sink, disk, **rows, shuffle=n) for n, disk in enumerate(disks)]
        assert [one.result() for one in found] == [[0, COUNT]] * 3
    orders = []
    for shuffle in range(3):
        orders.append(rows_of(7, COUNT))
        random.Random(shuffle).shuffle(orders[-1])
    assert sink.written("twins", 2, COUNT) in orders


def test_repeated_task_with_other_rows_raises_write_conflict_and_publishes_none(
    sink: Sink, tmp_path: Path
) -> None:
    rows = {"name": "other", "seed": 4}
    dead(sink, tmp_path / "one", **rows, die_at=10)
    with pytest.raises(rt.WriteConflict, match="the write was repeated with other rows") as error:
        done(sink, tmp_path / "two", **rows, change=True)
    assert "got 1 other rows of 700, expected the same rows" in str(error.value)
    assert done(sink, tmp_path / "two", **rows) == [0, COUNT]
    assert sink.written("other", 0, COUNT) == rows_of(4, COUNT)


def test_repeated_task_with_other_headers_is_rejected_and_with_same_ones_merged_once(
    sink: Sink, tmp_path: Path
) -> None:
    rows = {"name": "headers", "seed": 8, "headers": "first"}
    dead(sink, tmp_path / "one", **rows, die_at=100)
    for other in ("second", None):
        with pytest.raises(rt.WriteConflict, match="the write was repeated with other rows"):
            done(sink, tmp_path / "two", **rows | {"headers": other})
    assert done(sink, tmp_path / "two", **rows, shuffle=2, finish=True) == [0, COUNT]
    found = [(each.value, each.headers) for each in sink.messages("headers", COUNT)]
    assert found == [(row[0], headers_of(row, "first")) for row in rows_of(8, COUNT)]


def test_lost_ledger_raises_write_conflict_before_rows_are_dropped(sink: Sink, tmp_path: Path) -> None:
    rows = {"name": "ledger", "seed": 5}
    done(sink, tmp_path / "one", **rows, finish=True)
    (sink.ledger / "ledger").rename(sink.ledger / "ledger-before")
    with pytest.raises(rt.WriteConflict, match="rows would be dropped as duplicates"):
        done(sink, tmp_path / "one", **rows | {"seed": 6})
    assert sink.written("ledger", 0, COUNT) == rows_of(5, COUNT)


def test_certificate_without_dedup_id_raises_certificate_error(sink: Sink, tmp_path: Path) -> None:
    plain = sink.nodes.certificate("publisher", "plain")
    options = sink.options("plain", path=str(tmp_path)) | {"cert": str(plain.cert), "key": str(plain.key)}
    with pytest.raises(rt.CertificateError, match="the certificate cannot be used to write from Spark"):
        attempt({"options": options, "batch": 0, "partition": 0, "count": 3, "seed": 1})
