"""A log of Raft, its model, and a history of changes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from disks import MemoryDisk

from rt.log.disk import Disk
from sequencer.raft.model.messages import NOWHERE, LogIndex, RaftEntry
from sequencer.raft.storage.log import DurableLog
from sequencer.raft.storage.log_entries import Entries
from sequencer.raft.storage.log_format import SEGMENT_HEADER_BYTES, SYNCED_END_FILE
from sequencer.raft.storage.preallocation import SPARE_FILE

DIRECTORY = "/node"
SYNCED_END = f"{DIRECTORY}/{SYNCED_END_FILE}"
SEGMENT_BYTES = SEGMENT_HEADER_BYTES + 300
"""Small enough that few groups fill a segment."""
FIRST, SECOND = f"{DIRECTORY}/log.1", f"{DIRECTORY}/log.2"
SPARE = f"{DIRECTORY}/{SPARE_FILE}"


def opened(disk: Disk, directory: str = DIRECTORY, **options: Any) -> DurableLog:
    options = {
        "create_at": NOWHERE,
        "segment_bytes": SEGMENT_BYTES,
        "new_id": lambda: bytes(range(16)),
    } | options
    return DurableLog.open(directory, disk=disk, **options)


def entry(index: int, term: int = 1, size: int | None = None) -> RaftEntry:
    size = index * 37 % 90 if size is None else size
    return RaftEntry((b"%d/%d " % (index, term) * (size // 4 + 1))[:size], index, term)


class Model:
    """The log as a plain list. A compaction removes no entries from it."""

    def __init__(self) -> None:
        self.base = NOWHERE
        self.entries: list[RaftEntry] = []
        self.term, self.vote = 0, None
        self.compacted = 0

    @property
    def last(self) -> LogIndex:
        return self.entries[-1].place if self.entries else self.base

    def do(self, name: str, *arguments: Any) -> None:
        if name == "append":
            self.entries.append(*arguments)
        elif name == "extend":
            self.entries += arguments[0]
        elif name == "truncate":
            self.entries = [entry for entry in self.entries if entry.index < arguments[0]]
        elif name == "set_term":
            self.term, self.vote = arguments
        elif name == "reset":
            self.base, self.entries = arguments[0], []
        elif name == "compact":
            self.compacted = max(self.compacted, arguments[0])

    def check(self, log: DurableLog) -> None:
        """Assert that the log equals this model, except for compacted entries."""
        assert (log.term, log.voted_for, log.last) == (self.term, self.vote, self.last)
        kept = [entry for entry in self.entries if entry.index > log.base.index]
        assert log.entries(log.base.index + 1) == kept
        assert [*log][1:] == kept
        if log.base != self.base:
            assert self.base.index < log.base.index < self.compacted
            assert log.base in [entry.place for entry in self.entries]


def prepare(log: DurableLog) -> bool:
    """Make a spare at once if the log needs one. Return whether it did."""
    work = log.prepare_spare()
    if work is not None:
        work()
    return work is not None


def extend(log: Entries, entries: Iterable[RaftEntry]) -> None:
    for one in entries:
        log.append(one)


def change(log: DurableLog, name: str, *arguments: Any) -> None:
    if name == "extend":
        extend(log, *arguments)
    else:
        getattr(log, name)(*arguments)


def do(log: DurableLog, model: Model, name: str, *arguments: Any) -> None:
    """Apply one change to both."""
    change(log, name, *arguments)
    if name == "sync":
        log.record_synced_end()
    model.do(name, *arguments)


def written(*, groups: int = 5, fill: int = 0) -> MemoryDisk:
    """Return a disk with two segments. The newest holds `groups` groups. Each is filled up to `fill`."""
    disk = MemoryDisk()
    log = opened(disk, segment_bytes=2 * SEGMENT_BYTES, fill_bytes=fill)
    log.set_term(1, "a")
    extend(log, [entry(1), entry(2)])
    log.sync()
    log._segment_bytes = 1
    assert prepare(log) == (fill > 0)
    log._segment_bytes = 1 << 20
    log.roll()
    for index in range(3, 3 + groups):
        log.append(entry(index))
        log.sync()
    log.record_synced_end()
    log.close()
    return disk


def contents(disk: MemoryDisk) -> dict[str, bytes]:
    return {path: disk.read(path) for path in disk.paths()}


def rolled(count: int = 6) -> tuple[MemoryDisk, DurableLog]:
    """A log with one entry in each segment, and an empty one at the end."""
    disk = MemoryDisk()
    log = opened(disk)
    for index in range(1, count + 1):
        log.append(entry(index))
        log.roll()
    return disk, log


def segments(disk: MemoryDisk) -> list[str]:
    """The files of segments, oldest first."""
    numbers = [path.removeprefix(f"{DIRECTORY}/log.") for path in disk.paths() if path != SYNCED_END]
    return [f"log.{number}" for number in sorted(map(int, numbers))]
