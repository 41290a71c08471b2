"""Merged logs for tests of readers: several sessions, topics, batch sizes and codecs, in several segments."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import rt
from rt.log.disk import REAL, Disk
from rt.log.format.headers import Headers
from rt.log.format.segment import SegmentId
from rt.testing.merged import MergedLogBuilder

TOPICS = ("trade", "quote", "", "ärger")
BASE_NS = 1_700_000_000_000_000_000
CLUSTER = bytes(range(0x40, 0x50))


class Feeds:
    """Publishers to files below `root`, and a merged log of them. The test decides when to merge."""

    def __init__(
        self, root: Path | str, names: Sequence[str] = ("a", "b", "c"), *, disk: Disk = REAL
    ) -> None:
        self.path = f"{root}/merged"
        self._disk = disk
        self._publishers = {
            name: rt.Publisher(
                f"{root}/sources",
                "s",
                publisher_id=name,
                linger_ms=60_000,
                fsync="never",
                compression="zstd" if index == 1 else None,
                disk=disk,
            )
            for index, name in enumerate(names)
        }
        self.log = MergedLogBuilder(self.path, cluster_id=CLUSTER, stream="s", disk=disk)
        self._random = random.Random(7)
        self._count = 0

    def publish(
        self,
        name: str,
        values: Sequence[bytes],
        topic: str,
        timestamps_ns: Sequence[int],
        headers: Sequence[Headers] = (),
    ) -> None:
        """Publish one batch of a session."""
        publisher = self._publishers[name]
        publisher.publish_many(list(values), topic, list(timestamps_ns), headers)
        publisher.flush()

    def merge(self, *, block_bytes: int = 64 * 1024) -> range:
        """Merge what was published."""
        merged = self.log.merge_all(
            [publisher.directory for publisher in self._publishers.values()], block_bytes=block_bytes
        )
        self.log.sync()
        return merged

    def fill(self, batches: int, *, messages_max: int = 40, bytes_max: int = 400) -> range:
        """Publish and merge batches of random sizes.

        Timestamps mostly increase, and differ in the last digits.
        """
        draw = self._random
        for _ in range(batches):
            count = draw.choice([1, 1, 2, draw.randint(1, messages_max)])
            values = [draw.randbytes(draw.randint(0, bytes_max)) for _ in range(count)]
            stamps = [
                BASE_NS + (self._count + i) * 1_000_003 - draw.randint(0, 5_000_000) for i in range(count)
            ]
            name = draw.choice(list(self._publishers))
            self.publish(name, values, draw.choice(TOPICS), stamps)
            self._count += count
        return self.merge()

    def roll(self) -> None:
        """End the segment."""
        self.log.roll()

    def trim(self, roll: int) -> None:
        """Trim the segments before log.0.`roll`."""
        self.log.trim(SegmentId(0, roll))

    def rows(self, start: int = 0) -> list[rt.Message]:
        """Return the messages in the log from position `start` on, read one by one."""
        with rt.LogReader(self.path, disk=self._disk) as reader:
            return [message for message in reader if message.position >= start]

    def close(self) -> None:
        for publisher in self._publishers.values():
            publisher.close()
        self.log.close()
