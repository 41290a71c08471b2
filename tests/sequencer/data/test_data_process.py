"""The data process alone, with a control process that the test plays."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from batches import CLUSTER
from disks import MemoryDisk
from nodes_bench import Story, wait_until
from receiving import SESSION, files_of, give, items_of, publish, session_copy
from receiving_node import make_pki
from sequencing import do_close, do_fence, do_merge, do_open, must, new_state, opening

import rt
from replicator.protocol.handshake import PushHello
from replicator.protocol.messages import Chunk, LogOffset, Run, WholeRun, WholeRuns
from replicator.push.whole_runs import joined
from replicator.receive.batch_boundaries import read_marks
from replicator.receive.session_receiver import SessionReceiver
from rt.cluster_epoch import epoch_of
from rt.errors import Closed, ClusterMismatch, Corrupt, DiskFull, Fenced, RtError, Timeout, TooManySessions
from rt.log.disk import REAL
from rt.log.format.running_checksum import chain_of_segment
from rt.log.format.segment import SegmentId, decode_segment_header, encode_segment_header
from rt.log.format.segment_table import TrimReason
from rt.log.scan.directory import list_segments, read_header, read_identity
from rt.log.scan.scanner import SessionScanner
from rt.net.grpc_errors import Unreachable
from rt.net.identity import Identity
from rt.v1 import sequencer_pb2 as pb
from sequencer.config.config import ClusterMember, NodeConfig
from sequencer.config.restart_policy import RestartLater
from sequencer.data import command_client
from sequencer.data.process import DataProcess
from sequencer.ipc.server import ControlServer
from sequencer.localcluster.loopback import free_port
from sequencer.merged import catch_up as catch_up_module
from sequencer.merged import merged_log as merging_module
from sequencer.merged.repair_queue import Repairer
from sequencer.sessions import opener as opening_module
from sequencer.sessions import peer_fetch
from sequencer.sessions.disk_id import open_disk_id
from sequencer.sessions.idle_replicas import IdleReplicas
from sequencer.sessions.ingest import IngestStream
from sequencer.state.apply import apply
from sequencer.state.apply_result import (
    CommandRejected,
    ConfigurationChanged,
    Forgotten,
    RunFenced,
    RunOpened,
)
from sequencer.state.command_codec import decode_command, encode_command
from sequencer.state.commands import (
    Command,
    Configure,
    DecideRequest,
    JoinDisk,
    MergeInstruction,
    MergeRange,
    ReleaseHold,
    ResetCluster,
    SubmitRequest,
)
from sequencer.state.session_commands import (
    CloseRun,
    CloseSession,
    FenceRun,
    Forget,
    OpenRun,
    OpenSealedRuns,
    SealedRun,
)
from sequencer.state.state import Configuration, End, SequencerState
from sequencer.state.state_codec import encode_state
from sequencer.state.write_plan import SessionEnd, WritePlan, encode_write_plan


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture
def config(pki: Path, tmp_path: Path) -> NodeConfig:
    ports = [free_port(), free_port()]
    return NodeConfig(
        stream="s",
        name="n1",
        directory=str(tmp_path),
        members={"n1": ClusterMember(f"127.0.0.1:{ports[0]}", f"127.0.0.1:{ports[1]}")},
        ca=str(pki / "ca.crt"),
        cert=str(pki / "n1.crt"),
        key=str(pki / "n1.key"),
        listen="127.0.0.1",
        raft_port=ports[0],
        data_port=ports[1],
        rest_port=0,
        health_port=0,
    )


def with_peers(config: NodeConfig) -> NodeConfig:
    """Members where nobody listens."""
    peers = {name: ClusterMember(*(f"127.0.0.1:{free_port()}" for _ in range(2))) for name in ("n2", "n3")}
    return replace(config, members={**config.members, **peers})


def snapshot_of(state: SequencerState, index: int = 1, plans: tuple[bytes, ...] = ()) -> pb.ToData:
    snapshot = pb.ControlSnapshot(index=index, state=encode_state(state), plans=plans)
    return pb.ToData(snapshot=snapshot)


CAUGHT_UP = pb.ToData(standing=pb.Standing(is_caught_up=True))


def _is_echo(report: pb.DataReport) -> bool:
    return not report.segments and not report.HasField("merged") and not report.disk_bytes


class Played:
    """A data process whose control process is this object: it hears what control would."""

    def __init__(self, config: NodeConfig) -> None:
        self.data = DataProcess(config)
        self.heard: list[pb.ToControl] = []
        self.data.link.send = self.heard.append  # type: ignore[method-assign]

    def say(self, message: pb.ToData) -> None:
        self.data._on_message(message)

    @property
    def merged(self) -> list[pb.MergedReport]:
        return [one.report.merged for one in self.heard if one.report.HasField("merged")]

    @property
    def finals(self) -> list[pb.SessionEnd]:
        reports = [one for said in self.heard for one in said.report.segments]
        return [one.final for one in reports if one.HasField("final")]

    @property
    def joins(self) -> list[int]:
        return [one.report.joins for one in self.heard if one.HasField("report") and _is_echo(one.report)]

    async def until(self, is_so) -> None:
        async with asyncio.timeout(60):
            while not is_so():
                await asyncio.sleep(0.001)

    async def __aenter__(self) -> Played:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.data._close()


@pytest.mark.parametrize(("epoch", "ends"), [(1, False), (2, False), (epoch_of(1 << 16, 7), True)])
def test_the_process_begins_anew_where_control_comes_back_from_a_force(
    config: NodeConfig, epoch: int, ends: bool
) -> None:
    async def play() -> None:
        async with Played(config) as played:
            state, said = new_state(), snapshot_of(new_state())
            said.snapshot.epoch_id = 1
            played.say(said)
            do_open(state, "a")
            later = snapshot_of(state)
            later.snapshot.epoch_id = epoch
            played.say(later)
            assert isinstance(played.data.failure, RestartLater) == ends
            assert played.data.tasks.stopping.is_set() == ends
            assert (played.data.follower.state == state) == (not ends), "nothing of it is heard before"
            command = encode_command(opening("b"))
            played.say(pb.ToData(applied=pb.Applied(index=said.snapshot.index + 1, command=command)))
            known = played.data.follower.state
            assert known is not None
            assert (known.session_of("b") is None) == ends, (
                "nor what is applied behind it, whatever its index"
            )

    asyncio.run(play())


def test_the_process_ends_where_the_cluster_went_on_without_its_data(config: NodeConfig) -> None:
    async def play() -> None:
        async with Played(config) as played:
            state = new_state()
            apply(state, JoinDisk(config.name, played.data._disk))
            apply(state, ResetCluster(False, 1 << 16, 7, bytes(16), "n9"))
            os.makedirs(os.path.join(config.sessions_directory, "1"))
            played.say(snapshot_of(state))
            assert isinstance(played.data.failure, ClusterMismatch)
            assert played.data.merger is None, "nothing is opened"

    asyncio.run(play())


def test_a_control_process_that_begins_anew_is_told_how_far_merging_is_durable(config):
    async def play() -> None:
        async with Played(config) as played:
            state = new_state()
            played.say(snapshot_of(state))
            played.heard.clear()
            played.say(snapshot_of(state))
            assert len(played.merged) == 1
            played.heard.clear()
            played.say(snapshot_of(state, index=0))
            assert len(played.merged) == 1

    asyncio.run(play())


def test_a_fence_that_came_in_a_snapshot_is_answered_also_by_a_copy_that_is_open(config):
    async def play() -> None:
        async with Played(config) as played:
            state = new_state()
            do_open(state)
            played.say(snapshot_of(state))
            await played.until(lambda: played.data.replicas.get(1) is not None)
            do_open(state, run=1)
            do_fence(state)
            assert played.finals == []
            played.say(snapshot_of(state, index=3))
            await played.until(lambda: played.finals)
            # Each report of the segment has it.
            assert {(one.session_id, one.run) for one in played.finals} == {(1, 0)}

    asyncio.run(play())


def test_a_fence_that_is_applied_is_answered_once_the_copy_is_open(config):
    async def play() -> None:
        async with Played(config) as played:
            state = new_state()
            do_open(state)
            played.say(snapshot_of(state, index=1))
            command = pb.Command(version=1, fence=pb.Fence(session_id=1, run=0)).SerializeToString()
            played.say(pb.ToData(applied=pb.Applied(index=2, command=command)))
            await played.until(lambda: played.finals)
            assert played.finals[0] == pb.SessionEnd(session_id=1, run=0, roll=0, offset=64)
            assert not played.finals[0].HasField("chain"), "nothing of it is here"

    asyncio.run(play())


@pytest.mark.parametrize(("end", "wants"), [((0, 64), False), ((1, 64), True), ((0, 128), True)])
def test_what_a_node_lacks_of_a_closed_run_is_fetched_also_where_it_ends_at_the_start_of_a_segment(
    config, monkeypatch, end, wants
):
    fetched: list[LogOffset] = []

    async def fetch(
        _replicas: object, _copy: object, _life: object, place: LogOffset, *_: object, **_line: object
    ) -> None:
        fetched.append(place)
        raise asyncio.CancelledError

    monkeypatch.setattr(peer_fetch, "fetch_session", fetch)

    async def play() -> None:
        async with Played(config) as played:
            played.data.fetcher._endpoints = ["127.0.0.1:1"]
            state = new_state()
            do_open(state)
            do_open(state, run=1)
            do_fence(state)
            if wants:
                do_close(state, 1, 0, (*end, 5))
            played.say(snapshot_of(state))
            place = LogOffset(0, *end)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait_for(played.data.fetcher.complete(1, place), 60)
            assert bool(fetched) == wants

    asyncio.run(play())


def test_a_full_disk_while_trimming_is_tried_again_and_stops_nothing(config, monkeypatch):
    async def play() -> None:
        async with Played(config) as played:
            state = new_state()
            do_open(state)
            played.say(snapshot_of(state))
            data = played.data
            await played.until(lambda: data.replicas.get(1) is not None)
            trimmed: list[LogOffset] = []
            answers: list[RtError | None] = [DiskFull("full"), None]

            async def trim(_copy: object, place: LogOffset) -> None:
                trimmed.append(place)
                if (error := answers.pop(0)) is not None:
                    raise error

            monkeypatch.setattr(data.replicas, "trim", trim)
            data.merged_log._consumed.put_back(1, SessionEnd(1, 0, 1, 64, 5))
            await data.merged_log.release_input(1)
            await data.merged_log.release_input(2)
            await data.merged_log.release_input(3)
            assert trimmed == [LogOffset(0, 1, 64)] * 2
            assert data.failure is None

    asyncio.run(play())


@pytest.fixture
def control(config: NodeConfig) -> Iterator[tuple[ControlServer, list[bytes]]]:
    """A listening control process, and what it hears."""
    heard: list[bytes] = []
    link = ControlServer(config.control_socket, heard.append, lambda: None, 0.01)
    thread = threading.Thread(target=link.run)
    thread.start()
    yield link, heard
    link.stop()
    thread.join(60)


def _damage_merged(config: NodeConfig) -> None:
    async def play() -> None:
        async with Played(config) as played:
            played.say(snapshot_of(new_state()))
            assert played.data.merger is not None
            writer = played.data.merger._output.writer
            assert writer is not None
            writer.start(SegmentId(0, 0), first=0, created_ns=1)

    asyncio.run(play())
    path = Path(config.merged_directory) / "log.0.0"
    data = bytearray(path.read_bytes())
    data[30] ^= 1
    path.write_bytes(data)


def test_a_merged_log_that_cannot_be_opened_ends_the_process_and_not_only_its_link(
    config, control, monkeypatch
):
    link, heard = control
    _damage_merged(config)
    monkeypatch.setattr(Repairer, "on_corrupt", lambda *_: False)

    async def play() -> None:
        data = DataProcess(config)
        running = asyncio.ensure_future(data.run())
        await asyncio.to_thread(wait_until, lambda: bool(heard))
        link.send(snapshot_of(new_state()).SerializeToString())
        with pytest.raises(Corrupt):
            await asyncio.wait_for(running, 60)

    asyncio.run(play())


@pytest.mark.parametrize("has_peers", [True, False])
def test_a_merged_log_that_is_damaged_is_opened_once_it_is_good_again(config, has_peers):
    _damage_merged(config)
    config = with_peers(config) if has_peers else config
    path = Path(config.merged_directory) / "log.0.0"

    async def play() -> None:
        async with Played(config) as played:
            data = played.data
            played.say(snapshot_of(new_state()))
            merger = data.merger
            assert merger is not None
            assert merger.damage is not None
            assert str(path) in data.repair.repairer.corrupt_files
            assert not data._is_released(1)
            for work in (data.repair.repairer.run(), data.catch_up.run()):
                data.tasks.keep(work)
            content = bytearray(path.read_bytes())
            content[30] ^= 1
            path.write_bytes(content)
            await played.until(lambda: merger.damage is None)
            assert merger.place == LogOffset(0, 0, 64)
            assert data.failure is None

    asyncio.run(play())


def test_what_a_pull_finds_damaged_is_mended(config):
    class Servicer:
        async def pull(self, _requests: object, _context: object) -> None:
            raise Corrupt("a block fails its checksum", path="/nowhere/log.0.0", offset=64)

    async def play() -> None:
        async with Played(config) as played:
            with pytest.raises(Corrupt):
                await played.data._pull(Servicer(), None, None)
            assert "/nowhere/log.0.0" in played.data.repair.repairer.corrupt_files

    asyncio.run(play())


def test_a_copy_that_nobody_can_mend_is_set_aside_and_the_node_then_is_another_one(config):
    async def play() -> None:
        async with Played(config) as played:
            state = new_state()
            do_open(state)
            played.say(snapshot_of(state))
            data = played.data
            await played.until(lambda: data.replicas.get(1) is not None)
            directory = data.replicas.path(1)
            healing = data.repair
            assert not healing._give_up(config.merged_directory, 100)
            assert not healing._give_up(directory, 1)
            assert healing._give_up(directory, 100)
            assert not Path(directory).exists()
            assert [path.name.split(".")[0] for path in Path(directory).parents[1].glob("damaged/*")] == ["1"]
            assert not (Path(config.sessions_directory) / "disk").exists()
            assert data.failure is not None
            data.tasks.failure = None

    asyncio.run(play())


def test_what_the_leader_says_a_peer_has_is_fetched_while_nobody_sends_it(config, monkeypatch):
    fetched: list[LogOffset] = []

    async def fetch(_replicas, _copy, _life, place, _stream, _channel, check, **_line) -> None:
        check()
        fetched.append(place)
        replica.has_stream = True
        check()

    monkeypatch.setattr(peer_fetch, "fetch_session", fetch)
    config = with_peers(config)
    wanted = pb.Fetch(session_id=1, run=0, roll=0, offset=640, holder="n2")

    async def play() -> None:
        nonlocal replica
        async with Played(config) as played:
            state = new_state()
            do_open(state)
            played.say(snapshot_of(state))
            data = played.data
            await played.until(lambda: data.replicas.get(1) is not None)
            replica = data.replicas.get(1)
            await data.fetcher.fetch(wanted)
            assert fetched == [LogOffset(0, 0, 640)]
            await data.fetcher.fetch(wanted)  # Its publisher is there.
            replica.has_stream = False
            await data.fetcher.fetch(pb.Fetch(session_id=1, run=3, roll=0, offset=640, holder="n2"))
            await data.fetcher.fetch(pb.Fetch(session_id=1, run=0, roll=0, offset=640, holder="n9"))
            do_open(state, run=1)
            do_fence(state)
            played.say(snapshot_of(state, index=3))
            await data.fetcher.fetch(wanted)
            assert fetched == [LogOffset(0, 0, 640)]
            assert not data.fetcher._fetching

    replica = None
    asyncio.run(play())


def test_a_node_that_cannot_make_what_is_merged_gets_all_that_peers_have_at_once(config, monkeypatch):
    """Not only the next block: a stream that flows would leave it behind for ever."""
    story = Story.drawn()
    wanted: list[tuple[bool, bool]] = []

    async def catch_up(
        _path: object, _stream: object, _endpoints: object, _tls: object, until, **_line
    ) -> None:
        end, position = story.end, story.state.position
        wanted.append((until(end, position - 1), until(end, position)))

    monkeypatch.setattr(catch_up_module, "catch_up", catch_up)

    async def play() -> None:
        async with Played(config) as played:
            played.say(snapshot_of(story.state))
            merger = played.data.merger
            assert merger is not None
            assert merger.gap == story.end
            await played.data.catch_up.catch_up(merger, ["b:1"], story.state.position)
            assert wanted == [(False, True)]

    asyncio.run(play())


def test_the_cluster_of_the_state_is_that_of_the_merged_log(config):
    async def play() -> None:
        async with Played(config) as played:
            played.say(pb.ToData(applied=pb.Applied(index=1, command=encode_command(opening()))))
            played.say(snapshot_of(SequencerState(bytes(16))))
            assert played.data.merger is None
            played.say(snapshot_of(new_state(), index=2))
            assert played.data.merger is not None
            assert played.data.merger._output.identity.origin == CLUSTER

    asyncio.run(play())


class Lagging:
    """A session of several segments: this node's copy holds all of it; the cluster merged it, elsewhere."""

    def __init__(self, config: NodeConfig, root: Path) -> None:
        path = self.publisher_path = publish(REAL, *[1500] * 12, root=str(root))
        self.copy_path = Path(config.sessions_directory) / "1"
        replica = session_copy(REAL, str(self.copy_path), path)
        give(replica, items_of(REAL, path))
        assert replica.next_offset is not None
        self.end, self.count, incarnation = replica.next_offset, replica.end, replica.identity.origin
        replica.close()
        header = read_header(REAL, path, SegmentId(0, 0))
        assert header is not None
        self.state = new_state()
        must(RunOpened, apply(self.state, OpenRun("feed", incarnation, None, 0, header.run_id)))
        self.plans: list[WritePlan] = []
        for roll in range(self.end.roll + 1):
            first = read_header(REAL, path, SegmentId(0, roll))
            marks = read_marks(REAL, path, SegmentId(0, roll))
            assert first is not None
            chain = chain_of_segment(encode_segment_header(first))
            last, number = marks[-1], first.first
            whole = MergeRange(1, 0, roll, 64, last.offset, number, last.number - number, chain, last.chain)
            self.plans.append(do_merge(self.state, whole))

    @property
    def segments(self) -> list[int]:
        """The Ys of the copy's segments that have bytes."""
        files = files_of(REAL, str(self.copy_path))
        return sorted(segment.roll for segment in files)

    def snapshot(self) -> pb.ToData:
        return snapshot_of(self.state, 20, tuple(map(encode_write_plan, self.plans)))


