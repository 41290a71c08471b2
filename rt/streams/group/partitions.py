"""Which partition a topic belongs to, and the names under which a group's positions are kept. Pure.

    workers~1f0c9a77.p003     the position of partition 3 of group workers

The second part is a digest of the patterns and the number of partitions. So a member with other patterns or
another number of partitions is detected: its positions would belong to other messages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import translate
from hashlib import blake2b
from typing import Final

from rt.errors import InvalidOption
from rt.streams.core.stream_id import QueueId
from rt.streams.queue.mapper import HashRingQueueMapper

_DIGEST_BYTES: Final = 8


class Partitions:
    """The partitions of the topics of group `name` that match one of `patterns` (`*`, `?`, `[…]`)."""

    def __init__(self, name: str, patterns: Sequence[str], count: int) -> None:
        self.name: Final = name
        self.patterns: Final = tuple(patterns)
        self.mapper: Final = HashRingQueueMapper.of_names([f"p{index:03}" for index in range(count)])
        whole = "\0".join([str(count), *sorted(set(patterns))])
        self._prefix = f"{name}~{blake2b(whole.encode(), digest_size=_DIGEST_BYTES).hexdigest()}."
        self._compiled = [re.compile(translate(pattern)) for pattern in patterns]

    @property
    def queues(self) -> tuple[QueueId, ...]:
        return self.mapper.queues

    def position_name(self, queue: QueueId) -> str:
        """The name of a partition's position."""
        return self._prefix + queue.name

    def place(self, topic: str) -> tuple[QueueId, int] | None:
        """The partition of a topic, and the index of the first pattern that it matches; None if none does."""
        for index, pattern in enumerate(self._compiled):
            if pattern.fullmatch(topic):
                digest = blake2b(topic.encode("utf-8", "surrogatepass"), digest_size=8).digest()
                return self.queues[int.from_bytes(digest) % len(self.queues)], index
        return None

    def positions(self, found: Mapping[str, int]) -> dict[QueueId, int]:
        """The positions of the partitions. `found`: all positions that the cluster has for this name.

        `rt.InvalidOption` if some belong to a group with other patterns or another number of partitions.
        """
        names = {self.position_name(queue): queue for queue in self.queues}
        if strange := sorted(name for name in found if name not in names):
            raise InvalidOption(
                "the group has positions of other topic patterns or another number of partitions",
                where=self.name,
                got=f"{', '.join(self.patterns)} with {len(names)} partitions"[:200],
                expected=f"those of {strange[0]}",
                hint="Use the same ones, or another group. To retire the old positions, stop all members and "
                "delete them: `rt groups delete`.",
            )
        return {names[name]: position for name, position in found.items()}
