"""The faults of a chaos run: a generator draws them, and each is healed when it is due."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from chaos.cluster import Cluster
from chaos.power_cut import Keep
from rt.errors import Timeout

_POLL_S = 0.05


class Faults:
    """Faults for one cluster. `wait` heals a fault when it is due, and `heal` heals all of them.

    Each fault has its own random generator, so that the targets of one fault do not affect the next one.
    """

    def __init__(self, cluster: Cluster, seed: int, say: Callable[[str], None]) -> None:
        self._cluster, self._say = cluster, say
        self._seeds = random.Random(seed)
        self._draw = random.Random()
        self._heals: dict[str, tuple[float, Callable[[], None]]] = {}
        self.done: Counter[str] = Counter()
        """How often each kind was drawn. A fault may find no target."""
        self.lost_changes = 0
        """Number of file changes that power cuts undid."""
        self._kinds: dict[Callable[[], None], int] = {
            self._kill: 4,
            self._cut_power: 5,
            self._pause: 4,
            self._cut_off: 3,
            self._hold: 3,
            self._delay: 2,
            self._reset: 2,
            self._hand_over: 3,
            self._calm: 3,
        }

    def strike(self) -> None:
        """Draw a fault and do it."""
        self._draw.seed(self._seeds.getrandbits(64))
        (fault,) = self._draw.choices(list(self._kinds), list(self._kinds.values()))
        fault()

    def wipe(self) -> None:
        """Lose a disk. Call this only when all nodes count, because only one disk may be lost at a time."""
        self._draw.seed(self._seeds.getrandbits(64))
        name = self._draw.choice(self._cluster.names)
        self._note("wipe", name)
        self._cluster.wipe(name)
        self._cluster.start(name)
        if self._draw.random() < 0.5:
            self.wait(self._draw.uniform(0, 1))

    def wait(self, seconds: float) -> None:
        """Let the cluster run for this time, and heal faults that are due."""
        until = time.monotonic() + seconds
        while True:
            now = time.monotonic()
            for what, (due, heal) in list(self._heals.items()):
                if now >= due:
                    del self._heals[what]
                    heal()
            self._cluster.check_alive()
            if now >= until:
                return
            time.sleep(min(_POLL_S, until - now))

    def heal(self) -> None:
        """Heal everything now."""
        for _, heal in self._heals.values():
            heal()
        self._heals.clear()

    # Faults

    def _victims(self) -> list[str]:
        """Draw one node, the leader, a majority or all nodes. Return those that run."""
        names = self._cluster.names
        kind = self._draw.choices(["one", "leader", "majority", "all"], [4, 3, 2, 2])[0]
        some = self._draw.sample(
            names, {"one": 1, "leader": 1, "all": len(names)}.get(kind, len(names) // 2 + 1)
        )
        if kind == "leader":
            some = [self._leader() or some[0]]
        return [name for name in some if name in self._cluster.running]

    def _leader(self) -> str | None:
        """Return the leader, as known to the first node that answers at once."""
        for process in self._cluster.running.values():
            try:
                leader: str | None = process.ask("status", timeout_s=0.2)["leader"]
            except Timeout:
                continue
            return leader
        return None

    def _kill(self) -> None:
        victims = self._victims()
        self._note("kill", *victims)
        self._cluster.kill(victims)
        self._restart_later(victims)

    def _cut_power(self) -> None:
        victims = self._victims()
        keep: Keep = self._draw.choice(["none", "some"])
        self._note("power", keep, *victims)
        self.lost_changes += self._cluster.cut_power(victims, keep, self._draw.getrandbits(32))
        self._restart_later(victims)

    def _restart_later(self, victims: Sequence[str]) -> None:
        pause_s = self._draw.choice([0.0, 0.3, 2.0]) * self._draw.random()
        for name in victims:
            self._heals.pop(f"pause {name}", None)
            self._later(f"start {name}", pause_s, partial(self._cluster.start, name))

    def _pause(self) -> None:
        victims = [name for name in self._victims() if f"pause {name}" not in self._heals]
        self._note("pause", *victims)
        for name in victims:
            process = self._cluster.running[name]
            process.signal(signal.SIGSTOP)
            pause_s = 5 * self._draw.random() ** 2 + 0.1
            self._later(f"pause {name}", pause_s, partial(process.signal, signal.SIGCONT))

    def _cut_off(self) -> None:
        for name in self._draw.sample(
            self._cluster.names, self._draw.randint(1, len(self._cluster.names) // 2)
        ):
            self._note("cut", name)
            for wire in self._cluster.wires.of(name):
                wire.cut()
                self._later(f"wire {wire.name}", self._draw.uniform(0.3, 4), wire.heal)

    def _hold(self) -> None:
        wire = self._draw.choice(self._cluster.wires.all)
        there, back = self._draw.choice([(True, False), (False, True), (True, True)])
        self._note("hold", wire.name, f"there={there} back={back}")
        wire.hold(there=there, back=back)
        self._later(f"wire {wire.name}", self._draw.uniform(0.3, 6), wire.heal)

    def _delay(self) -> None:
        self._note("delay")
        for wire in self._cluster.wires.all:
            wire.delay(self._draw.choice([0.001, 0.01, 0.1]))
            self._later(f"wire {wire.name}", self._draw.uniform(1, 4), wire.heal)

    def _reset(self) -> None:
        wire = self._draw.choice(self._cluster.wires.all)
        self._note("reset", wire.name)
        wire.reset()

    def _hand_over(self) -> None:
        """Transfer the leadership. This is no fault, but the next fault may come before the transfer ends."""
        leader = self._leader() or ""
        self._note("hand_over", leader)
        if leader not in self._cluster.running:
            return
        process, seconds = self._cluster.running[leader], self._draw.choice([0.05, 0.5, 2.0])
        process.post("hand_over", seconds=seconds)
        if self._draw.random() < 0.5:
            with contextlib.suppress(Timeout):  # The node may be stopped.
                self.done["handed_over"] += process.answer(seconds + 0.5)["is_led_by_another"]

    def _calm(self) -> None:
        self._note("calm")
        self.wait(self._draw.uniform(0.5, 2))

    def _later(self, what: str, seconds: float, heal: Callable[[], None]) -> None:
        self._heals[what] = (time.monotonic() + seconds, heal)

    def _note(self, fault: str, *details: str) -> None:
        self.done[fault] += 1
        self._say(f"{self.done.total()} {fault} {' '.join(details)}")
