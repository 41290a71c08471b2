"""The settings of a provider."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from rt.errors import InvalidOption
from rt.streams.cache import BUCKETS

PoisonPolicy: TypeAlias = Literal["dead-letter", "fault", "block"]
"""What becomes of an event that its consumer does not take.

`dead-letter`: it goes to the provider's dead letters, and the consumer goes on behind it. `fault`: the
subscription gets nothing more before it is resumed, with that event first. `block`: it is tried for ever.
"""


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Seconds, events, bytes. `rt.InvalidOption` for what cannot be meant."""

    cache_events: int = 65_536
    """Most events of a queue in memory."""
    cache_bytes: int = 64 * 2**20
    """Most bytes of a queue in memory, and one read besides."""
    batch_events_max: int = 1000
    """Most events that a consumer is handed at a time."""
    deliver_for_s: float = 60.0
    """How long an event is tried before `on_poison` says what becomes of it."""
    retry_min_s: float = 0.1
    """The first wait between two tries; each is up to twice the one before."""
    retry_max_s: float = 10.0
    """The longest."""
    on_poison: PoisonPolicy = "fault"
    """See `PoisonPolicy`."""
    save_every_s: float = 1.0
    """How often is made durable, and told to the queue, what consumers have."""
    drain_s: float = 10.0
    """How long deliveries under way may last when a queue is given up."""
    inactive_s: float = 1800.0
    """After so long without events the implicit subscriptions of a stream leave the memory."""
    catch_ups_max: int = 16
    """Consumers of a queue that read for themselves at a time."""
    catch_up_events: int = 4096
    """Most events that such a one reads at a time."""
    receive_s: float = 1.0
    """How long one read of a queue waits for events."""

    def __post_init__(self) -> None:
        for name in ("cache_bytes", "batch_events_max", "catch_ups_max", "catch_up_events"):
            _require(name, getattr(self, name), 1)
        _require("cache_events", self.cache_events, BUCKETS)
        for name in ("deliver_for_s", "drain_s"):
            _require(name, getattr(self, name), 0)
        for name in ("retry_min_s", "save_every_s", "inactive_s", "receive_s"):
            _require(name, getattr(self, name), 0.001)
        _require("retry_max_s", self.retry_max_s, self.retry_min_s)
        if self.on_poison not in get_args(PoisonPolicy):
            raise InvalidOption(
                "not a policy",
                where="on_poison",
                got=self.on_poison,
                wanted=" | ".join(get_args(PoisonPolicy)),
            )


def _require(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise InvalidOption("too little", where=name, got=value, wanted=f"{least} or more")
