"""The topics of a log that a host reads. The values of others are not read, only their columns."""

from __future__ import annotations

import re
from collections.abc import Collection
from fnmatch import translate
from typing import Final

from rt.errors import InvalidOption
from rt.log.scan.message_batch import MessageBatch

_TOPICS_MAX: Final = 100_000
"""The number of topics whose answer is kept."""


class TopicFilter:
    """Topics that match one of `patterns` (`*`, `?`, `[…]`). None: all."""

    def __init__(self, patterns: Collection[str] | None) -> None:
        if isinstance(patterns, str) or (patterns is not None and not patterns):
            expected = "a list of patterns, such as ['trades/*']"
            raise InvalidOption(
                "not patterns of topics", where="topics", got=repr(patterns)[:200], expected=expected
            )
        self._pattern = None if patterns is None else re.compile("|".join(map(translate, patterns)))
        self._known: dict[str, bool] = {}

    def has(self, topic: str) -> bool:
        """Whether this host reads the topic."""
        if self._pattern is None:
            return True
        found = self._known.get(topic)
        if found is None:
            if len(self._known) >= _TOPICS_MAX:
                self._known.clear()
            found = self._known[topic] = self._pattern.fullmatch(topic) is not None
        return found

    def of(self, batch: MessageBatch) -> MessageBatch | None:
        """The messages that this host reads; None if there are none."""
        if self._pattern is None:
            return batch
        wanted = [name for name in batch.topic_names if self.has(name)]
        if len(wanted) == len(batch.topic_names):
            return batch
        return batch.with_topics(frozenset(wanted)) if wanted else None