def test_a_bit_that_flipped_in_a_copy_while_the_node_was_down_is_not_merged(config, tmp_path):
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
            played.say(lagging.snapshot())
            await played.until(lambda: data.merger.missing is not None)
            assert data.merger.position < lagging.count
            assert data.merger.failure is None

    asyncio.run(play())


def test_a_node_that_lags_merges_from_its_own_copy_before_it_lets_go_of_it(config, tmp_path):
    lagging = Lagging(config, tmp_path / "publisher")
    assert len(lagging.plans) >= 3

    async def play() -> None:
        async with Played(config) as played:
            data = played.data
            played.say(lagging.snapshot())
            assert data.merger is not None
            await played.until(lambda: data.merger.position == lagging.count)
            assert lagging.segments == [*range(lagging.end.roll + 1)]
            durable = await asyncio.to_thread(data.merger.sync)
            assert durable.instruction == len(lagging.plans)
            await data.merged_log.release_input(durable.instruction)
            assert lagging.segments == [lagging.end.roll]

    asyncio.run(play())


def test_a_copy_that_skips_keeps_what_is_not_durable_in_the_merged_log_here(config, tmp_path):
    lagging = Lagging(config, tmp_path / "publisher")
    consumed = lagging.state.sessions[1]
    assert consumed.consumed is not None
    ahead = consumed.consumed.end._replace(roll=lagging.end.roll + 2, offset=64)
    further = replace(consumed, consumed=replace(consumed.consumed, end=ahead))

    async def play() -> None:
        async with Played(config) as played:
            data = played.data
            played.say(lagging.snapshot())
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


