"""The faults of a chaos run of the whole stack: a shuffled deck, their healing, and checks of each fault.

Invariants:
- A node has at most one fault of its own at a time. Its wires may also be cut.
- At most one node's disk is corrupt or lost at a time, because the promises hold for a minority.
- A fault counts when it has really happened. If it cannot happen now, it stays in the deck.
"""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from chaos.faulty_nodes import FaultyNodes, Flip
from chaos.stack_cast import StackOperator, StackPublisher, StackSubscriber
from chaos.wires import Wire
from rt.errors import RtError
from sequencer.localcluster.nodes import Part

LASTS_S: Final = (0.3, 6.0)
POLL_S: Final = 0.05
_HOUR_S: Final = 3600
_ENDED_S: Final = 60.0
_WORDS_S: Final = 30.0
_FULL_WORDS: Final = re.compile(r"No space left|[Dd]isk.(is.)?full")
_SYNC_WORDS: Final = re.compile(r"event=process_failed .*Input/output error")
_DAMAGE_WORDS: Final = re.compile(r"event=(segment_corrupt|segment_repaired) |was set aside")
_SET_ASIDE: Final = "was set aside"

Heal = Callable[[], None]


class Unnoticed(RtError):
    """A fault that a node did not report."""


class StackFaults:
    """Faults for nodes and clients. `wait` heals a fault when it is due, and `heal` heals all of them.

    A short deck (`is_short`) has one fault of each kind.
    """

    def __init__(
        self,
        nodes: FaultyNodes,
        publishers: Sequence[StackPublisher],
        subscriber: StackSubscriber,
        seed: int,
        say: Callable[[str], None],
        *,
        is_short: bool = False,
    ) -> None:
        self._nodes, self._publishers, self._subscriber, self._say = nodes, publishers, subscriber, say
        self._is_short = is_short
        self._operator = StackOperator(nodes)
        self._draw = random.Random(seed)
        self._heals: dict[str, tuple[float, Heal]] = {}
        self._flips: list[Flip] = []
        self._lost: dict[str, int] = {}
        """By node whose disk was lost: how many times a disk of that node had been restored before."""
        self.done: Counter[str] = Counter()
        self.lost_files = 0
        """Number of files in which power cuts undid changes."""
        self.kinds: dict[str, tuple[Callable[[random.Random], bool], int]] = {
            "kill": (self._kill, 2),
            "kill_part": (self._kill_part, 2),
            "pause": (self._pause, 2),
            "power_cut": (self._cut_power, 3),
            "power_cut_of_all": (self._cut_all_power, 2),
            "disk_full": (self._fill_disk, 2),
            "sync_failure": (self._fail_sync, 2),
            "clock_jump": (self._jump_clock, 1),
            "flip_merged": (self._flip_merged, 2),
            "flip_copy": (self._flip_copy, 2),
            "flip_raft_snapshot": (partial(self._flip_raft, "snapshot"), 1),
            "flip_raft_log": (partial(self._flip_raft, "log"), 1),
            "wipe": (self._wipe, 2),
            "cut_off": (self._cut_off, 2),
            "cut_pair": (self._cut_pair, 2),
            "hold_pair": (self._hold_pair, 2),
            "delay": (self._delay, 1),
            "loss": (self._lose, 1),
            "cut_client": (self._cut_client, 4),
            "kill_publisher": (self._kill_publisher, 2),
            "restart_subscriber": (self._restart_subscriber, 1),
            "close_session": (self._close_session, 1),
            "soft_reset": (self._soft_reset, 1),
        }
        self._is_calm = False
        self._deck: list[str] = []
        self.decks = 0
        """Number of decks that are used up."""
        self._shuffle()

    # Called by the run

    def strike(self, *, is_calm: bool = False) -> None:
        """Do the next fault of the deck that can happen. `is_calm`: no other fault lasts now."""
        self._is_calm = is_calm
        # Each fault has its own generator, so that the targets of one fault do not affect the next one.
        seed = self._draw.getrandbits(64)
        for kind in list(self._deck):
            if self.kinds[kind][0](random.Random(f"{seed} {kind}")):
                self._deck.remove(kind)
                break

    def turn(self) -> None:
        """Shuffle the next deck if this one is used up. Call it when nothing is under way."""
        if not self._deck:
            self.decks += 1
            self._shuffle()

    def wait(self, seconds: float) -> None:
        """Let the stack run for this time, and heal faults that are due."""
        until = time.monotonic() + seconds
        while (now := time.monotonic()) < until:
            for what, (due, heal) in list(self._heals.items()):
                if now >= due:
                    del self._heals[what]
                    heal()
            self.check_alive()
            time.sleep(min(POLL_S, until - now))

    def heal(self) -> None:
        """Heal everything now."""
        while self._heals:
            _, (_, heal) = self._heals.popitem()
            heal()

    def check_alive(self) -> None:
        """Raise `ProcessEnded` if a process ended by itself. Let the subscriber read."""
        self._nodes.check_alive()
        for publisher in self._publishers:
            publisher.check_alive()
        self._subscriber.read()

    def damaged(self) -> list[str]:
        """Return flipped bytes that are not repaired, or whose repair is not in the node's log."""
        self._flips = [flip for flip in self._flips if flip.is_there() or not self._end_flip(flip)]
        return [f"{flip.node}: {flip.path} at {flip.offset}" for flip in self._flips]

    def forget_copies(self) -> None:
        """Forget the flipped bytes of copies. All their messages are merged everywhere, so no node reads them
        again.
        """
        self._flips = [flip for flip in self._flips if flip.path.parent.name == "merged"]

    # Machines and processes

    def _kill(self, draw: random.Random) -> bool:
        names = self._victims(draw, draw.choices([1, self._majority, len(self._nodes.names)], [4, 1, 1])[0])
        if names:
            self._note("kill", *names)
            self._nodes.kill(*names)
            self._start_later(names, draw)
        return bool(names)

    def _cut_power(self, draw: random.Random) -> bool:
        return self._cut_power_of(self._victims(draw, draw.choice([1, 1, self._majority])), "power_cut", draw)

    def _cut_all_power(self, draw: random.Random) -> bool:
        names = self._victims(draw, len(self._nodes.names))
        return len(names) == len(self._nodes.names) and self._cut_power_of(names, "power_cut_of_all", draw)

    def _cut_power_of(self, names: Sequence[str], kind: str, draw: random.Random) -> bool:
        if names:
            is_torn = draw.random() < 0.5
            self._note(kind, *names, f"is_torn={is_torn}")
            self.lost_files += self._nodes.cut_power(*names, draw=draw if is_torn else None)
            self._start_later(names, draw)
        return bool(names)

    def _kill_part(self, draw: random.Random) -> bool:
        part: Part = draw.choice(["control", "data"])
        for name in self._victims(draw, 1):
            self._note("kill_part", name, part)
            self._nodes.kill(name, part=part)
            return True
        return False

    def _pause(self, draw: random.Random) -> bool:
        part: Part = draw.choice(["node", "control", "data"])
        for name in self._victims(draw, 1):
            self._note("pause", name, part)
            self._nodes.pause(name, part)
            self._later(name, draw, partial(self._nodes.resume, name))
            return True
        return False

    def _jump_clock(self, draw: random.Random) -> bool:
        for name in self._victims(draw, 1):
            seconds = draw.choice([-1, 1]) * draw.choice([5, _HOUR_S])
            self._note("clock_jump", name, f"{seconds} s")
            self._nodes.set_clock(name, seconds)
            self._later(f"clock {name}", draw, partial(self._nodes.set_clock, name, 0))
            return True
        return False

    # Disks

    def _fill_disk(self, draw: random.Random) -> bool:
        for name in self._victims(draw, 1):
            self._say(f"disk_full {name}")
            self._nodes.fill_disk(name)
            self._later(name, draw, partial(self._free_disk, name, self._nodes.log_size(name)))
            return True
        return False

    def _free_disk(self, name: str, logged: int) -> None:
        """Count the fault if a write was refused and the node reported it. The node may defer a refused
        write, such as that of a spare segment.
        """
        is_said = _FULL_WORDS.search(self._nodes.said(name, logged)) is not None
        self._counts("disk_full", is_hit=self._nodes.free_disk(name) and is_said)

    def _fail_sync(self, draw: random.Random) -> bool:
        for name in self._victims(draw, 1):
            self._say(f"sync_failure {name}")
            self._nodes.fail_sync(name)
            self._later(name, draw, partial(self._stop_failing, name, self._nodes.log_size(name)))
            return True
        return False

    def _stop_failing(self, name: str, logged: int) -> None:
        if self._counts("sync_failure", is_hit=self._nodes.stop_failing(name)):
            self._expect_words(name, logged, _SYNC_WORDS, "a sync failed, and which process stops")

    def _flip_merged(self, draw: random.Random) -> bool:
        for name in self._victims(draw, 1) if self._is_whole() else []:
            return self._flip("flip_merged", name, "merged", draw)
        return False

    def _flip_copy(self, draw: random.Random) -> bool:
        """Flip a byte, usually while control is paused, so that the node merges these bytes later."""
        for name in self._victims(draw, 1) if self._is_whole() else []:
            if draw.random() < 0.7:
                self._nodes.pause(name, "control")
                self._later(name, draw, partial(self._nodes.resume, name))
                self.wait(draw.uniform(0.2, LASTS_S[0] + 1))
            return self._flip("flip_copy", name, "sessions", draw)
        return False

    def _flip(self, kind: str, name: str, where: str, draw: random.Random) -> bool:
        flip = self._nodes.flip_log(name, where, draw)
        if flip is None:
            return False
        self._note(kind, name, flip.path.name, f"at {flip.offset}")
        self._flips.append(flip)
        if draw.random() < 0.3 and name in self._victims(draw, len(self._nodes.names)):
            self._nodes.kill(name)
            self._start_later([name], draw)
        return True

    def _flip_raft(self, what: str, draw: random.Random) -> bool:
        """The node must end and name the file. Then its disk is wiped, as an operator would do."""
        for name in self._victims(draw, 1) if self._is_whole() else []:
            self._nodes.kill(name)
            flip = self._nodes.flip_raft(name, what, draw)
            self._nodes.start(name)
            if flip is None:
                return False
            self._note(f"flip_raft_{what}", name, flip.path.name, f"at {flip.offset}")
            self._nodes.wait_ended(name, timeout_s=_ENDED_S)
            if flip.path.name not in (said := self._nodes.said(name, flip.logged)):
                raise Unnoticed("a node does not name its damaged file", where=name, got=said[-500:])
            self._lose_disk(name)
            return True
        return False

    def _wipe(self, draw: random.Random) -> bool:
        for name in self._victims(draw, 1) if self._is_whole() else []:
            self._note("wipe", name)
            self._nodes.kill(name)
            self._lose_disk(name)
            return True
        return False

    def _lose_disk(self, name: str) -> None:
        self._lost[name] = self._restored(name)
        self._nodes.wipe(name)
        self._nodes.start(name)

    def _is_whole(self) -> bool:
        """Whether every disk holds everything."""
        self._lost = {name: before for name, before in self._lost.items() if self._restored(name) <= before}
        return not self._lost and not self.damaged()

    def _restored(self, name: str) -> int:
        """Return how often a disk of this node was found to be complete again."""
        words = f"proposal_submitted RestoreDisk(node='{name}'"
        return sum(self._nodes.said(one).count(words) for one in self._nodes.names)

    def _end_flip(self, flip: Flip) -> bool:
        """Whether the node reported a repaired byte. A deleted file needs no report."""
        said = self._nodes.said(flip.node, flip.logged)
        if _SET_ASIDE in said and flip.node not in self._lost:
            self._lost[flip.node] = self._restored(flip.node)
        return not flip.path.exists() or flip.path.stat().st_size == 0 or bool(_DAMAGE_WORDS.search(said))

    # Wires

    def _cut_off(self, draw: random.Random) -> bool:
        name = draw.choice(self._nodes.names)
        self._note("cut_off", name)
        return self._disturb(f"cut {name}", draw, self._nodes.wires(name), Wire.cut)

    def _cut_pair(self, draw: random.Random) -> bool:
        one, other = draw.sample(self._nodes.names, 2)
        self._note("cut_pair", one, other)
        wires = self._nodes.wires_between(one, other) + self._nodes.wires_between(other, one)
        return self._disturb(f"cut {one}-{other}", draw, wires, Wire.cut)

    def _hold_pair(self, draw: random.Random) -> bool:
        """Block the data in one direction or both, while the connections stay open."""
        one, other = draw.sample(self._nodes.names, 2)
        there, back = draw.choice([(True, False), (False, True), (True, True)])
        self._note("hold_pair", one, other, f"there={there} back={back}")
        wires = self._nodes.wires_between(one, other)
        return self._disturb(f"hold {one}-{other}", draw, wires, partial(Wire.hold, there=there, back=back))

    def _delay(self, draw: random.Random) -> bool:
        name, seconds = draw.choice(self._nodes.names), draw.choice([0.01, 0.05, 0.2])
        self._note("delay", name, f"{seconds} s")
        return self._disturb(
            f"delay {name}", draw, self._nodes.wires(name), partial(Wire.delay, seconds=seconds)
        )

    def _lose(self, draw: random.Random) -> bool:
        name, share = draw.choice(self._nodes.names), draw.choice([0.01, 0.05, 0.2])
        self._note("loss", name, f"{share:.0%}")
        return self._disturb(f"loss {name}", draw, self._nodes.wires(name), partial(Wire.lose, share=share))

    def _cut_client(self, draw: random.Random) -> bool:
        clients: list[StackPublisher | StackSubscriber] = [*self._publishers, self._subscriber]
        client = draw.choice(clients)
        name = draw.choice(client.reached)
        self._note("cut_client", client.name, name)
        wires = self._nodes.wires_between(client.name, name)
        return self._disturb(f"cut {client.name}-{name}", draw, wires, Wire.cut)

    def _disturb(
        self, what: str, draw: random.Random, wires: Sequence[Wire], how: Callable[[Wire], None]
    ) -> bool:
        for wire in wires:
            how(wire)
        self._later(what, draw, partial(_heal_wires, wires))
        return True

    # Clients and operators

    def _kill_publisher(self, draw: random.Random) -> bool:
        publisher = draw.choice(self._publishers)
        if publisher.is_running:
            self._note("kill_publisher", publisher.name)
            publisher.kill()
            self._later(publisher.name, draw, publisher.start)
            return True
        return False

    def _restart_subscriber(self, draw: random.Random) -> bool:
        if self._subscriber.is_running:
            self._note("restart_subscriber")
            self._subscriber.close()
            self._later(self._subscriber.name, draw, self._subscriber.start)
            return True
        return False

    def _close_session(self, draw: random.Random) -> bool:
        """Close the session of a publisher whose messages are all merged. It continues in another run."""
        publisher = draw.choice(self._publishers)
        if not self._is_calm or not publisher.is_running:
            return False
        publisher.ask("finish")
        deadline = time.monotonic() + _WORDS_S
        while (status := publisher.ask("status"))["merged"] < status["flushed"]:
            if time.monotonic() > deadline:
                raise Unnoticed(
                    "a publisher is not told that all is merged", where=publisher.name, got=status
                )
            time.sleep(POLL_S)
        publisher.kill()
        is_closed = self._operator.post("/close-session", session=publisher.name)
        self._later(publisher.name, draw, publisher.start)
        if is_closed:
            self._note("close_session", publisher.name)
        return is_closed

    def _soft_reset(self, draw: random.Random) -> bool:
        """Request it only while all nodes run. A node that is down would rejoin with an empty disk."""
        del draw
        if self._is_calm and self._is_whole() and self._operator.post("/soft-reset", force=False):
            self._note("soft_reset")
            return True
        return False

    # Helpers

    @property
    def _majority(self) -> int:
        return len(self._nodes.names) // 2 + 1

    def _victims(self, draw: random.Random, count: int) -> list[str]:
        """Up to `count` nodes that run and have no fault of their own."""
        running = self._nodes.running
        free = [name for name in self._nodes.names if name in running and name not in self._heals]
        return draw.sample(free, min(count, len(free)))

    def _start_later(self, names: Sequence[str], draw: random.Random) -> None:
        for name in names:
            self._later(name, draw, partial(self._nodes.start, name))

    def _later(self, what: str, draw: random.Random, heal: Heal) -> None:
        if what in self._heals:
            self._heals.pop(what)[1]()
        self._heals[what] = (time.monotonic() + draw.uniform(*LASTS_S), heal)

    def _counts(self, kind: str, *, is_hit: bool) -> bool:
        """Count a fault that hit something; otherwise put it back into the deck. Returns `is_hit`."""
        if is_hit:
            self.done[kind] += 1
        else:
            self._deck.append(kind)
        return is_hit

    def _expect_words(self, name: str, logged: int, words: re.Pattern[str], what: str) -> None:
        """Wait until these words are in the node's log."""
        deadline = time.monotonic() + _WORDS_S
        while not words.search(said := self._nodes.said(name, logged)):
            if time.monotonic() > deadline:
                raise Unnoticed(f"a node does not say that {what}", where=name, got=said[-500:])
            time.sleep(POLL_S)

    def _note(self, fault: str, *details: str) -> None:
        self.done[fault] += 1
        self._say(f"{self.done.total()} {fault} {' '.join(details)}")

    def _shuffle(self) -> None:
        self._deck = [
            kind for kind, (_, count) in self.kinds.items() for _ in range(1 if self._is_short else count)
        ]
        self._draw.shuffle(self._deck)


def _heal_wires(wires: Sequence[Wire]) -> None:
    for wire in wires:
        wire.heal()
