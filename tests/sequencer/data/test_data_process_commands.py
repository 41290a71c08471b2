"""The data process's disk id, its reports of joined disks, and the operator commands that it proposes."""

from __future__ import annotations

import asyncio
import shutil
import time
from types import SimpleNamespace

import pytest
from data_process_bench import Lagging, Played, snapshot_of
from sequencer_core import do_open, new_state

from rt.errors import Corrupt, Timeout
from rt.net.grpc_errors import Unreachable
from rt.v1 import sequencer_pb2 as pb
from sequencer.data import command_client
from sequencer.data.process import DataProcess
from sequencer.sessions import opener as opening_module
from sequencer.sessions.disk_id import open_disk_id
from sequencer.state.apply import apply
from sequencer.state.apply_result import CommandRejected, ConfigurationChanged
from sequencer.state.command_codec import decode_command, encode_command
from sequencer.state.commands import Configure, DecideRequest, JoinDisk, ReleaseHold, SubmitRequest
from sequencer.state.configuration import Configuration
from sequencer.state.session_commands import OpenRun

CAUGHT_UP = pb.ToData(standing=pb.Standing(is_caught_up=True))


# Disk identity


def test_joins_are_reported_after_all_held_segments(config):
    """So a receiver of the join already knows everything that was acknowledged before the disk joined."""

    async def play() -> None:
        state = new_state()
        do_open(state)
        async with Played(config) as played:
            await played.say(snapshot_of(state))
            await played.say(CAUGHT_UP)
            await played.until(lambda: played.joins)
            assert played.joins == [0]
            played.heard.clear()
            played.data.reports.segment(pb.SegmentReport(session_id=1, boundaries=b"all of it"))
            joined = encode_command(JoinDisk("n2", b"D" * 16))
            await played.say(pb.ToData(applied=pb.Applied(index=2, command=joined)))
            await played.until(lambda: played.joins)
            said = [
                [one.boundaries for one in said.report.segments] or said.report.joins for said in played.heard
            ]
            assert said == [[b"all of it"], 1]

    asyncio.run(play())


def test_joins_are_reported_only_after_replicas_are_open(config, monkeypatch):
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
            await played.say(snapshot_of(state))
            await played.say(CAUGHT_UP)
            await asyncio.sleep(0.01)
            assert not played.joins
            is_open.set()
            await played.until(lambda: played.joins)
            assert replicas.get(1) is not None

    asyncio.run(play())


def test_joins_are_reported_only_after_commands_of_earlier_terms_are_applied(config, tmp_path, monkeypatch):
    """A session opened after the snapshot is unknown to it, although its copy is on this disk."""

    async def play() -> None:
        monkeypatch.setattr(opening_module, "POLL_S", 0.001)
        lagging = Lagging(config, tmp_path / "publisher")
        session = lagging.state.sessions[1]
        async with Played(config) as played:
            await played.say(snapshot_of(new_state()))
            await asyncio.sleep(0.01)
            assert not played.joins
            command = encode_command(
                OpenRun("feed", session.incarnation, None, 0, session.active_runs[0].run_id)
            )
            await played.say(pb.ToData(applied=pb.Applied(index=2, command=command)))
            await played.say(CAUGHT_UP)
            await played.until(lambda: played.joins)
            told = [one.roll for said in played.heard for one in said.report.segments]
            assert sorted(set(told)) == lagging.segments
            assert played.heard[-1].report.joins == played.joins[-1]

    asyncio.run(play())


def test_pending_joins_report_is_dropped_when_control_process_is_lost(config, monkeypatch):
    async def play() -> None:
        monkeypatch.setattr(opening_module, "POLL_S", 0.001)
        async with Played(config) as played:
            await played.say(snapshot_of(new_state()))
            played.data._on_lost()
            await played.say(CAUGHT_UP)
            await asyncio.sleep(0.02)
            assert not played.joins
            await played.say(snapshot_of(new_state(), index=2))
            await played.say(CAUGHT_UP)
            await played.until(lambda: played.joins)

    asyncio.run(play())


def test_disk_id_survives_restart_and_changes_after_disk_loss(config):
    def disk() -> bytes:
        return DataProcess(config)._hello().disk

    async def play() -> tuple[bytes, bytes, bytes]:
        first, again = disk(), disk()
        shutil.rmtree(config.sessions_directory)
        return first, again, disk()

    first, again, other = asyncio.run(play())
    assert first == again != other


def test_unreadable_disk_id_raises_corrupt(tmp_path):
    known = open_disk_id(str(tmp_path / "sessions"))
    path = tmp_path / "sessions" / "disk"
    for damaged in (b"", path.read_bytes()[:-1], bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]):
        path.write_bytes(damaged)
        with pytest.raises(Corrupt, match="cannot be read"):
            open_disk_id(str(tmp_path / "sessions"))
    path.unlink()
    assert open_disk_id(str(tmp_path / "sessions")) != known


# Commands of operators


def test_operator_command_is_proposed_until_decided_and_returns_result(config, monkeypatch):
    monkeypatch.setattr(command_client, "PROPOSE_AGAIN_S", 0.001)

    async def play() -> None:
        async with Played(config) as played:
            run = played.data.commands.run
            with pytest.raises(Unreachable):
                await run(Configure(roll_minutes=0))
            await played.say(snapshot_of(new_state()))
            with pytest.raises(Unreachable, match=r"no leader.*a majority of the nodes must run"):
                await run(Configure(roll_minutes=0))
            await played.say(pb.ToData(standing=pb.Standing(is_caught_up=True, leader="n1")))
            log = Log(played)
            for wanted in (Configure(roll_minutes=5), Configure(roll_minutes=0)):
                changing = asyncio.ensure_future(run(wanted))
                await log.until_asked(wanted, times=3)
                for _ in range(2):  # Both copies are in the log, and the command runs once.
                    await log.apply(log.last)
                    await log.apply(DecideRequest(log.last.id, 1))
                assert await changing == ConfigurationChanged()
                assert played.data.follower.state.configuration.roll_minutes == wanted.roll_minutes
            releasing = asyncio.ensure_future(run(ReleaseHold("nobody")))
            await log.until_asked(ReleaseHold("nobody"))
            await log.apply(log.last)
            await log.apply(DecideRequest(log.last.id, 1))
            assert isinstance(await releasing, CommandRejected)

    asyncio.run(play())


