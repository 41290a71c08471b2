"""The whole stack under faults that a seed draws: nodes, and publishers that reach different ones of them.

`python -m chaos.run --stack --seconds 600 --seed 7` runs one by hand. Between faults everything
heals, and the merged logs must come to the committed end within a bound while the publishers go on. In the
end what is merged is checked, and the merged logs are compared byte by byte.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import rt
from chaos.stack_publisher import value_of
from chaos.wired_nodes import WiredNodes
from chaos.wires import Wire
from rt.errors import RtError, Timeout
from sequencer.localcluster.processes import Process, ProcessEnded

STREAM: Final = "chaos"
READY_S: Final = 60.0
"""A healed cluster has a leader, and all its nodes listen, after so long at most."""
LIVE_S: Final = 30.0
"""And so long after that all merged logs have what was published before, at most."""
REST_S_MAX: Final = 2.0
LASTS_S: Final = (0.3, 6.0)
_POLL_S: Final = 0.05
_ANSWER_S: Final = 60.0
_RESTORED: Final = "proposal_submitted RestoreDisk("
_PROBLEMS_MAX: Final = 20


@dataclass(slots=True)
class StackOutcome:
    """One run: what was done to the stack, and what came of it."""

    seed: int
    faults: Counter[str] = field(default_factory=Counter)
    published: int = 0
    merged: int = 0
    lives_s: list[float] = field(default_factory=list)
    """After each heal, until all merged logs had what was published before."""
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        faults = " ".join(f"{name}={count}" for name, count in sorted(self.faults.items()))
        slowest = max(self.lives_s, default=math.nan)
        return (
            f"seed={self.seed} published={self.published} merged={self.merged} heals={len(self.lives_s)} "
            f"slowest_heal_s={slowest:.1f} faults: {faults}"
            + "".join(f"\n  problem: {problem}" for problem in self.problems)
        )


class StackPublisher:
    """A publisher that reaches some nodes only, by wires of its own."""

    def __init__(self, nodes: WiredNodes, name: str, reached: Sequence[str], seed: int) -> None:
        self.name, self.reached = name, list(reached)
        self._nodes, self._seed = nodes, seed
        self._tls = nodes.certificate("publisher", name)
        self._process: Process | None = None

    @property
    def is_running(self) -> bool:
        """Whether it was started, and not killed since."""
        return self._process is not None

    def start(self) -> None:
        """Begin another life, which goes on with the numbers of the one before."""
        settings = {
            "name": self.name,
            "root": str(self._nodes.root / self.name),
            "stream": self._nodes.stream,
            "endpoints": self._nodes.endpoints_of(self.name, *self.reached),
            "tls": [str(path) for path in (self._tls.ca, self._tls.cert, self._tls.key)],
            "seed": self._seed,
            "pause_s": 0.1,
        }
        (self._nodes.root / self.name).mkdir(exist_ok=True)
        log = self._nodes.root / f"{self.name}.log"
        self._process = Process("chaos.stack_publisher", settings, log)

    def kill(self) -> None:
        """Kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def ask(self, do: str) -> dict[str, Any]:
        """See `stack_publisher`."""
        assert self._process is not None, self.name
        return self._process.ask(do, timeout_s=_ANSWER_S)

    def check_alive(self) -> None:
        """Raise `ProcessEnded` if it ended, and nobody killed it."""
        process = self._process
        if process is not None and process.exit_status is not None:
            raise ProcessEnded("a publisher ended by itself", where=self.name, got=process.last_words(500))


