"""Closed and forgotten sessions, the removal of their replicas, and what their publishers may send."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from pathlib import Path

import pytest
from data_process_bench import Lagging, Played, snapshot_of, with_peers
from log_items import items_of
from sequencer_core import do_close, do_fence, do_open, must, new_state

from replicator.protocol.handshake import PushHello
from replicator.protocol.messages import Chunk, LogOffset, Run
from replicator.receive.batch_boundaries import read_marks
from rt.errors import Fenced, TooManySessions
from rt.log.disk import REAL
from rt.log.format.segment import SegmentId
from rt.log.scan.directory import read_header
from rt.net.grpc_errors import Unreachable
from rt.net.identity import Identity
from rt.v1 import sequencer_pb2 as pb
from sequencer.sessions.ingest import IngestStream
from sequencer.state.apply import apply
from sequencer.state.apply_result import Forgotten, RunFenced, RunOpened
from sequencer.state.commands import Configure
from sequencer.state.session_commands import CloseSession, Forget, OpenRun
from sequencer.state.state import SequencerState
from sequencer.state.write_plan import encode_write_plan

# Sessions that are closed


def closed_with(lagging: Lagging) -> SequencerState:
    """The state after an operator closed the session at its merged end."""
    state = lagging.state
    must(RunFenced, apply(state, CloseSession("feed")))
    do_close(state, 1, 0, (lagging.end.roll, lagging.end.offset, lagging.count))
    assert [*state.closed] == [1]
    return state


def standing_with(*instructions: int) -> pb.ToData:
    """A message with nodes that have durably merged up to these instructions."""
    standing = pb.Standing(is_caught_up=True)
    for number, instruction in enumerate(instructions, 1):
        merged = pb.MergedReport(instruction=instruction)
        standing.nodes.add(name=f"n{number}", summary=pb.Summary(merged=merged))
    return pb.ToData(standing=standing)


@pytest.mark.parametrize("lacking", ["here", "a majority"])
def test_replica_of_closed_session_is_removed_once_merged_durably_here_and_on_majority(
    config, tmp_path, lacking: str
):
    lagging = Lagging(config, tmp_path / "publisher")
    state = closed_with(lagging)
    count = len(lagging.plans)

    async def play() -> None:
        async with Played(with_peers(config)) as played:
            data = played.data
            session = state.sessions[1]
            await played.say(snapshot_of(state, 20, tuple(map(encode_write_plan, lagging.plans))))
            # The merger needs the copy, so it is opened although the session is closed.
            await played.until(lambda: data.merger.position == lagging.count)
            durable = count if lacking == "a majority" else 0
            if durable:
                await asyncio.to_thread(data.merger.sync)
            others = (count, count) if lacking == "here" else (count - 1, 0)
            await played.say(standing_with(durable, *others))
            await data.closed_replicas.remove_some()
            assert lagging.copy_path.exists(), f"it is not durable: {lacking}"
            await asyncio.to_thread(data.merger.sync)
            await played.say(standing_with(count, count, 0))
            replica = data.replicas.get(1)
            with replica.in_use():
                await data.closed_replicas.remove_some()
                assert lagging.copy_path.exists(), "it is in use"
            await data.closed_replicas.remove_some()
            assert not lagging.copy_path.exists()
            assert data.replicas.all() == []
            await played.until(lambda: not data.merger._input.files)
            # The publisher returns. The copy continues after the merged end.
            again = await data.replicas.open_replica(session)
            assert again.receiver.next_offset == LogOffset(0, lagging.end.roll, 0)

    asyncio.run(play())


def test_replica_of_forgotten_session_is_removed_after_start_only_once_all_is_merged(config, tmp_path):
    lagging = Lagging(config, tmp_path / "publisher")
    state = closed_with(lagging)
    must(Forgotten, apply(state, Forget((1,))))
    (Path(config.sessions_directory) / "gone.7").mkdir()
    count = len(lagging.plans)

    async def play() -> None:
        async with Played(config) as played:
            data = played.data
            await played.say(standing_with(count, count, count))
            await played.say(snapshot_of(state, 20, tuple(map(encode_write_plan, lagging.plans))))
            await data.closed_replicas.remove_some()
            assert lagging.copy_path.exists()
            data.closed_replicas._released = lambda: count
            await played.say(standing_with(count, count, count))
            await data.closed_replicas.remove_some()
            assert [path.name for path in Path(config.sessions_directory).iterdir() if path.is_dir()] == []

    asyncio.run(play())


def test_replica_that_cannot_be_removed_blocks_no_other_and_is_logged_once(
    config, tmp_path, caplog, monkeypatch
):
    sessions = Path(config.sessions_directory)
    state = new_state()
    for number in range(1, 13):
        do_open(state, f"s{number}")
        do_fence(state, number)
        do_close(state, number, 0, (0, 64, 0))
    elsewhere = tmp_path / "elsewhere"
    for path in (elsewhere, *(sessions / str(number) for number in range(2, 13))):
        path.mkdir(parents=True)
        (path / "file").write_bytes(b"x")
    (sessions / "1").symlink_to(elsewhere)
    rename = type(REAL).rename

    def failing(disk: object, source: str, target: str) -> None:
        if os.path.basename(source) == "2":
            raise PermissionError(13, "no")
        rename(disk, source, target)

    monkeypatch.setattr(type(REAL), "rename", failing)

    async def play() -> None:
        async with Played(config) as played:
            await played.say(snapshot_of(state))
            for _ in range(3):
                await played.data.closed_replicas.remove_some()

    asyncio.run(play())
    assert (elsewhere / "file").exists()
    assert sorted(path.name for path in sessions.iterdir() if path.is_dir()) == ["1", "2"]
    assert [one.getMessage().count("closed_replica_not_removed") for one in caplog.records].count(1) == 2


def test_replica_is_renamed_durably_before_its_files_are_removed(config, monkeypatch):
    sessions = Path(config.sessions_directory)
    state = new_state()
    do_open(state)
    do_fence(state)
    do_close(state, 1, 0, (0, 64, 0))
    (sessions / "1").mkdir(parents=True)
    done: list[str] = []
    disk, rename, sync, rmtree = type(REAL), type(REAL).rename, type(REAL).sync_directory, shutil.rmtree
    monkeypatch.setattr(disk, "rename", lambda *args: (done.append("rename"), rename(*args))[1])
    monkeypatch.setattr(disk, "sync_directory", lambda *args: (done.append("sync"), sync(*args))[1])
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **_: (done.append("remove"), rmtree(*args))[1])

    async def play() -> None:
        async with Played(config) as played:
            await played.say(snapshot_of(state))
            done.clear()
            await played.data.closed_replicas.remove_some()

    asyncio.run(play())
    assert done == ["rename", "sync", "remove"]


def test_renamed_replica_is_removed_later_after_removal_fails(config, monkeypatch):
    sessions = Path(config.sessions_directory)
    state = new_state()
    do_open(state)
    do_fence(state)
    do_close(state, 1, 0, (0, 64, 0))
    (sessions / "1").mkdir(parents=True)
    rmtree = shutil.rmtree

    def failing(path: str, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(24, "too many files")

    async def play() -> None:
        async with Played(config) as played:
            await played.say(snapshot_of(state))
            monkeypatch.setattr(shutil, "rmtree", failing)
            await played.data.closed_replicas.remove_some()
            assert [path.name for path in sessions.iterdir() if path.is_dir()] == ["gone.1"]
            monkeypatch.setattr(shutil, "rmtree", rmtree)
            await played.data.closed_replicas.remove_some()

    asyncio.run(play())
    assert [path.name for path in sessions.iterdir() if path.is_dir()] == []


def test_replica_removal_runs_outside_the_event_loop(config, monkeypatch):
    gone = Path(config.sessions_directory) / "gone.7"
    gone.mkdir(parents=True)
    loops: list[bool] = []
    rmtree = shutil.rmtree

    def noted(path: str, **_: object) -> None:
        loops.append(threading.current_thread() is threading.main_thread())
        rmtree(path)

    monkeypatch.setattr(shutil, "rmtree", noted)

    async def play() -> None:
        async with Played(config) as played:
            await played.say(snapshot_of(new_state()))
            await played.data.closed_replicas.remove_some()

    asyncio.run(play())
    assert loops == [False]
    assert not gone.exists()


def hello_of(number: int, session: str = "feed") -> PushHello:
    return PushHello("s", session, number.to_bytes(16))


def test_session_limit_raises_too_many_sessions_without_proposal(config):
    async def play() -> None:
        async with Played(config) as played:
            state = new_state()
            apply(state, Configure(sessions_per_name_max=1))
            must(RunOpened, apply(state, OpenRun("feed~a", bytes(16), None, 0, bytes(8))))
            await played.say(snapshot_of(state))
            await played.say(pb.ToData(standing=pb.Standing(is_caught_up=True, node="n1")))
            intakes = played.data.ingest
            intakes._is_up = lambda: True
            with pytest.raises(TooManySessions, match="sessionsPerNameMax") as caught:
                await intakes.open_session(IngestStream(intakes, hello_of(1), None, None), Run(0, bytes(8)))
            assert caught.value.retriable
            assert not any(one.HasField("propose") for one in played.heard)

    asyncio.run(play())


def test_closed_session_accepts_next_run_and_forgotten_session_raises_fenced(config):
    async def play() -> None:
        async with Played(config) as played:
            state = new_state()
            must(RunOpened, apply(state, OpenRun("feed", (1).to_bytes(16), None, 3, bytes(8))))
            must(RunFenced, apply(state, CloseSession("feed")))
            do_close(state, 1, 3, (0, 64, 0))
            await played.say(snapshot_of(state))
            await played.say(pb.ToData(standing=pb.Standing(node="n1", is_caught_up=True)))
            intakes = played.data.ingest
            intakes._is_up = lambda: True
            intake = await intakes.accept(hello_of(1), Identity("s", "publisher", "feed"))
            assert intake.start.offset == LogOffset(4, 0, 0)
            await intake.close()
            must(Forgotten, apply(played.data.follower.state, Forget((1,))))
            with pytest.raises(Fenced, match="new directory"):
                await intakes.accept(hello_of(1), Identity("s", "publisher", "feed"))
            assert (
                await intakes.accept(hello_of(2), Identity("s", "publisher", "feed"))
            ).start.offset is None

    asyncio.run(play())


@pytest.mark.parametrize("is_here", [True, False])
def test_publisher_starts_at_next_run_after_last_run_was_closed(config, tmp_path, is_here: bool):
    """The publisher's disk still has unsent messages of the closed run. Another node had the next run
    opened.
    """
    lagging = Lagging(config, tmp_path / "publisher")
    state = closed_with(lagging)
    session = state.sessions[1]
    opening = OpenRun("feed", session.incarnation, None, 1, (1).to_bytes(8), 1)
    must(RunOpened, apply(state, opening))
    if not is_here:
        shutil.rmtree(lagging.copy_path)

    async def play() -> None:
        async with Played(with_peers(config)) as played:
            await played.say(snapshot_of(state, 20, tuple(map(encode_write_plan, lagging.plans))))
            await played.say(pb.ToData(standing=pb.Standing(node="n1", is_caught_up=True)))
            intakes = played.data.ingest
            intakes._is_up = lambda: True
            if not is_here:  # The copy was removed: enough merged logs have all of it.
                played.data.replicas.is_released = lambda _: True
            hello = PushHello("s", "feed", session.incarnation)
            intake = await intakes.accept(hello, Identity("s", "publisher", "feed"))
            assert intake.start.offset == LogOffset(1, 0, 0)
            await intake.open_run(Run(1, (1).to_bytes(8)))
            replica = played.data.replicas.get(1)
            assert replica is not None
            assert replica.receiver.next_offset in {None, LogOffset(1, 0, 0)}
            assert lagging.copy_path.exists(), "it is kept until it is merged durably"
            await intake.close()

    asyncio.run(play())


def test_closed_run_accepts_bytes_up_to_its_end_and_later_bytes_raise_unreachable(config, tmp_path):
    """The publisher may have started another run. The next stream reports the offset at which it
    continues.
    """
    lagging = Lagging(config, tmp_path / "publisher")
    items = items_of(REAL, lagging.publisher_path)
    chunk = next(one for one in items if isinstance(one, Chunk))
    marks = read_marks(REAL, str(lagging.copy_path), SegmentId(0, 0))
    shutil.rmtree(lagging.copy_path)
    state = new_state()
    session = lagging.state.sessions[1]
    header = read_header(REAL, lagging.publisher_path, SegmentId(0, 0))
    assert header is not None
    must(RunOpened, apply(state, OpenRun("feed", session.incarnation, None, 0, header.run_id)))
    must(RunFenced, apply(state, CloseSession("feed")))
    do_close(state, 1, 0, (0, marks[0].offset, marks[0].number))
    assert chunk.end.offset > marks[0].offset

    async def play() -> None:
        async with Played(config) as played:
            await played.say(snapshot_of(state))
            await played.say(pb.ToData(standing=pb.Standing(node="n1", is_caught_up=True)))
            intakes = played.data.ingest
            intakes._is_up = lambda: True
            hello = PushHello("s", "feed", session.incarnation)
            intake = await intakes.accept(hello, Identity("s", "publisher", "feed"))
            await intake.open_run(Run(0, header.run_id))
            with pytest.raises(Unreachable, match="end of a run"):
                await intake.append(chunk)
            replica = played.data.replicas.get(1)
            assert replica is not None
            assert replica.receiver.next_offset == LogOffset(0, 0, marks[0].offset)
            await intake.close()

    asyncio.run(play())
