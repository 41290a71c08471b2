"""The data process alone, with a control process played by the test."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from batches import CLUSTER
from data_process_bench import Played, snapshot_of, with_peers
from nodes_bench import Story, wait_until
from receiving_node import tls_of, until
from sequencer_core import do_close, do_fence, do_open, new_state, opening
from watch_loop import WatchLoop

import rt
from replicator.protocol.messages import LogOffset
from replicator.push.client import PushClient
from rt.cluster_epoch import epoch_of
from rt.errors import ClusterMismatch, Corrupt, DiskFull, RtError
from rt.log.format.segment import LogKind, SegmentId
from rt.log.format.segment_table import LogIdentity
from rt.log.write.writer import LogWriter
from rt.v1 import sequencer_pb2 as pb
from sequencer.config.config import NodeConfig
from sequencer.config.restart_policy import RestartLater
from sequencer.data import process
from sequencer.data.process import DataProcess
from sequencer.ipc import state_follower
from sequencer.ipc.server import ControlServer
from sequencer.localcluster.loopback import free_port
from sequencer.merged import catch_up as catch_up_module
from sequencer.merged.merged_files import MergedFiles
from sequencer.merged.repair_queue import Repairer
from sequencer.sessions import peer_fetch
from sequencer.state.apply import apply
from sequencer.state.command_codec import encode_command
from sequencer.state.commands import JoinDisk, ResetCluster
from sequencer.state.state import SequencerState
from sequencer.state.state_codec import decode_state
from sequencer.state.write_plan import SessionEnd


@pytest.mark.parametrize(("epoch", "ends"), [(1, False), (2, False), (epoch_of(1 << 16, 7), True)])
def test_data_process_restarts_on_snapshot_of_forced_epoch(
    config: NodeConfig, epoch: int, ends: bool
) -> None:
    async def play() -> None:
        async with Played(config) as played:
            state, said = new_state(), snapshot_of(new_state())
            said.snapshot.epoch_id = 1
            await played.say(said)
            do_open(state, "a")
            later = snapshot_of(state)
            later.snapshot.epoch_id = epoch
            await played.say(later)
            assert isinstance(played.data.failure, RestartLater) == ends
            assert played.data.tasks.stopping.is_set() == ends
            assert (played.data.follower.state == state) == (not ends), "nothing of it is heard before"
            command = encode_command(opening("b"))
            await played.say(pb.ToData(applied=pb.Applied(index=said.snapshot.index + 1, command=command)))
            known = played.data.follower.state
            assert known is not None
            assert (known.session_of("b") is None) == ends, (
                "nor what is applied behind it, whatever its index"
            )

    asyncio.run(play())


def test_data_process_fails_with_cluster_mismatch_after_reset_without_its_data(config: NodeConfig) -> None:
    async def play() -> None:
        async with Played(config) as played:
            state = new_state()
            apply(state, JoinDisk(config.name, played.data._disk))
            apply(state, ResetCluster(False, 1 << 16, 7, bytes(16), "n9"))
            os.makedirs(os.path.join(config.sessions_directory, "1"))
            await played.say(snapshot_of(state))
            assert isinstance(played.data.failure, ClusterMismatch)
            assert played.data.merger is None, "nothing is opened"

    asyncio.run(play())


def test_restarted_control_process_receives_durable_merge_progress(config):
    async def play() -> None:
        async with Played(config) as played:
            state = new_state()
            await played.say(snapshot_of(state))
            played.heard.clear()
            await played.say(snapshot_of(state))
            assert len(played.merged) == 1
            played.heard.clear()
            await played.say(snapshot_of(state, index=0))
            assert len(played.merged) == 1

    asyncio.run(play())


def test_snapshot_is_decoded_once(config, monkeypatch):
    """Decoding a large snapshot blocks the event loop for tenths of a second."""
    decoded = []

    def decode(content):
        decoded.append(content)
        return decode_state(content)

    for module in (process, state_follower):
        monkeypatch.setattr(module, "decode_state", decode)

    async def play() -> None:
        async with Played(config) as played:
            for count in (1, 2):
                await played.say(snapshot_of(new_state()))
                assert len(decoded) == count

    asyncio.run(play())


def test_fence_in_snapshot_is_reported_by_open_replica(config):
    async def play() -> None:
        async with Played(config) as played:
            state = new_state()
            do_open(state)
            await played.say(snapshot_of(state))
            await played.until(lambda: played.data.replicas.get(1) is not None)
            do_open(state, run=1)
            do_fence(state)
            assert played.finals == []
            await played.say(snapshot_of(state, index=3))
            await played.until(lambda: played.finals)
            # Each report of the segment includes the final end.
            assert {(one.session_id, one.run) for one in played.finals} == {(1, 0)}

    asyncio.run(play())


def test_applied_fence_is_reported_once_replica_is_open(config):
    async def play() -> None:
        async with Played(config) as played:
            state = new_state()
            do_open(state)
            await played.say(snapshot_of(state, index=1))
            command = pb.Command(version=1, fence=pb.Fence(session_id=1, run=0)).SerializeToString()
            await played.say(pb.ToData(applied=pb.Applied(index=2, command=command)))
            await played.until(lambda: played.finals)
            assert played.finals[0] == pb.SessionEnd(session_id=1, run=0, roll=0, offset=64)
            assert not played.finals[0].HasField("chain"), "nothing of it is here"

    asyncio.run(play())


@pytest.mark.parametrize(("end", "wants"), [((0, 64), False), ((1, 64), True), ((0, 128), True)])
def test_missing_bytes_of_closed_run_are_fetched_even_if_it_ends_at_segment_start(
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
            played.data.fetcher._peers._by_name = {"n2": "127.0.0.1:1"}
            state = new_state()
            do_open(state)
            do_open(state, run=1)
            do_fence(state)
            if wants:
                do_close(state, 1, 0, (*end, 5))
            await played.say(snapshot_of(state))
            place = LogOffset(0, *end)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait_for(played.data.fetcher.complete(1, place), 60)
            assert bool(fetched) == wants

    asyncio.run(play())


def test_trim_is_retried_after_disk_full_without_failing_process(config, monkeypatch):
    async def play() -> None:
        async with Played(config) as played:
            state = new_state()
            do_open(state)
            await played.say(snapshot_of(state))
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
def control(config: NodeConfig) -> Iterator[tuple[Callable[[pb.ToData], None], list[bytes]]]:
    """A listening control process: its send function, and its received messages."""
    heard: list[bytes] = []
    link, loop = ControlServer(config.control_socket, heard.append), WatchLoop()
    try:
        loop.call(lambda: link.start(loop.watch))
        yield lambda message: loop.call(lambda: link.send(message.SerializeToString())), heard
        loop.call(link.close)
    finally:
        loop.stop()


def _damage_merged(config: NodeConfig) -> None:
    async def play() -> None:
        async with Played(config) as played:
            await played.say(snapshot_of(new_state()))
            assert played.data.merger is not None
            writer = played.data.merger._output.writer
            assert writer is not None
            writer.start(SegmentId(0, 0), first=0, created_ns=1)

    asyncio.run(play())
    path = Path(config.merged_directory) / "log.0.0"
    data = bytearray(path.read_bytes())
    data[30] ^= 1
    path.write_bytes(data)


def test_merged_log_that_cannot_be_opened_ends_data_process(config, control, monkeypatch):
    say, heard = control
    _damage_merged(config)
    monkeypatch.setattr(Repairer, "on_corrupt", lambda *_: False)

    async def play() -> None:
        data = DataProcess(config)
        running = asyncio.ensure_future(data.run())
        await asyncio.to_thread(wait_until, lambda: bool(heard))
        say(snapshot_of(new_state()))
        with pytest.raises(Corrupt):
            await asyncio.wait_for(running, 60)

    asyncio.run(play())


@pytest.mark.parametrize("is_stopped", [False, True])
def test_merged_log_is_opened_off_the_event_loop_before_state_is_used(config, monkeypatch, is_stopped):
    is_opening, may_open = threading.Event(), threading.Event()
    open_files = MergedFiles.open

    def open_slowly(files: MergedFiles) -> tuple[LogWriter, int]:
        is_opening.set()
        assert may_open.wait(10), "the event loop waits for the disk"
        return open_files(files)

    monkeypatch.setattr(MergedFiles, "open", open_slowly)

    async def play() -> None:
        async with Played(config) as played:
            saying = asyncio.ensure_future(played.say(snapshot_of(new_state())))
            await asyncio.to_thread(is_opening.wait, 60)
            assert played.data.follower.state is None
            assert (played.data.merger, played.merged, played.joins) == (None, [], [])
            if is_stopped:
                saying.cancel()
            may_open.set()
            await asyncio.wait([saying])
            assert saying.cancelled() == is_stopped
            assert bool(played.merged) != is_stopped
        identity = LogIdentity(LogKind.MERGED, new_state().cluster, config.stream)
        LogWriter.open(config.merged_directory, identity, resume=True).close()  # It is not locked.

    asyncio.run(play())


def test_members_version_is_reported_once_to_each_control_process(config):
    nodes = [pb.NodeStanding(name="n1", address="localhost:1")]
    view = pb.ToData(standing=pb.Standing(node="n1", nodes=nodes, members_version=7))

    async def play() -> None:
        async with Played(config) as played:
            for count in (1, 2):
                for _ in range(2):
                    await played.say(view)
                said = [one.report.members_version for one in played.heard if one.HasField("report")]
                assert [version for version in said if version] == [7] * count
                played.data._on_lost()

    asyncio.run(play())


def test_older_member_list_of_restarted_control_process_is_ignored(config):
    def view(version: int, *names: str) -> pb.ToData:
        nodes = [pb.NodeStanding(name=name, address=f"{name}:1") for name in names]
        return pb.ToData(standing=pb.Standing(node="n1", nodes=nodes, members_version=version))

    async def play() -> None:
        async with Played(config) as played:
            await played.say(view(9, "n1", "n2", "n3"))
            played.data._on_lost()
            for older in (view(0, "n1"), view(7, "n1", "n2")):
                played.heard.clear()
                await played.say(older)
                assert played.data.known_nodes.names == {"n1", "n2", "n3"}
                assert not any(one.report.members_version for one in played.heard)
            await played.say(view(9, "n1", "n2", "n3"))
            assert [one.report.members_version for one in played.heard if one.report.members_version] == [9]

    asyncio.run(play())


def test_publisher_receives_member_changes(config, control, pki, tmp_path):
    say, heard = control
    endpoint = f"localhost:{config.data_port}"

    async def play() -> None:
        data = DataProcess(config)
        running = asyncio.ensure_future(data.run())
        await asyncio.to_thread(wait_until, lambda: bool(heard))
        say(snapshot_of(new_state()))
        say(pb.ToData(standing=pb.Standing(node="n1", leader="n1", is_caught_up=True)))
        with rt.Publisher(tmp_path / "source", "s", publisher_id="feed") as publisher:
            client = PushClient(publisher.directory, "s", [endpoint], tls_of(pki, "feed"))
            pushing = asyncio.ensure_future(client.run())
            await until(lambda: client._source is not None and client._source.quorum.majority == 1)
            await until(lambda: data.push_servicer is not None and data.push_servicer.sessions == ["feed"])
            nodes = [
                pb.NodeStanding(name="n1", address=endpoint),
                pb.NodeStanding(name="n2", address=f"localhost:{free_port()}"),
            ]
            say(
                pb.ToData(
                    standing=pb.Standing(
                        node="n1", leader="n1", is_caught_up=True, nodes=nodes, members_version=1
                    )
                )
            )
            await until(lambda: client._source is not None and client._source.quorum.majority == 2)
            await until(lambda: [one.is_connected for one in client.report.endpoints] == [True, False])
            pushing.cancel()
            await asyncio.wait([pushing])
        data.stop()
        await asyncio.wait_for(running, 60)

    asyncio.run(play())


@pytest.mark.parametrize("has_peers", [True, False])
def test_corrupt_merged_log_is_opened_once_valid_again(config, has_peers):
    _damage_merged(config)
    config = with_peers(config) if has_peers else config
    path = Path(config.merged_directory) / "log.0.0"

    async def play() -> None:
        async with Played(config) as played:
            data = played.data
            await played.say(snapshot_of(new_state()))
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


def test_corruption_found_by_pull_is_scheduled_for_repair(config):
    class Servicer:
        async def pull(self, _requests: object, _context: object) -> None:
            raise Corrupt("a block fails its checksum", path="/nowhere/log.0.0", offset=64)

    async def play() -> None:
        async with Played(config) as played:
            with pytest.raises(Corrupt):
                await played.data._pull(Servicer(), None, None)
            assert "/nowhere/log.0.0" in played.data.repair.repairer.corrupt_files

    asyncio.run(play())


def test_unrepairable_replica_is_quarantined_and_disk_id_removed(config):
    async def play() -> None:
        async with Played(config) as played:
            state = new_state()
            do_open(state)
            await played.say(snapshot_of(state))
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


def test_requested_fetch_from_peer_runs_only_while_no_publisher_sends(config, monkeypatch):
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
            await played.say(snapshot_of(state))
            data = played.data
            await played.until(lambda: data.replicas.get(1) is not None)
            replica = data.replicas.get(1)
            await data.fetcher.fetch(wanted)
            assert fetched == [LogOffset(0, 0, 640)]
            await data.fetcher.fetch(wanted)  # The publisher is connected.
            replica.has_stream = False
            await data.fetcher.fetch(pb.Fetch(session_id=1, run=3, roll=0, offset=640, holder="n2"))
            await data.fetcher.fetch(pb.Fetch(session_id=1, run=0, roll=0, offset=640, holder="n9"))
            do_open(state, run=1)
            do_fence(state)
            await played.say(snapshot_of(state, index=3))
            await data.fetcher.fetch(wanted)
            assert fetched == [LogOffset(0, 0, 640)]
            assert not data.fetcher._fetching

    replica = None
    asyncio.run(play())


def test_catch_up_across_gap_copies_to_latest_merged_position(config, monkeypatch):
    """If it copied only the next block, a node could stay behind a busy stream indefinitely."""
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
            await played.say(snapshot_of(story.state))
            merger = played.data.merger
            assert merger is not None
            assert merger.gap == story.end
            await played.data.catch_up.catch_up(merger, ["b:1"], story.state.position)
            assert wanted == [(False, True)]

    asyncio.run(play())


def test_merged_log_has_cluster_id_of_state(config):
    async def play() -> None:
        async with Played(config) as played:
            await played.say(pb.ToData(applied=pb.Applied(index=1, command=encode_command(opening()))))
            await played.say(snapshot_of(SequencerState(bytes(16))))
            assert played.data.merger is None
            await played.say(snapshot_of(new_state(), index=2))
            assert played.data.merger is not None
            assert played.data.merger._output.identity.origin == CLUSTER

    asyncio.run(play())
