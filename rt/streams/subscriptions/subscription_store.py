"""The subscriptions of a queue and their positions, in an object space, so that the next owner can continue.

    fence           the last owner that wrote
    low             every subscription below has everything before it, unless `places` has an entry
    subscriptions   id -> [topic, consumer, pattern, fault, name, created]
    places          id -> [sequence number, event index]: the first token that it needs
    patterns        name of an implicit subscription -> the same, for its streams without a place;
                    [] if that is `low`
    paused          since when nothing is delivered, in seconds since 1970
    epoch           [number, id of the last forced reset] of the queue's log when these were right
    resets          [sequence number, reason] of forced resets from which subscriptions were moved back

Invariants:
- A subscription without a place has everything before `low`.
- Any other subscription (no observer attached, faulted, catching up, or moved back) has its own place, so
  that
  `low` does not move it. If it is implicit, it also has a record, so that the next owner serves it even
  without new events in its stream.
- When `commit` returns, the next owner finds the edits.
- An owner with a lower fence than an earlier one is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from hashlib import blake2b
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

from msgspec import Struct
from msgspec.structs import replace

from rt.errors import Fenced
from rt.objects import (
    CheckpointKind,
    CommitUnknown,
    MemoryStore,
    PersistedDictionary,
    PersistedObjectSpace,
    PersistedValue,
    Store,
)
from rt.streams.balancer.balancer import Fence
from rt.streams.core.stream_id import QueueId, SequenceToken, StreamId, stream_of
from rt.streams.queue.adapter import QueueGap
from rt.streams.queue.queue_epoch import StoredEpoch
from rt.streams.requests.request import PostedRequest, QueueAnswer, RequestedStore, RequestedWriter

Stores: TypeAlias = Callable[[QueueId, Fence], Store]
"""Opens the store of a queue for the owner with this fence, in a thread. One owner at a time."""

_ID_DIGITS: Final = 16
_RESETS_MAX: Final = 16
"""How many forced resets are kept."""


@runtime_checkable
class Interruptible(Protocol):
    """A store whose commits wait for other machines."""

    def interrupt(self) -> None:
        """End a commit under way, and each later one, with an error: `CommitUnknown` if it may have happened.

        Called in the event loop, while another thread commits. Must return at once.
        """


class SubscriptionRecord(Struct, frozen=True):
    """A subscription. `consumer` is the name of the factory of its observer. `pattern` is the name of the
    implicit subscription that it comes from. `fault` is the reason if it is faulted. `name` is the name of an
    explicit subscription, if it has one. `created_s`: when it was created, in seconds since 1970, if that is
    known.
    """

    id: str
    stream: StreamId
    consumer: str | None = None
    pattern: str | None = None
    fault: str | None = None
    name: str | None = None
    created_s: int | None = None

    @property
    def is_implicit(self) -> bool:
        return self.pattern is not None

    @property
    def label(self) -> str:
        """The label for people: the name of the subscription, of its pattern or of its consumer's factory, or
        its id.
        """
        return self.name or self.pattern or self.consumer or self.id


def implicit_id(pattern: str, stream: StreamId) -> str:
    """The id of an implicit subscription: the same on every host and at all times."""
    return blake2b(f"{pattern}\0{stream.topic}".encode(), digest_size=16).hexdigest()


def named_id(name: str, stream: StreamId) -> str:
    """The id of the stream's explicit subscription with this name."""
    return blake2b(f"\0{name}\0{stream.topic}".encode(), digest_size=16).hexdigest()


