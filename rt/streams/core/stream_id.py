"""The names of streams and queues, and positions in queues.

Invariants:
- A stream is one topic, `namespace/key`. Every topic of a log is a stream and has exactly one name.
- The hash that places a stream is the same in every process, machine and release.
"""

from __future__ import annotations

import contextlib
import enum
import operator
from hashlib import blake2b
from typing import Final, NamedTuple, Self

from rt.errors import InvalidOption

RING_BITS: Final = 32
RING_SIZE: Final = 2**RING_BITS
NUMBER_MAX: Final = 2**63 - 1


class _Name(NamedTuple):
    namespace: str
    key: str


class StreamId(_Name):
    """A logical stream. `namespace` holds no '/'; `key` is any text.

    Without a namespace a key must not contain '/', except as its first character: otherwise it would equal
    another stream's topic. A tuple: several dictionaries are asked for it for each event.
    """

    __slots__ = ()

    def __new__(cls, namespace: str, key: str) -> Self:
        if "/" in namespace or (not namespace and key.find("/") > 0):
            raise InvalidOption(f"namespace={namespace!r}, key={key!r}: the first '/' ends a namespace")
        return super().__new__(cls, namespace, key)

    @property
    def topic(self) -> str:
        """The topic of its events in a log."""
        return f"{self.namespace}/{self.key}" if self.namespace else self.key

    @property
    def ring_hash(self) -> int:
        """Its position on the ring of 2^32: the first 32 bits of BLAKE2b of the topic."""
        return int.from_bytes(blake2b(self.topic.encode(), digest_size=RING_BITS // 8).digest())

    def __str__(self) -> str:
        return self.topic


def stream_of(topic: str) -> StreamId:
    namespace, slash, key = topic.partition("/")
    return StreamId(namespace, key) if slash and namespace else StreamId("", topic)


class QueueId(NamedTuple):
    """A queue, which carries many streams. Ordered as on the ring. `name` follows `rt.names`."""

    ring_position: int
    name: str

    def __str__(self) -> str:
        return self.name


class SequenceToken(NamedTuple):
    """An event's position in its queue. Tokens rise; the events of one message have rising indexes.

    As a start position it is inclusive.
    """

    sequence_number: int
    event_index: int = 0

    @property
    def next(self) -> SequenceToken:
        """The first token after it."""
        return SequenceToken(self.sequence_number, self.event_index + 1)

    def __str__(self) -> str:
        return f"{self.sequence_number}.{self.event_index}" if self.event_index else str(self.sequence_number)


def checked_token(token: object) -> SequenceToken:
    """Check a token from outside. `ValueError` if it cannot be the position of an event or a queue's end."""
    if isinstance(token, SequenceToken):
        with contextlib.suppress(TypeError):
            number, index = map(operator.index, token)
            if 0 <= number <= NUMBER_MAX and 0 <= index <= NUMBER_MAX:
                return SequenceToken(number, index)
    raise InvalidOption(f"got {token!r:.200}, expected a SequenceToken with numbers from 0 to 2^63 - 1")


class StartPosition(enum.Enum):
    """Where a subscription without a token starts."""

    LATEST = "latest"
    """At the first event published after `subscribe` has returned."""
    EARLIEST_AVAILABLE = "earliest"
    """At the oldest event that the queue still has."""
