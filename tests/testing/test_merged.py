"""Tests the builder of merged logs for tests: order, block layout, reproducible bytes, rejected input."""

from __future__ import annotations

import doctest

import pytest
from disks import MemoryDisk

import rt
from rt.errors import InvalidOption
from rt.log.format.block import BLOCK_HEADER_BYTES, BlockHeader, BlockKind, decode_block_header
from rt.log.format.checksum import batch_seed
from rt.log.format.segment import SEGMENT_HEADER_BYTES, SegmentId, decode_segment_header
from rt.testing import merged as merged_module
from rt.testing.merged import MergedLogBuilder

CLUSTER = b"cluster of test."


@pytest.fixture
def disk() -> MemoryDisk:
    return MemoryDisk()


def publish(disk: MemoryDisk, session: str, batches: int, *, dedup_id: str | None = None) -> str:
    """Publish batches of two messages, two batches in a segment. Return the directory."""
    with rt.Publisher(
        "/root", "s", publisher_id=session, dedup_id=dedup_id, roll_bytes=5000, linger_ms=60_000, disk=disk
    ) as publisher:
        for batch in range(batches):
            publisher.publish_many([f"{session}{batch}".encode() + bytes(1000)] * 2)
            publisher.flush()
    return publisher.directory


def open_merged(disk: MemoryDisk, path: str = "/merged") -> MergedLogBuilder:
    return MergedLogBuilder(path, cluster_id=CLUSTER, stream="s", disk=disk)


def blocks(disk: MemoryDisk, segment: str) -> list[BlockHeader]:
    data, at, found = disk.read(f"/merged/{segment}"), SEGMENT_HEADER_BYTES, []
    header = decode_segment_header(data, path=segment)
    while at < len(data):
        found.append(decode_block_header(data, at, batch_seed(header.seed, at)))
        at += BLOCK_HEADER_BYTES + found[-1].length_bytes
    return found


def test_messages_of_each_session_are_read_in_session_order(disk: MemoryDisk) -> None:
    sessions = [publish(disk, name, 5) for name in ("a", "b")]
    with open_merged(disk) as merged:
        assert merged.merge_all(sessions, block_bytes=1) == range(20)
    with rt.LogReader("/merged", disk=disk) as reader:
        messages = list(reader)
    assert [message.position for message in messages] == list(range(20))
    for name in ("a", "b"):
        own = [message for message in messages if message.session == name]
        assert [message.number for message in own] == list(range(10))
        assert [message.value[:2] for message in own] == [f"{name}{n // 2}".encode() for n in range(10)]


def test_block_holds_as_many_batches_as_fit(disk: MemoryDisk) -> None:
    session = publish(disk, "a", 4)
    with open_merged(disk) as merged:
        merged.merge_all([session], block_bytes=100_000)
    declaration, *batches = blocks(disk, "log.0.0")
    assert declaration.kind == BlockKind.DECLARATION
    assert [(block.source_roll, block.message_count) for block in batches] == [(0, 4), (1, 4)]


def test_session_is_declared_once_in_each_segment_using_it(disk: MemoryDisk) -> None:
    sessions = [publish(disk, name, 4) for name in ("a", "b")]
    with open_merged(disk) as merged:
        merged.merge(sessions[0])
        merged.roll()
        merged.merge_all(sessions)
    kinds = [[(block.kind, block.session_id) for block in blocks(disk, f"log.0.{roll}")] for roll in (0, 1)]
    declaration, content = BlockKind.DECLARATION, BlockKind.BATCHES
    assert kinds == [
        [(declaration, 1), (content, 1)],
        [(declaration, 1), (content, 1), (declaration, 2), (content, 2), (content, 2)],
    ]


def test_same_calls_produce_same_bytes(disk: MemoryDisk) -> None:
    sessions = [publish(disk, name, 4) for name in ("a", "b")]
    for path in ("/one", "/two"):
        with open_merged(disk, path) as merged:
            merged.merge(sessions[1])
            merged.roll()
            if path == "/two":
                merged.trim(SegmentId(0, 1))
            merged.merge_all(sessions)
            merged.roll()
    for segment in ("log.0.1", "log.0.2"):
        assert disk.read(f"/one/{segment}") == disk.read(f"/two/{segment}") != b""


def test_messages_of_sessions_sharing_dedup_id_are_merged_once(disk: MemoryDisk) -> None:
    twins = [publish(disk, name, 4, dedup_id="twins") for name in ("a", "b")]
    with open_merged(disk) as merged:
        merged.merge_all(twins, block_bytes=1)
    with rt.LogReader("/merged", disk=disk) as reader:
        assert [message.number for message in reader] == list(range(8))


def test_invalid_range_or_session_or_existing_log_raises_value_error(disk: MemoryDisk) -> None:
    session = publish(disk, "a", 2)
    merged = open_merged(disk)
    for start, end in ((0, None), (65, None), (64, 70), (64, 64)):
        with pytest.raises(ValueError, match="does not end between batches"):
            merged.merge(session, start, end)
    merged.merge(session)
    with pytest.raises(ValueError, match="nothing is left"):
        merged.merge(session)
    with pytest.raises(ValueError, match="is not a session"):
        merged.merge("/merged")
    merged.close()
    with pytest.raises(ValueError, match="already holds a log"):
        open_merged(disk)


def test_module_doctest_passes() -> None:
    assert doctest.testmod(merged_module).failed == 0


def test_session_named_twice_raises_invalid_option(disk: MemoryDisk) -> None:
    session = publish(disk, "a", 1)
    with open_merged(disk) as merged:
        with pytest.raises(InvalidOption, match="a session is named twice"):
            merged.merge_all([session, session])
        assert merged.merge_all([session]) == range(2)


@pytest.mark.parametrize("skip", [-1, 3])
def test_skip_outside_range_raises_invalid_option_and_changes_nothing(disk: MemoryDisk, skip: int) -> None:
    session = publish(disk, "a", 1)
    with open_merged(disk) as merged:
        with pytest.raises(InvalidOption, match=f"invalid skip: got {skip}, expected 0 to 2"):
            merged.merge(session, skip=skip)
        assert merged.merge(session) == range(2)


def test_close_is_idempotent(disk: MemoryDisk) -> None:
    with open_merged(disk) as merged:
        merged.close()
