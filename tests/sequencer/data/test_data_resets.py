"""Resets in the data process: files that a hard reset deletes, merging after it, and reset status."""

from __future__ import annotations

import asyncio
import errno
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from batches import CLUSTER
from disks import MemoryDisk
from log_items import give, items_of, publish, session_copy
from msgspec.structs import replace
from nodes_bench import Story, merged_files, open_merger
from sequencer_core import do_merge, do_open, must, new_state, opening, piece, random_runs

from replicator.protocol.handshake import PushHello
from replicator.protocol.messages import LogOffset, Run
from rt.cluster_epoch import forced_number
from rt.errors import Corrupt, Fenced
from rt.log import whole_files
from rt.log.disk import REAL, File
from rt.log.format.segment import SegmentId
from rt.log.format.segment_table import TrimReason
from rt.log.scan.directory import list_segments, read_header, read_table
from rt.net.grpc_errors import Unreachable
from rt.testing.merged import MergedLogBuilder
from rt.v1 import sequencer_pb2 as pb
from sequencer.data import reset_service
from sequencer.data.hard_reset import FILE, DroppedRange, HardResetRecord, HardResetter
from sequencer.data.reset_service import ResetService
from sequencer.ipc.data_reports import MergeProgress
from sequencer.ipc.state_follower import StateFollower
from sequencer.rest.base.errors import ResetRefused
from sequencer.sessions.ingest import IngestStream, SessionIngest
from sequencer.sessions.run_admission import run_end, start_offset
from sequencer.state import merge
from sequencer.state.apply import apply
from sequencer.state.apply_result import ClusterReset, RunOpened
from sequencer.state.command_codec import reset_of
from sequencer.state.commands import MergeRange, ResetCluster
from sequencer.state.session_commands import OpenRun
from sequencer.state.state import ClearedRange, End, SequencerState
from sequencer.state.write_plan import WritePlan

REQUEST = b"R" * 16


def reset(state: SequencerState, epoch: int = 2, *, is_hard: bool = True) -> None:
    must(ClusterReset, apply(state, ResetCluster(is_hard, epoch, 77, REQUEST)))


class Kept:
    """A node's files: copies of three sessions with 30 messages each. 10 messages of the first are merged."""

    def __init__(self, root: Path) -> None:
        self.sessions, self.merged = root / "sessions", root / "merged"
        self.sessions.mkdir(parents=True)
        self.state = new_state()
        for which in (1, 2, 3):
            path = publish(REAL, *[10] * 30, root=str(root / f"publisher{which}"))
            replica = session_copy(REAL, str(self.sessions / str(which)), path)
            give(replica, items_of(REAL, path))
            incarnation = replica.identity.origin
            replica.close()
            header = read_header(REAL, path, SegmentId(0, 0))
            assert header is not None
            opened = OpenRun(f"feed{which}", incarnation, None, 0, header.run_id)
            must(RunOpened, apply(self.state, opened))
        do_merge(self.state, MergeRange(1, 0, 0, 64, 128, 0, 10, 0, 0))
        self.ends = dict.fromkeys((1, 2, 3), 30)
        log = MergedLogBuilder(self.merged, cluster_id=CLUSTER, stream="s")
        log.merge_all([str(self.sessions / "1")])
        log.close()

    def hard_resetter(self) -> HardResetter:
        return HardResetter(str(self.sessions), str(self.merged), "s")

    @property
    def replicas(self) -> list[str]:
        return sorted(path.name for path in self.sessions.iterdir() if path.is_dir())

    def is_trimmed(self) -> bool:
        table = read_table(REAL, str(self.merged))
        assert table is not None
        return all((one.is_trimmed, one.reason) == (True, TrimReason.RESET) for one in table.segments)


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path)


def test_hard_reset_deletes_replicas_and_merged_log_and_records_dropped_ranges(kept: Kept) -> None:
    reset(kept.state)
    found = kept.hard_resetter()
    assert found.is_due(kept.state)
    found.clear(kept.state)
    assert found.done == HardResetRecord(
        2,
        True,
        (
            DroppedRange("feed1", 1, 0, 10, 30),
            DroppedRange("feed2", 2, 0, 0, 30),
            DroppedRange("feed3", 3, 0, 0, 30),
        ),
    )
    assert kept.replicas == []
    assert kept.is_trimmed()
    again = kept.hard_resetter()
    assert again.done == found.done
    assert not again.is_due(kept.state)