def test_a_copy_is_kept_until_a_majority_has_merged_it_durably_too(config, tmp_path, monkeypatch):
    monkeypatch.setattr(merging_module, "SYNC_S", 0.001)
    lagging = Lagging(config, tmp_path / "publisher")
    last = len(lagging.plans)

    def standing(instruction: int) -> pb.ToData:
        said = pb.Summary(merged=pb.MergedReport(instruction=instruction))
        return pb.ToData(standing=pb.Standing(nodes=[pb.NodeStanding(name="n3", summary=said)]))

    async def play() -> None:
        async with Played(with_peers(config)) as played:
            data = played.data
            played.say(lagging.snapshot())
            data.tasks.keep(data.merged_log.keep_durable())
            await played.until(lambda: data.merger.durable.instruction == last)
            assert not data._is_released(1)
            played.say(standing(2))
            await played.until(lambda: len(lagging.segments) < lagging.end.roll + 1)
            assert lagging.segments == [*range(1, lagging.end.roll + 1)], "the second one was merged in parts"
            played.say(standing(last))
            await played.until(lambda: lagging.segments == [lagging.end.roll])
            assert data._is_released(1)

    asyncio.run(play())


def test_a_damaged_copy_is_not_given_up_at_once_while_it_may_be_the_only_one(config, tmp_path):
    lagging = Lagging(config, tmp_path / "publisher")
    said = pb.Summary(merged=pb.MergedReport(instruction=len(lagging.plans)))

    async def play() -> None:
        async with Played(with_peers(config)) as played:
            data = played.data
            played.say(lagging.snapshot())
            await played.until(lambda: data.merger.position == lagging.count)
            await asyncio.to_thread(data.merger.sync)
            assert not data.repair._give_up(str(lagging.copy_path), 1)
            nodes = [pb.NodeStanding(name="n3", summary=said)]
            played.say(pb.ToData(standing=pb.Standing(nodes=nodes)))
            assert data.repair._give_up(str(lagging.copy_path), 1)
            data.tasks.failure = None

    asyncio.run(play())


