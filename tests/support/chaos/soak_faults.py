"""Draws the kinds and times of a soak's faults from one seed, before the soak starts.

Pure. Faults overlap. A fault is left out if its victim has another fault at that time.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

Kind: TypeAlias = Literal[
    "kill_node",
    "kill_control",
    "kill_data",
    "pause_node",
    "pause_control",
    "pause_data",
    "wipe",
    "cut",
    "silence",
    "cut_clients",
    "hand_over",
    "soft_reset",
    "configure",
    "kill_publisher",
    "restart_publisher",
    "kill_subscriber",
    "stop_subscriber",
]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
LEADER: Final = -1
"""As a victim: the leader at that time."""

_WEIGHTS: Final[dict[Kind, int]] = {
    "wipe": 2,
    "soft_reset": 1,
    "cut_clients": 2,
    "configure": 3,
    "stop_subscriber": 2,
}
_WEIGHT: Final = 4
_INSTANT: Final[frozenset[Kind]] = frozenset(
    {"kill_control", "kill_data", "soft_reset", "configure", "restart_publisher"}
)
_ON_PUBLISHERS: Final[frozenset[Kind]] = frozenset({"kill_publisher", "restart_publisher"})
_ON_SUBSCRIBERS: Final[frozenset[Kind]] = frozenset({"kill_subscriber", "stop_subscriber"})
_ON_ALL: Final[frozenset[Kind]] = frozenset({"cut_clients", "soft_reset", "configure"})
_GAP_S: Final = (0.5, 6.0)
_LASTS_S: Final = (0.2, 8.0)
_STOPPED_S: Final = (20.0, 60.0)
"""How long a subscriber is stopped. Meanwhile the messages that it would read next are trimmed."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault at `at_s` seconds after the start, which lasts `lasts_s` seconds (0: over at once)."""

    at_s: float
    kind: Kind
    victim: int
    """Index of the node, publisher or subscriber, from 0; or `LEADER`. It is 0 if the fault concerns all."""
    lasts_s: float

    def __str__(self) -> str:
        return f"{self.at_s:.1f} s: {self.kind} {self.victim} for {self.lasts_s:.1f} s"


def draw_faults(
    seed: int,
    seconds: float,
    *,
    nodes: int,
    publishers: int,
    subscribers: int,
    kinds: Collection[Kind] = KINDS,
) -> Iterator[Fault]:
    """Yield the faults in the order of their starts, all within the first `seconds`."""
    draw = random.Random(seed)
    known = [kind for kind in KINDS if kind in kinds]
    weights = [_WEIGHTS.get(kind, _WEIGHT) for kind in known]
    at_s = draw.uniform(*_GAP_S)
    while at_s < seconds:
        (kind,) = draw.choices(known, weights)
        yield Fault(at_s, kind, _victim(draw, kind, nodes, publishers, subscribers), _lasts_s(draw, kind))
        at_s += draw.uniform(*_GAP_S)


def _victim(draw: random.Random, kind: Kind, nodes: int, publishers: int, subscribers: int) -> int:
    if kind in _ON_PUBLISHERS:
        return draw.randrange(publishers)
    if kind in _ON_SUBSCRIBERS:
        return draw.randrange(subscribers)
    if kind in _ON_ALL:
        return 0
    return LEADER if kind == "hand_over" or draw.random() < 1 / 3 else draw.randrange(nodes)


def _lasts_s(draw: random.Random, kind: Kind) -> float:
    if kind in _INSTANT:
        return 0.0
    return draw.uniform(*(_STOPPED_S if kind == "stop_subscriber" else _LASTS_S))
