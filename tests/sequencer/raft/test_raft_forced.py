"""Forced epochs: which state they keep, which nodes follow, and that rival epochs never merge."""

from __future__ import annotations

import pytest
from disks import MemoryDisk
from disks.crash_sweep import Log, sweep

from rt.cluster_epoch import epoch_of, is_rival
from rt.errors import ClusterMismatch, DiskFull
from sequencer.raft.lifecycle import bootstrap, state_transfer
from sequencer.raft.lifecycle.state_transfer import IDLE_S, StateServer
from sequencer.raft.model.epochs import EpochOver, NoMajority
from sequencer.raft.model.messages import (
    AppendEntries,
    DiskClaim,
    FetchState,
    FetchStateChunk,
    Hello,
    LogIndex,
)
from tests.support.raft_bench import (
    TICK_S,
    Clock,
    Driven,
    Lockstep,
    Member,
    claim_of,
    config_of,
    disk_id,
    of_kind,
)

FORCED = 1 << 16


def epochs(cluster: Lockstep) -> dict[str, int]:
    return {name: member.status.epoch for name, member in cluster.members.items()}


def all_in(cluster: Lockstep, epoch: int) -> bool:
    return set(epochs(cluster).values()) == {epoch}


def leave_one(cluster: Lockstep, *, settle_s: float = 1.0) -> tuple[Member, str, str]:
    """Kill all nodes but the leader, and wipe the disk of one. Return the remaining member, then the names of
    the wiped node and of the other one.
    """
    left = cluster.lead().name
    blank, other = (name for name in cluster.members if name != left)
    for name in (blank, other):
        cluster.kill(name)
    cluster.wipe(blank)
    cluster.idle(settle_s)
    return cluster.members[left], blank, other


def force(member: Member, command: bytes = b"forced") -> None:
    assert member.node.force(command) is None


# Two forced epochs


def two_islands(cluster: Lockstep) -> tuple[str, str]:
    """Force n1 with a blank n2, and continue. Then force n3, which was offline, with another blank n2."""
    cluster.commit(b"one")
    cluster.converge()
    for name in ("n2", "n3"):
        cluster.kill(name)
    cluster.wipe("n2")
    cluster.idle(1)
    force(cluster.members["n1"], b"forced on n1")
    cluster.run(lambda: all_in(cluster, FORCED))
    cluster.commit(b"acknowledged in the one")
    cluster.converge()
    for name in ("n1", "n2"):
        cluster.kill(name)
    cluster.restart("n3")
    cluster.wipe("n2")
    cluster.idle(1)
    force(cluster.members["n3"], b"forced on n3")
    cluster.run(lambda: all_in(cluster, FORCED))
    cluster.commit(b"acknowledged in the other")
    cluster.converge()
    return "n1", "n3"


def test_node_of_rival_forced_epoch_raises_cluster_mismatch_and_follows_after_wipe(clock: Clock) -> None:
    cluster = Lockstep(clock)
    one, other = two_islands(cluster)
    cluster.restart(one)
    with pytest.raises(ClusterMismatch, match=r"epoch 65536-.*epoch 65536-.*Empty the node's"):
        cluster.idle(15)
    assert cluster.members[one].commands[:2] == [b"one", b"forced on n1"]
    cluster.wipe(one)
    cluster.run(lambda: all_in(cluster, FORCED))
    cluster.converge()
    assert cluster.members[one].commands == [b"one", b"forced on n3", b"acknowledged in the other"]
    assert cluster.members[other].commands == cluster.members[one].commands


def test_two_nodes_of_rival_epochs_elect_no_leader_and_keep_their_commands(clock: Clock) -> None:
    cluster = Lockstep(clock)
    one, other = two_islands(cluster)
    cluster.kill("n2")
    cluster.restart(one)
    before = {name: cluster.members[name].commands for name in (one, other)}
    cluster.idle(20)
    ids = [cluster.members[name].status.epoch_id for name in (one, other)]
    assert is_rival(*ids)
    assert {name: cluster.members[name].commands for name in (one, other)} == before
    assert cluster.leader is None
    refused = cluster.members[one].node.force(b"again")
    assert isinstance(refused, NoMajority), "the other island is no empty directory"


