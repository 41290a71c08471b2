"""Runs the whole stack under random faults: nodes, publishers that reach different nodes, a subscriber.

`python -m chaos.run --stack --seconds 600 --seed 7` starts one by hand. Between faults everything is healed.
Then the merged logs must reach the committed end in a limited time, while the publishers continue. At the end
the merged messages are checked, and the merged logs are compared byte by byte.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import rt
from chaos.faulty_nodes import FaultyNodes
from chaos.stack_cast import LogCheck, StackPublisher, StackSubscriber
from chaos.stack_faults import POLL_S, StackFaults
from rt.errors import RtError, Timeout
from sequencer.merged.scrubber import ROUND_S, SCRUB_BYTES_S

STREAM: Final = "chaos"
READY_S: Final = 60.0
"""Most seconds after a heal until the cluster has a leader and all nodes listen."""
LIVE_S: Final = 30.0
"""Most seconds from then until all merged logs have the messages published before. The repair of flipped
bytes has the same limit.
"""
RESTS_S_MAX: Final = (0.1, 1.0, 2.0)
"""Longest rests between two faults. One of them is drawn for each round."""
ROLL_BYTES: Final = 2**20


@dataclass(slots=True)
class StackOutcome:
    """The faults of one run, and its result."""

    seed: int
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    lost_files: int = 0
    """Number of files in which power cuts undid changes."""
    published: int = 0
    merged: int = 0
    lives_s: list[float] = field(default_factory=list)
    """Seconds after each heal until all merged logs had the messages published before."""
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        faults = " ".join(f"{name}={count}" for name, count in sorted(self.faults.items()))
        slowest = max(self.lives_s, default=math.nan)
        return (
            f"seed={self.seed} seconds={self.seconds:.0f} published={self.published} merged={self.merged} "
            f"heals={len(self.lives_s)} slowest_heal_s={slowest:.1f} lost_files={self.lost_files} "
            f"faults: {faults}" + "".join(f"\n  problem: {problem}" for problem in self.problems)
        )


class StackChaos:
    """One run: ends after `seconds` or after `decks` of faults, whichever comes first.

    A short deck has one fault of each kind.

    The publishers: one for each majority of the nodes that leaves out one node, one for each single node,
    and one that reaches all.
    """

    def __init__(
        self,
        root: Path,
        *,
        nodes: int = 3,
        seconds: float = math.inf,
        decks: float = math.inf,
        seed: int,
        live_s: float = LIVE_S,
        is_short: bool = False,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._root, self._count, self._seed, self._say = root, nodes, seed, say
        self._is_short = is_short
        self._seconds, self._decks, self._live_s = seconds, decks, live_s
        self._draw = random.Random(seed)
        self._outcome = StackOutcome(seed)

    def run(self) -> StackOutcome:
        """Run all phases. The outcome contains the problems."""
        begun = time.monotonic()
        names = [f"n{at}" for at in range(1, self._count + 1)]
        reached = {f"without-{name}": [one for one in names if one != name] for name in names}
        reached |= {f"only-{name}": [name] for name in names[:2]}
        reached["all"] = names
        flags = ["--roll-bytes", str(ROLL_BYTES), "--retention-disk-percent", "0"]
        nodes = self._nodes = FaultyNodes(
            self._root, self._count, stream=STREAM, flags=flags, clients=[*reached, "reader"]
        )
        with nodes:
            self._publishers = [
                StackPublisher(nodes, name, some, self._seed) for name, some in reached.items()
            ]
            self._subscriber = StackSubscriber(nodes, "reader")
            cast = self._publishers, self._subscriber
            self._faults = StackFaults(
                nodes, *cast, self._draw.getrandbits(64), self._say, is_short=self._is_short
            )
            try:
                nodes.start()
                nodes.wait_ready()
                for publisher in self._publishers:
                    publisher.start()
                self._subscriber.start()
                self._settle()
                self._torment(time.monotonic() + self._seconds)
                self._finish()
            except RtError as error:
                self._outcome.problems.append(f"{type(error).__name__}: {error}")
            finally:
                for publisher in self._publishers:
                    publisher.kill()
                self._subscriber.close()
        outcome, faults = self._outcome, self._faults
        outcome.faults, outcome.lost_files = faults.done, faults.lost_files
        outcome.problems += self._subscriber.check.problems
        outcome.seconds = time.monotonic() - begun
        return outcome

    @property
    def kinds(self) -> Collection[str]:
        """All kinds of faults. Available after `run`."""
        return self._faults.kinds.keys()

    # Phases

    def _torment(self, until: float) -> None:
        faults = self._faults
        while time.monotonic() < until and faults.decks < self._decks:
            rest_s_max = self._draw.choice(RESTS_S_MAX)
            for at in range(self._draw.randint(3, 8)):
                faults.strike(is_calm=at == 0)
                faults.wait(self._draw.uniform(0.05, rest_s_max))
            self._settle()
            faults.turn()

    def _settle(self) -> None:
        """Heal everything. Messages published before must reach all merged logs in time."""
        nodes = self._nodes
        self._faults.heal()
        nodes.wait_ready(timeout_s=READY_S)
        begun = time.monotonic()
        wanted = {one.name: one.ask("status")["flushed"] for one in self._publishers}
        self._await(lambda: self._lacking(wanted), "publishers to be told that all is merged", begun)
        # Numbers are dense in each session, so at least this many messages are committed.
        end = sum(one.ask("status")["merged"] for one in self._publishers)
        self._await(lambda: self._behind(end), f"merged logs that end at {end}", begun)
        live_s = time.monotonic() - begun
        self._faults.forget_copies()
        flips = "flipped bytes to be noticed and fixed"
        self._await(self._faults.damaged, flips, time.monotonic(), self._live_s + self._scrub_s())
        self._outcome.lives_s.append(live_s)
        self._say(f"settled after {live_s:.1f} s at {end}, fixed after {time.monotonic() - begun:.1f} s")

    def _finish(self) -> None:
        nodes, outcome = self._nodes, self._outcome
        self._faults.heal()
        ends = {one.name: one.ask("finish")["flushed"] for one in self._publishers}
        outcome.published = sum(ends.values())
        self._settle()
        for publisher in self._publishers:
            publisher.ask("close")
        outcome.problems += map(str, nodes.compare(self._subscriber.copy).differences)
        checks = [self._subscriber.check, *map(self._read, nodes.names)]
        for check in checks:
            if check.ends != ends:
                check.problem(f"ends with {check.ends}, but {ends} was published")
        outcome.merged = min(check.end for check in checks)
        outcome.problems += [problem for check in checks[1:] for problem in check.problems]

    def _read(self, node: str) -> LogCheck:
        check = LogCheck(node)
        with rt.LogReader(self._nodes.merged_directory(node)) as reader:
            while messages := reader.poll(10_000, 0):
                check.take(messages)
        return check

    # Waiting

    def _lacking(self, wanted: dict[str, int]) -> dict[str, int]:
        """By publisher: how many of the messages are not reported as merged."""
        reached = {one.name: one.ask("status")["merged"] for one in self._publishers}
        return {name: end - reached[name] for name, end in wanted.items() if reached[name] < end}

    def _behind(self, end: int) -> dict[str, int]:
        """By node and for the subscriber: how many messages are not merged or not read yet."""
        reached = {name: self._nodes.merged_position(name) for name in self._nodes.names}
        reached[self._subscriber.name] = self._subscriber.check.end
        return {name: end - position for name, position in reached.items() if position < end}

    def _scrub_s(self) -> float:
        """Seconds that a node needs to verify all its data. The rate of its scrubber is limited."""
        most = max(_bytes_below(self._nodes.directory(name)) for name in self._nodes.names)
        return ROUND_S + most / SCRUB_BYTES_S

    def _await(
        self, lacking: Callable[[], object], what: str, begun: float, limit_s: float | None = None
    ) -> None:
        limit_s = self._live_s if limit_s is None else limit_s
        while found := lacking():
            self._faults.check_alive()
            if time.monotonic() - begun > limit_s:
                words = "\n".join(f"{name}: {self._nodes.last_words(name, 8)}" for name in self._nodes.names)
                raise Timeout(f"after a heal: waited for {what}", got=f"{found}\n{words}", expected=limit_s)
            time.sleep(POLL_S)


def _bytes_below(directory: Path) -> int:
    """Total size of all files in bytes. Some files may be deleted meanwhile."""
    size = 0
    for place, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                size += Path(place, name).stat().st_size
    return size