def test_a_copy_of_a_session_that_is_over_is_opened_while_its_plans_wait(config, tmp_path):
    lagging = Lagging(config, tmp_path / "publisher")
    do_fence(lagging.state)
    end = lagging.state.sessions[1].consumed
    assert end is not None
    do_close(lagging.state, 1, 0, end.end)
    assert not lagging.state.sessions[1].active_runs

    async def play() -> None:
        async with Played(config) as played:
            played.say(lagging.snapshot())
            await played.until(lambda: played.data.merger.position == lagging.count)

    asyncio.run(play())


def test_what_was_merged_durably_before_a_restart_is_let_go_of_after_it(config, tmp_path):
    lagging = Lagging(config, tmp_path / "publisher")

    async def merge() -> None:
        async with Played(config) as played:
            played.say(lagging.snapshot())
            await played.until(lambda: played.data.merger.position == lagging.count)

    async def again() -> None:
        async with Played(config) as played:
            played.say(snapshot_of(lagging.state, 20))
            await asyncio.to_thread(played.data.merger.sync)
            await played.until(lambda: played.data.replicas.get(1) is not None)
            await played.data.merged_log.release_input(played.data.merger.durable.instruction)
            assert lagging.segments == [lagging.end.roll]

    asyncio.run(merge())
    assert len(lagging.segments) > 1
    asyncio.run(again())


def test_a_copy_that_cannot_be_opened_is_tried_again_by_one_task_and_told_once(config, monkeypatch, caplog):
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
                played.say(snapshot_of(state))
            await played.until(lambda: played.finals)
            assert tries == [5]

    asyncio.run(play())
    assert caplog.text.count("session_replica_failed") == 1


def test_ends_of_lives_that_are_merged_are_forgotten(config):
    async def play() -> None:
        async with Played(config) as played:
            state = new_state()
            do_open(state)
            played.say(snapshot_of(state))
            await played.until(lambda: played.data.replicas.get(1) is not None)
            replica = played.data.replicas.get(1)
            assert replica is not None
            for run in range(3):
                replica.finals[run] = replica.announced[run] = pb.SessionEnd(session_id=1, run=run)
            replica.prune_before(LogOffset(2, 0, 64))
            assert [*replica.finals] == [*replica.announced] == [2]

    asyncio.run(play())


def test_copies_open_side_by_side_and_each_once(config, monkeypatch):
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
            played.say(snapshot_of(state))
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


def test_a_copy_that_is_merged_and_unused_is_closed_and_a_fence_opens_it_again(config, tmp_path):
    lagging = Lagging(config, tmp_path / "publisher")

    async def play() -> None:
        async with Played(config) as played:
            data = played.data
            idle = IdleReplicas(
                data.follower, data.replicas, data.merged_log.is_released, open_max=0, idle_s=0
            )
            played.say(lagging.snapshot())
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
            # Control begins anew: nothing that is to be merged is there.
            played.say(lagging.snapshot())
            assert data.opener._opening == set()
            do_fence(lagging.state)
            played.say(snapshot_of(lagging.state, 21))
            await played.until(lambda: played.finals)
            assert {(one.roll, one.offset) for one in played.finals} == {lagging.end[1:]}
            # What is final of it is to be said again to the next control process.
            await idle.close_some()
            assert data.replicas.get(1) is not None

    asyncio.run(play())


