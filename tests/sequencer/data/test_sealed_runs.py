"""Sealed runs, runs deleted by their publisher, and superseded session directories."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from data_process_bench import Lagging, Played, snapshot_of
from disks import MemoryDisk
from log_items import SESSION, give, items_of, publish, session_copy
from msgspec.structs import replace
from sequencer_core import do_open, new_state, opening

import rt
from replicator.protocol.handshake import PushHello, PushProgress
from replicator.protocol.messages import Chunk, LogOffset, Run, WholeRun, WholeRuns
from replicator.push.whole_runs import joined
from rt.errors import Fenced
from rt.log.disk import REAL
from rt.log.format.segment import SegmentId, decode_segment_header
from rt.log.format.segment_table import TrimReason
from rt.log.scan.directory import read_identity
from rt.log.scan.scanner import SessionScanner
from rt.net.grpc_errors import Unreachable
from rt.net.identity import Identity
from rt.v1 import sequencer_pb2 as pb
from sequencer.config.config import NodeConfig
from sequencer.sessions.ingest import IngestStream
from sequencer.state.apply import apply
from sequencer.state.command_codec import decode_command, encode_command
from sequencer.state.commands import Command, MergeInstruction, MergeRange
from sequencer.state.session_commands import CloseRun, FenceRun, OpenRun, OpenSealedRuns, SealedRun
from sequencer.state.state import End, SequencerState

# Two directories of one session


@pytest.mark.parametrize("has_begun", [True, False])
@pytest.mark.parametrize("by", ["a command", "a snapshot"])
def test_idle_stream_of_superseded_directory_raises_fenced(
    config: NodeConfig, by: str, has_begun: bool
) -> None:
    """The newer directory may have reached other nodes only, so no stream of it replaces this one."""

    async def play() -> None:
        async with Played(config) as played:
            data, state = played.data, new_state()
            do_open(state, "a")
            do_open(state, "b")
            await played.say(snapshot_of(state, index=1))
            await played.say(pb.ToData(standing=pb.Standing(is_caught_up=True, node="n1")))
            data.ingest._is_up = lambda: True
            streams = {}
            for name in ("a", "b"):
                hello = PushHello("s", name, opening(name).incarnation, None)
                intake = streams[name] = await data.ingest.accept(hello, Identity("s", "publisher", name))
                told = None
                if has_begun:
                    await intake.open_run(Run(opening(name).run, opening(name).run_id))
                    told = await intake.next_progress(None)
                streams[name] = asyncio.ensure_future(intake.next_progress(told))
                await asyncio.sleep(0)
            newer = opening("a", incarnation=1, newest=1)
            if by == "a command":
                await played.say(pb.ToData(applied=pb.Applied(index=2, command=encode_command(newer))))
            else:
                apply(state, newer)
                await played.say(snapshot_of(state, index=2))
            async with asyncio.timeout(60):
                with pytest.raises(Fenced, match=r"a newer directory of this session.* example a~2"):
                    await streams["a"]
            assert not streams["b"].done()
            streams["b"].cancel()

    asyncio.run(play())


# Runs that the publisher has deleted


@pytest.mark.parametrize("lost", ["the copy", "its last segment"])
def test_node_announces_end_of_merged_run_deleted_before_announcement(config, tmp_path, lost: str):
    """The publisher may reach only this node. So no other node can announce that the next run may start."""
    lagging = Lagging(config, tmp_path / "publisher")
    shutil.rmtree(lagging.copy_path)
    if lost == "its last segment":
        items = items_of(REAL, lagging.publisher_path)
        begin = next(
            at
            for at, one in enumerate(items)
            if isinstance(one, Chunk) and one.start.roll == lagging.end.roll
        )
        copy = session_copy(REAL, str(lagging.copy_path), lagging.publisher_path)
        give(copy, items[:begin])
        copy.close()
    state, end = lagging.state, End(lagging.end.roll, lagging.end.offset, lagging.count)
    with rt.Publisher(tmp_path / "publisher", "s", publisher_id="feed") as publisher:
        publisher.publish(b"of the next run")
        publisher.flush()
        publisher._log.writer.trim(SegmentId(1, 0), TrimReason.MERGED)
        run_id = publisher._log.writer.active.run_id
        hello = PushHello("s", "feed", publisher._log.writer.identity.origin, None)

    def announced(played: Played) -> list[End]:
        reports = [one for said in played.heard for one in said.report.segments]
        found = [one.announced for one in reports if one.HasField("announced")]
        return [End(one.roll, one.offset, one.number) for one in found if one.run == 0]

    async def play() -> None:
        async with Played(config) as played:
            await played.say(snapshot_of(state, index=20))
            await played.say(pb.ToData(standing=pb.Standing(is_caught_up=True, node="n1")))
            played.data.ingest._is_up = lambda: True
            intake = await played.data.ingest.accept(hello, Identity("s", "publisher", "feed"))
            assert intake.start.offset == LogOffset(0, end.roll, 0)
            begin, *items = items_of(REAL, lagging.publisher_path, intake.start.offset)
            assert begin == Run(1, run_id), "nothing is said of the run before"
            opening = asyncio.ensure_future(intake.open_run(begin))
            await played.until(lambda: announced(played) or len(proposed(played)) > 1)
            assert announced(played) == [end]
            commands = (
                OpenRun("feed", hello.incarnation, None, 1, run_id, 1),
                FenceRun(1, 0),
                CloseRun(1, 0, *end),
            )
            for index, command in enumerate(commands, 21):
                assert not opening.done()
                await played.say(pb.ToData(applied=pb.Applied(index=index, command=encode_command(command))))
            await opening
            for item in items:
                await intake.append(item)
            assert set(announced(played)) == {end}
            await intake.close()

    asyncio.run(play())


# Whole runs


class Offline:
    """A publisher that was started `runs` times offline and once more without an end, and a state."""

    def __init__(self, runs: int) -> None:
        disk = MemoryDisk()
        for _ in range(runs + 1):
            publish(disk, 10)
        self.runs = [
            run
            for item in joined(items_of(disk, SESSION))
            if isinstance(item, WholeRuns)
            for run in item.runs
        ]
        assert len(self.runs) == runs
        self.incarnation = read_identity(disk, SESSION).origin
        self.hello = PushHello("s", "feed", self.incarnation, None)
        self.index = 1

    def opening(self, *, ends: bool = True) -> Command:
        if not ends:
            return OpenRun("feed", self.incarnation, None, 0, self.runs[0].run.run_id)
        sealed = [
            SealedRun(one.run.number, one.run.run_id, End(0, len(one.data), one.end)) for one in self.runs
        ]
        return OpenSealedRuns("feed", self.incarnation, None, tuple(sealed))

    def merging(self, state: SequencerState, *runs: WholeRun) -> MergeInstruction:
        ranges = tuple(map(range_of, runs))
        return MergeInstruction(state.instruction + 1, state.sequenced_ns + 1, ranges)

    async def commit(self, played: Played, command: Command) -> None:
        self.index += 1
        await played.say(pb.ToData(applied=pb.Applied(index=self.index, command=encode_command(command))))

    async def begin(self, played: Played) -> IngestStream:
        await played.say(snapshot_of(new_state(), index=1))
        await played.say(pb.ToData(standing=pb.Standing(is_caught_up=True, node="n1")))
        played.data.ingest._is_up = lambda: True
        return await played.data.ingest.accept(self.hello, Identity("s", "publisher", "feed"))

    def stored(self, played: Played) -> dict[SegmentId, bytes]:
        replica = Path(played.data.replicas.path(1))
        return {
            run.segment: file.read_bytes()
            for run in self.runs
            if (file := replica / run.segment.file_name).exists()
        }


def range_of(run: WholeRun) -> MergeRange:
    data = memoryview(run.data)
    scanner = SessionScanner(decode_segment_header(bytes(data[:64]), path="log"), marks=True)
    begin = scanner.chain
    scanner.scan(data[64:])
    return MergeRange(1, run.run.number, 0, 64, len(data), run.end - 1, 1, begin, scanner.chain)


def proposed(played: Played) -> list[Command]:
    return [decode_command(one.propose) for one in played.heard if one.HasField("propose")]


def test_sealed_runs_are_opened_by_one_command_and_stored_before_merging(config):
    offline = Offline(5)

    async def play() -> None:
        async with Played(config) as played:
            intake = await offline.begin(played)
            taking = asyncio.ensure_future(intake.append_runs(offline.runs))
            await played.until(lambda: proposed(played))
            assert proposed(played) == [offline.opening()]
            assert not played.data.replicas.all()
            await offline.commit(played, offline.opening())
            await taking
            assert offline.stored(played) == {run.segment: bytes(run.data) for run in offline.runs}
            await played.until(
                lambda: played.data.replicas.get(1).store.progress.durable == offline.runs[-1].end_offset
            )

            def reported() -> set[int]:
                reports = [one for said in played.heard for one in said.report.segments]
                return {one.run for one in reports if one.boundaries}

            await played.until(lambda: reported() == set(range(5)))
            await intake.close()

    asyncio.run(play())


def test_slow_node_stores_sealed_runs_already_merged_by_cluster(config):
    offline = Offline(6)

    async def play() -> None:
        async with Played(config) as played:
            intake = await offline.begin(played)
            state = played.data.follower.state
            taking = asyncio.ensure_future(intake.append_runs(offline.runs[:2]))
            await played.until(lambda: proposed(played))
            await offline.commit(played, offline.opening())
            await taking
            await offline.commit(played, offline.merging(state, *offline.runs[:5]))
            assert state.sessions[1].done[0] == 4
            await intake.append_runs(offline.runs[2:])
            assert offline.stored(played) == {run.segment: bytes(run.data) for run in offline.runs}
            with pytest.raises(Unreachable, match="after the end"):
                await intake.append(Chunk(offline.runs[2].end_offset, bytes(8)))
            await intake.close()

    asyncio.run(play())


@pytest.mark.parametrize("is_snapshot", [False, True])
def test_sealed_runs_fenced_and_closed_empty_are_not_acknowledged(config, is_snapshot: bool):
    """The stream accepted the runs before. They are over, and none of their messages are merged."""
    offline = Offline(4)

    async def play() -> None:
        async with Played(config) as played:
            intake = await offline.begin(played)
            state = played.data.follower.state
            taking = asyncio.ensure_future(intake.append_runs(offline.runs[:1]))
            await played.until(lambda: proposed(played))
            await offline.commit(played, offline.opening())
            await taking
            first = offline.runs[0]
            over = [FenceRun(1, 0, (1, 2, 3)), CloseRun(1, 0, 0, len(first.data), first.end, (1, 2))]
            if is_snapshot:
                for command in over:
                    apply(state, command)
                offline.index = 9
                await played.say(snapshot_of(state, index=9))
            else:
                for command in over:
                    await offline.commit(played, command)
            await offline.commit(played, offline.merging(state, first))
            assert played.data.follower.state.sessions[1].done[0] == 2
            for run in offline.runs[1:]:
                played.heard.clear()
                taking = asyncio.ensure_future(intake.append_runs([run]))
                await played.until(lambda taking=taking: taking.done() or proposed(played))
                for command in proposed(played):
                    await offline.commit(played, command)
                with pytest.raises(Unreachable):
                    await taking
            with_messages = {one: data for one, data in offline.stored(played).items() if len(data) > 64}
            assert with_messages == {first.segment: bytes(first.data)}
            await intake.close()

    asyncio.run(play())


def test_next_sealed_run_waits_while_previous_run_is_open_without_end(config):
    offline = Offline(3)

    async def play() -> None:
        async with Played(config) as played:
            intake = await offline.begin(played)
            await offline.commit(played, offline.opening(ends=False))
            await offline.commit(played, replace(offline.opening(), newest=1))
            taking = asyncio.ensure_future(intake.append_runs(offline.runs))
            await played.until(lambda: played.data.replicas.get(1) is not None)
            await played.until(lambda: played.data.replicas.get(1).receiver.has_ended)
            assert len(offline.stored(played)) == 1
            assert not taking.done()
            first = offline.runs[0]
            await offline.commit(played, FenceRun(1, 0))
            await offline.commit(played, CloseRun(1, 0, 0, len(first.data), first.end))
            await taking
            assert offline.stored(played) == {run.segment: bytes(run.data) for run in offline.runs}
            await intake.close()

    asyncio.run(play())


def test_run_of_restored_directory_is_not_reported_as_merged_instead_of_lost_run(config, tmp_path):
    """This node has not merged the lost run and never had a byte of it. It knows only the run's number."""
    root, copy = tmp_path / "root", tmp_path / "copy"
    publish(REAL, 10, root=str(root))
    shutil.copytree(root, copy)
    for _ in range(2):
        publish(REAL, 10, root=str(root))  # Runs 1 and 2, which the copy does not have.
    lost = runs_in(publish(REAL, 10, root=str(root)))
    publish(REAL, 10, root=str(copy))
    _, other = runs_in(publish(REAL, 10, root=str(copy)))
    incarnation = read_identity(REAL, str(copy / "s" / "sessions" / "feed")).origin
    state, whole = new_state(), {run.run.number: run for run in lost}
    sealed = tuple(SealedRun(one.run.number, one.run.run_id, end_of(one)) for one in lost)
    apply(state, OpenSealedRuns("feed", incarnation, None, sealed))
    merged = MergeInstruction(1, state.sequenced_ns + 1, (range_of(whole[0]), range_of(whole[1])))
    apply(state, merged)
    assert state.sessions[1].done == (1, end_of(whole[1]))

    async def play() -> None:
        async with Played(config) as played:
            await played.say(snapshot_of(state, index=1))
            await played.say(pb.ToData(standing=pb.Standing(is_caught_up=True, node="n1")))
            played.data.ingest._is_up = lambda: True
            hello = PushHello("s", "feed", incarnation, None)
            intake = await played.data.ingest.accept(hello, Identity("s", "publisher", "feed"))
            begin, chunk, seal = other.items
            assert (begin.number, begin.run_id != whole[1].run.run_id) == (1, True)
            await intake.open_run(begin)
            await intake.append(chunk)
            await intake.append(seal)
            store = played.data.replicas.get(1).store
            store.record_merged(chunk.end, other.end, is_urgent=True)
            await played.until(lambda: store.progress.durable == chunk.end)
            told = await intake.next_progress(None)
            assert told == PushProgress(chunk.end, other.end)
            nothing_new = asyncio.ensure_future(intake.next_progress(told))
            await asyncio.sleep(0)
            assert not nothing_new.done()
            opening = asyncio.ensure_future(intake.open_run(Run(2, other.run.run_id)))
            with pytest.raises(Fenced, match="another run id"):
                await opening
            await intake.open_run(whole[2].run)  # The publisher of the merged run would do this.
            assert (await nothing_new).merged == chunk.end
            await intake.close()

    asyncio.run(play())


def runs_in(path: str) -> list[WholeRun]:
    items = joined(items_of(REAL, path))
    return [run for item in items if isinstance(item, WholeRuns) for run in item.runs]


def end_of(run: WholeRun) -> End:
    return End(0, len(run.data), run.end)
