"""The names of streams, queues and places in them.

Laws. A stream is one topic: `namespace/key`, so that every topic of a log is a stream, and each has one name.
What decides where a stream lies is a hash that is the same in every process, machine and release.
"""

from __future__ import annotations

import contextlib
import enum
import operator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, NamedTuple

RING_BITS: Final = 32
RING_SIZE: Final = 2**RING_BITS
NUMBER_MAX: Final = 2**63 - 1


@dataclass(frozen=True, slots=True, order=True)
class StreamId:
    """A logical stream. `namespace` holds no '/'; `key` is any text.

    Without a namespace a key has no '/', but if it begins with one: else it would be another stream's topic.
    """

    namespace: str
    key: str

    def __post_init__(self) -> None:
        if "/" in self.namespace or (not self.namespace and self.key.find("/") > 0):
            raise ValueError(
                f"namespace={self.namespace!r}, key={self.key!r}: the first '/' ends a namespace"
            )

    @property
    def topic(self) -> str:
        """The topic that its events have in a log."""
        return f"{self.namespace}/{self.key}" if self.namespace else self.key

    @property
    def ring_hash(self) -> int:
        """Its place on the ring of 2^32: the first 32 bits of BLAKE2b of the topic."""
        return int.from_bytes(blake2b(self.topic.encode(), digest_size=RING_BITS // 8).digest())

    def __str__(self) -> str:
        return self.topic


def stream_of(topic: str) -> StreamId:
    """The stream whose topic it is."""
    namespace, slash, key = topic.partition("/")
    return StreamId(namespace, key) if slash and namespace else StreamId("", topic)


@dataclass(frozen=True, slots=True, order=True)
class QueueId:
    """A queue: it carries many streams. Ordered as the ring is; `name` is a name of `rt.names`."""

    ring_position: int
    name: str

    def __str__(self) -> str:
        return self.name


class SequenceToken(NamedTuple):
    """An event's place in its queue. Tokens rise; where one message carries many events, so do their indexes.

    As a start it means "from here on, this one too".
    """

    sequence_number: int
    event_index: int = 0

    @property
    def next(self) -> SequenceToken:
        """The first place behind it."""
        return SequenceToken(self.sequence_number, self.event_index + 1)

    def __str__(self) -> str:
        return f"{self.sequence_number}.{self.event_index}" if self.event_index else str(self.sequence_number)


def checked_token(token: object) -> SequenceToken:
    """A token that came from outside. `ValueError` if no event, and no queue's end, has such a place."""
    if isinstance(token, SequenceToken):
        with contextlib.suppress(TypeError):
            number, index = map(operator.index, token)
            if 0 <= number <= NUMBER_MAX and 0 <= index <= NUMBER_MAX:
                return SequenceToken(number, index)
    raise ValueError(f"{token!r:.200}: a SequenceToken of numbers from 0 to 2^63 - 1 is wanted")


class StartPosition(enum.Enum):
    """Where a subscription begins that names no token."""

    LATEST = "latest"
    """With every event that is published after `subscribe` has returned."""
    EARLIEST_AVAILABLE = "earliest"
    """With the oldest that the queue can still give."""