def test_who_opens_a_copy_that_is_just_being_closed_gets_another_one(config, tmp_path):
    lagging = Lagging(config, tmp_path / "publisher")

    async def play() -> None:
        async with Played(config) as played:
            data = played.data
            played.say(lagging.snapshot())
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


def test_however_many_copies_were_opened_few_keep_their_descriptors(config):
    async def play() -> None:
        async with Played(config) as played:
            data = played.data
            state = new_state()
            played.say(snapshot_of(state))
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


def test_what_is_refused_to_others_is_not_kept_and_who_asked_is_told(config):
    async def play() -> None:
        async with Played(config) as played:
            intakes = played.data.ingest
            state = new_state()
            do_open(state, run=1)
            played.say(snapshot_of(state, index=1))
            stale = opening(run=0, newest=1)
            for index in (2, 3):
                played.say(pb.ToData(applied=pb.Applied(index=index, command=encode_command(stale))))
            assert not intakes._refusals
            intakes._is_up = lambda: True
            played.say(pb.ToData(standing=pb.Standing(is_caught_up=True, node="n1")))
            hello = PushHello("s", stale.session, stale.incarnation, None)
            asking = asyncio.ensure_future(
                intakes.open_session(IngestStream(intakes, hello, None, None), Run(0, stale.run_id))
            )
            await played.until(lambda: any(one.HasField("propose") for one in played.heard))
            played.say(pb.ToData(applied=pb.Applied(index=4, command=encode_command(stale))))
            with pytest.raises(Fenced):
                await asking
            assert not intakes._refusals
            assert not intakes._asked

    asyncio.run(play())


# Which disk it is


def test_what_joins_are_known_is_told_behind_all_that_is_held(config):
    """So whoever heard it has heard of everything that was acknowledged before a disk joined."""

    async def play() -> None:
        state = new_state()
        do_open(state)
        async with Played(config) as played:
            played.say(snapshot_of(state))
            played.say(CAUGHT_UP)
            await played.until(lambda: played.joins)
            assert played.joins == [0]
            played.heard.clear()
            played.data.reports.segment(pb.SegmentReport(session_id=1, boundaries=b"all of it"))
            joined = encode_command(JoinDisk("n2", b"D" * 16))
            played.say(pb.ToData(applied=pb.Applied(index=2, command=joined)))
            await played.until(lambda: played.joins)
            said = [
                [one.boundaries for one in said.report.segments] or said.report.joins for said in played.heard
            ]
            assert said == [[b"all of it"], 1]

    asyncio.run(play())


def test_a_copy_that_is_being_opened_is_waited_for_before_it_is_told_that_all_was(config, monkeypatch):
    async def play() -> None:
        state = new_state()
        do_open(state)
        async with Played(config) as played:
            replicas = played.data.replicas
            open_replica, is_open = replicas.open_replica, asyncio.Event()

            async def opens_late(session):
                await is_open.wait()
                return await open_replica(session)

            monkeypatch.setattr(replicas, "open_replica", opens_late)
            monkeypatch.setattr(opening_module, "POLL_S", 0.001)
            played.say(snapshot_of(state))
            played.say(CAUGHT_UP)
            await asyncio.sleep(0.01)
            assert not played.joins
            is_open.set()
            await played.until(lambda: played.joins)
            assert replicas.get(1) is not None

    asyncio.run(play())


def test_nothing_is_answered_before_what_earlier_terms_committed_was_heard(config, tmp_path, monkeypatch):
    """A snapshot knows nothing of sessions that were opened behind it, whose copies are here all the same."""

    async def play() -> None:
        monkeypatch.setattr(opening_module, "POLL_S", 0.001)
        lagging = Lagging(config, tmp_path / "publisher")
        session = lagging.state.sessions[1]
        async with Played(config) as played:
            played.say(snapshot_of(new_state()))
            await asyncio.sleep(0.01)
            assert not played.joins
            command = encode_command(
                OpenRun("feed", session.incarnation, None, 0, session.active_runs[0].run_id)
            )
            played.say(pb.ToData(applied=pb.Applied(index=2, command=command)))
            played.say(CAUGHT_UP)
            await played.until(lambda: played.joins)
            told = [one.roll for said in played.heard for one in said.report.segments]
            assert sorted(set(told)) == lagging.segments
            assert played.heard[-1].report.joins == played.joins[-1]

    asyncio.run(play())


def test_what_the_last_control_process_was_to_be_answered_is_not_told_the_next(config, monkeypatch):
    async def play() -> None:
        monkeypatch.setattr(opening_module, "POLL_S", 0.001)
        async with Played(config) as played:
            played.say(snapshot_of(new_state()))
            played.data._on_lost()
            played.say(CAUGHT_UP)
            await asyncio.sleep(0.02)
            assert not played.joins
            played.say(snapshot_of(new_state(), index=2))
            played.say(CAUGHT_UP)
            await played.until(lambda: played.joins)

    asyncio.run(play())


def test_the_disk_is_the_same_after_a_restart_and_another_one_if_it_was_lost(config):
    def disk() -> bytes:
        return DataProcess(config)._hello().disk

    async def play() -> tuple[bytes, bytes, bytes]:
        first, again = disk(), disk()
        shutil.rmtree(config.sessions_directory)
        return first, again, disk()

    first, again, other = asyncio.run(play())
    assert first == again != other


def test_a_disk_whose_name_cannot_be_read_is_damaged(tmp_path):
    known = open_disk_id(str(tmp_path / "sessions"))
    path = tmp_path / "sessions" / "disk"
    for damaged in (b"", path.read_bytes()[:-1], bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]):
        path.write_bytes(damaged)
        with pytest.raises(Corrupt, match="cannot be read"):
            open_disk_id(str(tmp_path / "sessions"))
    path.unlink()
    assert open_disk_id(str(tmp_path / "sessions")) != known


# Commands of operators


