"""The merger on disks that fail, fill up or lose power writes the bytes of an uninterrupted run."""

from __future__ import annotations

import errno
import functools
import threading
from collections.abc import Iterator, Sequence

import pytest
from disks import MemoryDisk
from disks.crash_sweep import Log, sweep
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from nodes_bench import (
    MERGED,
    FakeSources,
    Story,
    begin,
    merged_files,
    open_merger,
    wait_until,
)

from replicator.protocol.messages import LogOffset
from rt.errors import Closed, DiskFull, Diverged, StorageFailed
from rt.log.format.segment import SegmentId
from rt.log.format.segment_table import TrimReason
from rt.log.write.writer import LogWriter, SyncPoint
from sequencer.ipc.data_reports import MergeProgress
from sequencer.merged import merger as merger_module
from sequencer.merged.merge_input import MissingInput
from sequencer.merged.merger import Merger
from sequencer.merged.plan_executor import QUICK_BLOCKS_MAX, QUICK_BYTES_MAX, is_quick
from sequencer.state import write_plan
from sequencer.state.state import MergedSegment
from sequencer.state.write_plan import WritePlan

STORY = Story.drawn()
FILES = STORY.files()
LAST = STORY.plans[-1].instruction


@pytest.fixture
def disk() -> MemoryDisk:
    disk = MemoryDisk()
    STORY.put_sessions(disk)
    return disk


@pytest.fixture
def sources(disk: MemoryDisk) -> FakeSources:
    return FakeSources(disk, STORY)


@pytest.fixture
def merger(disk: MemoryDisk, sources: FakeSources) -> Iterator[Merger]:
    merger = open_merger(disk, STORY, sources)
    yield merger
    merger.close()


def test_executed_plans_write_bytes_of_reference_merger(merger, disk):
    assert len(FILES) > 2, "the story rolls"
    begin(merger, STORY)
    merger.wait_written(LAST)
    assert merged_files(disk) == FILES
    assert merger.written == STORY.reached
    assert merger.sync() == STORY.reached
    assert (merger.place, merger.position) == (STORY.end, STORY.state.position)


def test_segment_rolled_by_age_is_sealed_without_message_and_can_be_trimmed(disk):
    story = Story.drawn(rolled=(2, 6))
    merger = open_merger(disk, story)
    try:
        begin(merger, story)
        merger.wait_written(story.plans[-1].instruction)
        assert merged_files(disk) == story.files()
        assert merger.sync() == story.reached
        assert (merger.place, merger.place.offset) == (story.end, 64)
        merger.trim([one.trimmed(TrimReason.TIME, 7) for one in story.state.segments])
        wait_until(lambda: not merger._output.to_trim())
    finally:
        merger.close()
    kept = [segment for segment, data in merged_files(disk).items() if data]
    assert kept == [story.end.segment]
    merger = open_merger(disk, story)
    try:
        begin(merger, story, [])
        assert (merger.place, merger.position, merger.gap) == (story.end, story.state.position, None)
        assert merger.written.instruction == story.reached.instruction
    finally:
        merger.close()


def test_plans_executed_again_leave_log_unchanged(merger, disk):
    begin(merger, STORY)
    merger.wait_written(LAST)
    for plan in STORY.plans:
        merger.add(plan)
    begin(merger, STORY)
    wait_until(lambda: merger.written == STORY.reached)
    assert merged_files(disk) == FILES
    assert merger.failure is None


def test_restarts_with_overlapping_plans_write_same_bytes(disk):
    for until in range(1, len(STORY.plans) + 1):
        merger = open_merger(disk, STORY)
        first = max(0, until - 3)
        merger.start(STORY.plans[first:until], *_end_behind(until))
        merger.wait_written(STORY.plans[until - 1].instruction)
        merger.close()
    assert merged_files(disk) == FILES


def add_each(merger: Merger, plans: Sequence[WritePlan]) -> None:
    """Add plans as the event loop does, each while the thread is idle."""
    for plan in plans:
        wait_until(lambda: merger._is_idle and not merger._plans)
        merger._quick_after_s = 0.0
        merger.add(plan)


