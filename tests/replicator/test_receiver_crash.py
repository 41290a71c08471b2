"""Power cuts at every disk change of a receiver: it keeps durable bytes, and no invalid ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from disks import MemoryDisk
from disks.crash_sweep import Log, sweep
from log_items import (
    CLUSTER,
    COPY,
    MERGED,
    SESSION,
    files_of,
    give,
    items_of,
    merged_copy,
    publish,
    recut,
    session_copy,
)

from replicator.protocol.messages import Chunk, Item, LogOffset, LogTrimmed
from replicator.receive.merged_receiver import MergedReceiver
from replicator.receive.session_receiver import SessionReceiver
from rt.log.check.verify import verify
from rt.log.format.segment import SegmentId
from rt.log.format.segment_table import TrimReason
from rt.log.whole_files import write_whole
from rt.testing.merged import MergedLogBuilder

Receiver = SessionReceiver | MergedReceiver
Open = Callable[[MemoryDisk], Receiver]


def made(kind: str) -> tuple[MemoryDisk, str, Open]:
    """Return a disk with a source of several segments, its path, and a function that opens a copy on another
    disk.
    """
    disk = MemoryDisk()
    publish(disk, 2000, 2500, 10)
    publish(disk, 300, 10)
    if kind == "session":
        return disk, SESSION, lambda other: session_copy(other, source=SESSION)
    with MergedLogBuilder(MERGED, cluster_id=CLUSTER, stream="s", disk=disk) as merged:
        merged.merge_all([SESSION], block_bytes=1000)
        merged.roll()
        publish(disk, 400, 10)
        merged.merge_all([SESSION], block_bytes=1000)
    return disk, MERGED, merged_copy


def receive(receiver: Receiver, items: list[Item], log: Log) -> None:
    """Pass items to the receiver, and log what is durable after each sync."""
    for item in items:
        give(receiver, [item])
        point = receiver.sync_point()
        if point is not None:
            receiver.sync_to(point)
        receiver.record_synced(point)
        log.append(receiver.durable)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["session", "merged"])
def test_receiver_keeps_durable_bytes_and_continues_after_power_cut(kind: str) -> None:
    source, path, open_replica = made(kind)
    whole = files_of(source, path)
    cut = list(recut(items_of(source, path), iter([700, 64, 3000] * 20)))
    table = source.read(f"{SESSION}/segments")

    def prepare(disk: MemoryDisk) -> None:
        # Write the session's identity, as a node knows it.
        disk.make_directory(SESSION)
        write_whole(disk, f"{SESSION}/segments", table)

    def run(disk: MemoryDisk, log: Log) -> None:
        receiver = open_replica(disk)
        half = len(cut) // 2
        receive(receiver, cut[:half], log)
        receiver.close()
        receiver = open_replica(disk)
        receive(receiver, items_of(source, path, receiver.next_offset), log)
        receiver.close()

    def recover(disk: MemoryDisk, log: Log) -> None:
        open_replica(disk).close()

    def check(disk: MemoryDisk, log: Log) -> None:
        promised = max((place for place in log if place is not None), default=LogOffset(0, 0, 0))
        receiver = open_replica(disk)
        place = receiver.next_offset or LogOffset(0, 0, 0)
        assert place >= promised
        assert receiver.durable == receiver.next_offset
        for segment, content in files_of(disk, COPY).items():
            assert whole[segment].startswith(content)
        give(receiver, items_of(source, path, receiver.next_offset))
        assert files_of(disk, COPY) == whole
        receiver.close()
        assert verify(COPY, disk=disk).damage == []

    assert sweep(run, check, prepare=prepare, recover=recover, recover_cuts=1, seeds=range(1)) > 100


def test_merged_receiver_skip_interrupted_by_power_cut_can_be_repeated() -> None:
    source, path, _ = made("merged")
    items = items_of(source, path)
    whole = files_of(source, path)
    second = SegmentId(0, 1)
    first = next(item.end for item in items if not isinstance(item, Chunk | LogTrimmed))  # type: ignore[union-attr]

    def run(disk: MemoryDisk, log: Log) -> None:
        receiver = merged_copy(disk)
        chunk = items[0]
        assert isinstance(chunk, Chunk)
        receiver.append(Chunk(chunk.start, chunk.data[:1500]))
        receiver.start_at(LogOffset(*second, 0), first)
        receive(receiver, items_of(source, path, LogOffset(*second, 0)), log)
        receiver.close()

    def check(disk: MemoryDisk, log: Log) -> None:
        receiver = merged_copy(disk)
        if receiver.end < first:
            receiver.start_at(LogOffset(*second, 0), first)
        give(receiver, items_of(source, path, receiver.next_offset))
        assert files_of(disk, COPY) == {second: whole[second]}
        receiver.close()
        assert verify(COPY, disk=disk).damage == []

    assert sweep(run, check, seeds=range(2)) > 50


def test_session_receiver_skip_of_merged_bytes_survives_power_cut() -> None:
    source, path, open_replica = made("session")
    items = items_of(source, path)
    whole = files_of(source, path)
    later = sorted(whole)[1]
    table = source.read(f"{SESSION}/segments")

    def prepare(disk: MemoryDisk) -> None:
        disk.make_directory(SESSION)
        write_whole(disk, f"{SESSION}/segments", table)

    def run(disk: MemoryDisk, log: Log) -> None:
        receiver = open_replica(disk)
        assert isinstance(receiver, SessionReceiver)
        give(receiver, items[:2])
        receiver.skip_to(LogOffset(*later, 64))
        receive(receiver, items_of(source, path, receiver.next_offset), log)
        receiver.trim(SegmentId(1, 0), TrimReason.MERGED)
        receiver.close()

    def check(disk: MemoryDisk, log: Log) -> None:
        receiver = session_copy(disk, at=LogOffset(*later, 64))
        assert receiver.next_offset is not None
        assert receiver.next_offset >= max(log, default=LogOffset(0, 0, 0))
        give(receiver, items_of(source, path, receiver.next_offset))
        kept = files_of(disk, COPY)
        assert kept == {segment: whole[segment] for segment in kept}
        assert max(kept) == max(whole)
        receiver.close()
        assert verify(COPY, disk=disk).damage == []

    assert sweep(run, check, prepare=prepare, seeds=range(2)) > 50