def test_blank_disk_named_by_two_rival_epochs_follows_only_one(clock: Clock) -> None:
    cluster = Lockstep(clock)
    cluster.commit(b"one")
    cluster.converge()
    cluster.kill("n2")
    cluster.cut(("n1", "n3"))
    cluster.wipe("n2")
    cluster.cut(("n1", "n2"))
    cluster.idle(3)
    cluster.heal()
    cluster.cut(("n1", "n3"))
    for _ in range(4):
        cluster.round()
    for name in ("n1", "n3"):
        force(cluster.members[name], b"forced on " + name.encode())
    cluster.run(lambda: all_in(cluster, FORCED), seconds=30)
    cluster.run(lambda: any(member.raft.leads for member in cluster.members.values()))
    winner = cluster.members["n2"].status.epoch_id
    ids = {name: cluster.members[name].status.epoch_id for name in ("n1", "n3")}
    loser = next(name for name, epoch in ids.items() if epoch != winner)
    assert is_rival(*ids.values())
    cluster.heal()
    with pytest.raises(ClusterMismatch, match="without this node"):
        cluster.idle(15)
    assert cluster.members[loser].status.epoch_id == ids[loser]
    cluster.wipe(loser)
    cluster.run(lambda: len({member.status.epoch_id for member in cluster.members.values()}) == 1, seconds=30)
    cluster.converge()


def test_blank_node_answers_leaders_of_only_one_epoch_at_a_time(clock: Clock) -> None:
    """Otherwise the node would answer two leaders in one term."""
    driven = Driven(clock, config_of("n1", ["n1", "n2", "n3"]))
    for peer, line in (("n2", 5), ("n3", 6)):
        driven.wire.link(peer, Hello(b"the one cluster.", epoch_of(FORCED, line), claim_of(peer)))
    driven.step()
    heartbeat = AppendEntries(7, LogIndex(9, 7), 9, 0, 0, ())
    assert driven.hear("n2", heartbeat)
    assert driven.hear("n3", heartbeat) == [], "it follows the other one"
    assert driven.hear("n2", heartbeat)
    clock.advance(60)
    assert driven.hear("n3", heartbeat), "which leads it no more"


# What one node does


def test_full_disk_delays_forced_epoch_without_changing_its_state(clock: Clock) -> None:
    cluster = Lockstep(clock, snapshot_ms=500)
    cluster.commit(b"one")
    left, _, _ = leave_one(cluster)
    real, tried = left.node._snapshots.write, []

    def write(*args):  # type: ignore[no-untyped-def]
        tried.append(args)
        if len(tried) < 4:
            raise DiskFull("full", where="x")
        return real(*args)

    left.node._snapshots.write = write  # type: ignore[method-assign]
    force(left)
    force(left)  # The request is repeated until it is done.
    assert isinstance(left.node.force(b"another"), NoMajority)
    cluster.run(lambda: all_in(cluster, FORCED), seconds=30)
    assert len({args[1] for args in tried}) == 1, "one epoch, and one state of it"
    assert len({args[3] for args in tried}) == 1
    cluster.commit(b"two")
    cluster.converge()
    assert cluster.lead().commands == [b"one", b"forced", b"two"]


def test_node_entering_forced_epoch_sends_nothing_in_old_epoch(clock: Clock) -> None:
    cluster = Lockstep(clock)
    cluster.commit(b"one")
    left, blank, other = leave_one(cluster, settle_s=0.2)
    assert left.raft.leads, "it does not know yet that it is alone"
    left.propose(b"nobody has this one")
    cluster.round()
    left.worker.is_held = True
    left.node._calls.append(lambda: force(left))
    before = len(left.wire.sent)
    cluster.round()
    cluster.restart(other)
    cluster.idle(5)
    assert len(left.wire.sent) == before
    assert (left.node.leader, left.node.is_leader, left.status.role) == (None, False, "stalled")
    assert cluster.members[blank].status.role == "joining", "the old epoch admits nobody"
    assert not left.node.send(other, b"news")
    assert left.node.wait_s() > 0, "it does not spin"
    cluster.kill(other)
    left.worker.is_held = False
    cluster.run(lambda: all_in(cluster, FORCED))
    cluster.commit(b"two")
    assert cluster.lead().commands == [b"one", b"nobody has this one", b"forced", b"two"]


