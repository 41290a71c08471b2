"""How long the flow stops when the leader is killed under load, and that nothing is lost by it.

The flow is back when a message of every publisher is merged that was published after the leader's end: what
was on its way before does not count. The killed node is started again, and has merged what the others had
then, before the next one goes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Final

from rt.bench.measure import Figure
from sequencer.bench.audit import verdict
from sequencer.bench.stage import Setup, Stage

GOAL_S: Final = 2.0
_RATE_MB: Final = 5.0
"""Of each publisher: load, but not all that the machine can carry."""
_LEAD_BYTES: Final = 1 << 20
"""A publisher waits when it is so far ahead, so that what is measured is the failover and not a backlog."""


def failover(setup: Setup, *, publishers: int, kills: int) -> Iterator[Figure]:
    """Kill the leader `kills` times."""
    with setup.open() as stage:
        stage.publishers(publishers, 1024)
        stage.ask("flood", lead_bytes=_LEAD_BYTES, rate_mb=_RATE_MB)
        stage.wait_for(lambda: min(stage.merged()), 1, "merges for the slowest publisher")
        gaps = [kill_leader(stage) for _ in range(kills)]
        name = f"{setup.nodes} nodes: leader killed under load"
        yield Figure(f"{name} until messages flow again", (statistics.median(gaps),), "s", GOAL_S)
        yield Figure(f"{name}, the longest of {kills}", (max(gaps),), "s")
        yield from verdict(stage, name)


def kill_leader(stage: Stage) -> float:
    """Kill the node that leads; seconds until the flow is back. The node is back too when this returns."""
    leader = stage.nodes.wait_ready()
    begun = time.monotonic()
    stage.nodes.kill(leader)
    ends = stage.published()
    if len(stage.nodes.names) == 1:
        stage.nodes.start(leader)
    stage.wait(
        lambda: all(merged > end for merged, end in zip(stage.merged(), ends, strict=True)),
        f"messages to flow after the end of {leader}",
    )
    gap_s = time.monotonic() - begun
    if leader not in stage.nodes.running:
        stage.nodes.start(leader)
    stage.wait_merged(max(map(stage.nodes.merged_position, stage.nodes.names)), leader)
    return gap_s
