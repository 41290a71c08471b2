"""Resets and forced resets: all nodes enter the next epoch with one state, despite crashes."""

from __future__ import annotations

import pytest
from disks import Keep, MemoryDisk
from disks.crash_sweep import Log, sweep

from rt.errors import ClusterMismatch
from sequencer.raft.lifecycle import state_transfer
from sequencer.raft.model.epochs import EpochOver, NoMajority
from sequencer.raft.model.messages import AppendEntries, Message
from tests.support.raft_bench import TICK_S, Clock, Lockstep, Member, config_of


def reset(cluster: Lockstep, command: bytes = b"reset", *, via: str | None = None) -> None:
    member = cluster.members[via] if via else cluster.lead()
    member.node.reset(command)


def epochs(cluster: Lockstep) -> dict[str, int]:
    return {name: member.status.epoch for name, member in cluster.members.items()}


def all_in(cluster: Lockstep, epoch: int) -> bool:
    return set(epochs(cluster).values()) == {epoch}


def commands(member: Member) -> list[bytes]:
    return member.commands


def test_reset_carries_whole_state_into_next_epoch(clock: Clock) -> None:
    cluster = Lockstep(clock)
    cluster.commit(b"one", b"two")
    reset(cluster)
    cluster.run(lambda: all_in(cluster, 2))
    cluster.commit(b"three")
    cluster.converge()
    for member in cluster.members.values():
        assert commands(member) == [b"one", b"two", b"reset", b"three"]
        assert member.log.base.index > 1
        assert len(member.disk.paths()) == len(set(member.disk.paths()))


def test_reset_via_follower_moves_all_nodes_to_next_epoch(clock: Clock) -> None:
    cluster = Lockstep(clock)
    leader = cluster.lead()
    cluster.commit(b"one")
    reset(cluster, via=next(name for name in cluster.members if name != leader.name))
    cluster.run(lambda: all_in(cluster, 2))
    cluster.converge()


@pytest.mark.parametrize("names", [("n1",), ("n1", "n2", "n3", "n4", "n5")])
def test_reset_moves_clusters_of_one_and_five_nodes_to_next_epoch(
    clock: Clock, names: tuple[str, ...]
) -> None:
    cluster = Lockstep(clock, names)
    cluster.commit(b"one")
    reset(cluster)
    cluster.run(lambda: all_in(cluster, 2))
    cluster.commit(b"two")
    cluster.converge()


def test_two_successive_resets_move_all_nodes_to_epoch_3(clock: Clock) -> None:
    cluster = Lockstep(clock)
    for epoch in (2, 3):
        cluster.commit(b"in %d" % epoch)
        reset(cluster)
        cluster.run(lambda epoch=epoch: all_in(cluster, epoch))  # type: ignore[misc]
    cluster.commit(b"last")
    cluster.converge()


def test_commands_after_reset_are_not_applied(clock: Clock) -> None:
    cluster = Lockstep(clock)
    leader = cluster.lead()
    cluster.commit(b"one")
    leader.node.reset(b"first")
    leader.node.reset(b"second")
    futures = leader.propose(b"late")
    cluster.run(lambda: all_in(cluster, 2))
    cluster.converge()
    assert commands(cluster.lead()) in ([b"one", b"first"], [b"one", b"late", b"first"])
    is_applied = b"late" in commands(cluster.lead())
    assert futures[0].done() or not is_applied


def test_node_down_during_reset_enters_next_epoch_with_same_disk(clock: Clock) -> None:
    cluster = Lockstep(clock)
    cluster.commit(b"one")
    name = next(name for name in cluster.members if name != cluster.lead().name)
    cluster.kill(name)
    reset(cluster)
    cluster.run(lambda: all_in(cluster, 2))
    cluster.commit(*[b"%d" % at for at in range(50)])
    disk = cluster.restart(name).config.name and cluster.members[name].node.claim.disk
    cluster.run(lambda: all_in(cluster, 2))
    cluster.converge()
    assert cluster.members[name].node.claim.disk == disk


def test_node_down_during_two_resets_enters_newest_epoch(clock: Clock) -> None:
    cluster = Lockstep(clock)
    cluster.commit(b"one")
    name = next(name for name in cluster.members if name != cluster.lead().name)
    cluster.kill(name)
    for epoch in (2, 3):
        reset(cluster)
        cluster.run(lambda epoch=epoch: all_in(cluster, epoch))  # type: ignore[misc]
        cluster.commit(b"in %d" % epoch)
    cluster.restart(name)
    cluster.run(lambda: all_in(cluster, 3))
    cluster.converge()


