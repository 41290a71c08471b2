"""The gRPC service for group positions: reads, acknowledgments, ownership, limits and resets."""

from __future__ import annotations

import asyncio

import pytest
from batches import CLUSTER

from rt.errors import CertificateError, Fenced, InvalidName, Overloaded, ProtocolViolation, Timeout
from rt.net.identity import Identity
from rt.net.lease_client import POSITIONS_PER_CALL_MAX, LeaseCalls
from rt.v1 import groups_pb2 as pb
from sequencer.data import group_positions
from sequencer.data.group_positions import GroupPositions
from sequencer.data.group_service import REQUEST_BYTES_MAX, GroupService
from sequencer.state.apply import apply
from sequencer.state.apply_result import HoldMoved
from sequencer.state.command_codec import decode_command, encode_command
from sequencer.state.commands import Command, HoldPosition, ResetCluster
from sequencer.state.state import HOLDS_MAX, HOLDS_PER_NAME_MAX, SequencerState, SubscriberHold


class Cluster:
    """A node that loses its first `lost` proposals and applies all others at once."""

    def __init__(self, lost: int = 0) -> None:
        self.state = SequencerState(CLUSTER)
        self.state.position = 100
        self.lost = lost
        self.positions = GroupPositions(lambda: self.state, self.propose)
        self.service = GroupService(self.positions, identify=lambda: Identity("s", "subscriber", "workers"))

    def propose(self, command: Command) -> None:
        if self.lost:
            self.lost -= 1
            return
        command = decode_command(encode_command(command))
        self.positions.on_applied(command, apply(self.state, command))

    def acknowledge(self, **positions: int) -> dict[str, int]:
        """Acknowledge positions. Names are relative to `workers`."""
        return self.ask({f"workers~{name}": position for name, position in positions.items()})

    def ask(self, positions: dict[str, int]) -> dict[str, int]:
        rows = [pb.GroupPosition(name=name, position=at) for name, at in positions.items()]
        data = pb.GroupPositions(positions=rows).SerializeToString()
        answer = pb.GroupPositions.FromString(asyncio.run(self.service.acknowledge(data)))
        return {row.name.removeprefix("workers~"): row.position for row in answer.positions}


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_group_positions_only_advance_and_are_returned(cluster: Cluster) -> None:
    assert cluster.acknowledge() == {}
    assert cluster.acknowledge(p0=0, p1=7) == {"p0": 0, "p1": 7}
    assert cluster.acknowledge(p0=5, p1=3) == {"p0": 5, "p1": 7}, "what is late changes nothing"
    cluster.state.holds["other"] = SubscriberHold(1, 1)
    cluster.state.holds["workers"] = SubscriberHold(1, 1)
    assert cluster.acknowledge() == {"p0": 5, "p1": 7}, "only its own"


def test_lost_proposal_is_repeated(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_positions, "PROPOSE_AGAIN_S", 0.01)
    cluster.lost = 3
    assert cluster.acknowledge(p0=4) == {"p0": 4}


def test_undecided_call_raises_timeout(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_positions, "TIMEOUT_S", 0.05)
    monkeypatch.setattr(group_positions, "PROPOSE_AGAIN_S", 0.01)
    with pytest.raises(Timeout, match="workers~p0 at 2"):
        Cluster(lost=10**9).acknowledge(p0=2)
    with pytest.raises(Timeout, match="a majority of the nodes did not confirm"):
        Cluster(lost=10**9).acknowledge()


def test_position_beyond_log_end_is_rejected_with_reason(cluster: Cluster) -> None:
    for before in ({}, {"p0": 1}):
        cluster.acknowledge(**before)
        with pytest.raises(ProtocolViolation, match="beyond the end of the merged log") as raised:
            cluster.acknowledge(p0=101)
        assert (raised.value.where, raised.value.got, raised.value.expected) == (
            "workers~p0",
            101,
            "at most 100",
        )
        assert cluster.acknowledge() == before, "nothing moved"


def test_rejected_position_fails_only_its_own_call(cluster: Cluster) -> None:
    async def both() -> list[BaseException | None]:
        wrong = asyncio.ensure_future(cluster.positions.acknowledge({"workers~p0": 101}))
        right = asyncio.ensure_future(cluster.positions.acknowledge({"workers~p0": 50}))
        await asyncio.wait([wrong, right])
        return [wrong.exception(), right.exception()]

    found = asyncio.run(both())
    assert isinstance(found[0], ProtocolViolation)
    assert found[1] is None
    assert cluster.acknowledge() == {"p0": 50}


def test_read_on_lagging_node_returns_all_positions_committed_before(cluster: Cluster) -> None:
    """With fewer positions, a member could create a group again at the end of the log, and skip messages."""
    behind = Cluster()
    behind.state.position = 40
    backlog: list[Command] = []
    behind.positions = GroupPositions(lambda: behind.state, backlog.append)
    behind.service = GroupService(behind.positions, identify=lambda: Identity("s", "subscriber", "workers"))
    cluster.acknowledge(p0=7)

    async def read() -> pb.GroupPositions:
        reading = asyncio.ensure_future(behind.service.acknowledge(b""))
        while not backlog and not reading.done():
            await asyncio.sleep(0)
        assert not reading.done(), "it does not answer from what it has"
        behind.state.position = 100
        for command in [HoldPosition("workers~p0", 7, 1), *backlog]:
            behind.positions.on_applied(command, apply(behind.state, command))
        return pb.GroupPositions.FromString(await reading)

    answer = asyncio.run(read())
    assert [(row.name, row.position) for row in answer.positions] == [("workers~p0", 7)]
    assert answer.log_end == 100
    assert behind.state.leases == {}


