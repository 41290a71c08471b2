"""Whether a merged log holds what was published: every message of every session, once, in order.

It reads with the public API, as a subscriber would.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

import rt
from rt.bench.measure import Figure
from rt.errors import Diverged
from rt.log.scan.message_batch import MessageBatch
from sequencer.bench.stage import Stage
from sequencer.localcluster.nodes import LocalCluster


@dataclass(frozen=True, slots=True)
class MergedAudit:
    """What is wrong with a merged log, in messages."""

    lost: int
    """Published, and not there where its turn is."""
    wrong: int
    """There twice, behind a later one of their session, or never published."""


def audit(batches: Iterable[MessageBatch], published: Mapping[str, int]) -> MergedAudit:
    """Compare a merged log with how many messages each session had; their numbers begin at 0."""
    wanted: dict[str, int] = {}
    lost = wrong = 0
    for batch in batches:
        index = batch.session_index
        for at, name in enumerate(batch.session_names):
            numbers = batch.numbers if index is None else batch.numbers[np.asarray(index) == at]
            if not len(numbers):
                continue
            highest = np.maximum.accumulate(np.append(wanted.get(name, 0) - 1, numbers))
            steps = numbers - highest[:-1]
            lost += int((steps[steps > 1] - 1).sum())
            wrong += int((steps < 1).sum())
            wanted[name] = int(highest[-1]) + 1
    for name in {*wanted, *published}:
        behind = published.get(name, 0) - wanted.get(name, 0)
        lost, wrong = lost + max(behind, 0), wrong + max(-behind, 0)
    return MergedAudit(lost, wrong)


def verdict(stage: Stage, name: str) -> Iterator[Figure]:
    """Have publishers stop, wait until all nodes have merged everything, and compare.

    `rt.Diverged` behind the figures if anything is wrong; `rt.Timeout` if it is never all merged.
    """
    published = stage.stop()
    total = sum(published.values())
    stage.wait_merged(total)
    with rt.LogReader(stage.nodes.merged_directory(stage.nodes.names[0])) as reader:
        found = audit(reader.batches(), published)
    differences = _differences(stage.nodes, total)
    yield Figure(f"{name}: messages lost", (found.lost,), "messages", 0)
    yield Figure(f"{name}: messages repeated or out of order", (found.wrong,), "messages", 0)
    yield Figure(f"{name}: merged logs that differ", (len(differences),), "logs", 0)
    if found.lost or found.wrong or differences:
        raise Diverged(
            "the merged logs are not what was published", got="; ".join([str(found), *differences])
        )


def _differences(nodes: LocalCluster, end: int) -> list[str]:
    if len(nodes.names) == 1:
        return []
    compared = nodes.compare()
    ends = [f"{log.path} ends at {log.end}, not at {end}" for log in compared.logs if log.end != end]
    return [str(difference) for difference in compared.differences] + ends
