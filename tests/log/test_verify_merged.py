"""Verifying merged logs: source ranges, dedup groups, skips and incomplete blocks."""

from __future__ import annotations

from disks import MemoryDisk
from hypothesis import given
from hypothesis import strategies as st
from verify_bench import CLUSTER, MERGED, damage, frame_starts, notes, publish, segment_path

import rt
from rt.log.check.status import SegmentState
from rt.log.check.verify import verify
from rt.log.disk import Disk
from rt.log.format.segment import SegmentId
from rt.log.scan.directory import list_segments
from rt.testing.merged import MergedLogBuilder


def test_merged_log_of_several_sessions_blocks_and_segments_has_no_problems(
    disk: MemoryDisk, sessions: list[str]
) -> None:
    with MergedLogBuilder(MERGED, cluster_id=CLUSTER, stream="stream", disk=disk) as merged:
        merged.merge(sessions[1])
        merged.roll()
        merged.merge_all(sessions, block_bytes=12_000)
        merged.roll()
        publish(disk, 1, "b")
        merged.merge_all(sessions)
    report = verify(MERGED, disk=disk)
    assert report.all_problems == []
    assert [segment.state for segment in report.segments] == [
        SegmentState.SEALED,
        SegmentState.SEALED,
        SegmentState.ACTIVE,
    ]
    assert sum(segment.message_count for segment in report.segments) == 2 * 18 + 9 + 3
    assert sum(segment.batch_count for segment in report.segments) == 2 * 6 + 3 + 1


def test_trimmed_merged_log_has_no_problems(disk: MemoryDisk, sessions: list[str]) -> None:
    with MergedLogBuilder(MERGED, cluster_id=CLUSTER, stream="stream", disk=disk) as merged:
        for _ in range(3):
            merged.merge(sessions[0])
            merged.merge(sessions[1])
            merged.roll()
        merged.trim(SegmentId(0, 2))
    assert verify(MERGED, disk=disk).all_problems == []


def batch_places(disk: Disk, session: str) -> list[int]:
    _, *places = frame_starts(disk, session, SegmentId(0, 0))
    return [*places, disk.size(segment_path(session, 0, 0)) or 0]


def test_gap_between_source_ranges_is_reported_as_corruption_at_its_block(disk: MemoryDisk) -> None:
    session = publish(disk, 3)
    first, second, third, end = batch_places(disk, session)
    with MergedLogBuilder(MERGED, cluster_id=CLUSTER, stream="stream", disk=disk) as merged:
        merged.merge(session, first, second)
        place = merged.writer.offset
        merged.merge(session, third, end)
    report = verify(MERGED, disk=disk)
    assert damage(report) == [(segment_path(MERGED, 0, 0), place)]
    assert report.segments[0].message_count == 6


def test_overlap_of_source_ranges_is_reported_as_corruption_at_its_block(disk: MemoryDisk) -> None:
    session = publish(disk, 3)
    first, second, third, end = batch_places(disk, session)
    with MergedLogBuilder(MERGED, cluster_id=CLUSTER, stream="stream", disk=disk) as merged:
        merged.merge(session, first, third)
        place = merged.writer.offset
        merged.merge(session, second, end)
    assert damage(verify(MERGED, disk=disk)) == [(segment_path(MERGED, 0, 0), place)]


def test_omitted_source_segment_is_reported_as_corruption(disk: MemoryDisk, sessions: list[str]) -> None:
    with MergedLogBuilder(MERGED, cluster_id=CLUSTER, stream="stream", disk=disk) as merged:
        merged.merge(sessions[0], segment=SegmentId(0, 0))
        merged.roll()
        merged.merge(sessions[0], segment=SegmentId(0, 2))
    assert [path for path, _ in damage(verify(MERGED, disk=disk))] == [segment_path(MERGED, 0, 1)]


def test_dedup_group_with_skips_and_omitted_ranges_has_no_problems(disk: MemoryDisk) -> None:
    twins = [publish(disk, 4, name, dedup_id="twins") for name in ("a", "b")]
    ends = batch_places(disk, twins[0])
    with MergedLogBuilder(MERGED, cluster_id=CLUSTER, stream="stream", disk=disk) as merged:
        merged.merge(twins[0], ends[0], ends[1])
        assert merged.merge(twins[1], ends[0], ends[2]) == range(3, 6)
        assert merged.merge(twins[0], ends[1], ends[2]) == range(6, 6)
        merged.merge(twins[0], ends[2], ends[3])
        assert merged.merge_all(twins) == range(9, 12)
    report = verify(MERGED, disk=disk)
    assert report.all_problems == []
    assert report.segments[0].message_count == 12
    with rt.LogReader(MERGED, disk=disk) as reader:
        assert [message.number for message in reader] == list(range(12))