class SubscriptionStore:
    """The subscriptions of one queue, in `store`, which `close` closes. The constructor reads the disk.

    Commits run in `thread`, which `close` shuts down (default: a thread that all stores share). If the
    cluster of a store does not answer, the store may occupy the thread for a long time.
    """

    def __init__(self, store: Store, queue: QueueId, fence: Fence, thread: Executor | None = None) -> None:
        self._store = store
        self._thread = thread
        self._space = PersistedObjectSpace()
        self._space.load(store.reader())
        self.store_id: Final = (
            None if isinstance(store, MemoryStore) else store.reader().store_id[:_ID_DIGITS]
        )
        """The id under which the queue keeps the acknowledgements of these subscriptions. None: the process
        keeps them.
        """
        owner = self._space.get_or_create_value("fence", 0, of=int)
        if owner.value > fence:
            hint = "A balancer without leases cannot use the stores of one with leases: give it its own."
            raise Fenced(
                "another host has taken over the queue",
                where=queue,
                got=fence,
                expected=owner.value,
                hint=hint,
            )
        if owner.value != fence:
            owner.value = fence
        self._low: PersistedValue[Any] = self._space.get_or_create_value("low", None)
        self._subscriptions: PersistedDictionary[str, Any] = self._space.get_or_create_dictionary(
            "subscriptions", keys=str
        )
        self._places: PersistedDictionary[str, Any] = self._space.get_or_create_dictionary("places", keys=str)
        self._patterns: PersistedDictionary[str, Any] = self._space.get_or_create_dictionary(
            "patterns", keys=str
        )
        self._paused: PersistedValue[Any] = self._space.get_or_create_value("paused", None)
        self._answers: dict[bytes, tuple[int, bytes]] = {}
        """The answers for the next commit. By request: the time until which it was valid, and the answer."""
        self._epoch: PersistedValue[Any] = self._space.get_or_create_value("epoch", None)
        self._resets: PersistedValue[Any] = self._space.get_or_create_value("resets", None)
        self._edits = 1
        self._undos: list[Callable[[], None]] = []
        """The undo functions of callers with edits in the next commit."""
        self._committed = 0
        self._committing: asyncio.Task[None] | None = None
        self.prepared_s = 0.0
        """The number of seconds for which the last commit kept the event loop from other work."""

    @property
    def low(self) -> SequenceToken | None:
        """None before anything was read."""
        return None if self._low.value is None else SequenceToken(*self._low.value)

    def records(self) -> Iterator[SubscriptionRecord]:
        """All recorded subscriptions: every explicit one, and the implicit ones that need a record."""
        for subscription_id, (topic, *rest) in list(self._subscriptions.items()):
            yield SubscriptionRecord(subscription_id, stream_of(topic), *rest)

    def record(self, subscription_id: str) -> SubscriptionRecord | None:
        row = self._subscriptions.get(subscription_id)
        return None if row is None else SubscriptionRecord(subscription_id, stream_of(row[0]), *row[1:])

    def place(self, subscription_id: str) -> SequenceToken | None:
        """The first token that the subscription needs, if it differs from `low`."""
        row = self._places.get(subscription_id)
        return None if row is None else SequenceToken(*row)

    def knows_pattern(self, name: str) -> bool:
        """Whether this implicit subscription was served before."""
        return name in self._patterns

    def pattern_place(self, name: str) -> SequenceToken | None:
        """The first token that its streams need, if that differs from `low`."""
        row = self._patterns.get(name)
        return SequenceToken(*row) if row else None

    @property
    def paused_s(self) -> int | None:
        """Since when nothing is delivered, in seconds since 1970. None: it is not paused."""
        since: int | None = self._paused.value
        return since

    @property
    def requested(self) -> RequestedStore | None:
        """The store, if it has requests for its owner."""
        return self._store if isinstance(self._store, RequestedStore) else None

    @property
    def epoch(self) -> StoredEpoch | None:
        """The epoch of the queue's log in which the positions are right. None: not known."""
        return None if self._epoch.value is None else StoredEpoch(*self._epoch.value)

    @epoch.setter
    def epoch(self, epoch: StoredEpoch) -> None:
        if self.epoch != epoch:
            self._epoch.value = list(epoch)
            self._edits += 1

    @property
    def resets(self) -> list[QueueGap]:
        """The forced resets from which subscriptions were moved back, by position."""
        rows = [(SequenceToken(at), why) for at, why in self._resets.value or []]
        return [QueueGap(at, at, why, is_reset=True) for at, why in rows]

    def furthest(self) -> SequenceToken | None:
        """The greatest stored position."""
        places = [
            SequenceToken(*row) for rows in (self._places, self._patterns) for row in rows.values() if row
        ]
        return max([*places, *([self.low] if self.low is not None else [])], default=None)

    # Edits: durable with the next `commit`

    def pause(self, since_s: int | None) -> None:
        """Pause the queue, since `since_s`. None: end the pause."""
        if since_s != self._paused.value:
            self._paused.value = since_s
            self._edits += 1

    def answer(self, posted: PostedRequest, answer: QueueAnswer) -> None:
        """Answer a request to the owner."""
        self._answers[posted.id] = posted.until_ns, answer.encode()
        self._edits += 1

    def take_back(self, posted: PostedRequest) -> None:
        """Withdraw the answer to a request."""
        self._answers.pop(posted.id, None)

    def go_back(self, reset: QueueGap) -> None:
        """Move all positions after a forced reset back to the position of the reset."""
        at = reset.resumed
        row = [at.sequence_number, at.event_index]
        if self.low is not None and self.low > at:
            self._low.value = row
        for rows in (self._places, self._patterns):
            for key, place in list(rows.items()):
                if place and SequenceToken(*place) > at:
                    rows[key] = row
        known = [[gap.resumed.sequence_number, gap.reason] for gap in self.resets if gap.resumed < at]
        self._resets.value = [*known, [at.sequence_number, reset.reason]][-_RESETS_MAX:]
        self._edits += 1

    def put(self, record: SubscriptionRecord, place: SequenceToken) -> None:
        """Record a subscription, with its own place."""
        self._set(
            self._subscriptions,
            record.id,
            [
                record.stream.topic,
                record.consumer,
                record.pattern,
                record.fault,
                record.name,
                record.created_s,
            ],
        )
        self._set(self._places, record.id, [place.sequence_number, place.event_index])

    def fault(self, record: SubscriptionRecord, why: str, place: SequenceToken) -> None:
        """Record a fault: the subscription gets nothing from `place` on until it is resumed."""
        self.put(replace(record, fault=why), place)

    def remove(self, subscription_id: str) -> None:
        for rows in (self._subscriptions, self._places):
            if rows.pop(subscription_id, None) is not None:
                self._edits += 1

    def put_pattern(self, name: str, place: SequenceToken | None) -> None:
        """Record that the streams of an implicit subscription start at `place`. None: at `low`, as all
        others.
        """
        self._set(self._patterns, name, [] if place is None else [place.sequence_number, place.event_index])

    def unrecord(self, subscription_id: str) -> None:
        """Remove the record of an implicit subscription that no longer needs one; its place stays."""
        if subscription_id in self._subscriptions:
            del self._subscriptions[subscription_id]
            self._edits += 1

    def record_positions(
        self, low: SequenceToken, places: Mapping[str, SequenceToken], served: Callable[[str], bool]
    ) -> None:
        """Record that consumers have everything before `low`, and that the subscriptions in `places` have
        everything before their own place.

        `served` returns whether a subscription has everything before `low`; then its place is removed.
        """
        stored = self.low
        if stored is None or low > stored:
            self._low.value = [low.sequence_number, low.event_index]
            self._edits += 1
        for subscription_id, place in places.items():
            self._set(self._places, subscription_id, [place.sequence_number, place.event_index])
        for subscription_id, row in list(self._places.items()):
            if SequenceToken(*row) <= low and served(subscription_id):
                del self._places[subscription_id]
                self._edits += 1

    def _set(self, rows: Any, key: str, row: list[Any]) -> None:
        if rows.get(key) != row:
            rows[key] = row
            self._edits += 1

    # Commits

    @property
    def is_dirty(self) -> bool:
        return self._committed < self._edits

    async def commit(self, undo: Callable[[], None] | None = None) -> None:
        """Make all edits so far durable. Concurrent calls share a commit.

        Raises the store's error. Then the edits are part of the next commit, unless the store has failed
        permanently. `undo` undoes the caller's edits. It is called, before another commit starts, if the
        edits were certainly not committed. Then callers without `undo` commit again, because the edits of the
        other callers may have caused the failure.
        """
        if undo is not None:
            self._undos.append(undo)
        wanted = self._edits
        while self._committed < wanted:
            if self._committing is None:
                self._committing = asyncio.create_task(self._commit())
                self._committing.add_done_callback(_consume_error)
            try:
                await asyncio.shield(self._committing)
            except _EditsUndone as error:
                if undo in error.undos:
                    raise error.failure from None

    def interrupt(self) -> None:
        """The lease is lost: end a commit under way, if the store can, instead of waiting for it."""
        if isinstance(self._store, Interruptible):
            self._store.interrupt()

    async def close(self) -> None:
        """Wait for a commit under way, and close the store. Uncommitted edits are lost."""
        if self._committing is not None:
            await asyncio.wait([self._committing])
        try:
            await self._in_thread(self._store.close)
        finally:
            if self._thread is not None:
                self._thread.shutdown(wait=False)

    async def _in_thread(self, work: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _commit(self) -> None:
        edits, now = self._edits, asyncio.get_running_loop().time
        begun, answers = now(), dict(self._answers)
        undos, self._undos = self._undos, []
        try:
            writer = self._store.begin(CheckpointKind.DIFFERENTIAL)
            self._space.save(writer)
            if answers and isinstance(writer, RequestedWriter):
                for request, (until_ns, content) in answers.items():
                    writer.answer(request, until_ns, content)
            self.prepared_s = now() - begun
            try:
                await self._in_thread(writer.commit)
            except BaseException as error:
                is_known = isinstance(error, Exception) and not isinstance(error, CommitUnknown)
                self._space.on_save_failed(unknown_outcome=not is_known)
                if not is_known or not undos:
                    raise
                for undo in undos:
                    undo()
                raise _EditsUndone(error, undos) from error
            self._space.on_saved()
            self._committed = edits
            for request in answers:
                self._answers.pop(request, None)
        finally:
            self._committing = None


class _EditsUndone(Exception):
    """A commit failed, and `undos` were called. Does not leave this module."""

    def __init__(self, failure: BaseException, undos: Sequence[Callable[[], None]]) -> None:
        super().__init__(str(failure))
        self.failure, self.undos = failure, undos


def _consume_error(commit: asyncio.Task[None]) -> None:
    """Read the error of a commit, because its waiters may be cancelled. After an error the edits are part of
    the next commit, or the store has failed.
    """
    if not commit.cancelled():
        commit.exception()