def test_what_an_operator_asks_for_is_proposed_until_it_is_decided_and_what_came_of_it_is_told(
    config, monkeypatch
):
    monkeypatch.setattr(command_client, "PROPOSE_AGAIN_S", 0.001)

    async def play() -> None:
        async with Played(config) as played:
            run = played.data.commands.run
            with pytest.raises(Unreachable):
                await run(Configure(roll_minutes=0))
            played.say(snapshot_of(new_state()))
            with pytest.raises(Unreachable, match="no leader"):
                await run(Configure(roll_minutes=0))
            played.say(pb.ToData(standing=pb.Standing(is_caught_up=True, leader="n1")))
            log = Log(played)
            for wanted in (Configure(roll_minutes=5), Configure(roll_minutes=0)):
                changing = asyncio.ensure_future(run(wanted))
                await log.until_asked(wanted, times=3)
                for _ in range(2):  # Both copies are in the log: it is carried out once.
                    log.apply(log.last)
                    log.apply(DecideRequest(log.last.id, 1))
                assert await changing == ConfigurationChanged()
                assert played.data.follower.state.configuration.roll_minutes == wanted.roll_minutes
            releasing = asyncio.ensure_future(run(ReleaseHold("nobody")))
            await log.until_asked(ReleaseHold("nobody"))
            log.apply(log.last)
            log.apply(DecideRequest(log.last.id, 1))
            assert isinstance(await releasing, CommandRejected)

    asyncio.run(play())


def test_what_an_operator_asked_for_too_late_is_told_never_to_happen(config, monkeypatch):
    monkeypatch.setattr(command_client, "PROPOSE_AGAIN_S", 0.001)

    async def play() -> None:
        async with Played(config) as played:
            played.say(snapshot_of(new_state()))
            nodes = [
                pb.NodeStanding(name=name, summary=pb.Summary(clock_ns=clock_ns))
                for name, clock_ns in (("n1", 10**18), ("n2", 5 * 10**9), ("n3", 7 * 10**9))
            ]
            standing = pb.Standing(is_caught_up=True, leader="n1", nodes=nodes)
            played.say(pb.ToData(standing=standing))
            log = Log(played)
            late = asyncio.ensure_future(played.data.commands.run(Configure(roll_bytes=7), timeout_s=60))
            await log.until_asked(Configure(roll_bytes=7))
            assert log.last.until_ns == 67 * 10**9  # By the clock that a majority has reached.
            log.apply(log.last)
            log.apply(DecideRequest(log.last.id, log.last.until_ns + 1))
            with pytest.raises(Timeout, match=r"too late.*Nothing was changed"):
                await late
            monkeypatch.setattr(command_client, "DECIDED_S", 0.0)
            played.heard.clear()
            with pytest.raises(Timeout, match="Check whether it was executed"):
                await played.data.commands.run(Configure(roll_bytes=7), timeout_s=0.01)
            await log.until_asked(Configure(roll_bytes=7))
            log.apply(log.last)  # It comes all the same, and is decided later.
            log.apply(DecideRequest(log.last.id, log.last.until_ns + 1))
            assert played.data.follower.state.configuration == Configuration()

    asyncio.run(play())


def test_of_what_was_decided_in_a_snapshot_nobody_says_that_nothing_was_changed(config, monkeypatch):
    monkeypatch.setattr(command_client, "PROPOSE_AGAIN_S", 0.001)
    monkeypatch.setattr(command_client, "DECIDED_S", 0.0)

    async def play() -> None:
        async with Played(config) as played:
            played.say(snapshot_of(new_state()))
            played.say(pb.ToData(standing=pb.Standing(is_caught_up=True, leader="n1")))
            log = Log(played)
            changing = asyncio.ensure_future(
                played.data.commands.run(Configure(roll_minutes=5), timeout_s=0.2)
            )
            await log.until_asked(Configure(roll_minutes=5))
            state = new_state()
            apply(state, log.last)
            apply(state, DecideRequest(log.last.id, 1))  # The control process ended behind it.
            played.say(snapshot_of(state))
            log.apply(DecideRequest(log.last.id, 1))  # Another leader's.
            with pytest.raises(Timeout, match="Check whether it was executed"):
                await changing
            assert played.data.follower.state.configuration.roll_minutes == 5

    asyncio.run(play())


class Log:
    """What is committed behind a first snapshot, and the requests that were proposed for it."""

    def __init__(self, played):
        self._played, self._index = played, 1
        self.last = None

    def apply(self, command):
        self._index += 1
        applied = pb.Applied(index=self._index, command=encode_command(command))
        self._played.say(pb.ToData(applied=applied))

    async def until_asked(self, operation, *, times=1):
        """So often the operation was asked for, with one id."""

        def asked():
            found = [decode_command(one.propose) for one in self._played.heard if one.HasField("propose")]
            return [one for one in found if isinstance(one, SubmitRequest) and one.operation == operation]

        await self._played.until(lambda: len(asked()) >= times)
        self.last = asked()[-1]
        assert {one.id for one in asked()} == {self.last.id}


# Two directories of one session


@pytest.mark.parametrize("by", ["a command", "a snapshot"])
def test_an_idle_stream_of_a_directory_that_another_one_took_over_from_is_told_so_at_once(
    config: NodeConfig, by: str
) -> None:
    """The other one may have reached other nodes only: no stream of it takes the place of this one."""

    async def play() -> None:
        async with Played(config) as played:
            data, state = played.data, new_state()
            do_open(state, "a")
            do_open(state, "b")
            played.say(snapshot_of(state, index=1))
            played.say(pb.ToData(standing=pb.Standing(is_caught_up=True, node="n1")))
            data.ingest._is_up = lambda: True
            streams = {}
            for name in ("a", "b"):
                hello = PushHello("s", name, opening(name).incarnation, None)
                intake = streams[name] = await data.ingest.accept(hello, Identity("s", "publisher", name))
                told = await intake.next_progress(None)
                streams[name] = asyncio.ensure_future(intake.next_progress(told))
                await asyncio.sleep(0)
            newer = opening("a", incarnation=1, newest=1)
            if by == "a command":
                played.say(pb.ToData(applied=pb.Applied(index=2, command=encode_command(newer))))
            else:
                apply(state, newer)
                played.say(snapshot_of(state, index=2))
            async with asyncio.timeout(60):
                with pytest.raises(Fenced, match="a newer directory of this session"):
                    await streams["a"]
            assert not streams["b"].done()
            streams["b"].cancel()

    asyncio.run(play())


# A run that the publisher has deleted


