"""A tally of a session's messages: a count and two running hashes, for the sender and the receiver.

Invariants:
- Equal tallies mean the same messages (topic, value) in the same order, in whichever batches.
- Numbers run from 0 without gap or repeat. The first error is noted.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from rt.log.scan.message_batch import MessageBatch
from sequencer.demo.source import DemoRecord

_DIGEST_BYTES = 16
_topic_code = lru_cache(maxsize=4096)(lambda topic: zlib.crc32(topic.encode()))


class Total(Struct, frozen=True):
    """The result of a tally, for JSON."""

    count: int
    value_bytes: int
    digest: str
    fault: str = ""
    """The first error of the numbers. Empty: none."""


class SessionTally:
    def __init__(self) -> None:
        self.count = 0
        self.value_bytes = 0
        self._fault = ""
        self._values = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        self._frames = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        """Hash of the length and topic of each message, so that the boundaries of values count too."""

    def add(self, records: Sequence[DemoRecord]) -> None:
        """Add the next messages."""
        lengths = np.array([len(record.value) for record in records], np.uint32)
        codes = np.array([_topic_code(record.topic) for record in records], np.uint32)
        self._add(lengths, codes, b"".join(record.value for record in records))

    def add_batch(self, batch: MessageBatch) -> None:
        """Add the messages of a batch, all of this session."""
        if not self._fault:
            self._fault = find_fault("number", batch.numbers, self.count)
        names = np.array([_topic_code(name) for name in batch.topic_names], np.uint32)
        codes = names.repeat(len(batch)) if batch.topic_index is None else names[batch.topic_index]
        offsets = batch.value_offsets
        self._add(
            np.diff(offsets).astype(np.uint32), codes, batch.value_bytes[int(offsets[0]) : int(offsets[-1])]
        )

    def total(self) -> Total:
        digest = self._values.hexdigest() + self._frames.hexdigest()
        return Total(self.count, self.value_bytes, digest, self._fault)

    def _add(
        self, lengths: npt.NDArray[np.uint32], codes: npt.NDArray[np.uint32], values: bytes | memoryview
    ) -> None:
        self.count += len(lengths)
        self.value_bytes += len(values)
        self._values.update(values)
        self._frames.update(np.stack([lengths, codes], axis=1).tobytes())


def find_fault(what: str, got: npt.NDArray[np.int64], start: int) -> str:
    """The first error in a column that must count from `start` without gap or repeat. Empty: none."""
    wrong = np.flatnonzero(got != np.arange(start, start + len(got)))
    return f"{what} {got[wrong[0]]} where {start + wrong[0]} must follow" if len(wrong) else ""


def by_session(batch: MessageBatch) -> list[tuple[str, MessageBatch]]:
    """Split a batch of several sessions by session."""
    if batch.session_index is None:
        return [(batch.session_names[0], batch)]
    index: npt.NDArray[Any] = np.asarray(batch.session_index)
    found = ((name, index == at) for at, name in enumerate(batch.session_names))
    return [(name, batch.select(rows)) for name, rows in found if rows.any()]
