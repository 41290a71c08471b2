"""The sequencer's core for tests: short functions for commands, written sessions, the simplest merger."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from batches import CLUSTER, CREATED_NS, Heard, Said, read_merged_dumbly, session_bytes
from crc32c import crc32c

from rt.log.format.segment import (
    LogKind,
    SegmentHeader,
    SegmentId,
    decode_segment_header,
    encode_segment_header,
)
from rt.log.scan.scanner import MergedScanner
from sequencer.leader.replication_tracker import BatchBoundary
from sequencer.state.apply import apply
from sequencer.state.apply_result import (
    CommandRejected,
    DiskJoined,
    Outcome,
    RangesMerged,
    RunClosed,
    RunFenced,
    RunOpened,
)
from sequencer.state.commands import Command, JoinDisk, MergeInstruction, MergeRange, Roll
from sequencer.state.session_commands import CloseRun, FenceRun, OpenRun
from sequencer.state.state import End, SequencerState, Session
from sequencer.state.write_plan import WritePlan

T = TypeVar("T")

INCARNATIONS = tuple(bytes([n]) * 16 for n in range(1, 9))


def new_state() -> SequencerState:
    return SequencerState(CLUSTER)


# Commands. The running checksum at an offset is the offset itself, unless a test sets another one.


def opening(
    name: str = "a",
    run: int = 0,
    *,
    incarnation: int = 0,
    active: int | None = None,
    dedup: str | None = None,
    newest: int = 0,
) -> OpenRun:
    life_id = struct.pack("<II", run if active is None else active, incarnation)
    return OpenRun(name, INCARNATIONS[incarnation], dedup, run, life_id, newest)


def newest_of(state: SequencerState, name: str) -> int:
    """Return the `newest` of an opening whose proposer knows the whole state."""
    session = state.session_of(name)
    return 0 if session is None else session.id


def piece(
    session_id: int = 1,
    start: int = 64,
    end: int = 128,
    *,
    run: int = 0,
    roll: int = 0,
    first: int = 0,
    count: int = 10,
    chains: tuple[int, int] | None = None,
) -> MergeRange:
    return MergeRange(session_id, run, roll, start, end, first, count, *(chains or (start, end)))


def merging(
    state: SequencerState, *ranges: MergeRange, number: int | None = None, sequenced_ns: int | None = None
) -> MergeInstruction:
    """Return a merge instruction, by default the next one."""
    return MergeInstruction(
        state.instruction + 1 if number is None else number,
        state.sequenced_ns + 1 if sequenced_ns is None else sequenced_ns,
        ranges,
    )


def rolling(
    state: SequencerState, run: int | None = None, roll: int | None = None, *, number: int | None = None
) -> Roll:
    """Return the instruction that seals the growing segment, or the given segment."""
    growing = state.merged.segment or SegmentId(0, 0)
    return Roll(
        state.instruction + 1 if number is None else number,
        growing.run if run is None else run,
        growing.roll if roll is None else roll,
        state.sequenced_ns + 1,
    )


def must(kind: type[T], outcome: Outcome) -> T:
    assert isinstance(outcome, kind), outcome
    return outcome


def do_open(state: SequencerState, name: str = "a", *args: object, **kwargs: object) -> int:
    """Open a run. Return the id of the session."""
    kwargs = {"newest": newest_of(state, name)} | kwargs
    return must(RunOpened, apply(state, opening(name, *args, **kwargs))).session_id  # type: ignore[arg-type]


def do_join(state: SequencerState, *nodes: str, disk: int = 0) -> None:
    for node in nodes:
        must(DiskJoined, apply(state, JoinDisk(node, bytes([disk]) * 16)))


def do_merge(state: SequencerState, *ranges: MergeRange) -> WritePlan:
    return must(RangesMerged, apply(state, merging(state, *ranges))).plan


def do_roll(state: SequencerState) -> WritePlan:
    return must(RangesMerged, apply(state, rolling(state))).plan


def do_fence(state: SequencerState, session_id: int = 1, run: int = 0) -> None:
    must(RunFenced, apply(state, FenceRun(session_id, run)))


def do_close(state: SequencerState, session_id: int, run: int, end: tuple[int, int, int]) -> None:
    must(RunClosed, apply(state, CloseRun(session_id, run, *end)))


def refusal(state: SequencerState, command: Command) -> CommandRejected:
    return must(CommandRejected, apply(state, command))


def end_of(session: Session) -> End | None:
    return session.consumed.end if session.consumed is not None else None


# Written sessions


@dataclass(slots=True)
class Writing:
    """A run of a publisher as the batch boundaries of each segment, by Y."""

    run: int
    first: int
    salt: int
    segments: list[list[BatchBoundary]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.segments.append([BatchBoundary(64, self.first, self._salted(0))])

    def _salted(self, chain: int) -> int:
        return crc32c(struct.pack("<QII", self.salt, self.run, len(self.segments)), chain)

    @property
    def end(self) -> End:
        return End(len(self.segments) - 1, self.segments[-1][-1].offset, self.segments[-1][-1].number)

    def append(self, size_bytes: int, count: int) -> None:
        last = self.segments[-1][-1]
        mark = BatchBoundary(last.offset + size_bytes, last.number + count, self._salted(last.chain + count))
        self.segments[-1].append(mark)

    def roll(self) -> None:
        number = self.segments[-1][-1].number
        self.segments.append([BatchBoundary(64, number, self._salted(0))])

    def ends(self) -> list[End]:
        """Return all boundaries, in order."""
        return [
            End(roll, mark.offset, mark.number) for roll, marks in enumerate(self.segments) for mark in marks
        ]

    def boundary_at(self, roll: int, offset: int) -> BatchBoundary:
        return next(mark for mark in self.segments[roll] if mark.offset == offset)

    def up_to(self, end: End | None) -> Iterator[tuple[int, list[BatchBoundary]]]:
        """Yield Y and the batch boundaries in each segment of a holder that has everything up to `end`."""
        for roll, marks in enumerate(self.segments):
            if end is not None and roll <= end.roll:
                yield roll, [mark for mark in marks if (roll, mark.offset) <= end[:2]]


@dataclass(slots=True)
class WrittenSession:
    """A session of real bytes: whole segments, and the batch boundaries of each, by (run, roll)."""

    incarnation: bytes
    files: dict[tuple[int, int], bytes] = field(default_factory=dict)
    marks: dict[tuple[int, int], list[BatchBoundary]] = field(default_factory=dict)
    runs: dict[tuple[int, int], list[list[Said]]] = field(default_factory=dict)

    def write(self, run: int, roll: int, first: int, runs: Sequence[Sequence[Said]]) -> int:
        """Write a segment with a batch for each of `runs`. Return the next number."""
        active = struct.pack("<Q", run + 1)
        header = SegmentHeader(
            LogKind.SESSION, SegmentId(run, roll), first, CREATED_NS, self.incarnation, active
        )
        data = encode_segment_header(header) + session_bytes(header, runs)
        self.files[run, roll] = data
        self.runs[run, roll] = [list(batch) for batch in runs]
        chain = crc32c(data[:64])
        marks = [BatchBoundary(64, first, chain)]
        while marks[-1].offset < len(data):
            at, number, _ = marks[-1]
            (size,) = struct.unpack_from("<I", data, at + 8)
            chain = crc32c(data[at : at + 64], chain)
            marks.append(BatchBoundary(at + size, number + len(runs[len(marks) - 1]), chain))
        self.marks[run, roll] = marks
        return marks[-1].number

    def range_of(self, session_id: int, run: int, roll: int, start: int, end: int) -> MergeRange:
        """Batches `start` to `end` of a segment."""
        low, high = self.marks[run, roll][start], self.marks[run, roll][end]
        return MergeRange(
            session_id,
            run,
            roll,
            low.offset,
            high.offset,
            low.number,
            high.number - low.number,
            low.chain,
            high.chain,
        )


def random_runs(rng: random.Random, numbers: Iterable[int], label: str) -> list[list[Said]]:
    """Return messages with these numbers, cut randomly into batches. Message n contains `label` and n."""
    runs: list[list[Said]] = [[]]
    for number in numbers:
        if runs[-1] and rng.random() < 0.4:
            runs.append([])
        runs[-1].append(Said(rng.choice(["", "t"]), f"{label}:{number}".encode()))
    return [run for run in runs if run]


# Merged logs


class DumbMerger:
    """Carries out write plans in memory, with as few assumptions as possible."""

    def __init__(self) -> None:
        self.files: dict[SegmentId, bytearray] = {}
        self.position = 0
        self.chain = 0

    def carry_out(self, order: WritePlan, sessions: dict[int, WrittenSession]) -> None:
        assert order.first_position == self.position
        if order.offset == 0:
            assert order.segment not in self.files
            first, time_ns = order.first_position, order.sequenced_ns
            header = SegmentHeader(LogKind.MERGED, order.segment, first, time_ns, CLUSTER)
            self.files[order.segment] = bytearray(encode_segment_header(header))
        data = self.files.setdefault(order.segment, bytearray(64))
        assert order.offset in {0, len(data)}
        for block in order.blocks:
            data += block.head
            self.chain = crc32c(block.head, self.chain)
            if not block.is_declaration:
                source = sessions[block.session_id].files[block.run, block.roll]
                assert block.end <= len(source)
                data += source[block.start : block.end]
                self.position += block.message_count
        assert len(data) == order.end_offset
        assert self.position == order.end_position
        assert self.chain == order.chain
        assert sum(map(len, self.files.values())) in {order.total_bytes, order.total_bytes + 64}

    def read(self) -> list[Heard]:
        """Return all messages, read by the simplest reader. The library's scanner must find nothing wrong."""
        heard: list[Heard] = []
        chain = 0
        for segment, data in sorted(self.files.items()):
            if len(data) == 64 and not any(data):
                continue  # Nothing was merged yet.
            header = decode_segment_header(data, path=str(segment))
            assert (header.id, header.first) == (segment, len(heard))
            scanner = MergedScanner(header, chain=chain)
            scan = scanner.scan(memoryview(bytes(data[64:])))
            assert (scan.problem, scan.needed, scan.consumed) == (None, 0, len(data) - 64)
            assert scanner.chain is not None
            chain = scanner.chain
            heard += read_merged_dumbly(bytes(data[64:]))
        assert chain == self.chain
        return heard
