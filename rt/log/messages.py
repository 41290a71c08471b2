"""Messages in columns: what readers hand out.

Law: a `MessageBatch` is only made of what was checked, so nothing here checks again. It copies as late and as
little as it can: a slice shares the arrays and bytes of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, repeat
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from rt.log.batch import Int64s

if TYPE_CHECKING:
    import pyarrow

Indices: TypeAlias = npt.NDArray[np.int64] | npt.NDArray[np.uint16]

_COPY_MEAN_BYTES_MAX = 4096
"""Up to this mean size one bulk copy of all values, then slices of bytes, beats a copy for each value."""


class Message(NamedTuple):
    """One message. In a session log `position` is the message's number."""

    position: int
    timestamp_ns: int
    session: str
    number: int
    topic: str
    value: bytes


_message = partial(tuple.__new__, Message)


@dataclass(frozen=True, slots=True, eq=False)
class MessageBatch:
    """Consecutive messages in columns, all of one length.

    `positions`, `timestamps_ns` (ns since the Unix epoch) and `numbers` are int64. Sessions and topics are
    dictionaries: `session_index[i]` is the place of message i's session in `session_names`, or None where
    there is just one; topics likewise. Message i's value is
    `value_bytes[value_offsets[i]:value_offsets[i + 1]]`. Arrays may be views of a read buffer: treat them as
    read-only.
    """

    positions: Int64s
    timestamps_ns: Int64s
    numbers: Int64s
    session_names: tuple[str, ...]
    session_index: Indices | None
    topic_names: tuple[str, ...]
    topic_index: Indices | None
    value_offsets: npt.NDArray[np.int32]
    value_bytes: memoryview

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def end(self) -> int:
        """One past the last position, if there is a message."""
        return int(self.positions[-1]) + 1

    @property
    def values(self) -> list[bytes]:
        """The values, each copied into bytes of its own."""
        first = int(self.value_offsets[0])
        offsets = (self.value_offsets - first).tolist()
        own = self.value_bytes[first : first + offsets[-1]]
        if offsets[-1] > _COPY_MEAN_BYTES_MAX * len(self):
            return [own[start:end].tobytes() for start, end in pairwise(offsets)]
        data = own.tobytes()
        return [data[start:end] for start, end in pairwise(offsets)]

    @property
    def topics(self) -> list[str]:
        """The topic of each message."""
        return _spread(self.topic_names, self.topic_index, len(self))

    @property
    def sessions(self) -> list[str]:
        """The session of each message."""
        return _spread(self.session_names, self.session_index, len(self))

    def messages(self, positions: Iterator[int] | None = None) -> Iterator[Message]:
        """The messages one by one. `positions`, if given, is where the positions are taken from."""
        rows = zip(
            self.positions.tolist() if positions is None else positions,
            self.timestamps_ns.tolist(),
            repeat(self.session_names[0]) if self.session_index is None else self.sessions,
            self.numbers.tolist(),
            repeat(self.topic_names[0]) if self.topic_index is None else self.topics,
            self.values,
            strict=False,
        )
        return map(_message, rows)

    def slice(self, start: int, stop: int) -> MessageBatch:
        """Messages `start` up to, not including, `stop`, as of a list; nothing is copied."""
        start, stop, _ = slice(start, stop).indices(len(self))
        stop = max(start, stop)
        return MessageBatch(
            self.positions[start:stop],
            self.timestamps_ns[start:stop],
            self.numbers[start:stop],
            self.session_names,
            None if self.session_index is None else self.session_index[start:stop],
            self.topic_names,
            None if self.topic_index is None else self.topic_index[start:stop],
            self.value_offsets[start : stop + 1],
            self.value_bytes,
        )

    def select(self, mask: npt.NDArray[np.bool_]) -> MessageBatch:
        """The messages where `mask` is true; their values are copied together."""
        lengths = np.diff(self.value_offsets)[mask]
        offsets = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(lengths, out=offsets[1:])
        return MessageBatch(
            self.positions[mask],
            self.timestamps_ns[mask],
            self.numbers[mask],
            self.session_names,
            None if self.session_index is None else self.session_index[mask],
            self.topic_names,
            None if self.topic_index is None else self.topic_index[mask],
            offsets,
            memoryview(b"".join(self._runs(mask))),
        )

    def with_topics(self, wanted: frozenset[str]) -> MessageBatch | None:
        """Only the messages of the `wanted` topics; None if there are none."""
        keep = np.fromiter((name in wanted for name in self.topic_names), np.bool_, len(self.topic_names))
        if keep.all():
            return self
        if self.topic_index is None or not keep.any():
            return None
        mask = keep[self.topic_index]
        return self.select(mask) if mask.any() else None

    def to_arrow(self) -> pyarrow.RecordBatch:
        """A record batch of position, timestamp (ns, UTC), session, number, topic (dictionaries) and value.

        Values, offsets and timestamps are not copied. Needs the extra `rt-transport[arrow]`.
        """
        from rt.log.arrow import record_batch

        return record_batch(self)

    def _runs(self, mask: npt.NDArray[np.bool_]) -> Iterator[memoryview]:
        """The value bytes of each run of consecutive messages in `mask`."""
        edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
        places = self.value_offsets[edges].tolist()
        for start, end in zip(places[::2], places[1::2], strict=True):
            yield self.value_bytes[start:end]


def _spread(names: tuple[str, ...], index: Indices | None, count: int) -> list[str]:
    if index is None:
        return [names[0]] * count
    table: Any = names
    return [table[place] for place in index.tolist()]
