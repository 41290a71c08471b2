"""Session replicas of a data process: opening, closing, repair, quarantine, and trimming after merging."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading

import pytest
from data_process_bench import Lagging, Played, snapshot_of, with_peers
from log_items import files_of
from msgspec.structs import replace
from sequencer_core import do_close, do_fence, do_join, do_open, must, new_state, opening

from replicator.protocol.handshake import PushHello
from replicator.protocol.messages import Chunk, LogOffset, Run
from replicator.receive.batch_boundaries import read_marks
from replicator.receive.session_receiver import SessionReceiver
from rt.errors import Closed, DiskFull, Fenced, RtError, StorageFailed, TooManyFiles
from rt.log.disk import REAL
from rt.log.format.checksum import sealed
from rt.log.format.segment import SegmentId
from rt.log.format.segment_table import TABLE_FILE, VERSION, encode_table
from rt.log.scan.directory import list_segments, read_header, read_table
from rt.v1 import sequencer_pb2 as pb
from sequencer.merged import merged_log as merging_module
from sequencer.merged.repair import GIVE_UP_TRIES
from sequencer.sessions import opener as opening_module
from sequencer.sessions import replica as replica_module
from sequencer.sessions.idle_replicas import IdleReplicas
from sequencer.sessions.ingest import IngestStream
from sequencer.state.apply import apply
from sequencer.state.apply_result import RunOpened
from sequencer.state.command_codec import encode_command
from sequencer.state.session_commands import OpenRun


def test_bit_flip_in_replica_during_downtime_is_not_merged(config, tmp_path):
    lagging = Lagging(config, tmp_path / "publisher")
    whole = read_marks(REAL, str(lagging.copy_path), SegmentId(0, 0))
    path = lagging.copy_path / "log.0.0"
    content = bytearray(path.read_bytes())
    content[whole[-1].offset - 9] ^= 1
    path.write_bytes(content)
    assert read_marks(REAL, str(lagging.copy_path), SegmentId(0, 0)) == whole[:-1]

    async def play() -> None:
        async with Played(config) as played:
            data = played.data
            await played.say(lagging.snapshot())
            await played.until(lambda: data.merger.missing is not None)
            assert data.merger.position < lagging.count
            assert data.merger.failure is None

    asyncio.run(play())


def test_rest_of_sealed_segment_is_merged_after_repair(config, tmp_path):
    lagging = Lagging(config, tmp_path / "publisher")
    assert len(lagging.segments) > 1
    path = lagging.copy_path / "log.0.0"
    good = path.read_bytes()
    bad = bytearray(good)
    bad[read_marks(REAL, str(lagging.copy_path), SegmentId(0, 0))[-1].offset - 9] ^= 1
    path.write_bytes(bad)

    async def play() -> None:
        async with Played(config) as played:
            data = played.data
            await played.say(lagging.snapshot())
            await played.until(lambda: data.replicas.get(1) and data.merger.missing is not None)
            replica = data.replicas.get(1)
            await data.replicas.read_again(1, SegmentId(0, 0))
            assert replica.read_again(SegmentId(0, 0)) == [], "it was not repaired"
            await data.replicas.read_again(99, SegmentId(0, 0))
            path.write_bytes(good)
            await data.replicas.read_again(1, SegmentId(0, 0))
            await played.until(lambda: data.merger.position == lagging.count)
            newest = SegmentId(0, lagging.end.roll)
            assert replica.read_again(newest) == [], "it is not sealed"

    asyncio.run(play())


def test_replica_with_thinned_boundaries_is_merged_whole(config, tmp_path, monkeypatch):
    """Plans may name boundaries that were thinned out: they are read from the files."""
    lagging = Lagging(config, tmp_path / "publisher")
    monkeypatch.setattr(replica_module, "MARKS_MAX", 4)
    recover, thinned = replica_module.SessionReplica.recover, list[int]()

    def counted(replica, consumed):
        recover(replica, consumed)
        known = {segment: {one.offset for one in marks} for segment, marks in replica._marks.items()}
        for segment in replica.unmerged:
            marks = read_marks(REAL, str(lagging.copy_path), segment)
            thinned.extend(one.offset for one in marks if one.offset not in known[segment])

    monkeypatch.setattr(replica_module.SessionReplica, "recover", counted)

    async def play() -> None:
        async with Played(config) as played:
            await played.say(lagging.snapshot())
            await played.until(lambda: played.data.merger.position == lagging.count)

    asyncio.run(play())
    assert thinned


def test_segment_repaired_while_replica_opens_is_merged(config, tmp_path, monkeypatch):
    """The opening task has already read the corrupt segment when the repair ends."""
    lagging = Lagging(config, tmp_path / "publisher")
    path = lagging.copy_path / "log.0.0"
    good = path.read_bytes()
    bad = bytearray(good)
    bad[read_marks(REAL, str(lagging.copy_path), SegmentId(0, 0))[-1].offset - 9] ^= 1
    path.write_bytes(bad)
    has_read, is_repaired = threading.Event(), threading.Event()

    def read_slowly(*arguments):
        marks = read_marks(*arguments)
        has_read.set()
        assert is_repaired.wait(60)
        return marks

    monkeypatch.setattr(replica_module, "read_marks", read_slowly)

    async def play() -> None:
        async with Played(config) as played:
            data = played.data
            await played.say(lagging.snapshot())
            await asyncio.to_thread(has_read.wait, 60)
            path.write_bytes(good)
            reading = asyncio.ensure_future(data.replicas.read_again(1, SegmentId(0, 0)))
            await asyncio.sleep(0)
            is_repaired.set()
            await reading
            await played.until(lambda: data.merger.position == lagging.count)

    asyncio.run(play())


def test_lagging_node_merges_from_own_replica_before_trimming_it(config, tmp_path):
    lagging = Lagging(config, tmp_path / "publisher")
    assert len(lagging.plans) >= 3

    async def play() -> None:
        async with Played(config) as played:
            data = played.data
            await played.say(lagging.snapshot())
            assert data.merger is not None
            await played.until(lambda: data.merger.position == lagging.count)
            assert lagging.segments == [*range(lagging.end.roll + 1)]
            durable = await asyncio.to_thread(data.merger.sync)
            assert durable.instruction == len(lagging.plans)
            await data.merged_log.release_input(durable.instruction)
            assert lagging.segments == [lagging.end.roll]

    asyncio.run(play())


def test_replica_keeps_skipped_segments_until_durable_in_merged_log(config, tmp_path):
    lagging = Lagging(config, tmp_path / "publisher")
    consumed = lagging.state.sessions[1]
    assert consumed.consumed is not None
    ahead = consumed.consumed.end._replace(roll=lagging.end.roll + 2, offset=64)
    further = replace(consumed, consumed=replace(consumed.consumed, end=ahead))

    async def play() -> None:
        async with Played(config) as played:
            data = played.data
            await played.say(lagging.snapshot())
            await played.until(lambda: data.replicas.get(1) is not None)
            replica = data.replicas.get(1)
            assert replica is not None
            data.merged_log._consumed._instructions[1] += 1
            await data.replicas.skip_merged(replica, further)
            assert replica.receiver.next_offset == LogOffset(0, ahead.roll, 0)
            assert lagging.segments == [*range(lagging.end.roll + 1)]
            data.merged_log._consumed._instructions[1] -= 1
            await played.until(lambda: data.merger.position == lagging.count)
            durable = await asyncio.to_thread(data.merger.sync)
            await data.merged_log.release_input(durable.instruction)
            assert lagging.segments == [lagging.end.roll]

    asyncio.run(play())


def test_replica_is_kept_until_majority_has_merged_it_durably(config, tmp_path, monkeypatch):
    monkeypatch.setattr(merging_module, "SYNC_S", 0.001)
    lagging = Lagging(config, tmp_path / "publisher")
    last = len(lagging.plans)

    def standing(instruction: int) -> pb.ToData:
        said = pb.Summary(merged=pb.MergedReport(instruction=instruction))
        return pb.ToData(standing=pb.Standing(nodes=[pb.NodeStanding(name="n3", summary=said)]))

    async def play() -> None:
        async with Played(with_peers(config)) as played:
            data = played.data
            await played.say(lagging.snapshot())
            data.tasks.keep(data.merged_log.keep_durable())
            await played.until(lambda: data.merger.durable.instruction == last)
            assert not data._is_released(1)
            await played.say(standing(2))
            await played.until(lambda: len(lagging.segments) < lagging.end.roll + 1)
            assert lagging.segments == [*range(1, lagging.end.roll + 1)], "the second one was merged in parts"
            await played.say(standing(last))
            await played.until(lambda: lagging.segments == [lagging.end.roll])
            assert data._is_released(1)

    asyncio.run(play())


def test_corrupt_replica_is_given_up_only_after_another_node_has_merged_it(config, tmp_path):
    lagging = Lagging(config, tmp_path / "publisher")
    said = pb.Summary(merged=pb.MergedReport(instruction=len(lagging.plans)))

    async def play() -> None:
        async with Played(with_peers(config)) as played:
            data = played.data
            await played.say(lagging.snapshot())
            await played.until(lambda: data.merger.position == lagging.count)
            await asyncio.to_thread(data.merger.sync)
            assert not data.repair._give_up(str(lagging.copy_path), 1)
            nodes = [pb.NodeStanding(name="n3", summary=said)]
            await played.say(pb.ToData(standing=pb.Standing(nodes=nodes)))
            assert data.repair._give_up(str(lagging.copy_path), 1)
            data.tasks.failure = None

    asyncio.run(play())


def test_replica_of_session_without_active_runs_opens_while_its_plans_wait(config, tmp_path):
    lagging = Lagging(config, tmp_path / "publisher")
    do_fence(lagging.state)
    end = lagging.state.sessions[1].consumed
    assert end is not None
    do_close(lagging.state, 1, 0, end.end)
    assert not lagging.state.sessions[1].active_runs

    async def play() -> None:
        async with Played(config) as played:
            await played.say(lagging.snapshot())
            await played.until(lambda: played.data.merger.position == lagging.count)

    asyncio.run(play())


def test_segments_merged_before_restart_are_trimmed_after_it(config, tmp_path):
    lagging = Lagging(config, tmp_path / "publisher")

    async def merge() -> None:
        async with Played(config) as played:
            await played.say(lagging.snapshot())
            await played.until(lambda: played.data.merger.position == lagging.count)

    async def again() -> None:
        async with Played(config) as played:
            await played.say(snapshot_of(lagging.state, 20))
            await asyncio.to_thread(played.data.merger.sync)
            await played.until(lambda: played.data.replicas.get(1) is not None)
            await played.data.merged_log.release_input(played.data.merger.durable.instruction)
            assert lagging.segments == [lagging.end.roll]

    asyncio.run(merge())
    assert len(lagging.segments) > 1
    asyncio.run(again())


def test_failed_replica_opening_is_retried_by_one_task_and_logged_once(config, monkeypatch, caplog):
    monkeypatch.setattr(opening_module, "OPEN_RETRY_S", 0.001)

    async def play() -> None:
        async with Played(config) as played:
            data = played.data
            open_replica, tries = data.replicas.open_replica, [0]

            async def fails_at_first(session):
                tries[0] += 1
                if tries[0] < 5:
                    raise DiskFull("no room")
                return await open_replica(session)

            monkeypatch.setattr(data.replicas, "open_replica", fails_at_first)
            state = new_state()
            do_open(state)
            do_open(state, run=1)
            do_fence(state)
            for _ in range(3):
                await played.say(snapshot_of(state))
            await played.until(lambda: played.finals)
            assert tries == [5]

    asyncio.run(play())
    assert caplog.text.count("session_replica_failed") == 1


def test_replica_opens_on_retry_after_late_opening_failure(config, tmp_path, monkeypatch, caplog):
    lagging = Lagging(config, tmp_path / "publisher")
    monkeypatch.setattr(opening_module, "OPEN_RETRY_S", 0.001)
    failures = [TooManyFiles("no more open files"), TooManyFiles("no more open files")]

    def fails_twice(*arguments):
        if failures:
            raise failures.pop()
        return read_marks(*arguments)

    monkeypatch.setattr(replica_module, "read_marks", fails_twice)

    async def play() -> None:
        async with Played(config) as played:
            await played.say(lagging.snapshot())
            await played.until(lambda: played.data.merger.position == lagging.count)

    asyncio.run(play())
    assert failures == []
    assert "DirectoryLocked" not in caplog.text
    assert caplog.text.count("session_replica_failed") == 1


def test_replica_opening_with_failed_trim_leaves_no_lock(config, tmp_path, monkeypatch):
    lagging = Lagging(config, tmp_path / "publisher")

    def fails(self, *arguments):
        raise StorageFailed("no disk")

    async def play() -> None:
        async with Played(config) as played:
            await played.say(lagging.snapshot())
            await played.until(lambda: played.data.merger.position == lagging.count)
            await asyncio.to_thread(played.data.merger.sync)
            await played.data.replicas.close_replica(played.data.replicas.get(1))
            monkeypatch.setattr(played.data.replicas, "is_released", lambda _: True)
            with monkeypatch.context() as patch:
                patch.setattr(SessionReceiver, "trim", fails)
                with pytest.raises(StorageFailed):
                    await played.data.replicas.open_replica(lagging.state.sessions[1])
            assert await played.data.replicas.open_replica(lagging.state.sessions[1])

    asyncio.run(play())


def forget_segment(lagging: Lagging) -> None:
    """Drop a middle entry of the segments table. All bytes stay valid, but the replica cannot be opened."""
    path = str(lagging.copy_path)
    table = read_table(REAL, path)
    assert table is not None
    first, _, *others = table.segments
    assert others
    (lagging.copy_path / TABLE_FILE).write_bytes(encode_table(replace(table, segments=(first, *others))))


def caught_up(*names: str, learners: tuple[str, ...] = ()) -> pb.ToData:
    nodes = [pb.NodeStanding(name=one, is_learner=one in learners) for one in (*names, *learners)]
    return pb.ToData(standing=pb.Standing(is_caught_up=True, nodes=nodes))


def name_another(lagging: Lagging) -> None:
    """Write another session's identity into the segments table, as if two directories were exchanged."""
    _change_identity(lagging, name="other")


