"""How fast one node merges if it waits for nothing: it has all session replicas and all write plans.

No network, no consensus: a node's merger executes plans as a leader makes them, and syncs as often as a node
does. Each round also measures a plain copy of the same bytes in the kernel, synced once at its end. Merging
may be faster by the clock, because its write-back overlaps with copying.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct, field

from replicator.protocol.messages import LogOffset
from replicator.receive.batch_boundaries import read_marks
from rt.bench.measure import Figure, Stopwatch, TimeUsed, ratios, scratch_directory
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
from sequencer.bench.traffic import publish_random
from sequencer.ipc.data_reports import MergeProgress
from sequencer.leader.merge_planner import Speculation, plan_merge
from sequencer.leader.replication_tracker import BatchBoundary, ReplicationTracker, SegmentKey
from sequencer.merged.merged_log import SYNC_S
from sequencer.merged.merger import Merger
from sequencer.sessions.batch_index import BatchIndex, RangeInfo
from sequencer.state.apply import apply
from sequencer.state.apply_result import RangesMerged, RunOpened
from sequencer.state.session_commands import OpenRun
from sequencer.state.state import SequencerState
from sequencer.state.write_plan import BlockWrite, WritePlan

GOAL: Final = 0.6
"""Share of the speed of the plain copy."""
_ROUNDS: Final = 3
_STREAM: Final = "bench"
_VALUE_BYTES: Final = 1024


def merging(directory: str | None, *, sessions: int, size_bytes: int) -> Iterator[Figure]:
    with scratch_directory(directory) as root:
        work = MergeWork.plan(_write_sessions(Path(root), sessions, size_bytes))
        ours, copies = [], []
        for _ in range(_ROUNDS):
            ours.append(work.merge(Path(root, "merged")))
            copies.append(work.copy(Path(root, "copied")))
    mb = work.reached.total_bytes / 1e6
    name = f"merging alone, {sessions} sessions"
    yield Figure(f"{name}: merged", tuple(mb / one.wall_s for one in ours), "MB/s")
    copied = tuple(mb / one.wall_s for one in copies)
    yield Figure(f"{name}: the same bytes copied in the kernel", copied, "MB/s")
    speeds = ratios([one.wall_s for one in copies], [one.wall_s for one in ours])
    yield Figure(f"{name}: merged over copied", speeds, "x", GOAL)
    yield Figure(f"{name}: CPU of merging", tuple(one.cpu_s / mb * 1000 for one in ours), "s/GB")
    yield Figure(f"{name}: CPU of copying", tuple(one.cpu_s / mb * 1000 for one in copies), "s/GB")


class BenchReplicas(Struct):
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


class MergeWork(Struct, frozen=True):
    """The write plans that merge all sessions, and the resulting end of the merged log."""

    identity: LogIdentity
    replicas: BenchReplicas
    plans: Sequence[WritePlan]
    end: LogOffset
    reached: MergeProgress

    @classmethod
    def plan(cls, paths: Sequence[str]) -> MergeWork:
        """Plan as the leader of a cluster of one node with these sessions."""
        state, tracker, replicas = SequencerState(os.urandom(16)), ReplicationTracker(1), BenchReplicas()
        for path in paths:
            _report(path, state, tracker, replicas)
        plans: list[WritePlan] = []
        speculation = Speculation(state)
        while (merge := plan_merge(speculation, tracker, time.time_ns())) is not None:
            result = apply(state, merge)
            assert isinstance(result, RangesMerged), result
            plans.append(result.plan)
        last = plans[-1]
        reached = MergeProgress(last.instruction, last.chain, last.total_bytes, last.end_position)
        identity = LogIdentity(LogKind.MERGED, state.cluster, _STREAM)
        return cls(identity, replicas, plans, LogOffset(*last.segment, last.end_offset), reached)

    def merge(self, path: Path) -> TimeUsed:
        """Merge until everything is durable, then delete the merged log."""
        is_over = threading.Event()

        def on_written() -> None:
            if merger.failure is not None or merger.written.instruction == self.reached.instruction:
                is_over.set()

        merger = Merger(str(path), self.identity, self.replicas, on_failed=on_written, on_written=on_written)
        try:
            stopwatch = Stopwatch()
            merger.start(self.plans, self.end, self.reached)
            while merger.sync() != self.reached:
                if merger.failure is not None:
                    raise merger.failure
                is_over.wait(SYNC_S)
            return stopwatch.read()
        finally:
            merger.close()
            shutil.rmtree(path)

    def copy(self, path: Path) -> TimeUsed:
        """Copy the same bytes to one file, then delete it."""
        stopwatch = Stopwatch()
        with path.open("wb") as target:
            for session_id, segment in sorted(self.replicas.marks):
                with Path(segment_path(self.replicas.paths[session_id], segment)).open("rb") as source:
                    left = os.fstat(source.fileno()).st_size
                    while left:
                        left -= os.copy_file_range(source.fileno(), target.fileno(), left)
            os.fsync(target.fileno())
        used = stopwatch.read()
        path.unlink()
        return used


def _write_sessions(root: Path, count: int, size_bytes: int) -> list[str]:
    paths = []
    for number in range(count):
        with Publisher(root, _STREAM, publisher_id=f"p{number}") as publisher:
            publish_random(publisher, size_bytes // count, _VALUE_BYTES)
            paths.append(publisher.directory)
    return paths


def _report(path: str, state: SequencerState, tracker: ReplicationTracker, replicas: BenchReplicas) -> None:
    """Open a session in `state`, and report all of it as durable."""
    identity = read_identity(REAL, path)
    for segment in list_segments(REAL, path):
        header = read_header(REAL, path, segment)
        assert header is not None, (path, segment)
        opened = apply(state, OpenRun(identity.name, identity.origin, None, segment.run, header.run_id))
        assert isinstance(opened, RunOpened), opened
        marks = [_beginning(header), *read_marks(REAL, path, segment)]
        tracker.on_boundaries(
            "n1",
            SegmentKey(opened.session_id, *segment),
            [BatchBoundary(mark.offset, mark.number, mark.chain) for mark in marks],
        )
        replicas.paths[opened.session_id] = path
        index = replicas.marks[opened.session_id, segment] = BatchIndex()
        index.add(marks)


def _beginning(header: SegmentHeader) -> ChecksummedBoundary:
    chain = chain_of_segment(encode_segment_header(header))
    times = header.created_ns, header.created_ns
    return ChecksummedBoundary(SEGMENT_HEADER_BYTES, header.first, chain, *times, CONTENT_START)
