"""Raft proposals: command types, retries, commit on a single node, and exiting callbacks."""

from __future__ import annotations

import sys
import threading
from array import array
from collections import deque
from typing import Any

import pytest
from raft_bench import (
    CLUSTER,
    Clock,
    Lockstep,
    claim_of,
)
from raft_members import proposals_of

from rt.errors import Closed
from sequencer.raft.model.cluster_state import ClusterState
from sequencer.raft.model.entry_codec import (
    PACKS_MAX,
    Commands,
    decode_content,
)
from sequencer.raft.model.messages import (
    RaftEntry,
)
from sequencer.raft.proposals import PACK_BYTES, Proposals, Route
from sequencer.raft.storage.worker import Worker

# Commands


@pytest.mark.parametrize(
    "command", ["text", bytearray(b"may change"), memoryview(array("i", [1, 2, 3])), None, 7]
)
def test_command_of_type_other_than_bytes_raises_type_error(clock: Clock, command: Any) -> None:
    """V5: a text ended the node. An array with items other than bytes was committed, and ended all nodes."""
    cluster = Lockstep(clock)
    leader = cluster.lead()
    with pytest.raises(TypeError, match="a command must be bytes"):
        leader.node.propose(command)
    assert leader.status.in_flight == 0
    cluster.commit(b"fine", via=leader.name)
    cluster.converge()


def proposals() -> tuple[Proposals, ClusterState]:
    state = ClusterState(CLUSTER, 1, {"n1": claim_of("n1")})
    return proposals_of("n1", commands_max=10**9, command_bytes_max=10**12), state


def _sequence(content: bytes) -> int:
    pack = decode_content(content)
    assert isinstance(pack, Commands)
    return pack.sequence


def test_progressing_packs_are_not_proposed_again(clock: Clock) -> None:
    """V4: all packs in flight were proposed again once a second, although each pack was done in a fifth of a
    second.
    """
    made, state = proposals()
    route, sent, under_way, index = Route("n2", 1, 1), [], deque[tuple[float, bytes]](), 1
    end = clock.now + 4
    while clock.now < end:
        while len(made._waiting) < 2 * PACKS_MAX:
            made.add(bytes(PACK_BYTES))
        for content in made.next_entries(route, clock.now):
            sent.append(_sequence(content))
            after = under_way[-1][0] + 0.0125 if under_way else 0.0  # Some packs are always under way.
            under_way.append((max(clock.now + 0.2, after), content))
        while under_way and under_way[0][0] <= clock.now:
            index += 1
            applied = state.apply(RaftEntry(under_way.popleft()[1], index, 1))
            assert applied is not None
            made.on_applied(applied, state, clock.now)
        clock.advance(0.005)
    assert len(sent) > 5 * PACKS_MAX
    assert sent == sorted(set(sent))


def test_stalled_cluster_is_sent_only_first_pack_again_with_growing_delay(clock: Clock) -> None:
    """V4: a cluster slower than the retry delay appended everything again every second, and so became ever
    slower.
    """
    made, _ = proposals()
    for _ in range(PACKS_MAX):
        made.add(bytes(PACK_BYTES))
    sent: list[int] = []
    for _ in range(300):
        sent += map(_sequence, made.next_entries(Route("n2", 1, 1), clock.now))
        clock.advance(0.1)
    assert sent == [*range(1, PACKS_MAX + 1), 1, 1, 1, 1]  # after 1, 3, 7 and 15 seconds
    assert len(made.next_entries(Route("n2", 1, 2), clock.now)) == PACKS_MAX


def test_single_node_commits_as_soon_as_it_has_synced(clock: Clock) -> None:
    """R1: a commit was noticed only at the next heartbeat, because no answer arrived that would have ended
    the wait.
    """
    cluster = Lockstep(clock, ["n1"])
    cluster.commit(b"first")
    cluster.idle(1)
    alone = cluster.members["n1"]
    [future] = alone.propose(b"second")
    alone.node.step()
    for _ in range(5):
        if not future.done():
            assert alone.node.wait_s() == 0.0
            alone.node.step()
    assert future.done()
    assert alone.node.wait_s() > 0.0


# Callbacks


def test_exiting_future_callback_does_not_block_other_futures(clock: Clock) -> None:
    """V16: the other commands of its pack never completed, not even at the end."""
    cluster = Lockstep(clock)
    leader = cluster.lead()
    futures = leader.propose(*[b"%d" % at for at in range(5)])
    futures[1].add_done_callback(lambda _future: sys.exit(3))
    cluster.run(lambda: all(future.done() for future in futures))
    late = leader.propose(b"a", b"b", b"c")
    late[0].add_done_callback(lambda _future: sys.exit(3))
    leader.node.proposals.close(Closed("the end"))
    assert all(isinstance(future.exception(0), Closed) for future in late)


def test_exiting_worker_job_reports_system_exit_and_later_jobs_run() -> None:
    """V16: the worker ended without a message, and with it every later snapshot and install."""
    woken = threading.Semaphore(0)
    worker = Worker("aside", woken.release)
    outcomes: list[object] = []

    def leave() -> None:
        raise SystemExit("from the machine's encoder")

    worker.run(leave, outcomes.append, outcomes.append)
    worker.run(lambda: "later work", outcomes.append, outcomes.append)
    for _ in range(2):
        assert woken.acquire(timeout=120)
    worker.collect()
    worker.close()
    assert [type(outcome) for outcome in outcomes] == [SystemExit, str]