def make_another_incarnation(lagging: Lagging) -> None:
    _change_identity(lagging, origin=bytes(16))


def _change_identity(lagging: Lagging, **changes: object) -> None:
    table = read_table(REAL, str(lagging.copy_path))
    assert table is not None
    changed = replace(table, identity=replace(table.identity, **changes))
    (lagging.copy_path / TABLE_FILE).write_bytes(encode_table(changed))


def attempts_of(data, monkeypatch) -> list[int]:
    """The results of `on_unopened` for each failed attempt from now on."""
    tries: list[int] = []
    on_unopened = data.repair.on_unopened
    monkeypatch.setattr(
        data.opener, "_on_unopened", lambda *found: tries.append(on_unopened(*found)) or tries[-1]
    )
    return tries


@pytest.mark.parametrize("spoil", [forget_segment, name_another, make_another_incarnation])
def test_valid_replica_that_cannot_open_is_quarantined_and_disk_id_changes(
    config, tmp_path, monkeypatch, spoil
):
    monkeypatch.setattr(opening_module, "OPEN_RETRY_S", 0.001)
    lagging = Lagging(config, tmp_path / "publisher")
    good = files_of(REAL, str(lagging.copy_path))
    spoil(lagging)
    do_join(lagging.state, "m1", "n1", "n2")

    async def first() -> bytes:
        async with Played(config) as played:
            data = played.data
            tries = attempts_of(data, monkeypatch)
            data.tasks.spawn(data.repair.repairer.run())
            await played.say(lagging.snapshot())
            await played.say(caught_up("m1", "n1", "n2", learners=("a1",)))
            await played.until(lambda: data.failure is not None)
            assert "replica was set aside" in str(data.failure)
            assert played.joins == [], "it reported less than it had"
            assert tries[-1] == 2 * GIVE_UP_TRIES + 1, "m1 would do it first"
            with pytest.raises(RtError, match="was set aside"):
                await data.replicas.open_replica(lagging.state.sessions[1])
            assert played.joins == []
            await data.tasks.cancel()
            data.tasks.failure = None
            return data._disk

    async def second() -> bytes:
        async with Played(config) as played:
            await played.say(lagging.snapshot())
            await played.say(caught_up("m1", "n1", "n2"))
            await played.until(lambda: played.joins == [lagging.state.joins])
            return played.data._disk

    assert asyncio.run(first()) != asyncio.run(second())
    (kept,) = (tmp_path / "s" / "damaged").glob("1.*")
    assert files_of(REAL, str(kept)) == good