@pytest.mark.parametrize(
    ("here", "change", "expected"),
    [
        (64, {}, True),
        (64, {"end_offset": 64 + QUICK_BYTES_MAX}, True),
        (64, {"end_offset": 65 + QUICK_BYTES_MAX}, False),
        (64, {"blocks": STORY.plans[0].blocks[:1] * QUICK_BLOCKS_MAX}, True),
        (64, {"blocks": STORY.plans[0].blocks[:1] * (QUICK_BLOCKS_MAX + 1)}, False),
        (0, {"offset": 0}, False),  # A new segment begins.
        (64, {"end_offset": 64}, False),  # The plan writes nothing, or it seals the segment.
        (72, {}, False),  # A part of the plan was executed before.
        (None, {}, False),
    ],
)
def test_plan_is_quick_only_as_one_short_write_at_log_end(here, change, expected):
    plan = replace(STORY.plans[0], offset=64, end_offset=1000, blocks=())
    place = None if here is None else LogOffset(*plan.segment, here)
    assert is_quick(replace(plan, **change), place) is expected


def test_small_plans_run_in_adding_thread_and_write_same_bytes(disk):
    story = Story.drawn(roll_bytes=1 << 20)
    story.put_sessions(disk)
    threads: list[int] = []
    merger = open_merger(disk, story, on_written=lambda: threads.append(threading.get_ident()))
    try:
        begin(merger, story, story.plans[:1])
        add_each(merger, story.plans[1:])
        assert merger.written == story.reached
        assert threads[1:] == [threading.get_ident()] * (len(story.plans) - 1)
        assert merged_files(disk) == story.files()
        assert merger.sync() == story.reached
    finally:
        merger.close()


def test_plans_added_one_by_one_write_same_bytes_across_rolls(merger, disk):
    begin(merger, STORY, STORY.plans[:1])
    add_each(merger, STORY.plans[1:])
    merger.wait_written(LAST)
    assert merged_files(disk) == FILES


def test_small_plan_with_missing_or_wrong_input_is_left_to_merger_thread(disk):
    story = Story.drawn(roll_bytes=1 << 20)
    story.put_sessions(disk)
    sources = FakeSources(disk, story)
    sources.hidden.add((2, SegmentId(0, 1)))
    sources.wrong.add((1, SegmentId(0, 2)))
    merger = open_merger(disk, story, sources)
    try:
        begin(merger, story, story.plans[:1])
        add_each(merger, story.plans[1:2])
        wait_until(lambda: merger.missing is not None)
        assert merger.missing.session_id == 2
        sources.hidden.clear()
        merger.wake()
        add_each(merger, story.plans[2:3])
        wait_until(lambda: bool(sources.bad))
        assert sources.bad[0].session_id == 1
        sources.wrong.clear()
        merger.wake()
        add_each(merger, story.plans[3:])
        merger.wait_written(story.plans[-1].instruction)
        assert merger.missing is None
        assert merged_files(disk) == story.files()
    finally:
        merger.close()


@pytest.mark.parametrize("error", [DiskFull("no space"), StorageFailed("it broke"), ZeroDivisionError()])
def test_failed_small_plan_is_retried_by_merger_thread_or_stops_merger(disk, error, monkeypatch):
    story = Story.drawn(roll_bytes=1 << 20)
    story.put_sessions(disk)
    merger = open_merger(disk, story)
    failing = [error]

    def execute(*_):
        raise failing.pop()

    try:
        begin(merger, story, story.plans[:1])
        merger.wait_written(story.plans[0].instruction)
        monkeypatch.setattr(merger._quick_executor, "execute", execute)
        add_each(merger, story.plans[1:2])
        assert not failing
        if isinstance(error, ZeroDivisionError):
            assert isinstance(merger.failure, Closed)
            return
        merger.wait_written(story.plans[1].instruction)
        monkeypatch.undo()
        add_each(merger, story.plans[2:])
        merger.wait_written(story.plans[-1].instruction)
        assert merger.failure is None
        assert merged_files(disk) == story.files()
    finally:
        merger.close()


