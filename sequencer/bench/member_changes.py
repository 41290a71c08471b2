"""How long the flow stops while the members of a cluster change under load, and how long the changes take.

Every block of a merged log has its sequencing time, by the leader's clock. The longest time between two
blocks, from the start of a change to its end, is the longest time in which nothing was merged.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import rt
from rt.bench.measure import Figure
from rt.errors import Diverged, RtError
from rt.log.check.compare import compare
from rt.units import NS_PER_S
from sequencer.bench.failover import LEAD_BYTES, RATE_MB, audit
from sequencer.bench.stage import Setup, Stage
from sequencer.demo.figures import longest_pause_s, sequenced_ns
from sequencer.state.feature_level import LATEST

SPARE: Final = 2


def member_changes(setup: Setup, *, publishers: int) -> Iterator[Figure]:
    """Add two nodes, then remove the leader and another node."""
    with setup.open(spare=SPARE) as stage:
        nodes, windows = stage.nodes, list[tuple[str, int, int]]()
        stage.wait_for(lambda: _raised_level(stage), LATEST, "the highest feature level")
        stage.start_publishers(publishers, 1024)
        stage.ask("flood", lead_bytes=LEAD_BYTES, rate_mb=RATE_MB)
        stage.wait_for(lambda: min(stage.merged()), 1, "merges for the slowest publisher")
        for name in nodes.names[-SPARE:]:
            nodes.start(name)
            body = {"name": name, "raftAddress": f"127.0.0.1:{nodes.raft_ports[name]}"}
            windows.append(("a node is started and added", *_change(stage, "/member-add", body)))
        for what in ("the leader is removed", "another node is removed"):
            leader = nodes.wait_ready()
            name = leader if "leader" in what else next(one for one in nodes.running if one != leader)
            windows.append((what, *_change(stage, "/member-remove", {"name": name}, going=name)))
        left = nodes.running
        published = stage.stop()
        total = sum(published.values())
        stage.wait_merged(total, *left)
        times_ns = sequenced_ns(nodes.merged_directory(left[0]))
        for what, began_ns, ended_ns in windows:
            pause_s = longest_pause_s(times_ns, began_ns, ended_ns)
            yield Figure(f"{what}, under load", ((ended_ns - began_ns) / NS_PER_S,), "s")
            yield Figure(f"{what}: longest time without a merge", (pause_s,), "s")
        with rt.LogReader(nodes.merged_directory(left[0])) as reader:
            found = audit(reader.batches(), published)
        different = [] if len(left) == 1 else compare([*map(nodes.merged_directory, left)]).differences
        yield Figure("member changes: messages lost", (found.lost,), "messages", 0)
        yield Figure("member changes: messages repeated or out of order", (found.wrong,), "messages", 0)
        yield Figure("member changes: merged logs that differ", (len(different),), "logs", 0)
        if found.lost or found.wrong or different:
            raise Diverged("the merged logs are not what was published", got=f"{found}; {different[:3]}")


def _raised_level(stage: Stage) -> int:
    """The level that the cluster has after an attempt to raise it. Each node has reports of its own."""
    with suppress(RtError):
        stage.rest("/raise-feature-level", {"level": LATEST})
    return int(stage.rest("/status")["featureLevel"])


def _change(stage: Stage, target: str, body: dict[str, str], going: str = "") -> tuple[int, int]:
    """Change the members. Return when the change was requested and when it was done, in ns since the Unix
    epoch. `going` is a removed node, which ends by itself.
    """
    began_ns = time.time_ns()
    number = int(stage.rest(target, body)["number"])

    if going:
        stage.nodes.wait_ended(going)

    def settled() -> float:
        """The number of the last change that is done, plus a fraction of the next change while its node
        merges.
        """
        change = stage.rest("/status")["settledMemberChange"]
        if change is not None and change["number"] == number and change["why"]:
            raise Diverged("the members were not changed", got=change["why"])
        done = 0 if change is None else int(change["number"])
        merged = 0 if going else stage.nodes.merged_position(body["name"])
        return done if done >= number else done + merged / (merged + 1)

    stage.wait_for(settled, number, f"change {number} of the members")
    return began_ns, time.time_ns()