def test_request_expired_by_leader_clock_is_proposed_again_with_that_clock(config, monkeypatch):
    """The clocks were corrected: the leader has learned of it, this node has not."""
    monkeypatch.setattr(command_client, "PROPOSE_AGAIN_S", 0.001)

    async def play() -> None:
        async with Played(config) as played:
            await played.say(snapshot_of(new_state()))
            await played.say(pb.ToData(standing=pb.Standing(is_caught_up=True, leader="n1")))
            log = Log(played)
            changing = asyncio.ensure_future(played.data.commands.run(Configure(roll_minutes=5)))
            await log.until_asked(Configure(roll_minutes=5))
            ahead_ns = log.last.until_ns + 3600 * 10**9
            await log.apply(log.last)
            await log.apply(DecideRequest(log.last.id, ahead_ns))
            played.heard.clear()
            await log.until_asked(Configure(roll_minutes=5))
            assert ahead_ns < log.last.until_ns <= ahead_ns + 10 * 10**9
            await log.apply(log.last)
            await log.apply(DecideRequest(log.last.id, ahead_ns))
            assert await changing == ConfigurationChanged()

    asyncio.run(play())


def test_expired_operator_command_raises_timeout_and_is_never_applied(config, monkeypatch):
    monkeypatch.setattr(command_client, "PROPOSE_AGAIN_S", 0.001)
    clock = [0.0]
    monkeypatch.setattr(
        command_client, "time", SimpleNamespace(monotonic=lambda: clock[0], time_ns=time.time_ns)
    )

    async def play() -> None:
        async with Played(config) as played:
            await played.say(snapshot_of(new_state()))
            nodes = [
                pb.NodeStanding(name=name, summary=pb.Summary(clock_ns=clock_ns))
                for name, clock_ns in (("n1", 10**18), ("n2", 5 * 10**9), ("n3", 7 * 10**9))
            ]
            standing = pb.Standing(is_caught_up=True, leader="n1", nodes=nodes)
            await played.say(pb.ToData(standing=standing))
            log = Log(played)
            late = asyncio.ensure_future(played.data.commands.run(Configure(roll_bytes=7), timeout_s=60))
            await log.until_asked(Configure(roll_bytes=7))
            assert log.last.until_ns == 67 * 10**9  # By the clock that a majority has reached.
            await log.apply(log.last)
            clock[0] += 60.0
            await log.apply(DecideRequest(log.last.id, log.last.until_ns + 1))
            with pytest.raises(Timeout, match=r"too late.*Nothing was changed"):
                await late
            monkeypatch.setattr(command_client, "DECIDED_S", 0.0)
            played.heard.clear()
            with pytest.raises(Timeout, match="Check whether it was executed"):
                await played.data.commands.run(Configure(roll_bytes=7), timeout_s=0.01)
            await log.until_asked(Configure(roll_bytes=7))
            await log.apply(log.last)  # The request arrives nevertheless, and is decided later.
            await log.apply(DecideRequest(log.last.id, log.last.until_ns + 1))
            assert played.data.follower.state.configuration == Configuration()

    asyncio.run(play())


def test_command_decided_in_snapshot_raises_timeout_with_unknown_outcome(config, monkeypatch):
    monkeypatch.setattr(command_client, "PROPOSE_AGAIN_S", 0.001)
    monkeypatch.setattr(command_client, "DECIDED_S", 0.0)

    async def play() -> None:
        async with Played(config) as played:
            await played.say(snapshot_of(new_state()))
            await played.say(pb.ToData(standing=pb.Standing(is_caught_up=True, leader="n1")))
            log = Log(played)
            changing = asyncio.ensure_future(
                played.data.commands.run(Configure(roll_minutes=5), timeout_s=0.2)
            )
            await log.until_asked(Configure(roll_minutes=5))
            state = new_state()
            apply(state, log.last)
            apply(state, DecideRequest(log.last.id, 1))  # The control process ended after this.
            await played.say(snapshot_of(state))
            await log.apply(DecideRequest(log.last.id, 1))  # This decision is from another leader.
            with pytest.raises(Timeout, match="Check whether it was executed"):
                await changing
            assert played.data.follower.state.configuration.roll_minutes == 5

    asyncio.run(play())


class Log:
    """The commands committed after a first snapshot, and the last request that was proposed."""

    def __init__(self, played):
        self._played, self._index = played, 1
        self.last = None

    async def apply(self, command):
        self._index += 1
        applied = pb.Applied(index=self._index, command=encode_command(command))
        await self._played.say(pb.ToData(applied=applied))

    async def until_asked(self, operation, *, times=1):
        """Wait until the operation was proposed at least `times` times, always with one id."""

        def asked():
            found = [decode_command(one.propose) for one in self._played.heard if one.HasField("propose")]
            return [one for one in found if isinstance(one, SubmitRequest) and one.operation == operation]

        await self._played.until(lambda: len(asked()) >= times)
        self.last = asked()[-1]
        assert {one.id for one in asked()} == {self.last.id}
