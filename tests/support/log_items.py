"""Logs to send and items to receive, shared by the tests of receiving."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence

import rt
from replicator.protocol.messages import (
    CHUNK_BYTES_MAX,
    Chunk,
    CompleteUpTo,
    Item,
    LogOffset,
    LogTrimmed,
    Run,
    SegmentSealed,
    WholeRuns,
)
from replicator.push.whole_runs import joined
from replicator.receive.merged_receiver import MergedReceiver
from replicator.receive.session_receiver import SessionReceiver
from replicator.send.sender import Sender
from rt.log.disk import REAL, Disk
from rt.log.format.segment import LogKind, SegmentId
from rt.log.format.segment_table import LogIdentity
from rt.log.scan.catalog import segment_path
from rt.log.scan.directory import list_segments, read_identity
from rt.testing.merged import MergedLogBuilder

ROOT = "/data"
SESSION = "/data/s/sessions/feed"
MERGED = "/merged"
COPY = "/copy"
CLUSTER = bytes(range(0x40, 0x50))
WHOLE = LogIdentity(LogKind.MERGED, CLUSTER, "s")
FILTERED = LogIdentity(LogKind.FILTERED, CLUSTER, "s")


def publish(disk: Disk, *sizes: int, root: str = ROOT, name: str = "feed", **options: object) -> str:
    """Publish a batch of one message for each of `sizes`, in one run. Return the session's directory."""
    settings = {"linger_ms": 60_000, "fsync": "never", "roll_bytes": 4096} | options
    with rt.Publisher(root, "s", publisher_id=name, disk=disk, **settings) as publisher:  # type: ignore[arg-type]
        for size in sizes:
            number = publisher.next_number
            publisher.publish(b"%d:" % number + os.urandom(size), topic=f"t{number % 3}")
            publisher.flush()
        return publisher.directory


def items_of(disk: Disk, path: str, start: LogOffset | None = None) -> list[Item]:
    """Return all items that a sender of the log sends from `start` on."""
    found: list[Item] = []
    with contextlib.closing(Sender(path, start, disk=disk)) as sender:
        while items := sender.items():
            found += items
    return list(recut(found, iter(())))


def recut(items: Iterable[Item], cuts: Iterator[int]) -> Iterator[Item]:
    """Yield the same bytes in chunks of other sizes, taken from `cuts`."""
    held: Chunk | None = None
    for item in items:
        if isinstance(item, Chunk) and held is not None and held.end == item.start:
            held = Chunk(held.start, bytes(held.data) + bytes(item.data))
        elif isinstance(item, Chunk):
            yield from pieces_of(held, cuts)
            held = item
        else:
            yield from pieces_of(held, cuts)
            held = None
            yield item
    yield from pieces_of(held, cuts)


def pieces_of(chunk: Chunk | None, cuts: Iterator[int]) -> Iterator[Chunk]:
    at = 0
    while chunk is not None and at < len(chunk.data):
        size = max(1, min(next(cuts, CHUNK_BYTES_MAX), CHUNK_BYTES_MAX))
        data = chunk.data[at : at + size]
        yield Chunk(chunk.start._replace(offset=chunk.start.offset + at), data)
        at += len(data)


def give(receiver: SessionReceiver | MergedReceiver, items: Iterable[Item]) -> None:
    """Pass items to a receiver, as its owner does."""
    for item in items:
        match item:
            case Chunk():
                receiver.append(item)
            case SegmentSealed():
                receiver.seal(item)
            case Run():
                assert isinstance(receiver, SessionReceiver)
                receiver.start_run(item)
            case LogTrimmed():
                assert isinstance(receiver, MergedReceiver)
                receiver.follow_trim(item)
            case CompleteUpTo():
                assert isinstance(receiver, MergedReceiver)
                receiver.complete(item)


def give_whole(receiver: SessionReceiver, items: Iterable[Item], together: int = 128) -> None:
    """Pass items to a receiver, as a node with whole runs does, at most `together` runs at a time."""
    for item in joined(list(items)):
        if not isinstance(item, WholeRuns):
            give(receiver, [item])
            continue
        for start in range(0, len(item.runs), together):
            runs = item.runs[start : start + together]
            if receiver.may_append_whole(runs[0]):
                receiver.append_whole(runs)
            else:
                give(receiver, (one for run in runs for one in run.items))


def session_copy(disk: Disk, path: str = COPY, source: str = SESSION, **options: object) -> SessionReceiver:
    identity = read_identity(disk, source)
    return SessionReceiver.open(path, identity, disk=disk, **options)  # type: ignore[arg-type]


def merged_copy(disk: Disk, path: str = COPY, **options: object) -> MergedReceiver:
    return MergedReceiver.open(path, WHOLE, disk=disk, **options)  # type: ignore[arg-type]


def files_of(disk: Disk, path: str) -> dict[SegmentId, bytes]:
    """Return the content of each segment that is not empty."""
    content: dict[SegmentId, bytes] = {}
    for segment in list_segments(disk, path):
        file = disk.open(segment_path(path, segment))
        if file.size():
            content[segment] = file.pread(file.size(), 0)
        file.close()
    return content


def merge(disk: Disk, sessions: Sequence[str], *, path: str = MERGED, rolls: int = 0) -> MergedLogBuilder:
    """Merge all messages of the sessions. Then roll `rolls` times, and merge unmerged messages each time.

    The merged log is returned open.
    """
    merged = MergedLogBuilder(path, cluster_id=CLUSTER, stream="s", disk=disk)
    merged.merge_all(sessions, block_bytes=2048)
    for _ in range(rolls):
        merged.roll()
        merged.merge_all(sessions, block_bytes=2048)
    return merged


def messages(path: str, disk: Disk = REAL, **options: object) -> list[tuple[int, str, bytes]]:
    with rt.LogReader(path, disk=disk, **options) as reader:  # type: ignore[arg-type]
        return [(message.position, message.topic, bytes(message.value)) for message in reader]