class StackChaos:
    """One run, of so many `seconds` or `strikes`, whichever comes first.

    The publishers: one for each majority of the nodes that leaves out one node, one for each single node,
    and one that reaches all.
    """

    def __init__(
        self,
        root: Path,
        *,
        nodes: int = 3,
        seconds: float = math.inf,
        strikes: float = math.inf,
        seed: int,
        live_s: float = LIVE_S,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._root, self._count, self._seed, self._say = root, nodes, seed, say
        self._seconds, self._strikes, self._live_s = seconds, strikes, live_s
        self._draw = random.Random(seed)
        self._heals: dict[str, tuple[float, Callable[[], None]]] = {}
        self._publishers: list[StackPublisher] = []
        self._wiped = self._struck = 0
        self._outcome = StackOutcome(seed)

    def run(self) -> StackOutcome:
        """Do it all; what went wrong is in the outcome."""
        names = [f"n{at}" for at in range(1, self._count + 1)]
        reached = {f"without-{name}": [one for one in names if one != name] for name in names}
        reached |= {f"only-{name}": [name] for name in names[:2]}
        reached["all"] = names
        nodes = self._nodes = WiredNodes(self._root, self._count, stream=STREAM, clients=list(reached))
        with nodes:
            try:
                nodes.start()
                nodes.wait_ready()
                self._publishers = [
                    StackPublisher(nodes, name, some, self._seed) for name, some in reached.items()
                ]
                for publisher in self._publishers:
                    publisher.start()
                self._settle()
                self._torment(time.monotonic() + self._seconds)
                self._finish()
            except RtError as error:
                self._outcome.problems.append(f"{type(error).__name__}: {error}")
            finally:
                for publisher in self._publishers:
                    publisher.kill()
        return self._outcome

    # Phases

    def _torment(self, until: float) -> None:
        while self._struck < self._strikes and time.monotonic() < until:
            for _ in range(self._draw.randint(3, 8)):
                self._strike()
                self._struck += 1
                self._wait(self._draw.uniform(0.05, REST_S_MAX))
            self._settle()
            if self._draw.random() < 0.5:
                self._wipe()

    def _settle(self) -> None:
        """Heal everything. What was published before must come to all merged logs in time."""
        nodes = self._nodes
        for _, heal in self._heals.values():
            heal()
        self._heals.clear()
        nodes.wait_ready(timeout_s=READY_S)
        begun = time.monotonic()
        wanted = {one.name: one.ask("status")["flushed"] for one in self._publishers}
        self._await(lambda: self._lacking(wanted), "publishers to be told that all is merged", begun)
        # Numbers are dense in each session, so that is how many messages are committed at least.
        end = sum(one.ask("status")["merged"] for one in self._publishers)
        self._await(lambda: self._behind(end), f"merged logs that end at {end}", begun)
        self._outcome.lives_s.append(time.monotonic() - begun)
        self._say(f"settled after {self._outcome.lives_s[-1]:.1f} s at {end}")

    def _finish(self) -> None:
        nodes, outcome = self._nodes, self._outcome
        ends = {one.name: one.ask("finish")["flushed"] for one in self._publishers}
        outcome.published = sum(ends.values())
        self._settle()
        for publisher in self._publishers:
            publisher.ask("close")
        outcome.problems += map(str, nodes.compare().differences)
        for name in nodes.names:
            self._check_log(name, ends)

    def _check_log(self, node: str, ends: dict[str, int]) -> None:
        """Each message is merged once, in its publisher's order, and positions are dense."""
        problems, following, at = self._outcome.problems, dict.fromkeys(ends, 0), 0
        with rt.LogReader(self._nodes.merged_directory(node)) as reader:
            while messages := reader.poll(10_000, 0):
                for message in messages:
                    session, number = message.session, message.number
                    is_next = (message.position, number) == (at, following.get(session))
                    if not is_next or message.value != value_of(number):
                        problems.append(
                            f"{node}: position {message.position} is {session} {number}: "
                            f"{at} and {following.get(session)} must follow"
                        )
                        if len(problems) >= _PROBLEMS_MAX:
                            return
                    at, following[session] = message.position + 1, number + 1
        self._outcome.merged = at
        if following != ends:
            problems.append(f"{node} ends with {following}, but {ends} was published")

    # Waiting

    def _lacking(self, wanted: dict[str, int]) -> dict[str, int]:
        """By publisher: how many of the messages are not told to be merged."""
        reached = {one.name: one.ask("status")["merged"] for one in self._publishers}
        return {name: end - reached[name] for name, end in wanted.items() if reached[name] < end}

    def _behind(self, end: int) -> dict[str, int]:
        """By node: how much is not in its merged log."""
        reached = {name: self._nodes.merged_position(name) for name in self._nodes.names}
        return {name: end - position for name, position in reached.items() if position < end}

    def _await(self, lacking: Callable[[], object], what: str, begun: float) -> None:
        while found := lacking():
            self._check_alive()
            if time.monotonic() - begun > self._live_s:
                words = "\n".join(f"{name}: {self._nodes.last_words(name, 8)}" for name in self._nodes.names)
                raise Timeout(
                    f"after a heal: waited for {what}", got=f"{found}\n{words}", expected=self._live_s
                )
            time.sleep(_POLL_S)

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (now := time.monotonic()) < until:
            for what, (due, heal) in list(self._heals.items()):
                if now >= due:
                    del self._heals[what]
                    heal()
            self._check_alive()
            time.sleep(min(_POLL_S, until - now))

    def _check_alive(self) -> None:
        self._nodes.check_alive()
        for publisher in self._publishers:
            publisher.check_alive()

    # Faults

    def _strike(self) -> None:
        kinds: dict[Callable[[random.Random], None], int] = {
            self._kill: 3,
            self._kill_part: 3,
            self._pause: 2,
            self._cut_off: 2,
            self._cut_pair: 4,
            self._hold_pair: 3,
            self._cut_publisher: 6,
            self._kill_publisher: 2,
        }
        # Each has a generator of its own, so that what one meets does not change the next one.
        draw = random.Random(self._draw.getrandbits(64))
        (fault,) = draw.choices(list(kinds), list(kinds.values()))
        fault(draw)

    def _wipe(self) -> None:
        """Lose a disk, once those that were lost before hold everything again."""
        name, nodes = self._draw.choice(self._nodes.names), self._nodes
        said = (Path(nodes.root, f"{one}.log").read_text(errors="replace") for one in nodes.names)
        if self._wiped > sum(text.count(_RESTORED) for text in said):
            return
        self._note("wipe", name)
        self._wiped += 1
        nodes.kill(name)
        nodes.wipe(name)
        nodes.start(name)

    def _kill(self, draw: random.Random) -> None:
        kinds = {"one": 1, "majority": self._count // 2 + 1, "all": self._count}
        (kind,) = draw.choices(list(kinds), [4, 1, 1])
        some = [one for one in draw.sample(self._nodes.names, kinds[kind]) if self._is_free(one)]
        self._note("kill", *some)
        self._nodes.kill(*some)
        for name in some:
            self._later(name, draw, lambda name=name: self._nodes.start(name))  # type: ignore[misc]

    def _kill_part(self, draw: random.Random) -> None:
        name, part = draw.choice(self._nodes.names), draw.choice(["control", "data"])
        if self._is_free(name):
            self._note(f"kill_{part}", name)
            self._nodes.kill(name, part=part)  # type: ignore[arg-type]

    def _pause(self, draw: random.Random) -> None:
        name, part = draw.choice(self._nodes.names), draw.choice(["node", "control", "data"])
        if self._is_free(name):
            self._note(f"pause_{part}", name)
            self._nodes.pause(name, part)  # type: ignore[arg-type]
            self._later(name, draw, lambda: self._nodes.resume(name))

    def _cut_off(self, draw: random.Random) -> None:
        name = draw.choice(self._nodes.names)
        self._note("cut_off", name)
        self._cut(name, draw, self._nodes.wires(name))

    def _cut_pair(self, draw: random.Random) -> None:
        one, other = draw.sample(self._nodes.names, 2)
        self._note("cut_pair", one, other)
        wires = self._nodes.wires_between(one, other) + self._nodes.wires_between(other, one)
        self._cut(f"{one}-{other}", draw, wires)

    def _hold_pair(self, draw: random.Random) -> None:
        """Nothing comes through one way, though all stays connected."""
        one, other = draw.sample(self._nodes.names, 2)
        there, back = draw.choice([(True, False), (False, True), (True, True)])
        self._note("hold_pair", one, other)
        wires = self._nodes.wires_between(one, other)
        for wire in wires:
            wire.hold(there=there, back=back)
        self._later(f"{one}-{other}", draw, lambda: _heal(wires))

    def _cut_publisher(self, draw: random.Random) -> None:
        publisher = draw.choice(self._publishers)
        name = draw.choice(publisher.reached)
        self._note("cut_publisher", publisher.name, name)
        self._cut(f"{publisher.name}-{name}", draw, self._nodes.wires_between(publisher.name, name))

    def _kill_publisher(self, draw: random.Random) -> None:
        publisher = draw.choice(self._publishers)
        if publisher.is_running:
            self._note("kill_publisher", publisher.name)
            publisher.kill()
            self._later(publisher.name, draw, publisher.start)

    def _cut(self, what: str, draw: random.Random, wires: Sequence[Wire]) -> None:
        for wire in wires:
            wire.cut()
        self._later(f"cut {what}", draw, lambda: _heal(wires))

    def _is_free(self, name: str) -> bool:
        return name in self._nodes.running and name not in self._heals

    def _later(self, what: str, draw: random.Random, heal: Callable[[], None]) -> None:
        if what in self._heals:
            self._heals.pop(what)[1]()
        self._heals[what] = (time.monotonic() + draw.uniform(*LASTS_S), heal)

    def _note(self, fault: str, *details: str) -> None:
        self._outcome.faults[fault] += 1
        self._say(f"{self._struck} {fault} {' '.join(details)}")


def _heal(wires: Sequence[Wire]) -> None:
    for wire in wires:
        wire.heal()