def test_force_completes_despite_uncommitted_reset(clock: Clock) -> None:
    cluster = Lockstep(clock)
    cluster.commit(b"one")
    leader = cluster.lead()
    cluster.drop_message = lambda *_: True
    leader.node.reset(b"soft")
    cluster.idle(0.05)
    others = [name for name in cluster.members if name != leader.name]
    for name in others:
        cluster.kill(name)
    cluster.drop_message = lambda *_: False
    cluster.wipe(others[0])
    cluster.idle(1)
    force(leader, b"hard")
    cluster.run(lambda: all_in(cluster, FORCED))
    assert cluster.members[leader.name].commands == [b"one", b"soft", b"hard"]


def test_force_returns_no_majority_during_committed_reset(clock: Clock) -> None:
    cluster = Lockstep(clock)
    cluster.commit(b"one")
    leader = cluster.lead()
    leader.worker.is_held = True
    leader.node.reset(b"soft")
    cluster.run(leader.node.is_over)
    refused = leader.node.force(b"hard")
    assert isinstance(refused, NoMajority)
    assert "Try again" in str(refused)


def test_power_cut_while_entering_forced_epoch_loses_no_data(clock: Clock) -> None:
    """Cut the power at every change of a file. Afterwards the node is in the old epoch, or in the forced
    epoch with all its data.
    """

    def begin(disk: MemoryDisk) -> Driven:
        driven = Driven(clock, config_of("n1", ["n1", "n2", "n3"], segment_bytes=512), disk)
        driven.step()
        return driven

    def run_to_end(driven: Driven) -> None:
        with pytest.raises(EpochOver):
            for _ in range(10):
                clock.advance(TICK_S)
                driven.step()
        driven.node.close()

    def prepare(disk: MemoryDisk) -> None:
        driven = begin(disk)
        driven.adopt()
        term = driven.lead()
        driven.propose(b"one")
        driven.step()
        driven.acknowledge("n2", driven.log.last.index, term=term)
        driven.step()
        assert driven.commands == [b"one"]
        driven.node.close()

    def run(disk: MemoryDisk, log: Log) -> None:
        driven = begin(disk)
        driven.wire.link("n2", Hello(bytes(16), 0, DiskClaim(disk_id("n2", 1))))
        driven.step()
        log.append("asked")
        force(driven)
        run_to_end(driven)
        driven = begin(disk)
        log.append(driven.status.epoch_id)
        driven.node.close()

    def recover(disk: MemoryDisk, _log: Log) -> None:
        begin(disk).node.close()

    def check(disk: MemoryDisk, log: Log) -> None:
        driven = begin(disk)
        is_forced = driven.status.epoch == FORCED
        assert is_forced or (driven.status.epoch == 1 and len(log) < 2)
        if is_forced:
            assert driven.commands == [b"one", b"forced"]
            assert driven.status.epoch_id == (log[1] if len(log) > 1 else driven.status.epoch_id)
            disks = driven.node.state.disks
            assert (disks["n1"].disk, disks["n2"].disk) == (disk_id("n1"), disk_id("n2", 1))
        driven.node.close()

    assert sweep(run, check, prepare=prepare, recover=recover, seeds=range(1), recover_cuts=1) > 50


# Nodes that follow


def test_uncounted_disk_follows_forced_epoch_even_if_ahead_in_old_epoch(clock: Clock) -> None:
    cluster = Lockstep(clock, snapshot_ms=200)
    cluster.commit(b"one")
    lead = cluster.lead().name
    behind, other = (name for name in cluster.members if name != lead)
    cluster.idle(1)
    cluster.cut((behind, lead), (behind, other))
    cluster.commit(*[b"%d" % at for at in range(20)], via=lead)
    cluster.idle(1)
    cluster.wipe(other)
    cluster.idle(3)  # It has the leader's snapshot, but no majority could admit it.
    ahead = cluster.members[other].status
    assert ahead.applied > cluster.members[behind].status.applied
    assert ahead.role == "joining"
    cluster.kill(lead)
    cluster.heal()
    cluster.idle(2)
    force(cluster.members[behind])
    cluster.run(lambda: all_in(cluster, FORCED), seconds=30)
    cluster.commit(b"two")
    cluster.converge()
    assert cluster.members[other].commands == [b"one", b"forced", b"two"]
    cluster.restart(other)
    cluster.converge()


