"""How long the flow stops when the leader is killed under load, and whether the merged logs are complete.

Messages flow again when, for every publisher, a message is merged that was published after the leader was
killed. The killed node is started again and catches up before the next kill. The audit reads the merged log
with the public API, as a subscriber does: every message of every session, once, in order.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import numpy as np
from msgspec import Struct

import rt
from rt.bench.measure import Figure
from rt.errors import Diverged
from rt.log.scan.message_batch import MessageBatch
from sequencer.bench.stage import STILL_S, Setup, Stage
from sequencer.localcluster.nodes import differences

GOAL_S: Final = 2.0
RATE_MB: Final = 5.0
"""Rate of each publisher: a load, but less than the machine can carry."""
LEAD_BYTES: Final = 1 << 20
"""A publisher waits when it is this far ahead, so that the figure measures the failover, not a backlog."""


def failover(setup: Setup, *, publishers: int, kills: int) -> Iterator[Figure]:
    with setup.open() as stage:
        stage.start_publishers(publishers, 1024)
        stage.ask("flood", lead_bytes=LEAD_BYTES, rate_mb=RATE_MB)
        stage.wait_for(lambda: min(stage.merged()), 1, "merges for the slowest publisher")
        gaps_s = [kill_leader(stage) for _ in range(kills)]
        name = f"{setup.nodes} nodes: leader killed under load"
        yield Figure(f"{name} until messages flow again", (statistics.median(gaps_s),), "s", GOAL_S)
        yield Figure(f"{name}, the longest of {kills}", (max(gaps_s),), "s")
        yield from verdict(stage, name)


def kill_leader(stage: Stage) -> float:
    """Kill the leader. Wait until messages flow again and the node has caught up. Return the seconds until
    messages flow again.
    """
    leader = stage.nodes.wait_ready()
    begun = time.monotonic()
    stage.nodes.kill(leader)
    ends = stage.published()
    if len(stage.nodes.names) == 1:
        stage.nodes.start(leader)
    stage.nodes.wait(
        lambda: all(merged > end for merged, end in zip(stage.merged(), ends, strict=True)),
        f"messages to flow after the end of {leader}",
        timeout_s=STILL_S,
    )
    gap_s = time.monotonic() - begun
    if leader not in stage.nodes.running:
        stage.nodes.start(leader)
    stage.wait_merged(max(map(stage.nodes.merged_position, stage.nodes.names)), leader)
    return gap_s


# The audit


class MergedAudit(Struct, frozen=True):
    """Errors of a merged log, in messages."""

    lost: int
    """Messages that were published, but are missing at their position in the order."""
    wrong: int
    """Messages that are repeated, come after a later message of their session, or were never published."""


def audit(batches: Iterable[MessageBatch], published: Mapping[str, int]) -> MergedAudit:
    """Compare a merged log with the number of messages of each session. Numbers start at 0."""
    expected: dict[str, int] = {}
    lost = wrong = 0
    for batch in batches:
        index = batch.session_index
        for at, name in enumerate(batch.session_names):
            numbers = batch.numbers if index is None else batch.numbers[np.asarray(index) == at]
            if not len(numbers):
                continue
            highest = np.maximum.accumulate(np.append(expected.get(name, 0) - 1, numbers))
            steps = numbers - highest[:-1]
            lost += int((steps[steps > 1] - 1).sum())
            wrong += int((steps < 1).sum())
            expected[name] = int(highest[-1]) + 1
    for name in {*expected, *published}:
        missing = published.get(name, 0) - expected.get(name, 0)
        lost, wrong = lost + max(missing, 0), wrong + max(-missing, 0)
    return MergedAudit(lost, wrong)


def verdict(stage: Stage, name: str) -> Iterator[Figure]:
    """Stop the publishers, wait until all nodes have merged everything, and compare.

    Raises `rt.Diverged` after the figures if anything is wrong, `rt.Timeout` if a message is never merged.
    """
    published = stage.stop()
    total = sum(published.values())
    stage.wait_merged(total)
    with rt.LogReader(stage.nodes.merged_directory(stage.nodes.names[0])) as reader:
        found = audit(reader.batches(), published)
    different = [] if len(stage.nodes.names) == 1 else differences(stage.nodes.compare(), total)
    yield Figure(f"{name}: messages lost", (found.lost,), "messages", 0)
    yield Figure(f"{name}: messages repeated or out of order", (found.wrong,), "messages", 0)
    yield Figure(f"{name}: merged logs that differ", (len(different),), "logs", 0)
    if found.lost or found.wrong or different:
        raise Diverged("the merged logs are not what was published", got="; ".join([str(found), *different]))
