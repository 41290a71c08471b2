"""How fast one node merges if it waits for nothing: it has all session replicas and all write plans.

No network, no consensus: a node's merger executes plans as a leader makes them, and syncs as often as a node
does. Each round also measures a plain copy of the same bytes in the kernel, synced once at its end. Merging
may be faster by the clock, because its write-back overlaps with copying.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from replicator.protocol.messages import LogOffset
from replicator.receive.batch_boundaries import read_marks
from rt.bench.measure import Figure, ratios
from rt.client.publisher import Publisher
from rt.log.disk import REAL, File
from rt.log.format.running_checksum import CONTENT_START, ChecksummedBoundary, chain_of_segment
from rt.log.format.segment import (
    SEGMENT_HEADER_BYTES,
    LogKind,
    SegmentHeader,
    SegmentId,
    encode_segment_header,
)
from rt.log.format.segment_table import LogIdentity
from rt.log.scan.catalog import segment_path
from rt.log.scan.directory import list_segments, read_header, read_identity
from sequencer.ipc.data_reports import MergeProgress
from sequencer.leader import replication_tracker
from sequencer.leader.merge_planner import Speculation, plan_merge
from sequencer.merged.merged_log import SYNC_S
from sequencer.merged.merger import Merger
from sequencer.sessions.batch_index import BatchIndex, RangeInfo
from sequencer.state.apply import apply
from sequencer.state.apply_result import RangesMerged, RunOpened
from sequencer.state.commands import OpenRun
from sequencer.state.state import SequencerState
from sequencer.state.write_plan import BlockWrite, WritePlan

GOAL: Final = 0.6
"""Share of the speed of the plain copy."""
_ROUNDS: Final = 3
_STREAM: Final = "bench"
_VALUE_BYTES: Final = 1024
_TOGETHER: Final = 256


@dataclass(frozen=True, slots=True)
class TimeUsed:
    """Seconds of wall-clock and CPU time of one measurement."""

    wall_s: float
    cpu_s: float


def merging(directory: str | None, *, sessions: int, size_bytes: int) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory(prefix="rt-bench-", dir=directory) as root:
        work = Work.ready(_write_sessions(Path(root), sessions, size_bytes))
        ours, copies = [], []
        for _ in range(_ROUNDS):
            ours.append(work.merge(Path(root, "merged")))
            copies.append(work.copy(Path(root, "copied")))
    mb = work.reached.total_bytes / 1e6
    name = f"merging alone, {sessions} sessions"
    yield Figure(f"{name}: merged", _mb_per_s(mb, ours), "MB/s")
    yield Figure(f"{name}: the same bytes copied in the kernel", _mb_per_s(mb, copies), "MB/s")
    speeds = ratios([one.wall_s for one in copies], [one.wall_s for one in ours])
    yield Figure(f"{name}: merged over copied", speeds, "x", GOAL)
    yield Figure(f"{name}: CPU of merging", tuple(one.cpu_s / mb * 1000 for one in ours), "s/GB")
    yield Figure(f"{name}: CPU of copying", tuple(one.cpu_s / mb * 1000 for one in copies), "s/GB")


def _mb_per_s(mb: float, taken: Sequence[TimeUsed]) -> tuple[float, ...]:
    return tuple(mb / one.wall_s for one in taken)


@dataclass(slots=True)
class BenchReplicas:
    """Complete session replicas, as `sequencer.merged.merge_input.ReplicaSource`."""

    paths: dict[int, str] = field(default_factory=dict)
    """Directory by session id."""
    marks: dict[tuple[int, SegmentId], BatchIndex] = field(default_factory=dict)

    def range_info(self, session_id: int, segment: SegmentId, start: int, end: int) -> RangeInfo | None:
        return self.marks[session_id, segment].range_info(start, end)

    def open(self, session_id: int, segment: SegmentId) -> File:
        return REAL.open(segment_path(self.paths[session_id], segment))

    def on_bad_replica(self, block: BlockWrite, got: str) -> None:
        raise AssertionError((block, got))


@dataclass(frozen=True, slots=True)
class Work:
    """The write plans that merge all sessions, and the resulting end of the merged log."""

    identity: LogIdentity
    copies: BenchReplicas
    orders: Sequence[WritePlan]
    end: LogOffset
    reached: MergeProgress

    @classmethod
    def ready(cls, paths: Sequence[str]) -> Work:
        """Plan as the leader of a cluster of one node with these sessions."""
        state, reported, copies = (
            SequencerState(os.urandom(16)),
            replication_tracker.ReplicationTracker(1),
            BenchReplicas(),
        )
        for path in paths:
            _report(path, state, reported, copies)
        orders: list[WritePlan] = []
        speculation = Speculation(state)
        while (merge := plan_merge(speculation, reported, time.time_ns())) is not None:
            outcome = apply(state, merge)
            assert isinstance(outcome, RangesMerged), outcome
            orders.append(outcome.order)
        last = orders[-1]
        reached = MergeProgress(last.instruction, last.chain, last.total_bytes, last.end_position)
        identity = LogIdentity(LogKind.MERGED, state.cluster, _STREAM)
        return cls(identity, copies, orders, LogOffset(*last.segment, last.end_offset), reached)

    def merge(self, path: Path) -> TimeUsed:
        """Merge until everything is durable, then delete the merged log."""
        is_over = threading.Event()

        def on_written() -> None:
            if merger.failure is not None or merger.written.instruction == self.reached.instruction:
                is_over.set()

        merger = Merger(str(path), self.identity, self.copies, on_failed=on_written, on_written=on_written)
        try:
            begun, used_s = time.perf_counter(), time.process_time()
            merger.start(self.orders, self.end, self.reached)
            while merger.sync() != self.reached:
                if merger.failure is not None:
                    raise merger.failure
                is_over.wait(SYNC_S)
            taken = TimeUsed(time.perf_counter() - begun, time.process_time() - used_s)
        finally:
            merger.close()
            shutil.rmtree(path)
        return taken

    def copy(self, path: Path) -> TimeUsed:
        """Copy the same bytes to one file, then delete it."""
        begun, used_s = time.perf_counter(), time.process_time()
        with path.open("wb") as target:
            for session_id, segment in sorted(self.copies.marks):
                with Path(segment_path(self.copies.paths[session_id], segment)).open("rb") as source:
                    left = os.fstat(source.fileno()).st_size
                    while left:
                        left -= os.copy_file_range(source.fileno(), target.fileno(), left)
            os.fsync(target.fileno())
        taken = TimeUsed(time.perf_counter() - begun, time.process_time() - used_s)
        path.unlink()
        return taken


def _write_sessions(root: Path, count: int, size_bytes: int) -> list[str]:
    """Write sessions of random values. Returns their directories."""
    values = [os.urandom(_VALUE_BYTES) for _ in range(_TOGETHER)]
    paths = []
    for number in range(count):
        with Publisher(root, _STREAM, publisher_id=f"p{number}") as publisher:
            left = -(-size_bytes // count // _VALUE_BYTES)
            while left > 0:
                left -= len(publisher.publish_many(values[:left]))
            paths.append(publisher.directory)
    return paths


def _report(
    path: str, state: SequencerState, reported: replication_tracker.ReplicationTracker, copies: BenchReplicas
) -> None:
    """Open a session in `state`, and report all of it as durable."""
    identity = read_identity(REAL, path)
    for segment in list_segments(REAL, path):
        header = read_header(REAL, path, segment)
        assert header is not None, (path, segment)
        opened = apply(state, OpenRun(identity.name, identity.origin, None, segment.run, header.run_id))
        assert isinstance(opened, RunOpened), opened
        marks = [_beginning(header), *read_marks(REAL, path, segment)]
        reported.on_boundaries(
            "n1",
            replication_tracker.SegmentKey(opened.session_id, *segment),
            [replication_tracker.BatchBoundary(mark.offset, mark.number, mark.chain) for mark in marks],
        )
        copies.paths[opened.session_id] = path
        known = copies.marks[opened.session_id, segment] = BatchIndex()
        known.add(marks)


def _beginning(header: SegmentHeader) -> ChecksummedBoundary:
    chain = chain_of_segment(encode_segment_header(header))
    times = header.created_ns, header.created_ns
    return ChecksummedBoundary(SEGMENT_HEADER_BYTES, header.first, chain, *times, CONTENT_START)
