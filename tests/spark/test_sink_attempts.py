"""Attempts of one task against real nodes: half done and dead, in another order, on another disk, late."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sink_nodes import Sink, running_sink
from sink_part import rows_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).parents[1] / "support" / "sink_part.py"
COUNT = 700


@pytest.fixture(scope="module")
def sink() -> Iterator[Sink]:
    with running_sink() as sink:
        yield sink


def attempt(sink: Sink, disk: Path, **asked: Any) -> subprocess.CompletedProcess[str]:
    """Run one to its end."""
    options = sink.options(asked.pop("name"), path=str(disk))
    said = {"options": options, "batch": 0, "partition": 0, "count": COUNT, **asked}
    return subprocess.run(
        [sys.executable, SCRIPT, json.dumps(said)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parent)},
    )


def done(found: subprocess.CompletedProcess[str]) -> list[int]:
    assert found.returncode == 0, found.stderr
    numbers: list[int] = json.loads(found.stdout)
    return numbers


def test_a_task_that_died_half_done_is_finished_elsewhere_in_the_order_it_began_with(
    sink: Sink, tmp_path: Path
) -> None:
    rows = {"name": "half", "seed": 1}
    dead = attempt(sink, tmp_path / "one", **rows, die_at=300)
    assert dead.returncode == -signal.SIGKILL, dead.stderr
    assert len(sink.written("half", 0)) >= 300

    assert done(attempt(sink, tmp_path / "two", **rows, shuffle=5, finish=True)) == [0, COUNT]

    assert sink.written("half", 0) == rows_of(1, COUNT)
    # And what the first one left behind arrives when its disk is back, with the next batch.
    more = attempt(sink, tmp_path / "one", **rows | {"seed": 2}, batch=1, finish=True)
    assert done(more) == [COUNT, 2 * COUNT]
    assert sink.written("half", 0) == rows_of(1, COUNT) + rows_of(2, COUNT)


def test_what_a_dead_disk_brings_late_is_not_published_again(sink: Sink, tmp_path: Path) -> None:
    rows = {"name": "late", "seed": 3, "partition": 1}
    lost = attempt(sink, tmp_path / "one", **rows, lost=True)
    assert lost.returncode == -signal.SIGKILL, lost.stderr
    assert done(attempt(sink, tmp_path / "two", **rows, shuffle=1)) == [0, COUNT]

    assert done(attempt(sink, tmp_path / "one", **rows)) == [0, COUNT]

    assert sink.written("late", 1) == rows_of(3, COUNT)


def test_attempts_that_run_at_once_publish_each_row_once_in_one_order(sink: Sink, tmp_path: Path) -> None:
    rows = {"name": "twins", "seed": 7, "partition": 2}
    with ThreadPoolExecutor(3) as pool:
        disks = [tmp_path / "one", tmp_path / "two", tmp_path / "one"]
        found = [pool.submit(attempt, sink, disk, **rows, shuffle=n) for n, disk in enumerate(disks)]
        assert [done(one.result()) for one in found] == [[0, COUNT]] * 3
    orders = []
    for shuffle in range(3):
        orders.append(rows_of(7, COUNT))
        random.Random(shuffle).shuffle(orders[-1])
    assert sink.written("twins", 2) in orders


def test_a_task_that_has_other_rows_the_second_time_publishes_nothing_and_says_so(
    sink: Sink, tmp_path: Path
) -> None:
    rows = {"name": "other", "seed": 4}
    attempt(sink, tmp_path / "one", **rows, die_at=10)
    found = attempt(sink, tmp_path / "two", **rows, change=True)
    assert "WriteConflict: the write is made again with other rows" in found.stderr
    assert "got 1 other rows of 700, wanted the same rows" in found.stderr
    assert done(attempt(sink, tmp_path / "two", **rows)) == [0, COUNT]
    assert sink.written("other", 0) == rows_of(4, COUNT)


def test_a_ledger_that_was_lost_is_noticed_before_rows_count_as_merged(sink: Sink, tmp_path: Path) -> None:
    rows = {"name": "ledger", "seed": 5}
    done(attempt(sink, tmp_path / "one", **rows, finish=True))
    (sink.ledger / "ledger").rename(sink.ledger / "ledger-before")
    found = attempt(sink, tmp_path / "one", **rows | {"seed": 6})
    assert "WriteConflict: rows would count as merged already" in found.stderr
    assert sink.written("ledger", 0) == rows_of(5, COUNT)


def test_a_certificate_without_a_dedup_id_is_refused(sink: Sink, tmp_path: Path) -> None:
    plain = sink.nodes.certificate("publisher", "plain")
    options = sink.options("plain", path=str(tmp_path)) | {"cert": str(plain.cert), "key": str(plain.key)}
    said = {"options": options, "batch": 0, "partition": 0, "count": 3, "seed": 1}
    found = subprocess.run(
        [sys.executable, SCRIPT, json.dumps(said)], capture_output=True, text=True, timeout=600, check=False
    )
    assert "CertificateError: the certificate cannot be used to write from Spark" in found.stderr
