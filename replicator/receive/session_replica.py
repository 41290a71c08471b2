"""The session replica of a node in its event loop: receiving, syncing and reporting.

Invariants:
- Only one operation of the receiver runs at a time: in the loop if it is quick, else in a thread. So the loop
  never waits for a disk.
- Bytes that a stream reports as durable were synced before. They are reported at once, because the sender
  waits for the report.
- A replica whose disk failed, or that was fenced, accepts nothing more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Final, ParamSpec, TypeVar

from msgspec import Struct

from replicator.protocol.handshake import NOWHERE, PushProgress
from replicator.protocol.messages import Chunk, LogOffset, Run, SegmentSealed, WholeRun
from replicator.protocol.run_in_thread import run_to_end
from replicator.receive.batch_boundaries import SegmentBoundaries
from replicator.receive.group_commit import GroupCommit
from replicator.receive.session_receiver import SessionReceiver
from rt.errors import Closed, Overloaded, RtError, StorageFailed
from rt.log.write.writer import SyncPoint

UNFINISHED_BYTES_MAX: Final = 2**28 + 2**24
"""Room for one message of the largest size, and 16 MiB for all others. Messages that do not fit are sent
again.
"""
STALLED_SECONDS: Final = 5.0
SLOW_BYTES_S: Final = 2**20
"""A batch makes room for others if it has been arriving for `STALLED_SECONDS` at fewer bytes a second."""
STILL_SECONDS: Final = 1.0
"""A batch that did not grow for this time is the first to make room when memory is short."""
LARGE_BYTES: Final = 2**21
"""Smaller unfinished batches make no room: most of their memory is in gRPC."""

MERGED_SECONDS_MAX: Final = 0.03
"""How long a report of merged messages may wait for a report of synced bytes: each report costs the same as a
chunk.
"""

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class _Unfinished(Struct, eq=False):
    """The unfinished batch of a receiver. `is_leaving`: it was interrupted to make room."""

    path: str
    since_s: float
    interrupt: Callable[[RtError], None]
    held: int = 0
    grown_s: float = 0.0
    """When it last became larger."""
    is_leaving: bool = False


class UnfinishedBytes:
    """The memory of unfinished batches of all replicas that share it, and its bound.

    Above the bound the slowest batch makes room: otherwise a sender that stops within a batch would keep all
    others from sending. `now` is a clock in seconds that never goes back.
    """

    def __init__(
        self, bytes_max: int = UNFINISHED_BYTES_MAX, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._bytes_max = bytes_max
        self._now = now
        self._held: dict[SessionReceiver, _Unfinished] = {}
        self.total = 0
        self._leaving = 0  # The bytes of interrupted batches; included in `total`.

    def record(
        self, receiver: SessionReceiver, interrupt: Callable[[RtError], None] = lambda _: None
    ) -> None:
        """Count the bytes that this receiver holds now.

        Above the bound, `interrupt` of the slowest batch is called, and the owner of that batch must call
        `release`. If no batch is slow, this receiver's batch is dropped: `rt.Overloaded`.
        """
        self._set(receiver, receiver.unfinished_bytes, interrupt)
        while self.total - self._leaving > self._bytes_max:
            slowest = self._slowest()
            if slowest is None or slowest is self._held.get(receiver):
                receiver.drop_unfinished()
                self.release(receiver)
                raise self._overloaded(receiver.path)
            self._interrupt(slowest)

    def release(self, receiver: SessionReceiver) -> None:
        self._set(receiver, 0, lambda _: None)

    def make_room(self, size: int) -> int:
        """Memory is short: interrupt large batches of `size` bytes together. Return how many bytes are
        leaving.

        The interrupted batches are sent again. Batches that did not grow for `STILL_SECONDS` leave first,
        then the newest. The oldest of the others stays, so that one batch is always finished.
        """
        before_s = self._now() - STILL_SECONDS
        staying = [one for one in self._held.values() if not one.is_leaving and one.held >= LARGE_BYTES]
        stalled = [one for one in staying if one.grown_s <= before_s]
        others = sorted((one for one in staying if one.grown_s > before_s), key=lambda one: -one.since_s)
        for one in (*stalled, *others[:-1]):
            if self._leaving >= size:
                break
            self._interrupt(one)
        return self._leaving

    def _interrupt(self, one: _Unfinished) -> None:
        one.is_leaving = True
        self._leaving += one.held
        one.interrupt(self._overloaded(one.path))

    def _slowest(self) -> _Unfinished | None:
        """The slowest of the batches that arrive slowly."""
        now = self._now()
        slow = [
            (one.held / (now - one.since_s), number, one)
            for number, one in enumerate(self._held.values())
            if not one.is_leaving and one.since_s + STALLED_SECONDS <= now
        ]
        rate, _, slowest = min(slow, default=(SLOW_BYTES_S, 0, None))
        return slowest if rate < SLOW_BYTES_S else None

    def _overloaded(self, where: str) -> Overloaded:
        return Overloaded(
            "too many large messages arrive at once",
            where=where,
            expected=self._bytes_max,
            hint="The sender repeats it by itself. A batch that comes slowly makes room for others.",
        )

    def _set(self, receiver: SessionReceiver, held: int, interrupt: Callable[[RtError], None]) -> None:
        known = self._held.get(receiver)
        if known is None and not held:
            return
        if known is None or held < known.held:
            self._drop(receiver)
            known = self._held[receiver] = _Unfinished(receiver.path, self._now(), interrupt)
        self.total += held - known.held
        self._leaving += held - known.held if known.is_leaving else 0
        known.held, known.grown_s = held, self._now()
        if not held:
            self._drop(receiver)

    def _drop(self, receiver: SessionReceiver) -> None:
        known = self._held.pop(receiver, None)
        if known is not None:
            self.total -= known.held
            self._leaving -= known.held if known.is_leaving else 0


class SessionReplicaWriter:
    """A session's receiver, shared by its sources: the publisher's stream, or a peer's replica.

    `on_marks` is called with the boundaries that became durable, `on_failed` with the failure of the disk,
    both in the loop. Writers that share `unfinished` share the memory for large messages.
    """

    def __init__(
        self,
        receiver: SessionReceiver,
        sync: GroupCommit,
        pool: Executor,
        *,
        on_marks: Callable[[list[SegmentBoundaries]], None],
        on_failed: Callable[[RtError], None],
        unfinished: UnfinishedBytes | None = None,
    ) -> None:
        self.receiver = receiver
        self._sync = sync
        self._pool = pool
        self._on_marks = on_marks
        self._on_failed = on_failed
        self._unfinished = unfinished or UnfinishedBytes()
        self._alone = asyncio.Lock()
        self._refusal: RtError | None = None
        self._interruption: RtError | None = None  # Ends the present stream; the next one may continue.
        self._progress = PushProgress(receiver.durable or NOWHERE, receiver.durable_end)
        self._changed = asyncio.Event()
        self._waking: asyncio.TimerHandle | None = None
        sync.add(receiver, self._handle_synced, self._handle_failed)

    @property
    def progress(self) -> PushProgress:
        return self._progress

    @property
    def is_idle(self) -> bool:
        """Whether the receiver is not in use, and all that it was given is durable."""
        receiver = self.receiver
        return not self._alone.locked() and not receiver.unfinished_bytes and receiver.sync_point() is None

    async def next_progress(
        self, told: PushProgress | None, is_over: Callable[[], bool] = lambda: False
    ) -> PushProgress:
        """Wait until the progress differs from `told`, or `is_over` returns True; return the progress.

        `wake` causes a new call of `is_over`. Raises the refusal, once there is one.
        """
        while self._refusal is self._interruption is None and self._progress == told and not is_over():
            await self._changed.wait()
        self._check()
        return self._progress

    async def wait_durable(self, place: LogOffset) -> None:
        """Return when everything before `place` is durable. Raises the refusal, once there is one.

        An error that only ends the current stream does not end this wait.
        """
        while self._refusal is None and self._progress.durable < place:
            await self._changed.wait()
        if self._refusal is not None:
            raise self._refusal

    async def append(self, item: Chunk | SegmentSealed) -> None:
        """Store the item. `next_progress` reports later what is durable. Raises the receiver's errors."""
        receiver = self.receiver
        async with self._alone:
            self._check()
            try:
                if isinstance(item, SegmentSealed):
                    await run_to_end(self._pool, partial(receiver.seal, item))
                elif not receiver.append_if_quick(item):
                    await run_to_end(self._pool, partial(receiver.append, item))
                self._unfinished.record(receiver, self._interrupt)
            except StorageFailed as error:
                self._handle_failed(error)
                raise
            finally:
                self._sync.request_sync(receiver)

    async def append_whole(self, runs: Sequence[WholeRun]) -> bool:
        """Store whole runs, durable on return. Return False and do nothing if they do not come next."""
        receiver = self.receiver
        async with self._alone:
            self._check()
            if not receiver.may_append_whole(runs[0]):
                return False
            try:
                await run_to_end(self._pool, partial(receiver.append_whole, runs))
            except StorageFailed as error:
                self._handle_failed(error)
                raise
            finally:
                self._sync.request_sync(receiver)
        return True

    async def start_run(self, run: Run) -> None:
        """Accept the bytes of an open run, with which a stream starts or continues."""
        async with self._alone:
            self._check()
            self.receiver.start_run(run)

    async def restart(self) -> None:
        """Prepare for the next stream, which sends from `receiver.next_offset` on. Called when a stream has
        ended, or another one takes over.
        """
        async with self._alone:
            self.receiver.drop_unfinished()
            self._unfinished.release(self.receiver)
            self._interruption = None
            self._check()

    async def call_alone(
        self, act: Callable[_Arguments, _Result], *arguments: _Arguments.args, **options: _Arguments.kwargs
    ) -> _Result:
        """Call a function of the receiver (trim it, skip forward) in a thread, while no other operation of it
        runs.
        """
        async with self._alone:
            try:
                return await run_to_end(self._pool, lambda: act(*arguments, **options))
            finally:
                self._sync.request_sync(self.receiver)

    def record_merged(self, place: LogOffset, number: int, *, is_urgent: bool) -> None:
        """Record that the merge of everything before `place`, which is number `number`, is committed.

        It is reported at once if `is_urgent`, else with the next report of synced bytes, within
        `MERGED_SECONDS_MAX`.
        """
        told = self._progress
        if place >= told.merged:
            self._progress = told._replace(merged=place, merged_run=place.run, merged_number=number)
            if self._progress == told:
                return
            if is_urgent:
                self.wake()
            elif self._waking is None:
                self._waking = asyncio.get_running_loop().call_later(MERGED_SECONDS_MAX, self.wake)

    def refuse(self, error: RtError) -> None:
        """Accept nothing from now on: every stream gets `error`. If there is a refusal already, it stays."""
        if self._refusal is None:
            self._refusal = error
            self.wake()

    async def close(self) -> None:
        """Wait for the running operation, then release the files. There is no guarantee for unsynced
        bytes.
        """
        self.refuse(Closed("the session replica is closed", where=self.receiver.path, hint="Try again."))
        self._sync.discard(self.receiver)
        async with self._alone:
            self._unfinished.release(self.receiver)
            await run_to_end(self._pool, self.receiver.close)

    def _check(self) -> None:
        if self._refusal is not None:
            raise self._refusal
        if self._interruption is not None:
            raise self._interruption

    def _interrupt(self, error: RtError) -> None:
        self._interruption = error
        self.wake()

    def _handle_synced(self, point: SyncPoint | None) -> None:
        synced = self.receiver.on_synced(point)
        if synced.boundaries:
            self._on_marks(synced.boundaries)  # First: merging waits for it.
        if synced.durable is not None:
            progress = self._progress._replace(durable=synced.durable, durable_number=synced.end)
            if progress != self._progress:
                self._progress = progress
                self.wake()

    def _handle_failed(self, error: RtError) -> None:
        self.refuse(error)
        self._on_failed(error)

    def wake(self) -> None:
        """Wake `next_progress`, which then calls `is_over` again."""
        if self._waking is not None:
            self._waking.cancel()
            self._waking = None
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
