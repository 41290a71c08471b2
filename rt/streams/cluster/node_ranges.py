"""Reads ranges of a merged log from the nodes, where the copy of this host does not have them.

Invariants:
- Everything that the nodes have is read. Only messages that the nodes have trimmed are a gap.
- A read that is cancelled loses nothing: the next one returns its result.
- Positions are read in the generation of forced resets in which they are valid.
- Reads use threads of their own. Nodes that hang do not block other work of this host.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Final, NamedTuple, TypeVar

from rt.cluster_epoch import generation_of, name_of
from rt.errors import Closed, Diverged, RtError
from rt.log.read.log_source import NO_END, LogSource, RemoteLogSource, open_nodes
from rt.log.read.projection import Projection
from rt.log.scan.message_batch import MessageBatch
from rt.net.grpc_errors import Unreachable
from rt.net.tls import TLS
from rt.streams.cluster.log_gaps import LogGaps
from rt.streams.core.errors import QueueReset

PATIENCE_S: Final = 10.0
"""How long all nodes may fail before a read raises, in seconds. The caller reads again."""
_THREADS: Final = 4
"""How many ranges of a cluster are read at a time."""
_WIDENING_MAX: Final = 64
"""Maximum number of positions that are read for each requested event, if most messages are of other
streams.
"""

_BATCHES_MAX: Final = 4
"""How many batches a feed reads ahead."""
_PAUSE_S_MIN: Final = 0.1
_PAUSE_S_MAX: Final = 1.0
"""How long a feed waits after an error before it asks the nodes again, in seconds."""

logger = logging.getLogger("rt.streams")

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
        self._idle: list[RemoteLogSource] = []
        self._used: set[RemoteLogSource] = set()
        self._changing = threading.Lock()
        self._is_closed = False

    def reader(
        self, position: int, interest: Projection, gaps: LogGaps, generation: int | None
    ) -> NodeRangeReader:
        """A reader of the messages from `position` on that `interest` selects. If the nodes have trimmed
        messages, `gaps` gets the gap.

        `generation`: the generation of forced resets in which the position is valid; None if it is not known.
        """
        return NodeRangeReader(self, position, interest, gaps, generation)

    def submit(self, reader: NodeRangeReader, limit: int | None, messages_max: int) -> Future[RangeRead]:
        """Read in a thread."""
        self._require_open()
        with_log = self._with_log if reader.generation is None else self._with_any_log
        return self._pool.submit(with_log, lambda log: reader.read_from(log, limit, messages_max))

    async def end(self) -> int:
        """The end of the log. Raises errors of the nodes."""
        self._require_open()
        return await asyncio.wrap_future(self._pool.submit(self._with_any_log, lambda log: log.bounds()[1]))

    async def position_at(self, timestamp_ns: int) -> int:
        """The position of the first message with this timestamp or a later one; the end of the log if there
        is none. Raises errors of the nodes.
        """
        self._require_open()
        find = partial(_position_at, timestamp_ns)
        return await asyncio.wrap_future(self._pool.submit(self._with_any_log, find))

    def feed(self, position: int, interest: Projection, gaps: LogGaps, generation: int | None) -> NodeFeed:
        """A feed of all messages from `position` on that `interest` selects, as they arrive. See `reader`."""
        return NodeFeed(self, position, interest, gaps, generation)

    @contextlib.contextmanager
    def log(self) -> Iterator[RemoteLogSource]:
        """A log for the calling thread. After the `with` block the log is kept for other callers, unless the
        block raises. `rt.Closed` if this object is closed.
        """
        log = self._taken()
        is_reusable = False
        try:
            yield log
            is_reusable = True
        finally:
            with self._changing:
                self._used.discard(log)
                is_reusable = is_reusable and not self._is_closed
                if is_reusable:
                    self._idle.append(log)
            if not is_reusable:
                log.close()

    def close(self) -> None:
        """Close the idle logs. A read under way raises `rt.Closed`, and its log is closed in its thread."""
        with self._changing:
            self._is_closed = True
            idle, self._idle = self._idle, []
            for log in self._used:
                log.interrupt()
        self._pool.shutdown(wait=False, cancel_futures=True)
        for log in idle:
            log.close()

    def _with_log(self, use: Callable[[LogSource], _Result]) -> _Result:
        with self.log() as log:
            return use(log)

    def _with_any_log(self, use: Callable[[LogSource], _Result]) -> _Result:
        """Call `use` with a log. If a forced reset replaced the log, it is opened again: `use` has no
        position, or checks the epoch.
        """
        while True:
            with contextlib.suppress(Diverged):
                return self._with_log(use)

    def _taken(self) -> RemoteLogSource:
        with self._changing:
            self._require_open()
            log = self._idle.pop() if self._idle else self._opened()
            self._used.add(log)
        return log

    def _require_open(self) -> None:
        if self._is_closed:
            raise Closed("the queues are closed", where=self._stream)

    def _opened(self) -> RemoteLogSource:
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


class NodeRangeReader:
    """Reads on from `position`. One task uses it."""

    def __init__(
        self,
        logs: NodeLogs,
        position: int,
        interest: Projection,
        gaps: LogGaps,
        generation: int | None,
    ) -> None:
        self._logs = logs
        self.position = position
        self._interest = interest
        self._gaps = gaps
        self.generation: Final = generation
        self._under_way: asyncio.Future[RangeRead] | None = None
        self._widening = 1

    async def read(self, limit: int | None, messages_max: int) -> RangeRead:
        """The messages of the next positions before `limit` (None: up to the end of the log). If most
        messages are of other streams, one read covers thousands of positions. Empty at the end.

        Returns more than `messages_max` messages only if a block has more. Raises errors of the nodes,
        `QueueReset`.
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
        _check_generation(log, self.generation)
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