@pytest.mark.parametrize("spoil", [forget_segment, name_another])
@pytest.mark.parametrize("others", [(), ("n2",), ("n2", "n3")])
def test_valid_replica_is_not_quarantined_without_majority_of_other_whole_disks(
    config, tmp_path, monkeypatch, others, spoil
):
    monkeypatch.setattr(opening_module, "OPEN_RETRY_S", 0.001)
    lagging = Lagging(config, tmp_path / "publisher")
    spoil(lagging)
    do_join(lagging.state, "n1", *others)
    if "n3" in others:
        do_join(lagging.state, "n3", disk=1)
        assert not lagging.state.disks["n3"].is_whole

    async def play() -> None:
        async with Played(config) as played:
            data = played.data
            tries = attempts_of(data, monkeypatch)
            data.tasks.spawn(data.repair.repairer.run())
            await played.say(lagging.snapshot())
            await played.say(caught_up("n1", *others))
            await played.until(lambda: tries and tries[-1] > 4 * GIVE_UP_TRIES)
            assert data.failure is None
            assert (lagging.copy_path / TABLE_FILE).exists()
            await data.tasks.cancel()

    asyncio.run(play())


def test_replica_under_repair_is_not_quarantined_after_many_failed_openings(config, tmp_path, monkeypatch):
    monkeypatch.setattr(opening_module, "OPEN_RETRY_S", 0.001)
    lagging = Lagging(config, tmp_path / "publisher")
    forget_segment(lagging)
    do_join(lagging.state, "n1", "n2", "n3")

    async def play() -> None:
        async with Played(config) as played:
            data = played.data
            tries = attempts_of(data, monkeypatch)
            await played.say(lagging.snapshot())
            await played.say(caught_up("n1", "n2", "n3"))
            await played.until(lambda: len(tries) > 4 * GIVE_UP_TRIES)
            assert set(tries) == {1}
            assert data.failure is None
            await data.tasks.cancel()

    asyncio.run(play())