@pytest.mark.parametrize("is_reset", [False, True])
def test_hard_resetter_is_not_due_without_hard_reset(kept: Kept, is_reset: bool) -> None:
    if is_reset:
        reset(kept.state, is_hard=False)
    assert not kept.hard_resetter().is_due(kept.state)


def test_hard_reset_keeps_session_newer_than_reset(kept: Kept) -> None:
    cleared = ClearedRange(2, 0, 3, 2)
    reset(kept.state)
    kept.state.cleared = cleared
    found = kept.hard_resetter()
    found.clear(kept.state)
    assert kept.replicas == ["3"]
    assert [dropped.session_id for dropped in found.done.dropped] == [1, 2]


@pytest.mark.parametrize("step", ["_trim", "_record"])
def test_hard_reset_completes_with_full_record_after_crash(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    reset(kept.state)
    whole, broken = kept.hard_resetter(), getattr(HardResetter, step)

    def crash(self: HardResetter, *args: object) -> None:
        if step == "_record" and not args[0].is_done:  # type: ignore[attr-defined]
            broken(self, *args)
            return
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(HardResetter, step, crash)
        whole.clear(kept.state)
    found = kept.hard_resetter()
    assert found.is_due(kept.state)
    found.clear(kept.state)
    assert [dropped.session_id for dropped in found.done.dropped] == [1, 2, 3]
    assert kept.replicas == []
    assert kept.is_trimmed()


def test_hard_reset_record_includes_deletions_of_interrupted_reset(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    reset(kept.state)
    delete = shutil.rmtree

    def crash_after_the_first(path: str) -> None:
        if path.endswith("2"):
            raise KeyboardInterrupt
        delete(path)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", crash_after_the_first)
        kept.hard_resetter().clear(kept.state)
    assert kept.replicas == ["2", "3"]
    reset(kept.state, 3)
    found = kept.hard_resetter()
    found.clear(kept.state)
    assert kept.replicas == []
    assert [(one.session_id, one.end) for one in found.done.dropped] == [(1, 30), (2, 30), (3, 30)]


def test_two_missed_hard_resets_are_done_at_once(kept: Kept) -> None:
    reset(kept.state)
    do_open(kept.state, "feed1", run=1)
    reset(kept.state, 3)
    found = kept.hard_resetter()
    found.clear(kept.state)
    assert found.done.epoch == 3
    assert kept.replicas == []


def test_hard_reset_deletes_merged_log_if_unreadable(kept: Kept) -> None:
    (kept.merged / "log.0.0").write_bytes(b"x" * 4096)
    reset(kept.state)
    kept.hard_resetter().clear(kept.state)
    assert not kept.merged.exists()


@pytest.mark.parametrize("crash_at", [None, "_unmerged", "_record"])
def test_hard_reset_on_full_disk_frees_merged_log_before_writing_record(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, crash_at: str | None
) -> None:
    """No new file fits on the disk while the merged log exists."""
    fill = whole_files._fill

    def fill_if_there_is_room(file: File, content: bytes) -> None:
        if any(path.stat().st_size for path in kept.merged.glob("log.*")):
            raise OSError(errno.ENOSPC, "no space")
        fill(file, content)

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(whole_files, "_fill", fill_if_there_is_room)
    reset(kept.state)
    if crash_at is not None:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(HardResetter, crash_at, crash)
            kept.hard_resetter().clear(kept.state)
        assert kept.replicas == ["1", "2", "3"]
    found = kept.hard_resetter()
    assert found.is_due(kept.state)
    found.clear(kept.state)
    assert [(one.session_id, one.first, one.end) for one in found.done.dropped] == [
        (1, 10, 30),
        (2, 0, 30),
        (3, 0, 30),
    ]
    assert (kept.replicas, kept.merged.exists()) == ([], False)


def test_hard_reset_keeps_merged_segments_of_new_epoch(kept: Kept) -> None:
    shutil.rmtree(kept.merged)
    log = MergedLogBuilder(kept.merged, cluster_id=CLUSTER, stream="s", run=2)
    log.merge_all([str(kept.sessions / "1")])
    log.close()
    reset(kept.state)
    kept.hard_resetter().clear(kept.state)
    assert list_segments(REAL, str(kept.merged)) == [SegmentId(2, 0)]
    assert (kept.merged / "log.2.0").stat().st_size > 64


def test_malformed_hard_reset_record_raises_corrupt(kept: Kept) -> None:
    (kept.sessions / FILE).write_text('{"epoch": 2}')
    with pytest.raises(Corrupt):
        kept.hard_resetter()


# The merger


@pytest.fixture
def story() -> Story:
    """Six plans, a hard reset, and one plan after it."""
    story = Story.drawn()
    reset(story.state, 7)
    must(RunOpened, apply(story.state, opening("p0", run=1, newest=1)))
    written = story.sessions[1]
    written.write(1, 0, 900, random_runs(random.Random(1), range(900, 910), "p0"))
    story.merge(written.range_of(1, 1, 0, 0, len(written.marks[1, 0]) - 1))
    return story


@pytest.mark.parametrize("merged", [0, 2, 6])
def test_merger_restarts_at_cleared_position_from_any_progress(story: Story, merged: int) -> None:
    disk = MemoryDisk()
    story.put_sessions(disk)
    merger = open_merger(disk, story)
    try:
        before, behind = story.plans[:6], story.plans[6]
        position = behind.first_position
        merger.start(before[:merged], None, MergeProgress(0, 0, 0, 0))
        if merged:
            merger.wait_written(merged)
        last = before[-1]
        reached = MergeProgress(last.instruction, last.chain, last.total_bytes, position)
        merger.start([], None, reached, story.state.cleared)
        assert (merger.gap, merger.position) == (None, position)
        assert merger.written._replace(chain=0) == reached._replace(chain=0)
        if merged < 6:
            assert merger.durable == merger.written, "nothing of it is to be kept"
        merger.add(behind)
        merger.wait_written(7)
        assert merger.failure is None
        assert merger.written == story.reached
        assert len(merged_files(disk)[SegmentId(7, 0)]) == behind.end_offset
    finally:
        merger.close()


def test_merger_reports_gap_if_start_of_new_epoch_is_missing(story: Story) -> None:
    merger = open_merger(MemoryDisk(), story)
    try:
        merger.start([], story.end, story.reached, story.state.cleared)
        assert merger.gap == story.end
    finally:
        merger.close()


def without_bytes(state: SequencerState) -> WritePlan:
    """The plan of an instruction that writes nothing, as if all its messages were below a watermark."""
    state.instruction += 1
    state.sequenced_ns += 1
    said = SimpleNamespace(number=state.instruction, sequenced_ns=state.sequenced_ns)
    return merge._plan(state, said, [], begins=False)  # type: ignore[arg-type]


def cleared_story() -> tuple[Story, MergeProgress]:
    """Six plans and a hard reset, and the progress at that point."""
    story = Story.drawn()
    reset(story.state, 7)
    last = story.plans[-1]
    return story, MergeProgress(last.instruction, last.chain, last.total_bytes, story.state.position)


def test_instructions_without_bytes_after_hard_reset_become_durable() -> None:
    story, reached = cleared_story()
    disk = MemoryDisk()
    merger = open_merger(disk, story)
    try:
        merger.start([], None, reached, story.state.cleared)
        for _ in range(3):
            merger.add(without_bytes(story.state))
        merger.wait_written(story.state.instruction)
        assert merger.sync().instruction == story.state.instruction
    finally:
        merger.close()


def test_merger_on_new_disk_continues_after_first_instruction_without_bytes() -> None:
    story, reached = cleared_story()
    empty = without_bytes(story.state)
    must(RunOpened, apply(story.state, opening("p0", run=1, newest=1)))
    written = story.sessions[1]
    written.write(1, 0, 900, random_runs(random.Random(1), range(900, 910), "p0"))
    story.merge(written.range_of(1, 1, 0, 0, len(written.marks[1, 0]) - 1))
    disk = MemoryDisk()
    story.put_sessions(disk)
    merger = open_merger(disk, story)
    try:
        merger.start([empty], None, reached._replace(instruction=empty.instruction), story.state.cleared)
        merger.add(story.plans[-1])
        merger.wait_written(story.state.instruction)
        assert (merger.gap, merger.failure, merger.written) == (None, None, story.reached)
    finally:
        merger.close()


def test_instruction_without_bytes_after_hard_reset_does_not_change_merged_files() -> None:
    story, reached = cleared_story()
    cleared = story.state.cleared
    empty = without_bytes(story.state)
    behind = reached._replace(instruction=empty.instruction)
    must(RunOpened, apply(story.state, opening("p0", run=1, newest=1)))
    written = story.sessions[1]
    written.write(1, 0, 900, random_runs(random.Random(1), range(900, 910), "p0"))
    story.merge(written.range_of(1, 1, 0, 0, len(written.marks[1, 0]) - 1))
    files = []
    # One of the two nodes was away during that merge.
    for plans, is_at in (([empty], reached), ([], behind)):
        disk = MemoryDisk()
        story.put_sessions(disk)
        merger = open_merger(disk, story)
        try:
            merger.start([], None, is_at, cleared)
            for plan in [*plans, story.plans[-1]]:
                merger.add(plan)
            merger.wait_written(story.state.instruction)
            assert (merger.gap, merger.failure, merger.written) == (None, None, story.reached)
        finally:
            merger.close()
        files.append(merged_files(disk))
    assert files[0] == files[1]
    assert len(files[0][SegmentId(7, 0)]) == story.end.offset


def test_merger_reports_no_gap_if_forced_reset_follows_instruction_without_bytes() -> None:
    story, _ = cleared_story()
    empty = without_bytes(story.state)
    must(ClusterReset, apply(story.state, ResetCluster(False, 1 << 16, 77, REQUEST, "n1")))
    must(RunOpened, apply(story.state, opening("p0", run=1, newest=1)))
    written = story.sessions[1]
    written.write(1, 0, 900, random_runs(random.Random(1), range(900, 910), "p0"))
    story.merge(written.range_of(1, 1, 0, 0, len(written.marks[1, 0]) - 1))
    disk = MemoryDisk()  # A new disk, or a node that was away when the log was cleared.
    story.put_sessions(disk)
    merger = open_merger(disk, story)
    try:
        merger.start([empty, story.plans[-1]], story.end, story.reached, story.state.cleared)
        assert merger.gap is None
        merger.wait_written(story.state.instruction)
        assert (merger.failure, merger.written) == (None, story.reached)
        assert set(merged_files(disk)) == {SegmentId(1 << 16, 0)}
    finally:
        merger.close()


def test_merger_continues_in_new_segment_after_forced_soft_reset() -> None:
    story = Story.drawn()
    must(ClusterReset, apply(story.state, ResetCluster(False, 1 << 16, 77, REQUEST, "n1")))
    written = story.sessions[1]
    first = written.marks[0, 5][-1].number
    written.write(0, 6, first, random_runs(random.Random(1), range(first, first + 5), "p0"))
    story.merge(written.range_of(1, 0, 6, 0, len(written.marks[0, 6]) - 1))
    disk = MemoryDisk()
    story.put_sessions(disk)
    merger = open_merger(disk, story)
    try:
        merger.start(story.plans, story.end, story.reached)
        merger.wait_written(story.state.instruction)
        assert (merger.gap, merger.failure, merger.written) == (None, None, story.reached)
        assert max(merged_files(disk)) == SegmentId(1 << 16, 0)
        assert len(merged_files(disk)) > 1, "nothing of before is gone"
    finally:
        merger.close()


# Pushes


def test_opening_finished_run_raises_unreachable_instead_of_fenced() -> None:
    """A slow node proposes to open a run after other nodes have already continued with later runs."""
    state = new_state()
    session_id = do_open(state, "a", run=0)
    intakes = intakes_of(state)
    late = opening("a", run=0)
    hello = PushHello("s", "a", late.incarnation, None)

    async def play() -> None:
        # This node has not applied the run yet.
        state.sessions[session_id] = replace(state.sessions[session_id], active_runs=(), last_run=-1)
        asking = asyncio.create_task(
            intakes.open_session(IngestStream(intakes, hello, None, None), Run(0, late.run_id))
        )
        await asyncio.sleep(0)
        state.sessions[session_id] = replace(
            state.sessions[session_id], active_runs=(), last_run=2, done=(1, End(0, 128, 10))
        )
        command = replace(late, newest=session_id)
        intakes.on_applied(command, apply(state, command))
        with pytest.raises(Unreachable, match="run 0 is over: run 2 was opened"):
            await asking
        assert start_offset(state, state.sessions[session_id], None, is_released=False) == LogOffset(
            1, 0, 128
        )
        with pytest.raises(Unreachable, match="that run is over"):
            run_end(state, session_id, 0)

    asyncio.run(play())


def intakes_of(state: SequencerState) -> SessionIngest:
    follower = StateFollower(lambda _: None, lambda *_: None)
    follower.state, follower.standing = state, pb.Standing(is_caught_up=True, node="n1", epoch=2)
    return SessionIngest(follower, None, 3, lambda _: None, lambda: True)  # type: ignore[arg-type]


def test_start_offset_after_reset_is_next_run_and_old_run_is_fenced() -> None:
    state = new_state()
    session_id = do_open(state, "a", run=3)
    do_merge(state, piece(session_id, run=3))
    intakes = intakes_of(state)
    assert start_offset(state, state.sessions[session_id], None, is_released=False) == LogOffset(3, 0, 128)
    reset(state)
    assert start_offset(state, state.sessions[session_id], None, is_released=False) == LogOffset(4, 0, 0)
    stale = opening("a", run=3)

    async def play() -> None:
        hello = PushHello("s", "a", stale.incarnation, None)
        with pytest.raises(Fenced, match="a reset of the cluster ended run 3"):
            await intakes.open_session(IngestStream(intakes, hello, None, None), Run(3, stale.run_id))

    asyncio.run(play())
    do_open(state, "a", run=5)
    do_merge(state, piece(session_id, run=5))
    assert start_offset(state, state.sessions[session_id], None, is_released=False) == LogOffset(5, 0, 128)


# Messages to operators


class Desk:
    """Resets of a node whose control process is the test."""

    def __init__(self, root: Path, *, leader: str = "n2", epoch: int = 1) -> None:
        self.follower = StateFollower(lambda _: None, lambda *_: None)
        self.proposed: list[ResetCluster] = []
        self.standing(leader=leader, epoch=epoch)
        self.tasks: list[asyncio.Task[None]] = []
        self.state = new_state()
        self.follower.state = self.state
        root.mkdir(exist_ok=True)
        self.merged = root / "merged"
        self.hard_resetter = HardResetter(str(root), str(self.merged), "s")
        self.resets = ResetService("n1", self.follower, self.hard_resetter, self._propose, self._spawn)

    def standing(self, *, leader: str = "n2", epoch: int = 1) -> None:
        self.follower.standing = pb.Standing(leader=leader, epoch=epoch)

    def _propose(self, content: bytes) -> None:
        command = reset_of(content)
        assert command is not None
        self.proposed.append(command)

    def _spawn(self, work: object) -> None:
        self.tasks.append(asyncio.ensure_future(work))  # type: ignore[arg-type]

    async def until(self, is_so: object) -> None:
        async with asyncio.timeout(120):
            while not is_so():  # type: ignore[operator]
                await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reset_service, "PROPOSE_AGAIN_S", 0.001)


def test_reset_status_is_running_until_node_enters_next_epoch(tmp_path: Path) -> None:
    async def play() -> None:
        desk = Desk(tmp_path)
        assert desk.resets.status().state == "idle"
        begun = await desk.resets.begin("soft", force=False)
        assert (begun.state, begun.kind, begun.epoch) == ("running", "soft", 2)
        await desk.until(lambda: len(desk.proposed) > 2)
        assert len(set(desk.proposed)) == 1, "it is asked for until it is applied"
        with pytest.raises(ResetRefused, match="a reset is running"):
            await desk.resets.begin("hard", force=False)
        apply(desk.state, desk.proposed[0])
        await desk.tasks[0]
        assert desk.resets.status().state == "running", "this node is still in the epoch before"
        desk.standing(epoch=2)
        desk.resets.on_changed()
        done = desk.resets.status()
        assert (done.state, done.epoch, done.error) == ("done", 2, "")
        assert done.ended_ns > 0

    asyncio.run(play())


def test_reset_status_shows_later_reset_requested_by_another_node(
    tmp_path: Path,
) -> None:
    async def play() -> None:
        desk = Desk(tmp_path)
        await desk.resets.begin("soft", force=False)
        await desk.until(lambda: desk.proposed)
        apply(desk.state, desk.proposed[0])
        desk.standing(epoch=2)
        await desk.tasks[0]
        assert (desk.resets.status().state, desk.resets.status().epoch) == ("done", 2)
        apply(desk.state, ResetCluster(False, 3, 78, REQUEST))
        assert (desk.resets.status().state, desk.resets.status().epoch) == ("running", 3)
        desk.standing(epoch=3)
        assert (desk.resets.status().state, desk.resets.status().epoch) == ("done", 3)
        again = await desk.resets.begin("soft", force=False)
        assert (again.state, again.epoch) == ("running", 4)
        for task in desk.tasks:
            task.cancel()

    asyncio.run(play())


def test_reset_status_is_derived_from_replicated_state(tmp_path: Path) -> None:
    async def play() -> None:
        desk = Desk(tmp_path, epoch=2)
        reset(desk.state, is_hard=False)
        status = desk.resets.status()
        assert (status.state, status.kind, status.epoch, status.started_ns) == ("done", "soft", 2, 77)

    asyncio.run(play())


def test_hard_reset_status_is_done_with_dropped_ranges_after_files_are_deleted(
    tmp_path: Path,
) -> None:
    kept = Kept(tmp_path)
    reset(kept.state)

    async def play() -> None:
        desk = Desk(tmp_path / "x", epoch=2)
        desk.follower.state = kept.state
        found = kept.hard_resetter()
        resets = ResetService("n1", desk.follower, found, desk._propose, desk._spawn)
        assert resets.status().state == "running"
        found.clear(kept.state)
        status = resets.status()
        assert (status.state, status.kind) == ("done", "hard")
        assert [(one.session, one.first, one.end) for one in status.dropped] == [
            ("feed1", 10, 30),
            ("feed2", 0, 30),
            ("feed3", 0, 30),
        ]

    asyncio.run(play())


def test_reset_fails_if_another_reset_is_applied_first(tmp_path: Path) -> None:
    async def play() -> None:
        desk = Desk(tmp_path)
        await desk.resets.begin("soft", force=False)
        reset(desk.state, is_hard=False)
        await desk.tasks[0]
        status = desk.resets.status()
        assert (status.state, status.error) == ("failed", "Another reset was first.")

    asyncio.run(play())


def test_reset_fails_if_not_applied_before_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reset_service, "GIVE_UP_S", 0.01)

    async def play() -> None:
        desk = Desk(tmp_path)
        await desk.resets.begin("soft", force=False)
        await desk.tasks[0]
        assert desk.resets.status().state == "failed"
        assert (await desk.resets.begin("soft", force=False)).state == "running"
        for task in desk.tasks:
            task.cancel()

    asyncio.run(play())


