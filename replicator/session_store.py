"""The copy of one session on a node, as its event loop holds it: what arrives, is synced and is told.

Laws. One thing at a time is done to the receiver, in the loop if it is quick, else in a thread, so that the
loop never waits for a disk to sync. What a stream is told as durable was synced before, and it is told at
once, for the sender goes by it. A copy whose disk failed, or that was fenced, takes nothing more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Final, ParamSpec, TypeVar

from replicator.group_sync import GroupSync
from replicator.handshake import NOWHERE, PushProgress
from replicator.items import Chunk, Life, Place, Sealed
from replicator.session_receiver import Marked, SessionReceiver
from replicator.threads import run_to_end
from rt.errors import Overloaded, RtError, StorageFailed
from rt.log.writer import SyncPoint

UNFINISHED_BYTES_MAX: Final = 2**29
"""Two of the largest messages; those that do not fit come again."""

MERGED_SECONDS_MAX: Final = 0.005
"""So long word of what is merged waits for the next of what is synced: each costs as much as a chunk."""

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class UnfinishedBytes:
    """What all stores that share it hold in memory of unfinished batches, and the bound on that."""

    def __init__(self, bytes_max: int = UNFINISHED_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._held: dict[SessionReceiver, int] = {}
        self.total = 0

    def note(self, receiver: SessionReceiver) -> None:
        """`rt.Overloaded` if it is too much by what this receiver holds now, which is dropped then."""
        self._set(receiver, receiver.unfinished_bytes)
        if self.total > self._bytes_max:
            receiver.forget_unfinished()
            self._set(receiver, 0)
            raise Overloaded(
                "too many large messages on their way at once", where=receiver.path, wanted=self._bytes_max
            )

    def forget(self, receiver: SessionReceiver) -> None:
        """It holds nothing any more."""
        self._set(receiver, 0)

    def _set(self, receiver: SessionReceiver, held: int) -> None:
        self.total += held - self._held.pop(receiver, 0)
        if held:
            self._held[receiver] = held


class SessionStore:
    """A session's receiver, shared by whatever feeds it: its publisher's stream, or a peer's copy.

    `on_marks` gets the marks that became durable, `on_failed` the failure of the disk, both in the loop.
    Stores that share `unfinished` share the memory that large messages may take.
    """

    def __init__(
        self,
        receiver: SessionReceiver,
        sync: GroupSync,
        pool: Executor,
        *,
        on_marks: Callable[[list[Marked]], None],
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
        self._progress = PushProgress(receiver.durable or NOWHERE, receiver.durable_end)
        self._changed = asyncio.Event()
        self._waking: asyncio.TimerHandle | None = None
        sync.add(receiver, self._synced, self._failed)

    @property
    def progress(self) -> PushProgress:
        """How far the session is safe now."""
        return self._progress

    async def next_progress(self, told: PushProgress | None) -> PushProgress:
        """The progress as soon as it is not `told`. Raises what the store refuses with, once it does."""
        while self._refusal is None and self._progress == told:
            await self._changed.wait()
        if self._refusal is not None:
            raise self._refusal
        return self._progress

    async def take(self, item: Chunk | Sealed) -> None:
        """Store it; the receiver's errors. What is durable of it is told later, by `next_progress`."""
        receiver = self.receiver
        async with self._alone:
            self._check()
            try:
                if isinstance(item, Sealed):
                    await run_to_end(self._pool, partial(receiver.seal, item))
                elif receiver.is_quick(item):
                    receiver.take(item)
                else:
                    await run_to_end(self._pool, partial(receiver.take, item))
                self._unfinished.note(receiver)
            except StorageFailed as error:
                self._failed(error)
                raise
            finally:
                self._sync.note(receiver)

    async def begin(self, life: Life) -> None:
        """A stream begins, or goes on, with the bytes of a life that is open."""
        async with self._alone:
            self._check()
            self.receiver.begin_life(life)

    async def restart(self) -> None:
        """A stream has ended, or another takes over: the next one sends from `receiver.place` on."""
        async with self._alone:
            self.receiver.forget_unfinished()
            self._unfinished.forget(self.receiver)
            self._check()

    async def run(
        self, act: Callable[_Arguments, _Result], *arguments: _Arguments.args, **options: _Arguments.kwargs
    ) -> _Result:
        """Do something to the receiver (trim it, skip forward) in a thread, with nothing else beside it."""
        async with self._alone:
            try:
                return await run_to_end(self._pool, lambda: act(*arguments, **options))
            finally:
                self._sync.note(self.receiver)

    def note_merged(self, place: Place, number: int) -> None:
        """The merge of everything before `place`, which is number `number`, is committed."""
        told = self._progress
        if place >= told.merged:
            self._progress = told._replace(merged=place, merged_x=place.x, merged_number=number)
            if self._waking is None and self._progress != told:
                loop = asyncio.get_running_loop()
                self._waking = loop.call_later(MERGED_SECONDS_MAX, self._wake)

    def refuse(self, error: RtError) -> None:
        """Take nothing from now on: `error` is what every stream is told. The first one stays."""
        if self._refusal is None:
            self._refusal = error
            self._wake()

    async def close(self) -> None:
        """Let what is under way end, then release the files. What is not synced is not promised."""
        self._sync.discard(self.receiver)
        async with self._alone:
            self._unfinished.forget(self.receiver)
            await run_to_end(self._pool, self.receiver.close)

    def _check(self) -> None:
        if self._refusal is not None:
            raise self._refusal

    def _synced(self, point: SyncPoint | None) -> None:
        marks = self.receiver.on_synced(point)
        durable, number = self.receiver.durable, self.receiver.durable_end
        if durable is not None:
            self._tell(self._progress._replace(durable=durable, durable_number=number))
        if marks:
            self._on_marks(marks)

    def _failed(self, error: RtError) -> None:
        self.refuse(error)
        self._on_failed(error)

    def _tell(self, progress: PushProgress) -> None:
        if progress != self._progress:
            self._progress = progress
            self._wake()

    def _wake(self) -> None:
        if self._waking is not None:
            self._waking.cancel()
            self._waking = None
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
