"""The parts of a node's two processes for tests: plans over real bytes, sources, waiting with a deadline."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from batches import CLUSTER
from disks import MemoryDisk, PowerCut
from sequencer_core import (
    INCARNATIONS,
    DumbMerger,
    WrittenSession,
    do_roll,
    merging,
    must,
    new_state,
    opening,
    random_runs,
)

from replicator.protocol.messages import LogOffset
from rt.errors import Closed
from rt.log.disk import Disk, File
from rt.log.format.checksum import crc32c
from rt.log.format.running_checksum import ChecksummedBoundary
from rt.log.format.segment import LogKind, SegmentId
from rt.log.format.segment_table import LogIdentity
from rt.log.scan.catalog import segment_path
from sequencer.ipc.data_reports import MergeProgress
from sequencer.merged.merger import Merger
from sequencer.sessions.batch_index import BatchIndex, RangeInfo
from sequencer.state.apply import apply
from sequencer.state.apply_result import RangesMerged, RunOpened
from sequencer.state.commands import Configure, MergeRange
from sequencer.state.state import SequencerState
from sequencer.state.write_plan import BlockWrite, WritePlan

MERGED = "/node/merged"
IDENTITY = LogIdentity(LogKind.MERGED, CLUSTER, "s")
DEADLINE_S = 120.0


def wait_until(is_so: Callable[[], bool], what: str = "") -> None:
    """Wait until `is_so` is true. Fail after the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    pause = threading.Event()
    while not is_so():
        assert time.monotonic() < deadline, f"never came: {what or is_so}"
        pause.wait(0.001)


@dataclass(slots=True)
class Story:
    """Plans for a few sessions of real bytes, and the result of an uninterrupted run of them."""

    state: SequencerState = field(default_factory=new_state)
    sessions: dict[int, WrittenSession] = field(default_factory=dict)
    plans: list[WritePlan] = field(default_factory=list)

    @classmethod
    def drawn(
        cls,
        seed: int = 1,
        *,
        instructions: int = 6,
        roll_bytes: int = 1200,
        rolled: Collection[int] = (),
    ) -> Story:
        """Draw three sessions. Segments roll on both sides. A `Roll` follows each merge in `rolled`."""
        story, rng = cls(), random.Random(seed)
        apply(story.state, Configure(roll_bytes=roll_bytes))
        for which in range(3):
            session_id = must(
                RunOpened, apply(story.state, opening(f"p{which}", incarnation=which))
            ).session_id
            written = story.sessions[session_id] = WrittenSession(INCARNATIONS[which])
            number = 0
            for roll in range(instructions):
                count = rng.randrange(2, 6)
                runs = random_runs(rng, range(number, number + count), f"p{which}")
                number = written.write(0, roll, number, runs)
        for roll in range(instructions):
            story.merge(
                *(
                    one.range_of(id_, 0, roll, 0, len(one.marks[0, roll]) - 1)
                    for id_, one in story.sessions.items()
                )
            )
            if roll + 1 in rolled:
                story.plans.append(do_roll(story.state))
        return story

    def merge(self, *ranges: MergeRange) -> None:
        """Add a plan for one more merge instruction."""
        self.plans.append(must(RangesMerged, apply(self.state, merging(self.state, *ranges))).plan)

    @property
    def end(self) -> LogOffset:
        """The end of the merged log after all plans."""
        assert self.state.merged.segment is not None
        return LogOffset(*self.state.merged.segment, self.state.merged.offset)

    @property
    def reached(self) -> MergeProgress:
        """The merge progress after all plans."""
        merged = self.state.merged
        return MergeProgress(self.state.instruction, merged.chain, merged.total_bytes, self.state.position)

    def files(self) -> dict[SegmentId, bytes]:
        """Return the merged segments as `DumbMerger` writes them."""
        dumb = DumbMerger()
        for plan in self.plans:
            dumb.carry_out(plan, self.sessions)
        dumb.read()
        return {segment: bytes(data) for segment, data in dumb.files.items()}

    def put_sessions(self, disk: MemoryDisk) -> None:
        """Write the session copies to a disk, durably."""
        for session_id, written in self.sessions.items():
            disk.make_directory(f"/node/{session_id}")
            for (run, roll), data in written.files.items():
                disk.write(f"/node/{session_id}/{SegmentId(run, roll).file_name}", data)


class FakeSources:
    """The copies of a story's sessions, without the segments in `hidden`."""

    def __init__(self, disk: Disk, story: Story) -> None:
        self._disk = disk
        self.hidden: set[tuple[int, SegmentId]] = set()
        self.wrong: set[tuple[int, SegmentId]] = set()
        """Segments whose running checksum differs."""
        self.bad: list[BlockWrite] = []
        self._marks: dict[tuple[int, SegmentId], BatchIndex] = {}
        for session_id, written in story.sessions.items():
            for place, marks in written.marks.items():
                known = self._marks[session_id, SegmentId(*place)] = BatchIndex()
                data = written.files[place]
                known.add(ChecksummedBoundary(*mark, 0, 0, crc32c(data[64 : mark.offset])) for mark in marks)

    def range_info(self, session_id: int, segment: SegmentId, start: int, end: int) -> RangeInfo | None:
        if (session_id, segment) in self.hidden:
            return None
        found = self._marks[session_id, segment].range_info(start, end)
        if found is not None and (session_id, segment) in self.wrong:
            found = found._replace(chain_end=found.chain_end ^ 1)
        return found

    def open(self, session_id: int, segment: SegmentId) -> File:
        return self._disk.open(segment_path(f"/node/{session_id}", segment))

    def on_bad_replica(self, block: BlockWrite, got: int) -> None:
        self.bad.append(block)


class TestedMerger(Merger):
    """A merger whose thread reports a power cut as its failure, instead of raising it."""

    __test__ = False

    def _run(self) -> None:
        try:
            super()._run()
        except PowerCut:
            self._fail(Closed("the power is off"))

    def wait_written(self, instruction: int) -> None:
        """Wait until this instruction is written, or until the merger has failed."""
        wait_until(
            lambda: self.written.instruction >= instruction or self.failure is not None,
            f"instruction {instruction}; missing {self.missing}, gap {self.gap}, written {self.written}",
        )


def open_merger(disk: Disk, story: Story, sources: FakeSources | None = None, **options: Any) -> TestedMerger:
    return TestedMerger(MERGED, IDENTITY, sources or FakeSources(disk, story), disk=disk, **options)


def begin(merger: Merger, story: Story, plans: Sequence[WritePlan] | None = None) -> None:
    merger.start(story.plans if plans is None else plans, story.end, story.reached)


def merged_files(disk: MemoryDisk) -> dict[SegmentId, bytes]:
    """The merged segments on a disk."""
    names = [path for path in disk.paths() if path.startswith(f"{MERGED}/log.") and path.count(".") == 2]
    ids = {path: SegmentId(*map(int, path.rsplit("/", 1)[1].split(".")[1:])) for path in names}
    return {segment: disk.read(path) for path, segment in ids.items()}