@pytest.mark.parametrize("is_begun", [False, True])
def test_interrupted_small_plan_is_completed_by_merger_thread(disk, is_begun, monkeypatch):
    story = Story.drawn(roll_bytes=1 << 20)
    story.put_sessions(disk)
    merger = open_merger(disk, story)
    interrupted, name = (LogWriter, "append") if is_begun else (merger._quick_executor, "execute")

    def interrupt(*_):
        monkeypatch.undo()
        raise KeyboardInterrupt

    try:
        begin(merger, story, story.plans[:1])
        merger.wait_written(story.plans[0].instruction)
        monkeypatch.setattr(interrupted, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            add_each(merger, story.plans[1:2])
        add_each(merger, story.plans[2:])
        merger.wait_written(story.plans[-1].instruction)
        assert merger.failure is None
        assert merged_files(disk) == story.files()
    finally:
        merger.close()


def test_pause_waits_for_small_plan_in_execution(disk, monkeypatch):
    story = Story.drawn(roll_bytes=1 << 20)
    story.put_sessions(disk)
    merger = open_merger(disk, story)
    held: list[int] = []
    pausing = threading.Thread(target=lambda: (merger.pause(), held.append(merger.written.instruction)))
    quick = merger._quick_executor.execute

    def execute(plan, chain):
        pausing.start()
        wait_until(lambda: merger._is_paused)
        assert not held
        return quick(plan, chain)

    try:
        begin(merger, story, story.plans[:1])
        merger.wait_written(story.plans[0].instruction)
        monkeypatch.setattr(merger._quick_executor, "execute", execute)
        add_each(merger, story.plans[1:2])
        pausing.join()
        assert held == [story.plans[1].instruction]
        merger.resume()
        begin(merger, story)
        merger.wait_written(story.plans[-1].instruction)
        assert merged_files(disk) == story.files()
    finally:
        merger.close()


def _end_behind(count: int):
    story = Story.drawn(instructions=6)
    plan = STORY.plans[count - 1]
    reached = story.reached._replace(
        instruction=plan.instruction,
        chain=plan.chain,
        total_bytes=plan.total_bytes,
        position=plan.end_position,
    )
    return LogOffset(*plan.segment, plan.end_offset), reached


def test_missing_input_is_reported_and_waited_for(merger, disk, sources):
    hidden = (2, SegmentId(0, 3))
    sources.hidden.add(hidden)
    begin(merger, STORY)
    wait_until(lambda: merger.missing is not None)
    assert (merger.missing.session_id, merger.missing.segment) == hidden
    assert merger.written.instruction == STORY.plans[2].instruction
    sources.hidden.clear()
    merger.wake()
    merger.wait_written(LAST)
    assert merger.missing is None
    assert merged_files(disk) == FILES


def test_snapshot_with_plan_in_execution_causes_no_divergence(disk):
    story = Story.drawn(roll_bytes=1 << 20)
    story.put_sessions(disk)
    sources = FakeSources(disk, story)
    sources.hidden.add((2, SegmentId(0, 2)))
    merger = open_merger(disk, story, sources)
    try:
        begin(merger, story)
        wait_until(lambda: merger.missing is not None)
        begin(merger, story, [replace(plan) for plan in story.plans])
        sources.hidden.clear()
        merger.wake()
        merger.wait_written(story.plans[-1].instruction)
        assert merger.failure is None
        assert merged_files(disk) == story.files()
        assert merger.sync() == story.reached
    finally:
        merger.close()


def test_input_with_wrong_running_checksum_is_reported_once_and_never_merged(merger, sources, disk):
    sources.wrong.add((2, SegmentId(0, 3)))
    begin(merger, STORY)
    wait_until(lambda: bool(sources.bad))
    assert sources.bad[0].session_id == 2
    sources.wrong.clear()
    merger.wake()
    merger.wait_written(LAST)
    assert len(sources.bad) == 1
    assert merged_files(disk) == FILES


def test_truncated_session_replica_is_missing_input_until_refilled(merger, disk):
    path = "/node/2/log.0.3"
    disk.write(path, disk.read(path)[:100])
    begin(merger, STORY)
    wait_until(lambda: merger.missing is not None)
    merger.pause()
    disk.write(path, STORY.sessions[2].files[0, 3])  # A peer would supply these bytes.
    merger.resume()
    merger.wait_written(LAST)
    assert merger.missing is None
    assert merged_files(disk) == FILES


@pytest.mark.parametrize("at", [64 + 20, 64 + 64 + 3, -1], ids=["header", "columns", "values"])
def test_corrupt_session_replica_is_merged_only_after_valid_bytes_return(merger, disk, sources, at):
    path = "/node/2/log.0.3"
    good = disk.read(path)
    bad = bytearray(good)
    bad[at] ^= 1
    disk.write(path, bytes(bad))
    begin(merger, STORY)
    wait_until(lambda: bool(sources.bad) or merger.failure is not None)
    bad_block = sources.bad[0]
    assert (bad_block.session_id, bad_block.run, bad_block.roll) == (2, 0, 3)
    wait_until(lambda: merger.missing is not None)
    assert merger.missing == MissingInput(2, SegmentId(0, 3), bad_block.start, bad_block.end)
    assert merger.written.instruction == STORY.plans[2].instruction
    written = merged_files(disk)
    assert all(FILES[segment].startswith(data) for segment, data in written.items())
    disk.write(path, good)  # A peer would supply these bytes.
    merger.wait_written(LAST)
    assert merger.missing is None
    assert merged_files(disk) == FILES


def test_log_that_ends_before_first_plan_reports_gap_and_writes_nothing(merger, disk):
    begin(merger, STORY, STORY.plans[3:])
    third = STORY.plans[3]
    assert merger.gap == LogOffset(*third.segment, third.offset)
    assert merged_files(disk) == {}
    begin(merger, STORY)
    merger.wait_written(LAST)
    assert merged_files(disk) == FILES


def test_log_without_plans_reports_gap_up_to_end_of_state(merger):
    begin(merger, STORY, [])
    assert merger.gap == STORY.end


@pytest.mark.parametrize("is_by_bytes", [True, False])
def test_oldest_waiting_plans_over_limit_are_dropped_and_leave_gap(
    merger, disk, sources, monkeypatch, is_by_bytes
):
    if is_by_bytes:
        bytes_max = STORY.plans[-1].total_bytes - STORY.plans[-2].total_bytes
        monkeypatch.setattr(write_plan, "PLANS_BYTES_MAX", bytes_max)
    else:
        monkeypatch.setattr(write_plan, "PLANS_MAX", 2)
    sources.hidden.add((1, SegmentId(0, 0)))
    for plan in STORY.plans:
        merger.add(plan)
    wait_until(lambda: merger.gap is not None)
    assert merger.gap == LogOffset(*STORY.plans[-2].segment, STORY.plans[-2].offset)
    monkeypatch.undo()
    sources.hidden.clear()
    merger.pause()
    other = open_merger(disk, STORY)
    other.start(STORY.plans[:-2], *_end_behind(len(STORY.plans) - 2))
    other.wait_written(STORY.plans[-3].instruction)
    other.close()
    merger.resume()
    merger.wait_written(LAST)
    assert merged_files(disk) == FILES


def test_running_checksum_is_as_agreed_before_and_after_restart(merger, disk):
    begin(merger, STORY)
    merger.wait_written(LAST)
    assert merger.written.chain == STORY.reached.chain
    merger.close()
    again = open_merger(disk, STORY)
    begin(again, STORY)
    again.wait_written(LAST)
    assert again.written == STORY.reached
    again.close()


def test_executed_plan_with_different_headers_stops_merger_as_diverged(merger, disk):
    begin(merger, STORY)
    merger.wait_written(LAST)
    merger.close()
    last = STORY.plans[-1]
    head = bytearray(last.blocks[-1].head)
    head[-1] ^= 1
    other = replace(last, blocks=(*last.blocks[:-1], replace(last.blocks[-1], head=bytes(head))))
    again = open_merger(disk, STORY)
    again.start([other], STORY.end, STORY.reached)
    wait_until(lambda: again.failure is not None or again.written.instruction == LAST)
    again.close()
    assert isinstance(again.failure, Diverged)


def test_corrupt_merged_block_is_waited_for_without_divergence(merger, disk):
    begin(merger, STORY)
    merger.wait_written(LAST)
    merger.sync()
    merger.close()
    path, last = f"{MERGED}/{STORY.end.segment.file_name}", STORY.plans[-1]
    good = disk.read(path)
    again = open_merger(disk, STORY)
    bad = bytearray(good)
    bad[(last.offset or 64) + 20] ^= 1
    disk.write(path, bytes(bad))
    begin(again, STORY, [last])
    wait_until(lambda: again.missing is not None)
    disk.write(path, good)
    again.wait_written(LAST)
    assert again.failure is None
    again.close()


def test_corrupt_log_blocks_merger_until_it_is_repaired(merger, disk):
    begin(merger, STORY)
    merger.wait_written(LAST)
    merger.sync()
    merger.close()
    path = f"{MERGED}/{STORY.end.segment.file_name}"
    good = disk.read(path)
    bad = bytearray(good)
    bad[100] ^= 1
    disk.write(path, bytes(bad))
    again = open_merger(disk, STORY)
    assert again.damage is not None
    assert again.damage.path == path
    begin(again, STORY)
    again.resume()
    assert again.damage is not None
    assert again.sync() == MergeProgress(0, 0, 0, 0)
    disk.write(path, good)
    again.resume()
    assert again.damage is None
    again.wait_written(LAST)
    assert again.sync() == STORY.reached
    assert merged_files(disk) == FILES
    again.close()


def test_input_that_arrives_during_lookup_is_not_missed(merger, sources, monkeypatch):
    monkeypatch.setattr(merger_module, "RETRY_S", 3600.0)
    hidden = (2, SegmentId(0, 3))
    sources.hidden.add(hidden)
    range_info = sources.range_info

    def look(session_id, segment, start, end):
        found = range_info(session_id, segment, start, end)
        if (session_id, segment) == hidden and hidden in sources.hidden:
            sources.hidden.clear()  # The input arrives just after the lookup.
            merger.wake()
        return found

    monkeypatch.setattr(sources, "range_info", look)
    begin(merger, STORY)
    merger.wait_written(LAST)
    assert merger.failure is None


def test_merger_paused_while_waiting_for_input_releases_lock_and_resumes(merger, disk, sources):
    sources.hidden.add((1, SegmentId(0, 2)))
    begin(merger, STORY)
    wait_until(lambda: merger.missing is not None)
    merger.pause()
    other = open_merger(disk, STORY)  # Fails if the lock is not free.
    other.close()
    merger.resume()
    sources.hidden.clear()
    merger.wake()
    merger.wait_written(LAST)
    assert merged_files(disk) == FILES


def test_merger_resumes_after_bytes_another_writer_added_during_pause(merger, disk, sources):
    sources.hidden.add((1, SegmentId(0, 2)))
    begin(merger, STORY)
    wait_until(lambda: merger.missing is not None)
    merger.pause()
    other = open_merger(disk, STORY)
    begin(other, STORY)
    other.wait_written(LAST)
    other.close()
    merger.resume()
    wait_until(lambda: merger.written == STORY.reached)
    assert merger.sync() == STORY.reached
    assert merged_files(disk) == FILES


def test_durable_progress_does_not_decrease_after_pause(merger, sources):
    sources.hidden.add((1, SegmentId(0, 4)))
    begin(merger, STORY)
    wait_until(lambda: merger.missing is not None)
    before = merger.sync()
    merger.pause()
    merger.resume()
    after = merger.sync()
    assert after.instruction >= before.instruction
    assert after.total_bytes >= before.total_bytes


def test_full_disk_is_waited_for_and_leaves_no_partial_block(merger, disk):
    disk.capacity_bytes = disk.used_bytes + 4000
    begin(merger, STORY)
    wait_until(lambda: merger.written.instruction >= 1)
    for more in range(200, 60_000, 200):
        disk.capacity_bytes = disk.used_bytes + more
        merger.wake()
    merger.wait_written(LAST)
    assert merged_files(disk) == FILES
    assert merger.failure is None


def test_sync_fails_again_after_failed_fsync(merger, disk):
    begin(merger, STORY, STORY.plans[:1])
    merger.wait_written(1)
    disk.fail("sync")
    with pytest.raises(StorageFailed):
        merger.sync()
    with pytest.raises(StorageFailed):
        merger.sync()
    assert merger.durable.instruction == 0


def test_failing_disk_stops_merger_with_storage_failed(merger, disk):
    disk.fail("pwritev", error=errno.EIO, times=100)
    begin(merger, STORY)
    wait_until(lambda: merger.failure is not None)
    assert isinstance(merger.failure, StorageFailed)


def test_plans_that_contradict_written_log_stop_merger_as_diverged(disk):
    merger = open_merger(disk, STORY)
    begin(merger, STORY, STORY.plans[:2])
    merger.wait_written(STORY.plans[1].instruction)
    merger.close()
    other = Story.drawn(seed=2)
    other.put_sessions(disk)
    merger = open_merger(disk, other)
    begin(merger, other)
    wait_until(lambda: merger.failure is not None or merger.written.instruction >= LAST)
    merger.close()
    assert isinstance(merger.failure, Diverged)


# Trimming


def _gone(count: int, reason: TrimReason = TrimReason.TIME) -> list[MergedSegment]:
    """The story's first sealed segments, as the cluster trims them: each at a time of its own."""
    sealed = [*STORY.state.segments][:count]
    return [one.trimmed(reason, 100 + one.id.roll) for one in sealed]


def _table(merger: Merger) -> list[tuple[SegmentId, TrimReason, int]]:
    assert merger._output.writer is not None
    return [(one.id, one.reason, one.trimmed_ns) for one in merger._output.writer.table.segments]


def _assert_trimmed(merger: Merger, disk: MemoryDisk, gone: Sequence[MergedSegment]) -> None:
    """Check that these segments are empty, that the table has their reasons and times, and that the others
    are unchanged.
    """
    said = _table(merger)
    assert said[: len(gone)] == [(one.id, one.reason, one.trimmed_ns) for one in gone]
    assert all(reason is TrimReason.NONE for _, reason, _ in said[len(gone) :])
    empty = dict.fromkeys((one.id for one in gone), b"")
    assert merged_files(disk) == FILES | empty


def test_trim_by_cluster_is_applied_with_its_reason_and_time(merger, disk):
    begin(merger, STORY)
    merger.wait_written(LAST)
    gone = _gone(1) + _gone(2, TrimReason.SIZE)[1:]
    merger.trim(gone)
    wait_until(lambda: _table(merger)[1][1] is TrimReason.SIZE)
    _idle(merger)
    _assert_trimmed(merger, disk, gone)
    assert merger.position == STORY.state.position


def test_segment_trimmed_by_cluster_before_local_seal_is_trimmed_once_sealed(merger, disk):
    gone = _gone(2)
    merger.trim(gone)
    for plan in STORY.plans:
        merger.add(plan)
        merger.wait_written(plan.instruction)
        _idle(merger)
        last = plan.segment
        empty = [one.id for one in gone if one.id < last]
        assert [segment for segment, data in merged_files(disk).items() if not data] == empty
    _assert_trimmed(merger, disk, gone)


def test_trim_of_unrecorded_segments_takes_reason_and_time_of_oldest_recorded(merger, disk):
    begin(merger, STORY)
    merger.wait_written(LAST)
    known = _gone(3)[2]
    merger.trim([known])
    wait_until(lambda: len(_table(merger)) > 2 and _table(merger)[2][1] is not TrimReason.NONE)
    assert [why for _, *why in _table(merger)[:3]] == [[known.reason, known.trimmed_ns]] * 3


def test_trim_during_pause_is_applied_after_resume(merger, disk):
    begin(merger, STORY)
    merger.wait_written(LAST)
    merger.pause()
    merger.trim(_gone(2))
    assert merged_files(disk) == FILES
    merger.resume()
    wait_until(lambda: _table(merger)[1][1] is TrimReason.TIME)
    _idle(merger)
    _assert_trimmed(merger, disk, _gone(2))


def test_trim_is_applied_while_merger_waits_for_input(merger, disk, sources):
    sources.hidden.add((1, SegmentId(0, 4)))
    begin(merger, STORY)
    wait_until(lambda: merger.missing is not None)
    merger.trim(_gone(1))
    wait_until(lambda: _table(merger)[0][1] is TrimReason.TIME)
    sources.hidden.clear()
    merger.wake()
    merger.wait_written(LAST)
    _assert_trimmed(merger, disk, _gone(1))


def test_trim_is_applied_to_log_with_gap(merger, disk):
    begin(merger, STORY, STORY.plans[:3])
    merger.wait_written(3)
    begin(merger, STORY, STORY.plans[5:])
    assert merger.gap is not None
    merger.trim(_gone(1))
    wait_until(lambda: _table(merger)[0][1] is TrimReason.TIME)
    assert merged_files(disk)[SegmentId(0, 0)] == b""


def test_trim_is_retried_when_full_disk_cannot_record_it(merger, disk):
    begin(merger, STORY)
    merger.wait_written(LAST)
    disk.capacity_bytes = disk.used_bytes
    merger.trim(_gone(2))
    merger._thread.join(2 * merger_module.RETRY_S)
    assert merged_files(disk) == FILES
    disk.capacity_bytes = disk.used_bytes + 4000
    wait_until(lambda: _table(merger)[1][1] is TrimReason.TIME)
    _idle(merger)
    _assert_trimmed(merger, disk, _gone(2))
    assert merger.failure is None


def test_trim_is_retried_when_full_disk_cannot_truncate_file(merger, disk):
    """A file system that copies on write needs space to cut a file, too."""
    begin(merger, STORY)
    merger.wait_written(LAST)
    disk.fail("truncate", error=errno.ENOSPC, times=2)
    merger.trim(_gone(2))
    wait_until(lambda: merged_files(disk)[SegmentId(0, 1)] == b"")
    _idle(merger)
    _assert_trimmed(merger, disk, _gone(2))
    assert merger.failure is None


def test_log_continues_after_its_newest_segment_is_sealed_and_trimmed(merger, disk):
    """The power failed after a segment was sealed and before the next one started."""
    rolls = next(at for at, plan in enumerate(STORY.plans) if at and plan.offset == 0)
    begin(merger, STORY, STORY.plans[:rolls])
    merger.wait_written(rolls)
    assert merger._output.writer is not None
    merger._output.writer.seal()
    merger.close()
    again = open_merger(disk, STORY)
    again.trim(_gone(1))
    wait_until(lambda: _table(again)[0][1] is TrimReason.TIME)
    begin(again, STORY)
    again.wait_written(LAST)
    _assert_trimmed(again, disk, _gone(1))
    assert (again.failure, again.missing) == (None, None)
    again.close()


def test_sealed_segment_is_not_trimmed_until_next_segment_starts(merger, disk):
    rolls = next(at for at, plan in enumerate(STORY.plans) if at and plan.offset == 0)
    begin(merger, STORY, STORY.plans[:rolls])
    merger.wait_written(rolls)
    writer = merger._output.writer
    assert writer is not None
    start = writer.start

    def full(*args, **kwargs):
        writer._seal(writer._active)
        raise DiskFull("no space for another segment")

    writer.start = full
    merger.trim(_gone(1))
    merger.add(STORY.plans[rolls])
    wait_until(lambda: writer.is_sealed)
    assert merged_files(disk)[SegmentId(0, 0)] == FILES[SegmentId(0, 0)]
    writer.start = start
    for plan in STORY.plans[rolls + 1 :]:
        merger.add(plan)
    merger.wait_written(LAST)
    wait_until(lambda: _table(merger)[0][1] is TrimReason.TIME)
    _idle(merger)
    _assert_trimmed(merger, disk, _gone(1))


def _trim_in_steps(disk: MemoryDisk, log: Log) -> None:
    """Merge and trim. Each segment is trimmed when the next one exists."""
    merger = open_merger(disk, STORY)
    try:
        begin(merger, STORY)
        merger.wait_written(LAST)
        for count in (1, 2):
            if merger.failure is None:
                merger.trim(_gone(count))
                wait_until(lambda: merger.failure is not None or not merger._output.to_trim())
                wait_until(lambda: merger._is_idle)
        if merger.failure is None:
            log.append(merger.sync().instruction)
    finally:
        merger.close()


def _check_trimmed(disk: MemoryDisk, log: Log) -> None:
    """Check that no kept segment is empty, and that repeating all steps leads to the same result."""
    merger = open_merger(disk, STORY)
    try:
        for segment, reason, _ in _table(merger):
            assert bool(merged_files(disk)[segment]) == (reason is TrimReason.NONE)
    finally:
        merger.close()
    _trim_in_steps(disk, log)
    assert {segment for segment, data in merged_files(disk).items() if not data} == {
        one.id for one in _gone(2)
    }


def test_trim_after_kill_at_any_change_leaves_same_log():
    def prepare(disk: MemoryDisk) -> None:
        STORY.put_sessions(disk)
        merger = open_merger(disk, STORY)
        begin(merger, STORY)
        merger.wait_written(LAST)
        merger.sync()
        merger.close()

    assert sweep(_trim_in_steps, _check_trimmed, prepare=prepare, strategies=("all",)) > 8


class _SlowSync:
    """Lets a test do something between a merger's sync point and its sync."""

    def __init__(self, merger: Merger) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()
        self._sync_to = merger._output.writer.sync_to
        merger._output.writer.sync_to = self._slowly

    def _slowly(self, point: SyncPoint) -> None:
        if threading.current_thread().name != "rt-merger":
            self.began.set()
            assert self.go_on.wait(60)
        self._sync_to(point)


def _idle(merger: Merger) -> None:
    wait_until(lambda: merger._is_idle and not merger._plans)


@pytest.mark.parametrize("what", ["hold", "roll"])
def test_running_sync_succeeds_during_pause_or_roll(what, merger):
    rolls = next(at for at, plan in enumerate(STORY.plans) if at and plan.offset == 0)
    begin(merger, STORY, STORY.plans[:rolls])
    merger.wait_written(rolls)
    slow = _SlowSync(merger)
    found: list[object] = []

    def sync() -> None:
        try:
            found.append(merger.sync())
        except StorageFailed as error:
            found.append(error)

    syncing = threading.Thread(target=sync)
    syncing.start()
    assert slow.began.wait(60)
    if what == "hold":
        acting = threading.Thread(target=merger.pause)
    else:
        acting = threading.Thread(target=lambda: (merger.add(STORY.plans[rolls]), _idle(merger)))
    acting.start()
    acting.join(0.2)
    slow.go_on.set()
    acting.join(60)
    syncing.join(60)
    assert [one.instruction for one in found] == [rolls]
    if what == "roll":
        merger.wait_written(rolls + 1)
    assert merger.failure is None


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_any_split_of_plans_into_restarts_writes_same_bytes(data):
    story = Story.drawn(
        data.draw(st.integers(0, 10_000)),
        roll_bytes=data.draw(st.integers(300, 3000)),
        rolled=data.draw(st.sets(st.integers(1, 6), max_size=3)),
    )
    disk = MemoryDisk()
    story.put_sessions(disk)
    at = 0
    while at < len(story.plans):
        first = data.draw(st.integers(0, at), label="first")
        at = data.draw(st.integers(at + 1, len(story.plans)), label="until")
        merger = open_merger(disk, story)
        plan = story.plans[at - 1]
        end = LogOffset(*plan.segment, plan.end_offset)
        reached = story.reached._replace(instruction=at, chain=plan.chain, total_bytes=plan.total_bytes)
        merger.start(story.plans[first:at], end, reached)
        merger.wait_written(at)
        assert merger.failure is None, merger.failure
        if data.draw(st.booleans(), label="sync"):
            assert merger.sync().instruction == at
        merger.close()
    assert merged_files(disk) == story.files()


@functools.cache
def _small() -> Story:
    """A small story. It is cached, so no test may change it."""
    return Story.drawn(3, instructions=3, roll_bytes=700, rolled=(3,))


@functools.cache
def _small_files() -> dict[SegmentId, bytes]:
    return _small().files()


def _merge_all(disk: MemoryDisk, log: Log) -> None:
    """Execute the plans that a node receives after its start: all plans after its reported durable end."""
    story = _small()
    merger = open_merger(disk, story)
    try:
        kept = [plan for plan in story.plans if plan.instruction > max(log, default=0)]
        begin(merger, story, kept)
        assert merger.gap is None
        merger.wait_written(story.plans[-1].instruction)
        if merger.failure is None:
            log.append(merger.sync().instruction)
    finally:
        merger.close()


def _in_steps(disk: MemoryDisk, log: Log) -> None:
    story = _small()
    merger = open_merger(disk, story)
    try:
        for plan in story.plans:
            merger.add(plan)
            merger.wait_written(plan.instruction)
            if merger.failure is not None:
                return
            log.append(merger.sync().instruction)
    finally:
        merger.close()


def _check_prefix_and_rest(disk: MemoryDisk, log: Log) -> None:
    _merge_all(disk, log)
    assert merged_files(disk) == _small_files()


def _sweep(**options: object) -> int:
    story = _small()
    return sweep(_in_steps, _check_prefix_and_rest, prepare=story.put_sessions, **options)  # type: ignore[arg-type]


def test_restart_after_kill_at_any_change_writes_same_bytes():
    assert _sweep(strategies=("all",)) > 20


@pytest.mark.slow
def test_restart_after_power_cut_at_any_change_or_in_recovery_writes_same_bytes():
    assert _sweep(recover=_merge_all, seeds=range(1), recover_cuts=1) > 50