def test_reset_without_leader_needs_force_and_warns_of_possible_loss(tmp_path: Path) -> None:
    async def play() -> None:
        desk = Desk(tmp_path, leader="")
        with pytest.raises(ResetRefused, match="no majority") as refused:
            await desk.resets.begin("soft", force=False)
        assert "are lost: positions from 0 on" in str(refused.value.hint)
        with MergedLogBuilder(desk.merged, cluster_id=CLUSTER, stream="s") as merged:
            merged.merge_all([publish(REAL, *[10] * 7, root=str(tmp_path))])
        with pytest.raises(ResetRefused, match="positions from 7 on may be given to other messages"):
            await desk.resets.begin("soft", force=False)
        asking = asyncio.ensure_future(desk.resets.begin("soft", force=True))
        await desk.until(lambda: desk.proposed)
        command = desk.proposed[0]
        assert (command.forced_by, command.epoch) == ("n1", forced_number(1))
        apply(desk.state, command)
        status = await asking
        assert (status.state, status.epoch) == ("running", forced_number(1))
        assert "only other nodes had is lost" in status.may_lose
        desk.standing(epoch=forced_number(1))
        assert desk.resets.status().state == "done"

    asyncio.run(play())


def test_forced_reset_rejected_by_control_raises_reset_refused(tmp_path: Path) -> None:
    async def play() -> None:
        desk = Desk(tmp_path, leader="")
        asking = asyncio.ensure_future(desk.resets.begin("soft", force=True))
        await desk.until(lambda: desk.proposed)
        desk.resets.on_refused(b"another request.", "not this one")
        desk.resets.on_refused(desk.proposed[0].request, "nobody else is there")
        with pytest.raises(ResetRefused, match="was not started") as refused:
            await asking
        assert refused.value.got == "nobody else is there"
        assert desk.resets.status().state == "idle"

    asyncio.run(play())
