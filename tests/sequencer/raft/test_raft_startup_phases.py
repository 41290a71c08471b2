"""Phases that the status of a returning member reports: starting, snapshot, commands, ready."""

from __future__ import annotations

from raft_bench import Clock, Lockstep, Member

from sequencer.config.startup_phase import NodePhases, Phase
from sequencer.control.cluster_view import raft_log_view
from sequencer.raft.model.messages import CHUNK_BYTES_MAX


def steps_of_return(cluster: Lockstep, clock: Clock, member: Member) -> list[Phase]:
    """Return the phases of a member without repeats, from its start until it keeps up."""
    steps, told = NodePhases(), list[Phase]()

    def look() -> bool:
        log = raft_log_view(member.status, is_caught_up=member.node.is_caught_up)
        step = steps.update(log, Phase("ready"), int(clock.now * 1e9))
        if step not in told:
            told.append(step)
        return step.name == "ready"

    cluster.run(look, seconds=60)
    return told


def names_of(steps: list[Phase]) -> list[str]:
    names = [step.name for step in steps]
    return [name for at, name in enumerate(names) if name not in names[:at]]


def away(cluster: Lockstep) -> str:
    """Stop a follower, and return its name."""
    leader = cluster.lead()
    cluster.converge()
    name = next(name for name in cluster.names if name != leader.name)
    cluster.kill(name)
    return name


def test_member_with_own_snapshot_reports_commands_phase(clock: Clock) -> None:
    cluster = Lockstep(clock, snapshot_ms=100)
    cluster.commit(b"before")
    cluster.idle(1)
    name = away(cluster)
    for round_ in range(30):
        cluster.commit(*[bytes([round_]) * 50_000] * 4)
    committed = cluster.lead().status.committed
    member = cluster.start(name, cluster.disks[name].after_power_cut("all"))
    assert member.status.snapshot > 0
    assert member.status.term == cluster.lead().status.term, "its snapshot is of this term"
    assert not member.node.is_caught_up, "it has to apply what came after the snapshot"
    assert member.status.leader_committed == member.status.committed < committed
    told = steps_of_return(cluster, clock, member)
    assert names_of(told) == ["starting", "commands", "ready"]
    applied = [step for step in told if step.name == "commands"]
    assert {step.total for step in applied if step.total > step.done} <= set(range(committed, committed + 5))
    assert [step.done for step in applied] == sorted(step.done for step in applied)


def test_member_needing_compacted_entries_reports_snapshot_phase(clock: Clock) -> None:
    cluster = Lockstep(clock, snapshot_ms=100, keep_entries=1, keep_bytes=1, segment_bytes=1000)
    name = away(cluster)
    for round_ in range(3):
        cluster.commit(*[bytes([round_]) * (CHUNK_BYTES_MAX // 2)] * 2)
        cluster.idle(0.5)
    cluster.idle(2)
    member = cluster.start(name, cluster.disks[name].after_power_cut("all"))
    assert cluster.lead().status.log_start > member.status.log_end
    assert member.status.received is None
    told = steps_of_return(cluster, clock, member)
    assert names_of(told)[:2] == ["starting", "snapshot"]
    assert names_of(told)[-1] == "ready"
    snapshots = [step for step in told if step.name == "snapshot"]
    assert len({step.total for step in snapshots}) == 1
    assert snapshots[0].total > 3 * CHUNK_BYTES_MAX
    assert 0 < snapshots[0].done < snapshots[0].total == snapshots[-1].done
    assert member.status.received is None
    cluster.converge()


def test_isolated_blank_member_reports_starting_phase(clock: Clock) -> None:
    cluster = Lockstep(clock, ["n1", "n2", "n3"])
    cluster.isolate("n3")
    cluster.idle(1)
    status = cluster.members["n3"].status
    assert (status.leader_committed, status.received) == (0, None)
    assert NodePhases().update(raft_log_view(status, is_caught_up=False), None, 0) == Phase("starting")