def make_a_link(lagging: Lagging) -> None:
    real = lagging.copy_path.with_name("real")
    lagging.copy_path.rename(real)
    lagging.copy_path.symlink_to(real)


def write_a_newer_version(lagging: Lagging) -> None:
    path = lagging.copy_path / TABLE_FILE
    content = bytearray(path.read_bytes())
    content[8] = VERSION + 1
    path.write_bytes(sealed(bytes(content)))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [(make_a_link, "is a symbolic link"), (write_a_newer_version, "segments table of an unknown version")],
)
def test_replica_repairable_only_by_operator_raises_alarm_until_opened(
    config, tmp_path, monkeypatch, spoil, reason
):
    monkeypatch.setattr(opening_module, "OPEN_RETRY_S", 0.001)
    lagging = Lagging(config, tmp_path / "publisher")
    good = (lagging.copy_path / TABLE_FILE).read_bytes()
    do_join(lagging.state, "n1", "n2", "n3")
    spoil(lagging)

    async def play() -> None:
        async with Played(config) as played:
            data = played.data
            await played.say(lagging.snapshot())
            await played.say(caught_up("n1", "n2", "n3"))
            await played.until(lambda: data.opener.unopened)
            assert reason in str(data.opener.unopened[1])
            assert data.replicas.all() == []
            if lagging.copy_path.is_symlink():
                lagging.copy_path.unlink()
                lagging.copy_path.with_name("real").rename(lagging.copy_path)
            (lagging.copy_path / TABLE_FILE).write_bytes(good)
            await played.until(lambda: not data.opener.unopened)
            assert data.replicas.get(1) is not None

    asyncio.run(play())


