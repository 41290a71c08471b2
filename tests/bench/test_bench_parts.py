"""Parts of the transport benchmark: audits of merged logs, pauses, memory, errors, merging alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rt
from rt.bench.processes import MemoryUsage, ProcessTable, joint_peak_mb, memory
from rt.errors import Timeout
from rt.log.scan.message_batch import MessageBatch
from rt.testing.merged import MergedLogBuilder
from sequencer.bench.backlog import Peaks
from sequencer.bench.failover import MergedAudit, audit
from sequencer.bench.merge_speed import BenchReplicas, MergeWork
from sequencer.bench.speed import Pauses
from sequencer.bench.stage import logs_kept
from sequencer.localcluster.processes import ProcessEnded

NAMES = ("a", "b", "c")


def a_batch(rows: Sequence[tuple[int, int]], first: int) -> MessageBatch:
    """Return a batch of messages. Each row is (index into `NAMES`, number)."""
    count = len(rows)
    which = np.array([session for session, _ in rows], np.uint16)
    return MessageBatch(
        np.arange(first, first + count),
        np.zeros(count, np.int64),
        np.array([number for _, number in rows], np.int64),
        (NAMES[rows[0][0]],) if len(set(which)) == 1 else NAMES,
        (0,) if len(set(which)) == 1 else (0,) * len(NAMES),
        None if len(set(which)) == 1 else which,
        ("",),
        None,
        np.zeros(count + 1, np.int32),
        memoryview(b""),
    )


def audit_dumbly(rows: Sequence[tuple[int, int]], published: dict[str, int]) -> MergedAudit:
    wanted = dict.fromkeys(NAMES, 0)
    lost = wrong = 0
    for session, number in rows:
        name = NAMES[session]
        if number < wanted[name]:
            wrong += 1
        else:
            lost += number - wanted[name]
            wanted[name] = number + 1
    for name in NAMES:
        lost += max(0, published.get(name, 0) - wanted[name])
        wrong += max(0, wanted[name] - published.get(name, 0))
    return MergedAudit(lost, wrong)


# The audit


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6)), min_size=1, max_size=8), max_size=5),
    st.dictionaries(st.sampled_from(NAMES), st.integers(0, 8)),
)
def test_audit_agrees_with_naive_audit(runs, published) -> None:
    rows = [row for run in runs for row in run]
    batches = [a_batch(run, 0) for run in runs]
    assert audit(batches, published) == audit_dumbly(rows, published)


def test_audit_counts_missing_messages_at_end_of_session(tmp_path: Path) -> None:
    paths = []
    for name, count in (("a", 30), ("b", 12)):
        with rt.Publisher(tmp_path, "s", publisher_id=name) as publisher:
            publisher.publish_many([b"x"] * count)
            paths.append(publisher.directory)
    with MergedLogBuilder(tmp_path / "merged", cluster_id=bytes(16), stream="s") as merged:
        merged.merge_all(paths)
    with rt.LogReader(tmp_path / "merged") as reader:
        assert audit(reader.batches(), {"a": 30, "b": 12}) == MergedAudit(0, 0)
    with rt.LogReader(tmp_path / "merged") as reader:
        assert audit(reader.batches(), {"a": 33, "b": 12, "c": 1}) == MergedAudit(4, 0)


# Pauses and memory


def test_longest_pause_counts_ended_and_ongoing_pauses() -> None:
    pauses = Pauses([0, 0], [0.0, 0.0])
    pauses.add([1, 0], 1.0)
    pauses.add([2, 1], 4.0)
    assert pauses.longest_s == 4.0
    pauses.add([3, 1], 6.0)
    assert pauses.longest_s == 4.0
    pauses.add([4, 1], 9.0)
    assert pauses.longest_s == 5.0


def test_joint_peak_counts_shared_memory_once() -> None:
    assert joint_peak_mb([MemoryUsage(100, 30), MemoryUsage(60, 40)]) == 70 + 20 + 40


def test_peak_memory_is_kept_after_process_restarts() -> None:
    peaks = Peaks()
    peaks.add(
        {
            "n1": {"control": MemoryUsage(50, 10), "data": MemoryUsage(200, 10)},
            "n2": {"data": MemoryUsage(90, 10)},
        }
    )
    peaks.add({"n1": {"control": MemoryUsage(60, 10), "data": MemoryUsage(80, 10)}})
    assert (peaks.part_mb("data"), peaks.node_mb) == (200, 50 + 190 + 10)


def test_child_process_and_its_memory_are_found_until_it_ends() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in ProcessTable().children(os.getpid())
        assert memory(child.pid).peak_mb > 0
        child.communicate()
    assert child.pid not in ProcessTable().children(os.getpid())
    assert memory(child.pid) == MemoryUsage()


# Failures


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            Timeout("waited for it", got="n1: one\ntwo\nn2: three", expected="60 s"),
            "waited for it: expected 60 s",
        ),
        (
            Timeout("n1 merges: no more for 60 s", got="7", expected="9"),
            "no more for 60 s: got 7, expected 9",
        ),
        (
            ProcessEnded("a node ended by itself", where="n1", got="status 1: one\ntwo\nlast"),
            "status 1: one ... last",
        ),
    ],
)
def test_failure_message_is_one_line_naming_file_with_all_logs(error, expected, tmp_path: Path) -> None:
    root, kept = tmp_path / "root", tmp_path / "kept"
    root.mkdir()
    kept.mkdir()
    (root / "n1.log").write_text("the log of n1\n")
    (root / "publishers.0.log").write_text("the log of publishers\n")
    with pytest.raises(type(error)) as raised, logs_kept(root, str(kept)):
        raise error
    (file,) = kept.iterdir()
    line = str(raised.value)
    assert expected in line
    assert str(file) in line
    assert "\n" not in line
    assert "the log of n1\n" in file.read_text()
    assert "the log of publishers\n" in file.read_text()


def test_success_keeps_no_logs(tmp_path: Path) -> None:
    (tmp_path / "n1.log").write_text("")
    with logs_kept(tmp_path, str(tmp_path)):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["n1.log"]


# Merging alone


def test_merge_work_covers_all_session_messages_and_removes_merged_log(tmp_path: Path) -> None:
    paths = []
    for number in range(3):
        with rt.Publisher(tmp_path, "s", publisher_id=f"p{number}", roll_bytes=4096) as publisher:
            for _ in range(4):
                publisher.publish_many([b"x" * 1000] * 3)
                publisher.flush()
            paths.append(publisher.directory)
    work = MergeWork.plan(paths)
    assert work.reached.position == 36
    assert len({segment for _, segment in work.replicas.marks}) > 1
    assert sorted(work.replicas.paths.values()) == sorted(paths)
    work.merge(tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_failed_merge_raises_rt_error(tmp_path: Path) -> None:
    with rt.Publisher(tmp_path, "s", publisher_id="p") as publisher:
        publisher.publish(b"x")
        publisher.flush()
        work = MergeWork.plan([publisher.directory])
    replicas = BenchReplicas(work.replicas.paths, {})
    broken = MergeWork(work.identity, replicas, work.plans, work.end, work.reached)
    with pytest.raises(rt.RtError):
        broken.merge(tmp_path / "merged")
