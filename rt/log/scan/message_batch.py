"""Messages in columns: what readers return.

A `MessageBatch` is only made from checked data, so this module does not check the data again. A batch copies
data as late and as little as possible: a slice shares the arrays and bytes of the whole batch.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from io import BytesIO
from itertools import pairwise, repeat
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from rt.log.format.constants import Int64s
from rt.log.format.headers import Headers
from rt.log.scan.header_table import HeaderTable

if TYPE_CHECKING:
    import pyarrow

Indices: TypeAlias = npt.NDArray[np.int64] | npt.NDArray[np.uint16]

_COPY_MEAN_BYTES_MAX = 4096
"""For values up to this mean size, it is faster to copy all values in bulk first, and then each value."""


class Message(NamedTuple):
    """One message. In a session log `position` is the message's number.

    `run` counts the starts of the publisher on its session directory, from 0. Numbers are dense within one
    run. After a power loss of its host, a publisher may reuse numbers that its disk does not remember, in
    another run. So (session, run, number) names one message, as long as the publisher keeps its directory. A
    directory that was lost and created again starts with run 0.
    """

    position: int
    timestamp_ns: int
    session: str
    run: int
    number: int
    topic: str
    value: bytes
    headers: Headers = ()


_new: Any = tuple.__new__
"""Makes a named tuple from a tuple, at less than half the cost of its class."""

_VALUE: Final = 6
_VALUE_FROM_FRONT: Final = itemgetter(1, 2, 3, 4, 5, 6, 0, 7)
"""Puts the fields of a row that starts with the value into their normal order."""


class MessageBatch(Struct, frozen=True, eq=False):
    """Consecutive messages in columns, all of one length.

    `positions`, `timestamps_ns` (ns since the Unix epoch) and `numbers` are int64. Sessions and topics are
    dictionaries: `session_index[i]` is the index of message i's session in `session_names`, and of its run in
    `session_runs`; None if there is only one entry. A session has one entry for each of its runs. Topics
    likewise. Message i's value is `value_bytes[value_offsets[i]:value_offsets[i + 1]]`. Arrays may be views
    of a read buffer: treat them as read-only.
    """

    positions: Int64s
    timestamps_ns: Int64s
    numbers: Int64s
    session_names: tuple[str, ...]
    session_runs: tuple[int, ...]
    session_index: Indices | None
    topic_names: tuple[str, ...]
    topic_index: Indices | None
    value_offsets: npt.NDArray[np.int32]
    value_bytes: memoryview
    header_table: HeaderTable | None = None
    header_index: npt.NDArray[np.uint16] | None = None
    """The set of each message in `header_table`; None if there is one set."""

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def end(self) -> int:
        """One past the last position. The batch must not be empty."""
        return int(self.positions[-1]) + 1

    @property
    def values(self) -> list[bytes]:
        """The values, each copied into its own bytes."""
        return list(self._each_value())

    @property
    def topics(self) -> list[str]:
        return _spread(self.topic_names, self.topic_index, len(self))

    @property
    def headers(self) -> list[Headers]:
        """The headers of each message. Messages with equal headers share them."""
        if self.header_table is None:
            return [()] * len(self)
        sets = self.header_table.sets
        if self.header_index is None:
            return [sets[0]] * len(self)
        return [sets[index] for index in self.header_index.tolist()]

    @property
    def sessions(self) -> list[str]:
        return _spread(self.session_names, self.session_index, len(self))

    @property
    def runs(self) -> Int64s:
        """The run of each message: the start of its publisher that it came from."""
        runs = np.array(self.session_runs, np.int64)
        return runs.repeat(len(self)) if self.session_index is None else runs[self.session_index]

    def messages(self, positions: Iterator[int] | None = None) -> Iterator[Message]:
        """The messages one by one. Positions are taken from `positions`, if given.

        Each value is copied when its message is taken: messages that are dropped at once leave the caches of
        the processor to the next ones. If the copy of a large one fails or is interrupted, its position
        is not taken.
        """
        columns: list[Iterable[Any]] = [
            self.positions.tolist() if positions is None else positions,
            self.timestamps_ns.tolist(),
            repeat(self.session_names[0]) if self.session_index is None else self.sessions,
            repeat(self.session_runs[0]) if self.session_index is None else self.runs.tolist(),
            self.numbers.tolist(),
            repeat(self.topic_names[0]) if self.topic_index is None else self.topics,
            self._each_value(),
            repeat(()) if self.header_table is None else self.headers,
        ]
        rows: Iterator[Any]
        if self._has_large_values:
            rows = map(_VALUE_FROM_FRONT, zip(columns.pop(_VALUE), *columns, strict=False))
        else:
            rows = zip(*columns, strict=False)
        return map(_new, repeat(Message), rows)

    def slice(self, start: int, stop: int) -> MessageBatch:
        """Messages `start` to `stop` (exclusive), as of a list. Copies nothing."""
        start, stop, _ = slice(start, stop).indices(len(self))
        stop = max(start, stop)
        return MessageBatch(
            self.positions[start:stop],
            self.timestamps_ns[start:stop],
            self.numbers[start:stop],
            self.session_names,
            self.session_runs,
            None if self.session_index is None else self.session_index[start:stop],
            self.topic_names,
            None if self.topic_index is None else self.topic_index[start:stop],
            self.value_offsets[start : stop + 1],
            self.value_bytes,
            self.header_table,
            None if self.header_index is None else self.header_index[start:stop],
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
            self.session_runs,
            None if self.session_index is None else self.session_index[mask],
            self.topic_names,
            None if self.topic_index is None else self.topic_index[mask],
            offsets,
            memoryview(b"".join(self._runs(mask))),
            self.header_table,
            None if self.header_index is None else self.header_index[mask],
        )

    def with_topics(self, topics: Container[str]) -> MessageBatch | None:
        """The messages of these topics; None if there are none."""
        keep = np.fromiter((name in topics for name in self.topic_names), np.bool_, len(self.topic_names))
        if keep.all():
            return self
        if self.topic_index is None or not keep.any():
            return None
        mask = keep[self.topic_index]
        return self.select(mask) if mask.any() else None

    def to_arrow(self) -> pyarrow.RecordBatch:
        """A record batch of position, timestamp (ns, UTC), session, run, number, topic, value and headers.

        Sessions and topics are dictionaries. Values, offsets and timestamps are not copied. Needs the extra
        `rt-transport[arrow]`.
        """
        from rt.log.scan.arrow import record_batch

        return record_batch(self)

    @property
    def _has_large_values(self) -> bool:
        size = int(self.value_offsets[-1]) - int(self.value_offsets[0])
        return size > _COPY_MEAN_BYTES_MAX * len(self)

    def _each_value(self) -> Iterator[bytes]:
        first, last = int(self.value_offsets[0]), int(self.value_offsets[-1])
        if self._has_large_values:
            data = self.value_bytes
            return (data[start:end].tobytes() for start, end in pairwise(self.value_offsets.tolist()))
        # Reading a stream costs half as much as a slice of bytes.
        return map(BytesIO(self.value_bytes[first:last]).read, np.diff(self.value_offsets).tolist())

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