@pytest.mark.parametrize("index", [0, 1, 2])
def test_stale_state_chunk_is_ignored_and_state_is_requested_again(clock: Clock, index: int) -> None:
    driven = Driven(clock, config_of("n1", ["n1", "n2", "n3"]))
    driven.adopt()
    for peer in ("n2", "n3"):
        driven.wire.drop(peer)
    driven.step()
    driven.up("n2", epoch=2)
    driven.step()
    clock.advance(60)
    (asks,) = of_kind(driven.step() + driven.step(), FetchState)
    assert asks.offset == 0
    driven.hear("n2", FetchStateChunk(LogIndex(index, min(index, 1)), 10, bytes(32), 0, bytes(10)))
    driven.step()
    assert (driven.status.epoch, driven.status.snapshot) == (1, 1)
    clock.advance(2)
    assert of_kind(driven.step() + driven.step(), FetchState)


def test_useless_state_chunks_trigger_no_immediate_request(clock: Clock) -> None:
    """Otherwise a peer that sends such chunks would be asked as fast as it answers."""
    driven = Driven(clock, config_of("n1", ["n1", "n2", "n3"]))
    driven.adopt()
    for peer in ("n2", "n3"):
        driven.wire.drop(peer)
    driven.step()
    driven.up("n2", epoch=2)
    driven.step()
    clock.advance(60)
    assert of_kind(driven.step() + driven.step(), FetchState)
    place = LogIndex(9, 4)
    (asks,) = of_kind(
        driven.hear_all("n2", FetchStateChunk(place, 1000, bytes(32), 0, bytes(10))), FetchState
    )
    assert asks.offset == 10
    for offset, data in ((10, b""), (0, bytes(10)), (500, bytes(10))):
        assert not of_kind(
            driven.hear_all("n2", FetchStateChunk(place, 1000, bytes(32), offset, data)), FetchState
        )
    clock.advance(2)
    (asks,) = of_kind(driven.step() + driven.step(), FetchState)
    assert asks.offset == 10


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split states into many chunks, so that a transfer takes longer than the time between two snapshots."""
    for module in (state_transfer, bootstrap):
        monkeypatch.setattr(module, "CHUNK_BYTES_MAX", 64)


@pytest.mark.usefixtures("pieces")
def test_blank_disk_reaches_forced_epoch_despite_peer_in_old_epoch(clock: Clock) -> None:
    cluster = Lockstep(clock)
    cluster.commit(*[b"%05d" % at for at in range(2500)])
    cluster.converge()
    for name in ("n2", "n3"):
        cluster.kill(name)
    cluster.wipe("n2")
    cluster.restart("n3")
    cluster.cut(("n1", "n3"))  # n3 is in the old epoch, where the blank disk does not count.
    cluster.idle(3)
    force(cluster.members["n1"])
    cluster.run(lambda: epochs(cluster)["n2"] == FORCED, seconds=60)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("breaks", [False, True])
def test_state_transfer_completes_despite_newer_snapshots(clock: Clock, breaks: bool) -> None:
    cluster = Lockstep(clock, snapshot_ms=500)
    cluster.commit(*[b"%05d" % at for at in range(2500)])
    name = next(name for name in cluster.members if name != cluster.lead().name)
    cluster.kill(name)
    cluster.lead().node.reset(b"reset")
    cluster.run(lambda: all_in(cluster, 2))
    cluster.lead()
    cluster.restart(name)
    for second in range(60):
        cluster.lead().propose(b"load %d" % second)
        if breaks and second % 3 == 2:
            cluster.isolate(name)
            cluster.idle(0.1)
            cluster.heal()
        cluster.idle(0.5)
        if epochs(cluster)[name] == 2:
            break
    assert epochs(cluster)[name] == 2
    cluster.converge()


@pytest.mark.usefixtures("pieces")
def test_state_server_resumes_transfers_and_releases_idle_readers(clock: Clock) -> None:
    cluster = Lockstep(clock, ("n1",))
    cluster.commit(*[b"%05d" % at for at in range(50)])
    member = cluster.members["n1"]
    member.node.reset(b"reset")
    cluster.run(lambda: all_in(cluster, 2))
    snapshots = cluster.members["n1"].node._snapshots
    giver = StateServer(snapshots)
    first = giver.chunk_for("n2", FetchState(), 0.0)
    assert first is not None
    again = giver.chunk_for("n2", FetchState(first.digest, 64), 1.0)
    assert again is not None
    assert (again.digest, again.offset) == (first.digest, 64)
    assert giver.chunk_for("n2", FetchState(first.digest, first.length), 1.0) is None
    anew = giver.chunk_for("n2", FetchState(b"another".ljust(32), 64), 2.0)
    assert anew is not None
    assert anew.offset == 0, "what the peer has is of no use"
    assert len(giver._readers) == 1
    giver.release_idle(IDLE_S + 1.0)
    assert len(giver._readers) == 1
    giver.release_idle(IDLE_S + 2.0)
    assert giver._readers == {}
    giver.close()


def test_force_does_not_treat_disk_with_committed_join_as_new(
    clock: Clock,
) -> None:
    driven = Driven(clock, config_of("n1", ["n1", "n2", "n3"]))
    driven.adopt()
    for peer in ("n2", "n3"):
        driven.wire.drop(peer)
    driven.step()
    driven.up("n2", claims={"n2": DiskClaim(disk_id("n2"))})
    driven.step()
    assert isinstance(driven.node.force(b"forced"), NoMajority)
    driven.wire.drop("n2")
    driven.up("n2", claims={"n2": DiskClaim(disk_id("n2", 1))})
    driven.step()
    force(driven)


# More members


def test_single_node_cluster_grows_to_three_with_all_commands_by_forced_epoch(clock: Clock) -> None:
    cluster = Lockstep(clock, ["n1"])
    cluster.commit(b"one")
    cluster.names, cluster.generations = ["n1", "n2", "n3"], dict.fromkeys(("n1", "n2", "n3"), 0)
    cluster.isolate("n1")  # n1 rejects nodes that are not members.
    for name in ("n2", "n3"):
        cluster.start(name)
    cluster.idle(3)
    assert cluster.members["n1"].commands == [b"one"]
    cluster.heal()
    cluster.restart("n1")
    cluster.idle(10)
    assert cluster.leader is None, "nobody but n1 has a say, and it is no majority"
    assert epochs(cluster) == {"n1": 1, "n2": 0, "n3": 0}
    force(cluster.members["n1"])
    cluster.run(lambda: all_in(cluster, FORCED))
    cluster.commit(b"two")
    cluster.converge()
    for name in cluster.names:
        assert cluster.members[name].commands == [b"one", b"forced", b"two"]
        cluster.restart(name)
    cluster.kill(cluster.lead().name)
    cluster.commit(b"three", via=next(iter(cluster.members)))


def test_force_on_growing_single_node_returns_no_majority_without_another_node(clock: Clock) -> None:
    cluster = Lockstep(clock, ["n1"])
    cluster.commit(b"one")
    cluster.names = ["n1", "n2", "n3"]
    cluster.restart("n1")
    cluster.idle(3)
    assert isinstance(cluster.members["n1"].node.force(b"forced"), NoMajority)
    cluster.names = ["n1"]
    cluster.restart("n1")  # Nothing has changed.
    cluster.commit(b"two")
    assert cluster.members["n1"].commands == [b"one", b"two"]


def test_extension_of_three_node_cluster_raises_cluster_mismatch(clock: Clock) -> None:
    cluster = Lockstep(clock)
    cluster.commit(b"one")
    cluster.converge()
    cluster.names = ["n1", "n2", "n3", "n4", "n5"]
    with pytest.raises(ClusterMismatch, match="Only a cluster of one node can be extended"):
        cluster.restart("n1")