@pytest.mark.parametrize("is_missing", [False, True])
def test_replica_opens_despite_incomplete_segment_without_needed_bytes(
    config, tmp_path, monkeypatch, is_missing
):
    """If its run is over, no node has the segment's bytes any more. So it could never be repaired."""
    monkeypatch.setattr(opening_module, "OPEN_RETRY_S", 0.001)
    lagging = Lagging(config, tmp_path / "publisher", unmerged=1)
    spoilt = lagging.copy_path / "log.0.0"

    async def merge() -> None:
        async with Played(config) as played:
            await played.say(lagging.snapshot())
            await played.until(lambda: played.data.merger.position == lagging.state.position)

    async def again() -> None:
        async with Played(config) as played:
            data = played.data
            await played.say(snapshot_of(lagging.state, 20))
            await played.until(lambda: data.opener.unopened)
            data.tasks.spawn(data.repair.repairer.run())
            await asyncio.to_thread(data.merger.sync)
            await played.until(lambda: data.replicas.get(1) is not None)
            assert lagging.segments == [lagging.end.roll - 1, lagging.end.roll]
            await played.until(lambda: not data.repair.repairer.corrupt_segments)
            await data.tasks.cancel()

    asyncio.run(merge())
    assert len(lagging.segments) > 2
    if is_missing:
        spoilt.unlink()
    else:
        os.truncate(spoilt, 100)
    asyncio.run(again())


