"""The merger on disks that fail, fill up and lose power leaves what an uninterrupted run leaves."""

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


def test_plans_carried_out_make_the_bytes_of_the_dumbest_merger(merger, disk):
    assert len(FILES) > 2, "the story rolls"
    begin(merger, STORY)
    merger.wait_written(LAST)
    assert merged_files(disk) == FILES
    assert merger.written == STORY.reached
    assert merger.sync() == STORY.reached
    assert (merger.place, merger.position) == (STORY.end, STORY.state.position)


def test_a_segment_that_is_rolled_by_age_is_sealed_without_a_message_and_may_be_trimmed(disk):
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


def test_plans_that_are_carried_out_again_change_nothing(merger, disk):
    begin(merger, STORY)
    merger.wait_written(LAST)
    for plan in STORY.plans:
        merger.add(plan)
    begin(merger, STORY)
    wait_until(lambda: merger.written == STORY.reached)
    assert merged_files(disk) == FILES
    assert merger.failure is None


def test_a_log_that_goes_on_after_each_restart_with_overlapping_plans_is_the_same(disk):
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
        (64, {"end_offset": 64}, False),  # Nothing is written, or the segment is sealed.
        (72, {}, False),  # It was executed in part before.
        (None, {}, False),
    ],
)
def test_a_plan_is_quick_if_it_is_one_short_write_at_the_end(here, change, expected):
    plan = replace(STORY.plans[0], offset=64, end_offset=1000, blocks=())
    place = None if here is None else LogOffset(*plan.segment, here)
    assert is_quick(replace(plan, **change), place) is expected


def test_small_plans_are_executed_by_whoever_adds_them_and_make_the_same_bytes(disk):
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


def test_plans_added_one_by_one_make_the_same_bytes_also_where_segments_roll(merger, disk):
    begin(merger, STORY, STORY.plans[:1])
    add_each(merger, STORY.plans[1:])
    merger.wait_written(LAST)
    assert merged_files(disk) == FILES


def test_a_small_plan_whose_input_is_missing_or_wrong_is_left_to_the_thread(disk):
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
def test_a_small_plan_that_fails_is_executed_again_by_the_thread_or_stops_the_merger(
    disk, error, monkeypatch
):
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
def test_a_small_plan_that_is_interrupted_leaves_the_merger_to_its_thread(disk, is_begun, monkeypatch):
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


def test_a_merger_is_held_only_when_a_plan_that_is_being_added_is_executed(disk, monkeypatch):
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


def test_missing_input_is_named_and_waited_for(merger, disk, sources):
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


def test_a_snapshot_with_the_plan_that_is_being_executed_does_not_make_the_log_differ(disk):
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


def test_input_with_another_chain_is_never_merged_and_told_once(merger, sources, disk):
    sources.wrong.add((2, SegmentId(0, 3)))
    begin(merger, STORY)
    wait_until(lambda: bool(sources.bad))
    assert sources.bad[0].session_id == 2
    sources.wrong.clear()
    merger.wake()
    merger.wait_written(LAST)
    assert len(sources.bad) == 1
    assert merged_files(disk) == FILES


def test_a_copy_that_is_cut_short_is_missing_input_and_other_bytes_are_taken(merger, disk):
    path = "/node/2/log.0.3"
    disk.write(path, disk.read(path)[:100])
    begin(merger, STORY)
    wait_until(lambda: merger.missing is not None)
    merger.pause()
    disk.write(path, STORY.sessions[2].files[0, 3])  # As if they came from a peer.
    merger.resume()
    merger.wait_written(LAST)
    assert merger.missing is None
    assert merged_files(disk) == FILES


@pytest.mark.parametrize("at", [64 + 20, 64 + 64 + 3, -1], ids=["header", "columns", "values"])
def test_a_byte_of_a_copy_that_flipped_since_it_came_is_never_merged_and_good_bytes_are(
    merger, disk, sources, at
):
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
    disk.write(path, good)  # As if they came from a peer.
    merger.wait_written(LAST)
    assert merger.missing is None
    assert merged_files(disk) == FILES


def test_a_log_that_ends_before_the_first_plan_has_a_gap_and_writes_nothing(merger, disk):
    begin(merger, STORY, STORY.plans[3:])
    third = STORY.plans[3]
    assert merger.gap == LogOffset(*third.segment, third.offset)
    assert merged_files(disk) == {}
    begin(merger, STORY)
    merger.wait_written(LAST)
    assert merged_files(disk) == FILES