class NodeFeed:
    """The log from `position` on, as messages arrive: one request to one node. For one task; close it.

    It has its own thread. An event loop that ended or a process that exits does not wait for this thread.
    """

    def __init__(
        self,
        logs: NodeLogs,
        position: int,
        interest: Projection,
        gaps: LogGaps,
        generation: int | None,
    ) -> None:
        self._logs, self._position, self._interest, self._gaps = logs, position, interest, gaps
        self._generation = generation
        self._failure: RtError | None = None
        self._loop = asyncio.get_running_loop()
        self._batches: deque[MessageBatch] = deque()
        self._arrived = asyncio.Event()
        self._room = threading.Semaphore(_BATCHES_MAX)
        self._is_closed = threading.Event()
        self._changing = threading.Lock()
        self._log: RemoteLogSource | None = None
        """The log that the thread reads now."""
        threading.Thread(target=self._run, name="rt-streams-feed", daemon=True).start()

    async def read(self, messages_max: int) -> MessageBatch:
        """The next messages. Waits for them. A cancelled call loses nothing. Raises `QueueReset`,
        `rt.Diverged`.
        """
        while not self._batches:
            if self._failure is not None:
                raise self._failure
            self._arrived.clear()
            await self._arrived.wait()
        batch = self._batches.popleft()
        if len(batch) > messages_max:
            self._batches.appendleft(batch.slice(messages_max, len(batch)))
            batch = batch.slice(0, messages_max)
        else:
            self._room.release()
        return batch

    def close(self) -> None:
        """Read no more. The thread ends soon."""
        with self._changing:
            self._is_closed.set()
            if self._log is not None:
                self._log.interrupt()
        self._room.release()

    # The thread

    def _run(self) -> None:
        pause_s = 0.0
        while not self._is_closed.wait(pause_s):
            pause_s = max(_PAUSE_S_MIN, min(2 * pause_s, _PAUSE_S_MAX))
            try:
                with self._logs.log() as log:
                    self._set_log(log)
                    try:
                        self._read(log)
                    finally:
                        self._set_log(None)
            except (QueueReset, Diverged, Closed) as error:
                if not isinstance(error, Diverged) or self._generation is None:
                    self._call(partial(self._fail, error))
                    return
            except RtError as error:
                logger.info("queue_feed_failed position=%d error=%r", self._position, str(error))

    def _set_log(self, log: RemoteLogSource | None) -> None:
        with self._changing:
            if log is not None and self._is_closed.is_set():
                raise Closed("the feed is closed")
            self._log = log

    def _read(self, log: RemoteLogSource) -> None:
        """Ends only by an error."""
        with contextlib.closing(log.read(self._position, NO_END, self._interest, self._gaps)) as found:
            for batch in found:
                _check_generation(log, self._generation)
                self._room.acquire()
                if self._is_closed.is_set() or not self._call(partial(self._take, batch)):
                    raise Closed("the feed is closed")
                self._position = batch.end

    def _call(self, act: Callable[[], None]) -> bool:
        """Call `act` in the event loop. Returns False if the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(act)
        except RuntimeError:
            self._is_closed.set()
        return not self._is_closed.is_set()

    def _fail(self, error: RtError) -> None:
        self._failure = error
        self._arrived.set()

    def _take(self, batch: MessageBatch) -> None:
        self._batches.append(batch)
        self._arrived.set()


def _consume_error(under_way: asyncio.Future[RangeRead]) -> None:
    """Mark the error as retrieved, because the reader may have been given up."""
    if not under_way.cancelled():
        under_way.exception()


def _check_generation(log: LogSource, generation: int | None) -> None:
    """`QueueReset` if the nodes continue after a forced reset that is later than the reset of `generation`.

    `rt.Unreachable` if the nodes are in an epoch before the forced reset of `generation`.
    """
    if generation is None or (got := generation_of(log.epoch)) == generation:
        return
    if got > generation:
        raise QueueReset("a reset of the cluster was forced", got=f"epoch {name_of(log.epoch)}")
    raise Unreachable("the nodes are in an epoch before a forced reset", got=f"epoch {name_of(log.epoch)}")


def _position_at(timestamp_ns: int, log: LogSource) -> int:
    start, end = log.bounds()
    return log.find_time(start, end, timestamp_ns)