@pytest.mark.parametrize("lost", ["the copy", "its last segment"])
def test_a_node_announces_the_end_of_a_run_that_was_merged_whole_and_deleted_before_it_was_announced(
    config, tmp_path, lost: str
):
    """The publisher may reach this node only, so no other one can say that the next run may begin."""
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
            played.say(snapshot_of(state, index=20))
            played.say(pb.ToData(standing=pb.Standing(is_caught_up=True, node="n1")))
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
                played.say(pb.ToData(applied=pb.Applied(index=index, command=encode_command(command))))
            await opening
            for item in items:
                await intake.append(item)
            assert set(announced(played)) == {end}
            await intake.close()

    asyncio.run(play())


# Sessions that are closed


def closed_with(lagging: Lagging) -> SequencerState:
    """An operator has closed it where it is merged."""
    state = lagging.state
    must(RunFenced, apply(state, CloseSession("feed")))
    do_close(state, 1, 0, (lagging.end.roll, lagging.end.offset, lagging.count))
    assert [*state.closed] == [1]
    return state


def standing_with(*instructions: int) -> pb.ToData:
    """Nodes that have merged durably up to these instructions."""
    standing = pb.Standing(is_caught_up=True)
    for number, instruction in enumerate(instructions, 1):
        merged = pb.MergedReport(instruction=instruction)
        standing.nodes.add(name=f"n{number}", summary=pb.Summary(merged=merged))
    return pb.ToData(standing=standing)


@pytest.mark.parametrize("lacking", ["here", "a majority"])
def test_the_copy_of_a_closed_session_is_removed_once_it_is_merged_durably_here_and_on_a_majority(
    config, tmp_path, lacking: str
):
    lagging = Lagging(config, tmp_path / "publisher")
    state = closed_with(lagging)
    count = len(lagging.plans)

    async def play() -> None:
        async with Played(with_peers(config)) as played:
            data = played.data
            session = state.sessions[1]
            played.say(snapshot_of(state, 20, tuple(map(encode_write_plan, lagging.plans))))
            # The copy is opened although the session is closed: the merger needs it.
            await played.until(lambda: data.merger.position == lagging.count)
            durable = count if lacking == "a majority" else 0
            if durable:
                await asyncio.to_thread(data.merger.sync)
            others = (count, count) if lacking == "here" else (count - 1, 0)
            played.say(standing_with(durable, *others))
            await data.closed_replicas.remove_some()
            assert lagging.copy_path.exists(), f"it is not durable: {lacking}"
            await asyncio.to_thread(data.merger.sync)
            played.say(standing_with(count, count, 0))
            replica = data.replicas.get(1)
            with replica.in_use():
                await data.closed_replicas.remove_some()
                assert lagging.copy_path.exists(), "it is in use"
            await data.closed_replicas.remove_some()
            assert not lagging.copy_path.exists()
            assert data.replicas.all() == []
            await played.until(lambda: not data.merger._input.files)
            # Its publisher comes again: the copy goes on behind what is merged.
            again = await data.replicas.open_replica(session)
            assert again.receiver.next_offset == LogOffset(0, lagging.end.roll, 0)

    asyncio.run(play())


def test_a_copy_without_a_record_is_removed_at_the_start_but_not_before_all_is_merged_here(config, tmp_path):
    lagging = Lagging(config, tmp_path / "publisher")
    state = closed_with(lagging)
    must(Forgotten, apply(state, Forget((1,))))
    (Path(config.sessions_directory) / "gone.7").mkdir()
    count = len(lagging.plans)

    async def play() -> None:
        async with Played(config) as played:
            data = played.data
            played.say(standing_with(count, count, count))
            played.say(snapshot_of(state, 20, tuple(map(encode_write_plan, lagging.plans))))
            await data.closed_replicas.remove_some()
            assert lagging.copy_path.exists()
            data.closed_replicas._released = lambda: count
            played.say(standing_with(count, count, count))
            await data.closed_replicas.remove_some()
            assert [path.name for path in Path(config.sessions_directory).iterdir() if path.is_dir()] == []

    asyncio.run(play())