def test_a_log_without_any_plans_has_a_gap_up_to_the_end_of_the_state(merger):
    begin(merger, STORY, [])
    assert merger.gap == STORY.end


def test_of_too_many_plans_that_wait_the_oldest_are_forgotten_and_leave_a_gap(
    merger, disk, sources, monkeypatch
):
    monkeypatch.setattr(merger_module, "PLANS_MAX", 2)
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


def test_the_chain_is_that_of_the_headers_that_are_in_the_file(merger, disk):
    begin(merger, STORY)
    merger.wait_written(LAST)
    assert merger.written.chain == STORY.reached.chain
    merger.close()
    again = open_merger(disk, STORY)
    begin(again, STORY)
    again.wait_written(LAST)
    assert again.written == STORY.reached
    again.close()


def test_a_plan_that_was_carried_out_with_other_headers_stops_the_merger(merger, disk):
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


def test_a_merged_block_that_went_bad_is_no_divergence_and_is_waited_for(merger, disk):
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


def test_a_damaged_log_holds_the_merger_until_it_is_mended(merger, disk):
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


def test_input_that_comes_while_it_is_looked_for_is_not_missed(merger, sources, monkeypatch):
    monkeypatch.setattr(merger_module, "RETRY_S", 3600.0)
    hidden = (2, SegmentId(0, 3))
    sources.hidden.add(hidden)
    range_info = sources.range_info

    def look(session_id, segment, start, end):
        found = range_info(session_id, segment, start, end)
        if (session_id, segment) == hidden and hidden in sources.hidden:
            sources.hidden.clear()  # It comes just behind the look.
            merger.wake()
        return found

    monkeypatch.setattr(sources, "range_info", look)
    begin(merger, STORY)
    merger.wait_written(LAST)
    assert merger.failure is None


def test_a_merger_that_is_held_while_it_waits_lets_go_and_goes_on(merger, disk, sources):
    sources.hidden.add((1, SegmentId(0, 2)))
    begin(merger, STORY)
    wait_until(lambda: merger.missing is not None)
    merger.pause()
    other = open_merger(disk, STORY)  # The lock is free.
    other.close()
    merger.resume()
    sources.hidden.clear()
    merger.wake()
    merger.wait_written(LAST)
    assert merged_files(disk) == FILES


def test_what_another_writer_brought_while_it_was_held_is_not_written_again(merger, disk, sources):
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


def test_what_is_durable_is_never_told_to_be_less_after_holding(merger, sources):
    sources.hidden.add((1, SegmentId(0, 4)))
    begin(merger, STORY)
    wait_until(lambda: merger.missing is not None)
    before = merger.sync()
    merger.pause()
    merger.resume()
    after = merger.sync()
    assert after.instruction >= before.instruction
    assert after.total_bytes >= before.total_bytes


def test_a_full_disk_is_waited_for_and_leaves_no_part_of_a_block(merger, disk):
    disk.capacity_bytes = disk.used_bytes + 4000
    begin(merger, STORY)
    wait_until(lambda: merger.written.instruction >= 1)
    for more in range(200, 60_000, 200):
        disk.capacity_bytes = disk.used_bytes + more
        merger.wake()
    merger.wait_written(LAST)
    assert merged_files(disk) == FILES
    assert merger.failure is None


def test_a_failed_fsync_is_final(merger, disk):
    begin(merger, STORY, STORY.plans[:1])
    merger.wait_written(1)
    disk.fail("sync")
    with pytest.raises(StorageFailed):
        merger.sync()
    with pytest.raises(StorageFailed):
        merger.sync()
    assert merger.durable.instruction == 0


def test_a_disk_that_fails_stops_the_merger(merger, disk):
    disk.fail("pwritev", error=errno.EIO, times=100)
    begin(merger, STORY)
    wait_until(lambda: merger.failure is not None)
    assert isinstance(merger.failure, StorageFailed)


def test_plans_that_lead_elsewhere_than_what_is_here_stop_the_merger(disk):
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
    """These are empty, the table says why and when, and the others are what they were."""
    said = _table(merger)
    assert said[: len(gone)] == [(one.id, one.reason, one.trimmed_ns) for one in gone]
    assert all(reason is TrimReason.NONE for _, reason, _ in said[len(gone) :])
    empty = dict.fromkeys((one.id for one in gone), b"")
    assert merged_files(disk) == FILES | empty


