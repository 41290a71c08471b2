"""The topics of a log that a host reads. Nodes send no others; of a directory their values are not read."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from rt.errors import InvalidOption
from rt.log.read.projection import EVERYTHING, Projection
from rt.log.read.topic_patterns import check_wanted
from rt.log.scan.message_batch import MessageBatch


class TopicSelection:
    """Topics that match one of `patterns` (`*`, `?`, `[…]`). None: all. `rt.InvalidOption`."""

    def __init__(self, patterns: Collection[str] | None) -> None:
        if isinstance(patterns, str) or (patterns is not None and not patterns):
            expected = "a list of patterns, such as ['trades/*']"
            raise InvalidOption(
                "not patterns of topics", where="topics", got=repr(patterns)[:200], expected=expected
            )
        self._topics = None if patterns is None else check_wanted(patterns)
        self.patterns: Final = () if self._topics is None else self._topics.patterns
        """Empty: all topics."""
        self.interest: Final = EVERYTHING if self._topics is None else Projection(topics=self._topics)

    def has(self, topic: str) -> bool:
        """Whether this host reads the topic."""
        return self._topics is None or topic in self._topics

    def of(self, batch: MessageBatch) -> MessageBatch | None:
        """The messages that this host reads; None if there are none."""
        return batch if self._topics is None else batch.with_topics(self._topics)