def test_a_copy_that_cannot_be_removed_keeps_no_other_one_and_is_told_of_once(
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
            played.say(snapshot_of(state))
            for _ in range(3):
                await played.data.closed_replicas.remove_some()

    asyncio.run(play())
    assert (elsewhere / "file").exists()
    assert sorted(path.name for path in sessions.iterdir() if path.is_dir()) == ["1", "2"]
    assert [one.getMessage().count("closed_replica_not_removed") for one in caplog.records].count(1) == 2


def test_a_copy_has_another_name_durably_before_the_first_file_of_it_goes(config, monkeypatch):
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
            played.say(snapshot_of(state))
            done.clear()
            await played.data.closed_replicas.remove_some()

    asyncio.run(play())
    assert done == ["rename", "sync", "remove"]


def test_what_is_left_of_a_removed_copy_goes_later_if_it_cannot_go_now(config, monkeypatch):
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
            played.say(snapshot_of(state))
            monkeypatch.setattr(shutil, "rmtree", failing)
            await played.data.closed_replicas.remove_some()
            assert [path.name for path in sessions.iterdir() if path.is_dir()] == ["gone.1"]
            monkeypatch.setattr(shutil, "rmtree", rmtree)
            await played.data.closed_replicas.remove_some()

    asyncio.run(play())
    assert [path.name for path in sessions.iterdir() if path.is_dir()] == []


def test_a_snapshot_has_nothing_removed_in_the_event_loop(config, monkeypatch):
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
            played.say(snapshot_of(new_state()))
            await played.data.closed_replicas.remove_some()

    asyncio.run(play())
    assert loops == [False]
    assert not gone.exists()


def hello_of(number: int, session: str = "feed") -> PushHello:
    return PushHello("s", session, number.to_bytes(16))


def test_a_publisher_beyond_the_limit_is_told_so_and_nothing_is_proposed(config):
    async def play() -> None:
        async with Played(config) as played:
            state = new_state()
            apply(state, Configure(sessions_per_name_max=1))
            must(RunOpened, apply(state, OpenRun("feed~a", bytes(16), None, 0, bytes(8))))
            played.say(snapshot_of(state))
            played.say(pb.ToData(standing=pb.Standing(is_caught_up=True, node="n1")))
            intakes = played.data.ingest
            intakes._is_up = lambda: True
            with pytest.raises(TooManySessions, match="sessionsPerNameMax") as caught:
                await intakes.open_session(IngestStream(intakes, hello_of(1), None, None), Run(0, bytes(8)))
            assert caught.value.retriable
            assert not any(one.HasField("propose") for one in played.heard)

    asyncio.run(play())


def test_of_a_closed_session_only_the_next_start_is_taken_and_a_forgotten_one_never(config):
    async def play() -> None:
        async with Played(config) as played:
            state = new_state()
            must(RunOpened, apply(state, OpenRun("feed", (1).to_bytes(16), None, 3, bytes(8))))
            must(RunFenced, apply(state, CloseSession("feed")))
            do_close(state, 1, 3, (0, 64, 0))
            played.say(snapshot_of(state))
            played.say(pb.ToData(standing=pb.Standing(node="n1", is_caught_up=True)))
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
def test_a_publisher_whose_last_run_was_closed_without_it_begins_with_the_next_run_on_every_node(
    config, tmp_path, is_here: bool
):
    """Its disk still holds what it had not sent of the closed run. Another node had the next run opened."""
    lagging = Lagging(config, tmp_path / "publisher")
    state = closed_with(lagging)
    session = state.sessions[1]
    opening = OpenRun("feed", session.incarnation, None, 1, (1).to_bytes(8), 1)
    must(RunOpened, apply(state, opening))
    if not is_here:
        shutil.rmtree(lagging.copy_path)

    async def play() -> None:
        async with Played(with_peers(config)) as played:
            played.say(snapshot_of(state, 20, tuple(map(encode_write_plan, lagging.plans))))
            played.say(pb.ToData(standing=pb.Standing(node="n1", is_caught_up=True)))
            intakes = played.data.ingest
            intakes._is_up = lambda: True
            if not is_here:  # It was removed, for all of it is in enough merged logs.
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


def test_of_a_closed_run_all_before_its_end_is_taken_and_what_is_after_it_ends_no_publisher(config, tmp_path):
    """The publisher may have begun another run: where it goes on, the next stream is told."""
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
            played.say(snapshot_of(state))
            played.say(pb.ToData(standing=pb.Standing(node="n1", is_caught_up=True)))
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


def test_the_headers_of_a_copy_are_known_without_its_files(config, tmp_path):
    lagging = Lagging(config, tmp_path / "publisher")

    async def play() -> None:
        async with Played(config) as played:
            data = played.data
            played.say(lagging.snapshot())
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


# Runs that go whole


class Offline:
    """A publisher that was started some times offline, its last start without an end, and a state."""

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

    def commit(self, played: Played, command: Command) -> None:
        self.index += 1
        played.say(pb.ToData(applied=pb.Applied(index=self.index, command=encode_command(command))))

    async def begin(self, played: Played) -> IngestStream:
        played.say(snapshot_of(new_state(), index=1))
        played.say(pb.ToData(standing=pb.Standing(is_caught_up=True, node="n1")))
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


def test_whole_runs_are_opened_by_one_command_and_stored_before_any_of_them_is_merged(config):
    offline = Offline(5)

    async def play() -> None:
        async with Played(config) as played:
            intake = await offline.begin(played)
            taking = asyncio.ensure_future(intake.append_runs(offline.runs))
            await played.until(lambda: proposed(played))
            assert proposed(played) == [offline.opening()]
            assert not played.data.replicas.all()
            offline.commit(played, offline.opening())
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


def test_a_slow_node_still_takes_sealed_runs_that_the_cluster_has_merged(config):
    offline = Offline(6)

    async def play() -> None:
        async with Played(config) as played:
            intake = await offline.begin(played)
            state = played.data.follower.state
            taking = asyncio.ensure_future(intake.append_runs(offline.runs[:2]))
            await played.until(lambda: proposed(played))
            offline.commit(played, offline.opening())
            await taking
            offline.commit(played, offline.merging(state, *offline.runs[:5]))
            assert state.sessions[1].done[0] == 4
            await intake.append_runs(offline.runs[2:])
            assert offline.stored(played) == {run.segment: bytes(run.data) for run in offline.runs}
            with pytest.raises(Unreachable, match="after the end"):
                await intake.append(Chunk(offline.runs[2].end_offset, bytes(8)))
            await intake.close()

    asyncio.run(play())


@pytest.mark.parametrize("is_snapshot", [False, True])
def test_sealed_runs_that_were_fenced_and_closed_empty_are_not_acknowledged(config, is_snapshot: bool):
    """The stream knew them before. They are over, and nothing of them is merged."""
    offline = Offline(4)

    async def play() -> None:
        async with Played(config) as played:
            intake = await offline.begin(played)
            state = played.data.follower.state
            taking = asyncio.ensure_future(intake.append_runs(offline.runs[:1]))
            await played.until(lambda: proposed(played))
            offline.commit(played, offline.opening())
            await taking
            first = offline.runs[0]
            over = [FenceRun(1, 0, (1, 2, 3)), CloseRun(1, 0, 0, len(first.data), first.end, (1, 2))]
            if is_snapshot:
                for command in over:
                    apply(state, command)
                offline.index = 9
                played.say(snapshot_of(state, index=9))
            else:
                for command in over:
                    offline.commit(played, command)
            offline.commit(played, offline.merging(state, first))
            assert played.data.follower.state.sessions[1].done[0] == 2
            for run in offline.runs[1:]:
                played.heard.clear()
                taking = asyncio.ensure_future(intake.append_runs([run]))
                await played.until(lambda taking=taking: taking.done() or proposed(played))
                for command in proposed(played):
                    offline.commit(played, command)
                with pytest.raises(Unreachable):
                    await taking
            with_messages = {one: data for one, data in offline.stored(played).items() if len(data) > 64}
            assert with_messages == {first.segment: bytes(first.data)}
            await intake.close()

    asyncio.run(play())


def test_of_a_run_that_is_open_without_its_end_the_next_one_waits(config):
    offline = Offline(3)

    async def play() -> None:
        async with Played(config) as played:
            intake = await offline.begin(played)
            offline.commit(played, offline.opening(ends=False))
            offline.commit(played, replace(offline.opening(), newest=1))
            taking = asyncio.ensure_future(intake.append_runs(offline.runs))
            await played.until(lambda: played.data.replicas.get(1) is not None)
            await played.until(lambda: played.data.replicas.get(1).receiver.has_ended)
            assert len(offline.stored(played)) == 1
            assert not taking.done()
            first = offline.runs[0]
            offline.commit(played, FenceRun(1, 0))
            offline.commit(played, CloseRun(1, 0, 0, len(first.data), first.end))
            await taking
            assert offline.stored(played) == {run.segment: bytes(run.data) for run in offline.runs}
            await intake.close()

    asyncio.run(play())
