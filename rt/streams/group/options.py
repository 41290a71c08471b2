"""The settings of a group's member, and what its program decides about failures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, TypeAlias

from msgspec import Struct

from rt.errors import InvalidOption
from rt.log.read.reader import EventHandler
from rt.log.scan.message_batch import Message
from rt.option_checks import check_range
from rt.streams.balancer.lease import LEASE_S_MAX, LEASE_S_MIN

Decision: TypeAlias = Literal["retry", "skip", "stop"]

PARTITIONS_MAX: Final = 256
"""The maximum number of positions that one call acknowledges, and a quarter of the holds that a cluster
keeps.
"""


class HandlerFailure(Struct, frozen=True):
    """A message that its handler did not take, or that could not be decoded."""

    message: Message
    error: Exception
    attempts: int


ErrorDecision: TypeAlias = Callable[[HandlerFailure], Decision]
"""What happens to a message that failed. Called in the event loop: it must not block.

`retry`: it is tried for another `retry_for_s`. `skip`: it counts as handled, and the log has
`message_skipped`. `stop`: the member stops, and another one tries it.
"""


class GroupOptions(Struct, frozen=True):
    """Times are in seconds. All members of a group need the same `partitions`."""

    partitions: int = 16
    """How many parts the topics are spread over: at most this many members have work. 1 to 256."""
    start: Literal["earliest", "latest"] = "earliest"
    """Where a group starts if the cluster does not know it yet."""
    concurrency: int = 1
    """How many handlers of a member run at a time, for messages of different partitions."""
    buffer_messages: int = 1000
    """A member reads no more while this many messages wait for their handlers."""
    buffer_bytes: int = 64 * 2**20
    """A member also reads no more while the waiting messages need about this much memory. The last read may
    exceed it by some MiB.
    """
    lease_s: float = 10.0
    """After this time the partitions of a dead or paused member are handled by others."""
    commit_every_s: float = 1.0
    """How often positions are acknowledged. After a crash, messages of about this time are handled again."""
    retry_for_s: float = 60.0
    """How long a failing message is retried before `on_error` decides."""
    retry_min_s: float = 0.1
    """The first wait between two tries. It doubles each time."""
    retry_max_s: float = 10.0
    """The longest wait between two tries."""
    on_error: ErrorDecision | None = None
    """None: stop."""
    on_event: EventHandler | None = None
    """Receives the events of `rt.Subscriber`, such as missing messages, in another thread. None: a gap stops
    the member with `rt.Gap`.
    """

    def __post_init__(self) -> None:
        check_range(self.partitions, 1, PARTITIONS_MAX, name="partitions", is_whole=True)
        check_range(self.concurrency, 1, 1024, name="concurrency", is_whole=True)
        check_range(self.buffer_messages, 1, 10**9, name="buffer_messages", is_whole=True)
        check_range(self.buffer_bytes, 1, 2**50, name="buffer_bytes", is_whole=True)
        check_range(self.lease_s, LEASE_S_MIN, LEASE_S_MAX, name="lease_s")
        check_range(self.commit_every_s, 0.01, self.lease_s, name="commit_every_s")
        check_range(self.retry_for_s, 0, 10**9, name="retry_for_s")
        check_range(self.retry_min_s, 0.001, 10**9, name="retry_min_s")
        check_range(self.retry_max_s, self.retry_min_s, 10**9, name="retry_max_s")
        for name in ("on_error", "on_event"):
            if (given := getattr(self, name)) is not None and not callable(given):
                raise InvalidOption("not callable", where=name, got=repr(given)[:200])
        if self.start not in ("earliest", "latest"):
            raise InvalidOption("unknown start", where="start", got=self.start, expected="earliest | latest")