def test_ends_of_merged_runs_are_pruned(config):
    async def play() -> None:
        async with Played(config) as played:
            state = new_state()
            do_open(state)
            await played.say(snapshot_of(state))
            await played.until(lambda: played.data.replicas.get(1) is not None)
            replica = played.data.replicas.get(1)
            assert replica is not None
            for run in range(3):
                replica.finals[run] = replica.announced[run] = pb.SessionEnd(session_id=1, run=run)
            replica.prune_before(LogOffset(2, 0, 64))
            assert [*replica.finals] == [*replica.announced] == [2]

    asyncio.run(play())


def test_replicas_open_concurrently_and_once_each(config, monkeypatch):
    opened: list[str] = []
    slow, both = threading.Event(), threading.Barrier(2, timeout=60)
    real = SessionReceiver.open

    def open_slowly(path: str, *arguments: object, **options: object) -> SessionReceiver:
        opened.append(path)
        both.wait()
        assert slow.wait(60)
        return real(path, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(SessionReceiver, "open", open_slowly)

    async def play() -> None:
        async with Played(config) as played:
            state = new_state()
            for which in range(2):
                do_open(state, f"s{which}", incarnation=which)
            await played.say(snapshot_of(state))
            replicas = played.data.replicas
            asked = [asyncio.ensure_future(replicas.open_replica(one)) for one in state.sessions.values()]
            given_up = asyncio.ensure_future(replicas.open_replica(state.sessions[1]))
            await played.until(lambda: len(opened) == 2)
            given_up.cancel()
            slow.set()
            assert [replica.session_id for replica in await asyncio.gather(*asked)] == [1, 2]
            assert len(opened) == 2

    asyncio.run(play())


def descriptors_of(directory: str) -> int:
    """How many descriptors of this process are of files below a directory."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            count += os.readlink(f"/proc/self/fd/{name}").startswith(directory + "/")
    return count


def test_merged_unused_replica_is_closed_and_fence_opens_it_again(config, tmp_path):
    lagging = Lagging(config, tmp_path / "publisher")

    async def play() -> None:
        async with Played(config) as played:
            data = played.data
            idle = IdleReplicas(
                data.follower, data.replicas, data.merged_log.is_released, open_max=0, idle_s=0
            )
            await played.say(lagging.snapshot())
            await played.until(lambda: data.merger.position == lagging.count)
            await idle.close_some()
            assert data.replicas.get(1) is not None, "not all of it is durable in the merged log"
            await asyncio.to_thread(data.merger.sync)
            replica = data.replicas.get(1)
            with replica.in_use():
                await idle.close_some()
                assert data.replicas.get(1) is replica
            await idle.close_some()
            assert data.replicas.all() == []
            assert descriptors_of(str(lagging.copy_path)) <= 1, "but for the one that the merger reads"
            path = str(lagging.copy_path)
            left = [one for one in list_segments(REAL, path) if read_header(REAL, path, one) is not None]
            assert left == [SegmentId(0, lagging.end.roll)], "what is merged is not trimmed"
            # The control process restarts. Nothing has to be merged, so no copy is opened.
            await played.say(lagging.snapshot())
            assert data.opener._opening == set()
            do_fence(lagging.state)
            await played.say(snapshot_of(lagging.state, 21))
            await played.until(lambda: played.finals)
            assert {(one.roll, one.offset) for one in played.finals} == {lagging.end[1:]}
            # The replica stays open, because its final end must be reported to the next control process.
            await idle.close_some()
            assert data.replicas.get(1) is not None

    asyncio.run(play())


def test_opening_replica_while_it_closes_returns_new_replica(config, tmp_path):
    lagging = Lagging(config, tmp_path / "publisher")

    async def play() -> None:
        async with Played(config) as played:
            data = played.data
            await played.say(lagging.snapshot())
            await played.until(lambda: data.merger.position == lagging.count)
            await asyncio.to_thread(data.merger.sync)
            replica = data.replicas.get(1)
            closing = asyncio.ensure_future(data.replicas.close_replica(replica))
            await asyncio.sleep(0)
            again = await data.replicas.open_replica(lagging.state.sessions[1])
            await closing
            assert again is not replica
            assert again.receiver.next_offset == lagging.end
            with pytest.raises(Closed):
                await replica.store.append(Chunk(lagging.end, b"x"))

    asyncio.run(play())


def test_open_replicas_and_their_descriptors_are_limited(config):
    async def play() -> None:
        async with Played(config) as played:
            data = played.data
            state = new_state()
            await played.say(snapshot_of(state))
            idle = IdleReplicas(data.follower, data.replicas, lambda _: True, open_max=4, idle_s=0)
            for which in range(100):
                must(RunOpened, apply(state, OpenRun(f"s{which}", which.to_bytes(16), None, 0, bytes(8))))
            data.follower.state = state
            for number in range(1, 101):
                await data.replicas.open_replica(state.sessions[number])
                await idle.close_some()
                assert len(data.replicas.all()) == min(number, 4)
            assert descriptors_of(config.sessions_directory) <= 4 * 4

    asyncio.run(play())


def test_rejected_run_opening_is_not_stored_and_requester_gets_fenced(config):
    async def play() -> None:
        async with Played(config) as played:
            intakes = played.data.ingest
            state = new_state()
            do_open(state, run=1)
            await played.say(snapshot_of(state, index=1))
            stale = opening(run=0, newest=1)
            for index in (2, 3):
                await played.say(pb.ToData(applied=pb.Applied(index=index, command=encode_command(stale))))
            assert not intakes._refusals
            intakes._is_up = lambda: True
            await played.say(pb.ToData(standing=pb.Standing(is_caught_up=True, node="n1")))
            hello = PushHello("s", stale.session, stale.incarnation, None)
            asking = asyncio.ensure_future(
                intakes.open_session(IngestStream(intakes, hello, None, None), Run(0, stale.run_id))
            )
            await played.until(lambda: any(one.HasField("propose") for one in played.heard))
            await played.say(pb.ToData(applied=pb.Applied(index=4, command=encode_command(stale))))
            with pytest.raises(Fenced):
                await asking
            assert not intakes._refusals
            assert not intakes._asked

    asyncio.run(play())


def test_segment_headers_from_replica_table_match_files_before_and_after_trim(config, tmp_path):
    lagging = Lagging(config, tmp_path / "publisher")

    async def play() -> None:
        async with Played(config) as played:
            data = played.data
            await played.say(lagging.snapshot())
            await played.until(lambda: data.merger.position == lagging.count)
            replica = data.replicas.get(1)
            segments = [SegmentId(0, y) for y in range(lagging.end.roll + 2)]
            for _ in range(2):
                known = [replica._header_of(segment) for segment in segments]
                assert known == [read_header(REAL, str(lagging.copy_path), one) for one in segments]
                durable = await asyncio.to_thread(data.merger.sync)
                await data.merged_log.release_input(durable.instruction)
            assert known[0] is None, "it was trimmed"
            assert known[-2] is not None

    asyncio.run(play())
