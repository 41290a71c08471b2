"""The input of the merger: session bytes, in ranges that were fetched from peers or in session replicas.

Invariant: the merged log gets only bytes with the running checksum that the plan names. `FetchedRanges`
returns only such bytes. The checksum of a replica's bytes is compared before they are copied, and the writer
verifies the bytes while it copies them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, Protocol

from msgspec import Struct

from rt.log.disk import File, storage_errors
from rt.log.format.segment import SegmentId
from rt.log.write.writer import BatchFrames, CopyRange
from sequencer.merged.fetched_ranges import FetchedRanges
from sequencer.sessions.batch_index import RangeInfo
from sequencer.sessions.input_planner import FetchedRange
from sequencer.state.write_plan import BlockWrite, WritePlan

FILES_MAX: Final = 256
"""Maximum number of files that stay open between two plans. One plan opens up to `commands.RANGES_MAX`."""


class ReplicaSource(Protocol):
    """The session replicas of this node.

    The thread that executes a plan calls these methods: the merger's, or the event loop's for small plans.
    """

    def range_info(self, session_id: int, segment: SegmentId, start: int, end: int) -> RangeInfo | None:
        """The checksums and times of a range of whole batches; None unless all of it is here and durable."""

    def open(self, session_id: int, segment: SegmentId) -> File:
        """Open the segment's file. The caller closes it."""

    def on_bad_replica(self, block: BlockWrite, got: str) -> None:
        """Handle a replica whose bytes differ from the bytes that the plan names, or changed since they were
        verified.

        Must fetch good bytes from a peer. May be called again until they are here. `got` is for the log.
        """


class MissingInput(Struct, frozen=True):
    """The range for which the merger waits."""

    session_id: int
    segment: SegmentId
    start: int
    end: int

    @classmethod
    def of(cls, block: BlockWrite) -> MissingInput:
        return cls(block.session_id, SegmentId(block.run, block.roll), block.start, block.end)


class BlockInput(NamedTuple):
    """Where the input of a block is: in a fetched range, or else in the session's replica."""

    segment: SegmentId
    range_info: RangeInfo
    fetched: FetchedRange | None


class MergeInput:
    """Finds and reads the input of blocks that are no declarations. For the thread that executes the plan."""

    def __init__(self, sources: ReplicaSource, fetched: FetchedRanges) -> None:
        """Ranges in `fetched`, which come from peers, are used before those of `sources`."""
        self._sources, self._fetched = sources, fetched
        self.files = ReplicaFiles(sources.open)

    def find(self, block: BlockWrite) -> BlockInput | None:
        """The input of a block; None if it is not here. If it is in a replica, the caller compares its
        checksum.
        """
        segment, fetched = SegmentId(block.run, block.roll), self._fetched.find(block)
        if fetched is not None and (range_info := fetched.range_info(block)) is not None:
            return BlockInput(segment, range_info, fetched)
        range_info = self._sources.range_info(block.session_id, segment, block.start, block.end)
        return None if range_info is None else BlockInput(segment, range_info, None)

    def find_sound(self, block: BlockWrite) -> BlockInput | None:
        """The input of a block, if it is here and its checksum is the block's."""
        found = self.find(block)
        return found if found is not None and found.range_info.chain_end == block.chain_end else None

    def frames(self, block: BlockWrite, found: BlockInput, end: int) -> BatchFrames:
        """The header and the bytes of a block, for the writer. `end`: one past the block's last position."""
        info = found.range_info
        if found.fetched is not None:
            content: CopyRange | memoryview = found.fetched.bytes_of(block)
        else:
            file = self.files.open(block.session_id, found.segment)
            name = _name_of(block.session_id, found.segment)
            content = CopyRange(file, block.start, block.size, name, info.content)
        return BatchFrames([block.head, content], end, info.timestamp_low_ns, info.timestamp_high_ns)

    def on_bad_replica(self, block: BlockWrite, got: str) -> None:
        self._sources.on_bad_replica(block, got)


def find_block(plan: WritePlan, name: str) -> BlockWrite:
    """The block that an error concerns: the first block copied from the file `name`, or else from any
    file.
    """
    blocks = [block for block in plan.blocks if not block.is_declaration]
    names = (_name_of(block.session_id, SegmentId(block.run, block.roll)) for block in blocks)
    return next((block for block, one in zip(blocks, names, strict=True) if one == name), blocks[0])


def _name_of(session_id: int, segment: SegmentId) -> str:
    """The source file of a block, for errors."""
    return f"session {session_id}, {segment.file_name}"


class ReplicaFiles:
    """Open files: one for each session, and earlier ones that the present plan reads. For one thread.

    A session's segments are merged in order, so the next plan needs the file that was opened last for the
    session.
    """

    def __init__(self, open_segment: Callable[[int, SegmentId], File]) -> None:
        self._open_segment = open_segment
        self._files: OrderedDict[int, tuple[SegmentId, File]] = OrderedDict()
        """By session id; the most recently used comes last."""
        self._passed: list[File] = []
        """Files of earlier segments. A plan that merges several segments of a session still reads them."""

    def __len__(self) -> int:
        return len(self._files)

    def open(self, session_id: int, segment: SegmentId) -> File:
        """Return the segment's file. `close_passed` closes it after another segment of the session is
        opened.
        """
        known = self._files.get(session_id)
        if known is not None and known[0] != segment:
            self._passed.append(self._files.pop(session_id)[1])
            known = None
        if known is None:
            with storage_errors(_name_of(session_id, segment), "opening a segment to merge"):
                known = segment, self._open_segment(session_id, segment)
            self._files[session_id] = known
        self._files.move_to_end(session_id)
        return known[1]

    def close_sessions(self, session_ids: Iterable[int]) -> None:
        for session_id in session_ids:
            if (known := self._files.pop(session_id, None)) is not None:
                known[1].close()

    def close_passed(self) -> None:
        """Close the files of earlier segments: the plan that reads them was written, or was given up."""
        for file in self._passed:
            file.close()
        self._passed.clear()

    def close_idle(self) -> None:
        """Close the least recently used files above `FILES_MAX`."""
        while len(self._files) > FILES_MAX:
            _, (_, file) = self._files.popitem(last=False)
            file.close()

    def close(self) -> None:
        self.close_passed()
        self.close_sessions(list(self._files))