def leave_alone(cluster: Lockstep) -> tuple[str, str, str]:
    """Let the leader apply a reset and enter the next epoch alone. One follower has the reset uncommitted,
    the other does not have it.

    Return the names of the leader, of the follower with the reset, and of the follower without it.
    """
    leader = cluster.lead()
    has, lacks = (name for name in cluster.members if name != leader.name)
    end = leader.log.last.index

    def drops(sender: str, receiver: str, message: Message) -> bool:
        """Return whether to drop a message, so that only the leader learns of the commit."""
        if not isinstance(message, AppendEntries) or sender != leader.name:
            return False
        return receiver == lacks or message.commit > end

    cluster.drop_message = drops
    leader.node.reset(b"reset")
    cluster.run(lambda: leader.node.is_over())
    cluster.isolate(leader.name)
    cluster.drop_message = lambda *_: False
    assert cluster.members[has].log.last.index > end
    assert cluster.members[lacks].log.last.index == end
    cluster.run(lambda: epochs(cluster)[leader.name] == 2)
    return leader.name, has, lacks


def test_followers_finish_reset_while_old_leader_is_isolated(clock: Clock) -> None:
    cluster = Lockstep(clock)
    cluster.commit(b"one")
    leader, has, lacks = leave_alone(cluster)
    cluster.run(lambda: epochs(cluster)[has] == epochs(cluster)[lacks] == 2)
    cluster.heal()
    cluster.commit(b"two")
    cluster.converge()
    assert commands(cluster.members[leader]) == [b"one", b"reset", b"two"]


def test_followers_finish_reset_after_power_cut_of_the_one_with_the_reset_entry(clock: Clock) -> None:
    cluster = Lockstep(clock)
    cluster.commit(b"one")
    _, has, _ = leave_alone(cluster)
    disk = cluster.kill(has)
    cluster.idle(3)
    cluster.start(has, disk.after_power_cut("none"))
    cluster.run(lambda: all_in(cluster, 2))
    cluster.heal()
    cluster.commit(b"two")
    cluster.converge()


def test_follower_without_reset_entry_enters_epoch_of_leader_if_the_other_is_lost(clock: Clock) -> None:
    cluster = Lockstep(clock)
    cluster.commit(b"one")
    leader, has, lacks = leave_alone(cluster)
    cluster.kill(has)
    cluster.idle(1)
    assert epochs(cluster)[lacks] == 1, "nobody says what became of the epoch"
    cluster.heal()
    cluster.run(lambda: all_in(cluster, 2), seconds=30)
    cluster.commit(b"two")
    cluster.wipe(has)
    cluster.run(lambda: all_in(cluster, 2), seconds=30)
    cluster.converge()
    assert commands(cluster.members[has]) == commands(cluster.members[leader]) == [b"one", b"reset", b"two"]


def test_followers_of_old_epoch_converge_with_reconnected_leader_of_next_epoch(clock: Clock) -> None:
    cluster = Lockstep(clock)
    cluster.commit(b"one")
    leader, has, lacks = leave_alone(cluster)
    # The two nodes of the old epoch connect to the node of the next epoch, continue, and so reach the reset.
    cluster.heal()
    cluster.run(lambda: all_in(cluster, 2))
    cluster.converge()
    assert {leader, has, lacks} == set(cluster.members)


def test_state_of_many_chunks_is_fetched_from_node_without_leadership(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_transfer, "CHUNK_BYTES_MAX", 20)
    cluster = Lockstep(clock)
    cluster.commit(*[b"%d" % at for at in range(30)])
    _, has, lacks = leave_alone(cluster)
    cluster.kill(has)
    cluster.heal()
    cluster.run(lambda: epochs(cluster)[lacks] == 2, seconds=30)
    cluster.commit(b"two")
    cluster.converge()


def lone(disk: MemoryDisk) -> Member:
    return Member(config_of("n1", ["n1"], bootstrap=True, segment_bytes=512), disk)


