"""What of a merged log a reader wants, so that the rest can be passed over without being read.

Law: what is said to be unwanted has nothing wanted in it; what is said to be wanted may have. A reader of
single messages looks again at each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

TIMESTAMP_LOW_NS: Final = -(2**63)
TIMESTAMP_HIGH_NS: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Interest:
    """Messages of these sessions and topics (None: of all), and of these timestamps, both ends included.

    Without `values` their values are neither read nor verified, and come out empty.
    """

    values: bool = True
    sessions: frozenset[str] | None = None
    topics: frozenset[str] | None = None
    timestamp_low_ns: int = TIMESTAMP_LOW_NS
    timestamp_high_ns: int = TIMESTAMP_HIGH_NS

    @property
    def is_of_batches(self) -> bool:
        """Whether every batch of a wanted session is wanted."""
        is_timeless = (self.timestamp_low_ns, self.timestamp_high_ns) == (TIMESTAMP_LOW_NS, TIMESTAMP_HIGH_NS)
        return is_timeless and self.topics is None

    @property
    def is_nothing(self) -> bool:
        """Whether no message can be wanted."""
        none = frozenset[str]()
        return self.timestamp_low_ns > self.timestamp_high_ns or none in {self.sessions, self.topics}

    def wants_session(self, session: str) -> bool:
        """Whether messages of `session` may be wanted."""
        return self.sessions is None or session in self.sessions

    def wants_times(self, low_ns: int, high_ns: int) -> bool:
        """Whether messages between these timestamps may be wanted."""
        return low_ns <= self.timestamp_high_ns and high_ns >= self.timestamp_low_ns

    def wants_topics(self, topics: list[str]) -> bool:
        """Whether messages of one of `topics` may be wanted."""
        return self.topics is None or not self.topics.isdisjoint(topics)


EVERYTHING: Final = Interest()