def test_concurrent_reads_share_one_proposal() -> None:
    """A certificate that sends reads at full speed must not fill the consensus log."""
    node, proposed = Cluster(), list[Command]()
    node.positions = GroupPositions(lambda: node.state, proposed.append)

    def apply_last() -> None:
        node.positions.on_applied(proposed[-1], apply(node.state, proposed[-1]))

    async def settle() -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    async def read() -> None:
        first = asyncio.create_task(node.positions.catch_up())
        await settle()
        later = [asyncio.create_task(node.positions.catch_up()) for _ in range(50)]
        await settle()
        assert len(proposed) == 1
        apply_last()
        await settle()
        assert first.done()
        assert len(proposed) == 2
        assert not any(one.done() for one in later), "the first was proposed before they were asked"
        later[0].cancel()
        await settle()
        apply_last()
        await asyncio.gather(first, *later[1:])
        assert len(proposed) == 2

    asyncio.run(read())


def test_cancelled_read_does_not_block_next_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_positions, "PROPOSE_AGAIN_S", 0.01)
    node = Cluster(lost=3)

    async def read() -> None:
        left = asyncio.create_task(node.positions.catch_up())
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.wait([left])
        await node.positions.catch_up()

    asyncio.run(read())


def test_acknowledge_raises_overloaded_if_cluster_hold_limit_is_reached(cluster: Cluster) -> None:
    cluster.state.holds |= {f"n{number}": SubscriberHold(0, 1) for number in range(HOLDS_MAX)}
    with pytest.raises(Overloaded, match="hold data back"):
        cluster.acknowledge(p0=1)


def test_hold_limit_of_one_certificate_does_not_block_other_names(cluster: Cluster) -> None:
    partitions = {f"p{number}": 0 for number in range(HOLDS_PER_NAME_MAX)}
    assert cluster.acknowledge(**partitions) == partitions, "the largest group"
    with pytest.raises(Overloaded, match="workers~p256 is one more"):
        cluster.acknowledge(p256=0)
    assert cluster.acknowledge(p0=1)["p0"] == 1, "those that are there move on"
    assert isinstance(apply(cluster.state, HoldPosition("workers", 0, 1)), HoldMoved), "its own hold"
    assert isinstance(apply(cluster.state, HoldPosition("workers2~p0", 0, 1)), HoldMoved)


def test_client_can_move_only_its_own_positions(cluster: Cluster) -> None:
    for name in ("other~p0", "workers", "workers2~p0"):
        with pytest.raises(CertificateError, match=name):
            cluster.ask({name: 1})
    with pytest.raises(InvalidName):
        cluster.ask({"workers~../p0": 1})
    assert cluster.state.holds == {}


def test_malformed_request_raises_protocol_violation(cluster: Cluster) -> None:
    many = {f"workers~p{number}": 1 for number in range(POSITIONS_PER_CALL_MAX + 1)}
    with pytest.raises(ProtocolViolation, match="too many"):
        cluster.ask(many)
    with pytest.raises(ProtocolViolation, match="not a position"):
        cluster.acknowledge(p0=2**63)
    for data in (b"\xff", bytes(REQUEST_BYTES_MAX + 1)):
        with pytest.raises(ProtocolViolation):
            asyncio.run(cluster.service.acknowledge(data))


def test_read_reply_contains_log_epoch_and_runs(cluster: Cluster) -> None:
    def read(**positions: int) -> pb.GroupPositions:
        rows = [pb.GroupPosition(name=f"workers~{name}", position=at) for name, at in positions.items()]
        data = pb.GroupPositions(positions=rows).SerializeToString()
        return pb.GroupPositions.FromString(asyncio.run(cluster.service.acknowledge(data)))

    assert not read(p0=1).HasField("epoch"), "a write is answered in short"
    assert read().epoch == pb.LogEpoch(runs=[pb.LogRun(first=100)])
    apply(cluster.state, ResetCluster(False, 1 << 16, 1, b"F" * 16, "n1"))
    assert read().epoch == pb.LogEpoch(
        number=1 << 16, forced=b"F" * 16, runs=[pb.LogRun(run=1 << 16, first=100)]
    )


def test_positions_of_log_before_forced_reset_raise_fenced(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a continuing member would mark messages as processed that no member has received."""

    async def call(_: LeaseCalls, __: str, ___: str, data: bytes, ____: float) -> bytes:
        return await cluster.service.acknowledge(data)

    monkeypatch.setattr(LeaseCalls, "_call", call)

    async def work() -> None:
        cluster.state.position = 500
        member, later = LeaseCalls(["a:1"], None), LeaseCalls(["a:1"], None)
        await member.acknowledge({})
        await member.acknowledge({"workers~p0": 150})
        apply(cluster.state, ResetCluster(False, 1 << 16, 1, b"F" * 16, "n1"))
        for _ in range(2):
            with pytest.raises(Fenced, match="reset of the cluster was forced"):
                await member.acknowledge({"workers~p0": 400})
            assert (await member.acknowledge({})).positions == {"workers~p0": 150}, "it still reads"
        assert (await later.acknowledge({})).positions == {"workers~p0": 150}
        assert (await later.acknowledge({"workers~p0": 200})).positions == {"workers~p0": 200}
        apply(cluster.state, ResetCluster(False, (1 << 16) + 1, 2, b"S" * 16, ""))
        assert (await later.acknowledge({"workers~p0": 300})).positions == {"workers~p0": 300}, "a soft reset"

    asyncio.run(work())
