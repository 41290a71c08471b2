"""`rt.aio.Publisher`: the publisher for event loops.

Invariants:
- The loop never waits for the network. `publish` writes full batches to a local file; it syncs that file only
  where a segment rolls, and after each batch with `fsync="batch"`.
- A message that was published stays published, even if a call is cancelled afterwards.
- A wait needs no thread and no task of its own: one poll of the progress ends all waits that are due.
"""

from __future__ import annotations

import asyncio
import copy
import heapq
import logging
import os
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Self

import rt.client.publisher
from rt.client.publisher_status import PublisherStats, PublisherStatus
from rt.client.replication_problem import ErrorHandler
from rt.client.settings import FsyncPolicy
from rt.client.wait_handle import WaitHandle, WaitLevel
from rt.errors import Closed, RtError
from rt.log.format.constants import Int64s
from rt.log.format.headers import HeadersInput
from rt.option_checks import check_timeout
from rt.sidecar.progress_file import PublisherProgress

if TYPE_CHECKING:
    from rt.net.tls import TLS

logger = logging.getLogger("rt.client.publisher")

_ABANDONED_MAX: Final = 1000
"""The most cancelled or timed-out waits that are still in the heap. If there are more, the heap is cleared of
them.
"""


class Delivery:
    """What `rt.aio.Publisher.publish` returns: the numbers, and an awaitable that ends when they are merged.

    It need not be awaited. `await` returns the numbers, or raises what `rt.Publisher.wait` raises.
    """

    __slots__ = ("_publisher", "numbers")

    def __init__(self, publisher: Publisher, numbers: range) -> None:
        self.numbers = numbers
        """The numbers of the messages. Empty if there was none."""
        self._publisher = publisher

    @property
    def number(self) -> int:
        """The last of the numbers."""
        return self.numbers[-1]

    def __await__(self) -> Generator[Any, None, range]:
        if self.numbers:
            yield from self._publisher.wait(self.number).__await__()
        return self.numbers