def test_dedup_group_with_rest_of_segment_merged_from_other_session_has_no_problems(disk: MemoryDisk) -> None:
    twins = [publish(disk, 6, name, size=1500, roll_bytes=12_000, dedup_id="twins") for name in ("a", "b")]
    ends = batch_places(disk, twins[0])
    assert len(list_segments(disk, twins[0])) > 2
    for is_rolled in (False, True):
        path = f"/merged-{is_rolled}"
        with MergedLogBuilder(path, cluster_id=CLUSTER, stream="stream", disk=disk) as merged:
            assert merged.merge(twins[0], ends[0], ends[1]) == range(3)
            if is_rolled:
                merged.roll()
            merged.merge(twins[1])
            assert not merged.merge(twins[0], ends[1])
            assert merged.merge(twins[0], segment=SegmentId(0, 1))
            merged.merge_all(twins)
        report = verify(path, disk=disk)
        assert report.all_problems == []
        assert sum(segment.message_count for segment in report.segments) == 18


def batch_ranges(disk: Disk, session: str) -> list[tuple[SegmentId, int, int]]:
    """The segment, the start and the end of each batch of a session."""
    found = []
    for segment in list_segments(disk, session):
        _, *starts = frame_starts(disk, session, segment)
        ends = [*starts[1:], disk.size(f"{session}/{segment}") or 0]
        found += [(segment, start, end) for start, end in zip(starts, ends, strict=True)]
    return found


@given(st.data())
def test_dedup_group_has_no_problems_in_any_order_of_its_sessions(data: st.DataObject) -> None:
    """Segments, runs, rolls and turns are drawn. The watermark determines which messages are merged."""
    disk = MemoryDisk()
    twins: dict[str, list[tuple[SegmentId, int, int]]] = {}
    for name in ("a", "b", "c"):
        roll_bytes = data.draw(st.sampled_from([4_096, 8_000, 2**20]), label="roll_bytes")
        for batches in data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=3), label=name):
            directory = publish(disk, batches, name, size=500, roll_bytes=roll_bytes, dedup_id="twins")
        twins[directory] = batch_ranges(disk, directory)
    with MergedLogBuilder(MERGED, cluster_id=CLUSTER, stream="stream", disk=disk) as merged:
        for turn in data.draw(st.lists(st.integers(0, 8), max_size=40), label="turns"):
            directory = list(twins)[turn % 3]
            if turn > 5 and merged.position:
                merged.roll()
            first = 3 * (len(batch_ranges(disk, directory)) - len(twins[directory]))
            if twins[directory] and first <= merged.position:
                segment, start, end = twins[directory].pop(0)
                merged.merge(directory, start, end, segment=segment)
        merged.merge_all(list(twins))
        end = merged.position
    assert verify(MERGED, disk=disk).all_problems == []
    with rt.LogReader(MERGED, disk=disk) as reader:
        assert [message.number for message in reader] == list(range(end))


def test_wrong_skip_is_reported_as_corruption(disk: MemoryDisk) -> None:
    twins = [publish(disk, 2, name, dedup_id="twins") for name in ("a", "b")]
    ends = batch_places(disk, twins[0])
    for skip in (0, 2, 4):
        path = f"/merged{skip}"
        with MergedLogBuilder(path, cluster_id=CLUSTER, stream="stream", disk=disk) as merged:
            merged.merge(twins[0], ends[0], ends[1])
            merged.merge(twins[1], ends[0], ends[2], skip=skip)
        assert [where for where, _ in damage(verify(path, disk=disk))] == [segment_path(path, 0, 0)], skip


def test_source_ranges_are_not_checked_across_corrupt_segment(disk: MemoryDisk, sessions: list[str]) -> None:
    with MergedLogBuilder(MERGED, cluster_id=CLUSTER, stream="stream", disk=disk) as merged:
        for _ in range(3):
            merged.merge(sessions[0])
            merged.roll()
    disk.flip_bit(segment_path(MERGED, 0, 1), 2000, 0)
    assert [path for path, _ in damage(verify(MERGED, disk=disk))] == [segment_path(MERGED, 0, 1)]


def test_truncated_block_is_reported_as_note_and_its_messages_are_not_counted(disk: MemoryDisk) -> None:
    session = publish(disk, 3)
    ends = batch_places(disk, session)
    merged = MergedLogBuilder(MERGED, cluster_id=CLUSTER, stream="stream", disk=disk)
    merged.merge(session, ends[0], ends[1])
    merged.sync()
    place = merged.writer.offset
    merged.merge(session, ends[1], ends[3])
    merged.writer.close()
    path = segment_path(MERGED, 0, 0)
    disk.write(path, disk.read(path)[: place + 96 + ends[2] - ends[1]])
    report = verify(MERGED, disk=disk)
    assert damage(report) == []
    assert notes(report) == [(path, place)]
    assert (report.segments[0].message_count, report.segments[0].end) == (3, 3)
