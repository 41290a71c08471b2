"""Ranges of a merged log read from the nodes, where the copy of this host does not have them.

Invariants:
- What the nodes have is read. Only what they have trimmed is a gap.
- A read that is cancelled loses nothing: the next one returns its result.
- Reads use threads of their own. Nodes that hang keep no other work of this host waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Final, NamedTuple, TypeVar

from rt.errors import Closed
from rt.log.read.log_source import LogSource, open_nodes
from rt.log.read.projection import Projection
from rt.log.scan.message_batch import MessageBatch
from rt.net.tls import TLS
from rt.streams.queue.log_gaps import LogGaps

PATIENCE_S: Final = 10.0
"""How long all nodes may fail before a read raises, in seconds. The caller reads again."""
_THREADS: Final = 4
"""How many ranges of a cluster are read at a time."""
_WIDENING_MAX: Final = 64
"""How many positions are read for each event that was requested, if most are of other streams."""

_Result = TypeVar("_Result")


class RangeRead(NamedTuple):
    """Messages of a range, up to `end`."""

    batches: Sequence[MessageBatch]
    end: int


class NodeLogs:
    """The log of one cluster. Connections are kept for the next reader."""

    def __init__(self, endpoints: Sequence[str], stream: str, tls: TLS) -> None:
        self._endpoints, self._stream, self._tls = tuple(endpoints), stream, tls
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="rt-streams-nodes")
        self._idle: list[LogSource] = []
        self._changing = threading.Lock()
        self._is_closed = False

    def reader(self, position: int, interest: Projection, gaps: LogGaps) -> RangeReader:
        """Reads from `position` on what `interest` selects. `gaps` gets what the nodes have trimmed."""
        return RangeReader(self, position, interest, gaps)

    def submit(self, reader: RangeReader, limit: int | None, messages_max: int) -> Future[RangeRead]:
        """Read in a thread."""
        if self._is_closed:
            raise Closed("the queues are closed", where=self._stream)
        return self._pool.submit(self._with_log, lambda log: reader.read_from(log, limit, messages_max))

    async def end(self) -> int:
        """The end of the log. Raises errors of the nodes."""
        if self._is_closed:
            raise Closed("the queues are closed", where=self._stream)
        return await asyncio.wrap_future(self._pool.submit(self._with_log, lambda log: log.bounds()[1]))

    async def position_at(self, timestamp_ns: int) -> int:
        """The first message with this timestamp or a later one; the end if there is none. Raises errors of
        the nodes.
        """
        if self._is_closed:
            raise Closed("the queues are closed", where=self._stream)
        find = partial(_position_at, timestamp_ns)
        return await asyncio.wrap_future(self._pool.submit(self._with_log, find))

    def close(self) -> None:
        """Close what is idle. A read under way ends by itself."""
        with self._changing:
            self._is_closed = True
            idle, self._idle = self._idle, []
        self._pool.shutdown(wait=False, cancel_futures=True)
        for log in idle:
            log.close()

    def _with_log(self, use: Callable[[LogSource], _Result]) -> _Result:
        log = self._taken()
        try:
            found = use(log)
        except BaseException:
            log.close()
            raise
        with self._changing:
            if not self._is_closed:
                self._idle.append(log)
                return found
        log.close()
        return found

    def _taken(self) -> LogSource:
        with self._changing:
            if self._idle:
                return self._idle.pop()
        tls = self._tls
        return open_nodes(
            self._endpoints,
            self._stream,
            ca=tls.ca,
            cert=tls.cert,
            key=tls.key,
            connect_seconds=PATIENCE_S,
            patience_seconds=PATIENCE_S,
        )


class RangeReader:
    """Reads on from `position`. One task uses it."""

    def __init__(self, logs: NodeLogs, position: int, interest: Projection, gaps: LogGaps) -> None:
        self._logs = logs
        self.position = position
        self._interest = interest
        self._gaps = gaps
        self._under_way: asyncio.Future[RangeRead] | None = None
        self._widening = 1

    async def read(self, limit: int | None, messages_max: int) -> RangeRead:
        """The messages of the next positions before `limit` (None: up to the end of the log), in thousands
        of positions if most are of other streams. Nothing at the end.

        More than `messages_max` only with a block that has more. Raises errors of the nodes.
        """
        if self._under_way is None:
            self._under_way = asyncio.wrap_future(self._logs.submit(self, limit, messages_max))
            self._under_way.add_done_callback(_consume_error)
        under_way = self._under_way
        await asyncio.wait([under_way])
        self._under_way = None
        found = under_way.result()
        self.position = found.end
        return found

    def read_from(self, log: LogSource, limit: int | None, messages_max: int) -> RangeRead:
        """Runs in a thread."""
        start, end = log.bounds()
        end = end if limit is None else min(end, limit)
        position = self.position
        if position < start:
            stop = start if limit is None else min(start, limit)
            self._gaps.add(position, stop, "trimmed on the nodes")
            position = stop
        end = min(end, position + messages_max * self._widening)
        batches: list[MessageBatch] = []
        count = 0
        if position < end:
            with contextlib.closing(log.read(position, end, self._interest, self._gaps)) as found:
                for batch in found:
                    batches.append(batch)
                    count += len(batch)
                    if count >= messages_max and batch.end < end:
                        end = batch.end
                        break
        if 2 * count < messages_max:
            self._widening = min(2 * self._widening, _WIDENING_MAX)
        elif self._widening > 1:
            self._widening //= 2
        return RangeRead(batches, max(position, end))


def _consume_error(under_way: asyncio.Future[RangeRead]) -> None:
    """The reader may have been given up."""
    if not under_way.cancelled():
        under_way.exception()


def _position_at(timestamp_ns: int, log: LogSource) -> int:
    start, end = log.bounds()
    return log.find_time(start, end, timestamp_ns)