def test_what_the_cluster_trims_goes_here_with_its_reason_and_time(merger, disk):
    begin(merger, STORY)
    merger.wait_written(LAST)
    gone = _gone(1) + _gone(2, TrimReason.SIZE)[1:]
    merger.trim(gone)
    wait_until(lambda: _table(merger)[1][1] is TrimReason.SIZE)
    _idle(merger)
    _assert_trimmed(merger, disk, gone)
    assert merger.position == STORY.state.position


def test_what_was_trimmed_before_it_is_sealed_here_goes_when_it_is(merger, disk):
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


def test_what_nobody_remembers_to_have_trimmed_goes_as_the_oldest_that_is_known(merger, disk):
    begin(merger, STORY)
    merger.wait_written(LAST)
    known = _gone(3)[2]
    merger.trim([known])
    wait_until(lambda: len(_table(merger)) > 2 and _table(merger)[2][1] is not TrimReason.NONE)
    assert [why for _, *why in _table(merger)[:3]] == [[known.reason, known.trimmed_ns]] * 3


def test_while_it_is_held_nothing_goes_and_then_all_of_it(merger, disk):
    begin(merger, STORY)
    merger.wait_written(LAST)
    merger.pause()
    merger.trim(_gone(2))
    assert merged_files(disk) == FILES
    merger.resume()
    wait_until(lambda: _table(merger)[1][1] is TrimReason.TIME)
    _idle(merger)
    _assert_trimmed(merger, disk, _gone(2))


def test_what_is_trimmed_goes_while_input_is_waited_for(merger, disk, sources):
    sources.hidden.add((1, SegmentId(0, 4)))
    begin(merger, STORY)
    wait_until(lambda: merger.missing is not None)
    merger.trim(_gone(1))
    wait_until(lambda: _table(merger)[0][1] is TrimReason.TIME)
    sources.hidden.clear()
    merger.wake()
    merger.wait_written(LAST)
    _assert_trimmed(merger, disk, _gone(1))


def test_a_log_with_a_gap_is_trimmed_too(merger, disk):
    begin(merger, STORY, STORY.plans[:3])
    merger.wait_written(3)
    begin(merger, STORY, STORY.plans[5:])
    assert merger.gap is not None
    merger.trim(_gone(1))
    wait_until(lambda: _table(merger)[0][1] is TrimReason.TIME)
    assert merged_files(disk)[SegmentId(0, 0)] == b""


def test_where_there_is_no_space_to_say_what_is_trimmed_it_is_tried_again(merger, disk):
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


def test_where_a_full_disk_removes_no_file_what_is_trimmed_goes_later_without_another_trim(merger, disk):
    """A file system that copies on write needs space to cut a file, too."""
    begin(merger, STORY)
    merger.wait_written(LAST)
    disk.fail("truncate", error=errno.ENOSPC, times=2)
    merger.trim(_gone(2))
    wait_until(lambda: merged_files(disk)[SegmentId(0, 1)] == b"")
    _idle(merger)
    _assert_trimmed(merger, disk, _gone(2))
    assert merger.failure is None


def test_a_log_whose_newest_segment_is_sealed_and_trimmed_goes_on(merger, disk):
    """The power went between the seal of a segment and the beginning of the next one."""
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


def test_a_segment_that_is_sealed_but_open_for_want_of_space_is_not_trimmed_yet(merger, disk):
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
    """Merge and trim, each segment when the next one is there."""
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
    """Whatever was done, doing it again comes to the same; no kept segment is ever empty."""
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


def test_after_a_kill_at_any_change_of_trimming_the_log_is_trimmed_the_same():
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
def test_a_sync_that_is_under_way_keeps_its_file_open(what, merger):
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
def test_any_cuts_of_any_story_into_begins_make_the_same_bytes(data):
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
    """Nobody changes it."""
    return Story.drawn(3, instructions=3, roll_bytes=700, rolled=(3,))


@functools.cache
def _small_files() -> dict[SegmentId, bytes]:
    return _small().files()


def _merge_all(disk: MemoryDisk, log: Log) -> None:
    """Carry out what a node is told after its start: all plans behind what it said to be durable."""
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


def test_after_a_kill_at_any_change_the_rest_of_the_plans_makes_the_same_bytes():
    assert _sweep(strategies=("all",)) > 20


@pytest.mark.slow
def test_after_power_cuts_at_any_change_also_of_the_recovery_the_bytes_are_the_same():
    assert _sweep(recover=_merge_all, seeds=range(1), recover_cuts=1) > 50