@pytest.mark.slow
def test_power_cut_during_reset_loses_no_acknowledged_command(clock: Clock) -> None:
    """Cut the power at every change of a file. Afterwards the node is in one of the two epochs, with all
    acknowledged commands.
    """

    def run_to(member: Member, command: bytes, log: Log) -> Member:
        """Commit a command, and record the commit."""
        while not member.node.is_leader:
            clock.advance(TICK_S)
            member.node.step()
        (future,) = member.propose(command)
        while not future.done():
            clock.advance(TICK_S)
            member.node.step()
        log.append(command)
        return member

    def prepare(disk: MemoryDisk) -> None:
        member = lone(disk)
        for at in range(3):
            run_to(member, b"%d" % at + bytes(200), [])
        member.node.close()

    def run(disk: MemoryDisk, log: Log) -> None:
        member = run_to(lone(disk), b"before", log)
        member.node.reset(b"reset")
        with pytest.raises(EpochOver):
            while True:
                clock.advance(TICK_S)
                member.node.step()
        member.node.close()
        member = lone(disk)
        assert member.status.epoch == 2
        log.append(b"reset")
        run_to(member, b"behind", log)
        member.node.close()

    def recover(disk: MemoryDisk, _log: Log) -> None:
        member = lone(disk)
        member.node.close()

    def check(disk: MemoryDisk, log: Log) -> None:
        member = lone(disk)
        for _ in range(2):
            try:
                run_to(member, b"last", [])
                break
            except EpochOver:
                member.node.close()
                member = lone(disk)
        commands = [command for command in member.commands[3:] if command != b"last"]
        assert commands[: len(log)] == log, (commands, log)
        assert commands == [b"before", b"reset", b"behind"][: len(commands)]
        assert member.status.epoch == (2 if b"reset" in commands else 1)
        member.node.close()

    strategies: list[Keep] = ["none", "some"]
    swept = sweep(
        run,
        check,
        prepare=prepare,
        recover=recover,
        strategies=strategies,
        seeds=range(1),
        recover_cuts=1,
    )
    assert swept > 200


def test_forced_reset_continues_with_state_of_one_node(clock: Clock) -> None:
    cluster = Lockstep(clock)
    cluster.commit(b"one", b"two")
    name = cluster.lead().name
    others = [other for other in cluster.members if other != name]
    for other in others:
        cluster.kill(other)
    node = cluster.members[name].node
    cluster.idle(2)
    assert isinstance(node.force(b"forced"), NoMajority), "nobody could go on with it"
    cluster.wipe(others[0])
    cluster.idle(0.5)
    assert node.force(b"forced") is None
    cluster.run(lambda: all_in(cluster, 1 << 16))
    cluster.commit(b"three")
    cluster.wipe(others[1])
    cluster.run(lambda: all_in(cluster, 1 << 16))
    cluster.converge()
    assert commands(cluster.lead()) == [b"one", b"two", b"forced", b"three"]


def test_forced_reset_applies_uncommitted_entries_of_its_node(clock: Clock) -> None:
    cluster = Lockstep(clock)
    cluster.commit(b"one")
    leader = cluster.lead()
    others = [other for other in cluster.members if other != leader.name]
    cluster.drop_message = lambda *_: True
    leader.propose(b"two")
    cluster.idle(0.05)
    for other in others:
        cluster.kill(other)
    cluster.drop_message = lambda *_: False
    cluster.wipe(others[0])
    cluster.idle(0.5)
    assert leader.node.force(b"forced") is None
    cluster.run(lambda: all_in(cluster, 1 << 16))
    assert commands(cluster.members[leader.name]) == [b"one", b"two", b"forced"]


def test_node_left_out_of_forced_epoch_raises_cluster_mismatch(clock: Clock) -> None:
    cluster = Lockstep(clock)
    cluster.commit(b"one")
    name = cluster.lead().name
    first, second = (other for other in cluster.members if other != name)
    for other in (first, second):
        cluster.kill(other)
    cluster.wipe(first)
    cluster.idle(0.5)
    assert cluster.members[name].node.force(b"forced") is None
    cluster.run(lambda: all_in(cluster, 1 << 16))
    cluster.restart(second)
    with pytest.raises(ClusterMismatch, match="an operator forced a new epoch"):
        cluster.run(lambda: all_in(cluster, 1 << 16))


def test_forced_reset_is_refused_while_members_could_elect_leader(clock: Clock) -> None:
    cluster = Lockstep(clock)
    cluster.commit(b"one")
    leader = cluster.lead().name
    behind, other = (name for name in cluster.members if name != leader)
    cluster.cut((behind, leader), (behind, other))
    cluster.commit(b"acknowledged", via=leader)
    cluster.kill(other)
    cluster.wipe(other)
    cluster.idle(1.5)
    cluster.heal()
    for _ in range(3):
        cluster.round()
    refused = cluster.members[behind].node.force(b"forced")
    assert isinstance(refused, NoMajority)
    assert "could elect a leader" in str(refused)