class Publisher:
    """Like `rt.Publisher`, with the same arguments. Opened by `async with`, or by `open`.

    `on_merged` and `on_error` are called in the event loop. All methods belong to the loop that opened it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        stream: str,
        *,
        publisher_id: str | None = None,
        dedup_id: str | None = None,
        endpoints: Sequence[str] = (),
        tls: TLS | None = None,
        batch_bytes: int = 256 * 1024,
        linger_ms: float = 1.0,
        roll_bytes: int = 128 * 2**20,
        fsync: FsyncPolicy = "interval",
        compression: Literal["zstd"] | None = None,
        local_persistence: float = 0.0,
        max_silence: float | None = None,
        on_merged: Callable[[int], None] | None = None,
        on_error: ErrorHandler | None = None,
    ) -> None:
        self._on_merged, self._on_error = on_merged, on_error
        self._make = partial(
            rt.client.publisher.Publisher,
            path,
            stream,
            publisher_id=publisher_id,
            dedup_id=dedup_id,
            endpoints=endpoints,
            tls=tls,
            batch_bytes=batch_bytes,
            linger_ms=linger_ms,
            roll_bytes=roll_bytes,
            fsync=fsync,
            compression=compression,
            local_persistence=local_persistence,
            max_silence=max_silence,
            on_error=None if on_error is None else self._pass_error_on,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._publisher: rt.client.publisher.Publisher | None = None
        self._waits: _Waits | None = None
        self._merged = 0

    @property
    def session(self) -> str:
        """The name of the session. `rt.Closed` before the session was opened, as for all members below."""
        return self._opened.session

    @property
    def stream(self) -> str:
        """The stream that it publishes to."""
        return self._opened.stream

    @property
    def directory(self) -> str:
        """The session directory."""
        return self._opened.directory

    @property
    def next_number(self) -> int:
        """The number of the next message."""
        return self._opened.next_number

    @property
    def progress(self) -> PublisherProgress:
        """See `rt.Publisher.progress`."""
        return self._opened.progress

    def status(self) -> PublisherStatus:
        """See `rt.Publisher.status`."""
        return self._opened.status()

    def stats(self) -> PublisherStats:
        """See `rt.Publisher.stats`. From any thread."""
        return self._opened.stats()

    async def open(self) -> None:
        """Open the session. Once; `async with` does it. If it is cancelled, the session is closed again."""
        self._loop = asyncio.get_running_loop()
        making = self._loop.run_in_executor(None, self._make)
        try:
            publisher = self._publisher = await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(_close_unwanted)
            raise
        if (replication := publisher._replication) is not None:
            self._merged = publisher.progress.merged
            self._waits = _Waits(replication)
            replication.listen(self._wake)

    def publish(
        self,
        value: bytes,
        topic: str = "",
        timestamp_ns: int | None = None,
        number: int | None = None,
        headers: HeadersInput = (),
    ) -> Delivery:
        """Append one message, as `rt.Publisher.publish` does. Await the result to wait until it is merged."""
        accepted = self._opened.publish(value, topic, timestamp_ns, number, headers)
        return Delivery(self, range(accepted, accepted + 1))

    def publish_many(
        self,
        values: Iterable[bytes],
        topic: str = "",
        timestamps_ns: Sequence[int] | Int64s | None = None,
        headers: HeadersInput | Sequence[HeadersInput] = (),
    ) -> Delivery:
        """Append many messages of one topic, as `rt.Publisher.publish_many` does. It takes about a
        millisecond per MB: pass large lists in parts.
        """
        return Delivery(self, self._opened.publish_many(values, topic, timestamps_ns, headers))

    async def flush(self) -> None:
        """See `rt.Publisher.flush`."""
        await asyncio.shield(asyncio.to_thread(self._opened.flush))

    async def wait(self, number: int, level: WaitLevel = "merged", timeout: float | None = None) -> None:
        """See `rt.Publisher.wait`."""
        timeout = check_timeout(timeout)
        replication, run = self._opened._check_wait(number, level)
        if asyncio.get_running_loop() is not self._loop:  # The progress belongs to that loop.
            raise Closed("the publisher belongs to another event loop", hint="Open one in each loop.")
        waits = self._waits
        assert waits is not None
        wait = waits.add(run, number, level)
        if wait is None:
            return
        try:
            async with asyncio.timeout(timeout):
                await wait.future
        except TimeoutError:
            raise replication.timed_out(number, level) from None
        finally:
            waits.discard(wait)

    async def close(self, timeout: float | None = rt.client.publisher.CLOSE_SECONDS) -> None:
        """See `rt.Publisher.close`. If it is cancelled, the closing continues in its thread."""
        if self._publisher is not None:
            await asyncio.shield(asyncio.to_thread(self._publisher.close, timeout))

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._publisher is not None:
            await asyncio.shield(asyncio.to_thread(self._publisher.__exit__, kind, error, traceback))

    @property
    def _opened(self) -> rt.client.publisher.Publisher:
        if self._publisher is None:
            raise Closed("the publisher is not open", hint="Use `async with`, or await `open`.")
        return self._publisher

    # From other threads

    def _wake(self) -> None:
        """The replication changed."""
        self._call_soon(self._advance)

    def _pass_error_on(self, error: RtError) -> None:
        assert self._on_error is not None
        self._call_soon(partial(self._call, self._on_error, error))

    def _call_soon(self, call: Callable[[], None]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # The loop is closed, and its waits with it.
            return

    # In the loop

    def _advance(self) -> None:
        if self._waits is not None:
            self._waits.advance()
        if self._on_merged is not None and (merged := self._opened.progress.merged) > self._merged:
            self._merged = merged
            self._call(self._on_merged, merged)

    def _call(self, handler: Callable[[Any], None], argument: object) -> None:
        try:
            handler(argument)
        except Exception:
            logger.exception("handler_failed session=%s", self._opened.session)


def _close_unwanted(making: asyncio.Future[rt.client.publisher.Publisher]) -> None:
    """Release the directory that a cancelled `open` has taken."""
    if not making.cancelled() and making.exception() is None:
        close = partial(making.result().close, 0)
        threading.Thread(target=close, name="rt-publisher-unwanted").start()


class _Wait(NamedTuple):
    run: int
    number: int
    order: int
    future: asyncio.Future[None]


class _Waits:
    """The waits for the progress of one session. For one event loop."""

    def __init__(self, replication: WaitHandle) -> None:
        self._replication = replication
        self._heaps: dict[WaitLevel, list[_Wait]] = {"replicated": [], "merged": []}
        self._next_order = 0
        self._left = 0
        """How many waits have not ended."""
        self._abandoned = 0

    def add(self, run: int, number: int, level: WaitLevel) -> _Wait | None:
        """Return a wait that ends when `number` of `run` has reached `level`; None if it already has. Call
        `discard` with the wait in the end. Raises the error that prevents the wait from succeeding.
        """
        if self._replication.has_come(run, number, level):
            return None
        self._replication.raise_if_vain()
        wait = _Wait(run, number, self._next_order, asyncio.get_running_loop().create_future())
        self._next_order += 1
        heapq.heappush(self._heaps[level], wait)
        self._left += 1
        if self._left == 1:
            self._replication.start_waiting()
        return wait

    def discard(self, wait: _Wait) -> None:
        self._left -= 1
        if not self._left:
            self._replication.stop_waiting()
        if not wait.future.done() or wait.future.cancelled():
            wait.future.cancel()
            self._abandoned += 1
        else:
            wait.future.exception()  # Its task may have been cancelled at the same moment.
        if self._abandoned > _ABANDONED_MAX:
            self._abandoned = 0
            for heap in self._heaps.values():
                heap[:] = [one for one in heap if not one.future.done()]
                heapq.heapify(heap)

    def advance(self) -> None:
        """End the waits that are due, or all waits if the replication is blocked or has ended.

        If there are no waits, it must not ask for the error: an error that is raised here counts as raised to
        the program.
        """
        for level, heap in self._heaps.items():
            while heap and self._replication.has_come(heap[0].run, heap[0].number, level):
                _end(heapq.heappop(heap).future, None)
        if not self._left:
            return
        try:
            self._replication.raise_if_vain()
        except RtError as error:
            for heap in self._heaps.values():
                while heap:
                    _end(heapq.heappop(heap).future, copy.copy(error))


def _end(future: asyncio.Future[None], error: RtError | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
