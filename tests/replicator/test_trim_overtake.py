"""A pull stream detects that a trim removed bytes which it was to send."""

from __future__ import annotations

from collections import Counter

import pytest
from disks import MemoryDisk
from hypothesis import example, given, settings
from hypothesis import strategies as st

import rt
from replicator.protocol.handshake import PullMerged
from replicator.protocol.messages import Chunk, Item, LogOffset, LogTrimmed, SegmentSealed
from replicator.pull.source import TrimOvertake
from replicator.send.sender import Sender
from rt.log.format.segment import SEGMENT_HEADER_BYTES, SegmentId
from rt.log.format.segment_table import TrimReason
from rt.log.scan.catalog import segment_path
from rt.log.scan.directory import list_segments
from rt.testing.merged import MergedLogBuilder

CLUSTER = b"c" * 16


def chunk(roll: int, offset: int = 0) -> Chunk:
    return Chunk(LogOffset(0, roll, offset), b"x" * 100)


def sealed(roll: int) -> SegmentSealed:
    """The end of a segment with 100 bytes and 10 positions."""
    return SegmentSealed(LogOffset(0, roll, 100), 10 * (roll + 1), is_last_of_run=False, sealed_ns=1)


def trimmed(roll: int) -> LogTrimmed:
    return LogTrimmed(SegmentId(0, roll), 10 * roll, TrimReason.TIME)


def has_up_to(place: LogOffset, end: int) -> PullMerged:
    return PullMerged(CLUSTER, place, end)


@pytest.mark.parametrize(
    ("wanted", "first", "is_overtaken"),
    [
        (PullMerged(), 50, False),
        (PullMerged(position="latest"), 50, False),
        (PullMerged(position=50), 50, False),
        (PullMerged(position=59), 50, False),
        (PullMerged(position=49), 50, True),
        (has_up_to(LogOffset(0, 4, 100), 50), 50, False),
        (has_up_to(LogOffset(0, 4, 50), 45), 50, True),
    ],
)
def test_stream_started_after_its_requested_position_is_overtaken(
    wanted: PullMerged, first: int, is_overtaken: bool
) -> None:
    assert TrimOvertake(wanted, LogOffset(0, 5, 0), first).is_overtaken is is_overtaken


@pytest.mark.parametrize(
    ("items", "is_overtaken"),
    [
        ([chunk(5), sealed(5), chunk(6), sealed(6), sealed(6), chunk(7)], False),
        ([trimmed(5), chunk(5), chunk(5, 50)], False),
        ([chunk(5), trimmed(5), sealed(5), trimmed(6), chunk(6)], False),
        ([chunk(5), trimmed(6), sealed(5), chunk(6)], False),
        ([chunk(5), trimmed(6), chunk(6)], True),
        ([chunk(5), sealed(5), trimmed(8), chunk(8)], True),
        ([trimmed(6), chunk(6)], True),
        ([], False),
    ],
)
def test_stream_is_overtaken_if_its_items_skip_bytes(items: list[Item], is_overtaken: bool) -> None:
    overtaking = TrimOvertake(PullMerged(), LogOffset(0, 5, 0), 50)

    overtaking.follow(items)

    assert overtaking.is_overtaken is is_overtaken


def test_stream_started_within_segment_is_overtaken_if_rest_of_segment_is_trimmed() -> None:
    for item, is_overtaken in ((chunk(5, 60), False), (chunk(6), True)):
        overtaking = TrimOvertake(has_up_to(LogOffset(0, 5, 60), 55), LogOffset(0, 5, 60), 55)
        overtaking.follow([trimmed(6), item])
        assert overtaking.is_overtaken is is_overtaken


def test_overtake_flag_after_reset_is_set_again_only_by_next_skip() -> None:
    overtaking = TrimOvertake(PullMerged(position=3), LogOffset(0, 5, 0), 50)
    overtaking.is_overtaken = False

    overtaking.follow([chunk(5), sealed(5), chunk(6)])
    assert not overtaking.is_overtaken
    overtaking.follow([trimmed(9), chunk(9)])
    assert overtaking.is_overtaken


@settings(max_examples=40)
@given(st.lists(st.sampled_from(["merge", "merge", "roll", "take", "trim"]), max_size=20))
@example(["merge", "take", "roll", "merge", "trim"])
@example(["roll", "roll", "take", "trim"])
def test_stream_is_overtaken_exactly_when_bytes_of_log_were_not_sent(script: list[str]) -> None:
    disk = MemoryDisk()
    merged = MergedLogBuilder("/merged", cluster_id=CLUSTER, stream="s", disk=disk)
    with rt.Publisher("/root", "s", publisher_id="feed", disk=disk, fsync="never") as publisher:
        publish_and_merge(publisher, merged)
        sender = Sender("/merged", None, disk=disk)
        overtaking = TrimOvertake(PullMerged(), LogOffset(0, 0, 0), 0)
        ever: dict[SegmentId, int] = {}
        sent: Counter[SegmentId] = Counter()

        def take(bytes_max: int) -> bool:
            items = sender.items(bytes_max)
            overtaking.follow(items)
            for item in items:
                if isinstance(item, Chunk):
                    sent[item.start.segment] += len(item.data)
            return bool(items)

        for step in (*script, "end"):
            match step:
                case "merge":
                    publish_and_merge(publisher, merged)
                case "roll":
                    merged.roll()
                case "trim":
                    assert merged.writer.last_id is not None
                    merged.trim(merged.writer.last_id)
                case "take":
                    take(1000)
                case "end":
                    while take(10_000):
                        pass
            ever |= sizes(disk)

        assert overtaking.is_overtaken is any(sent[segment] < size for segment, size in ever.items())
        sender.close()
    merged.close()


def publish_and_merge(publisher: rt.Publisher, merged: MergedLogBuilder) -> None:
    publisher.publish_many([b"x" * 400] * 5)
    publisher.flush()
    merged.merge_all([publisher.directory], block_bytes=1500)


def sizes(disk: MemoryDisk) -> dict[SegmentId, int]:
    """The sizes of the segments that have messages and are not trimmed."""
    found = {}
    for segment in list_segments(disk, "/merged"):
        file = disk.open(segment_path("/merged", segment))
        if (size := file.size()) > SEGMENT_HEADER_BYTES:
            found[segment] = size
        file.close()
    return found
