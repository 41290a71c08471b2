"""The subscriptions of a queue and their positions, in an object space, so that the next owner continues.

    fence           the last owner that wrote
    low             every subscription below has everything before it, unless `places` has an entry
    subscriptions   id -> [topic, consumer, pattern, fault]
    places          id -> [sequence number, event index]: the first token that it needs

Invariants:
- A subscription without a place has everything before `low`.
- Any other (no observer attached, faulted, catching up, or moved back) has its own place, so that `low` does
  not move it. If it is implicit it also has a record, so that the next owner serves it even without new
  events in its stream.
- When `commit` returns, the next owner finds the edits.
- An owner with a lower fence than an earlier one is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, TypeAlias

from rt.errors import Fenced
from rt.objects import (
    CheckpointKind,
    CommitUnknown,
    PersistedDictionary,
    PersistedObjectSpace,
    PersistedValue,
    Store,
)
from rt.streams.balancer.balancer import Fence
from rt.streams.core.stream_id import QueueId, SequenceToken, StreamId, stream_of

Stores: TypeAlias = Callable[[QueueId], Store]
"""Opens the store of a queue, in a thread. One owner at a time: `rt.DirectoryLocked`."""


@dataclass(frozen=True, slots=True)
class SubscriptionRecord:
    """A subscription. `consumer` is the name of the factory of its observer. `pattern` is the name of the
    implicit subscription that it comes from. `fault` is the reason if it is faulted.
    """

    id: str
    stream: StreamId
    consumer: str | None = None
    pattern: str | None = None
    fault: str | None = None

    @property
    def is_implicit(self) -> bool:
        return self.pattern is not None


def implicit_id(pattern: str, stream: StreamId) -> str:
    """The same on every host and at all times."""
    return blake2b(f"{pattern}\0{stream.topic}".encode(), digest_size=16).hexdigest()


class SubscriptionStore:
    """The subscriptions of one queue, in `store`, which `close` closes. The constructor reads the disk."""

    def __init__(self, store: Store, queue: QueueId, fence: Fence) -> None:
        self._store = store
        self._space = PersistedObjectSpace()
        self._space.load(store.reader())
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
        self._edits = 1
        self._committed = 0
        self._committing: asyncio.Task[None] | None = None
        self.prepared_s = 0.0
        """For how many seconds the last commit kept the event loop from other work."""

    @property
    def low(self) -> SequenceToken | None:
        """None before anything was read."""
        return None if self._low.value is None else SequenceToken(*self._low.value)

    def records(self) -> Iterator[SubscriptionRecord]:
        """All recorded subscriptions: every explicit one, and the implicit ones that need a record."""
        for subscription_id, (topic, consumer, pattern, fault) in list(self._subscriptions.items()):
            yield SubscriptionRecord(subscription_id, stream_of(topic), consumer, pattern, fault)

    def record(self, subscription_id: str) -> SubscriptionRecord | None:
        row = self._subscriptions.get(subscription_id)
        return None if row is None else SubscriptionRecord(subscription_id, stream_of(row[0]), *row[1:])

    def place(self, subscription_id: str) -> SequenceToken | None:
        """Its next token, if that differs from `low`."""
        row = self._places.get(subscription_id)
        return None if row is None else SequenceToken(*row)

    # Edits: durable with the next `commit`

    def put(self, record: SubscriptionRecord, place: SequenceToken) -> None:
        """Record it, with its own place."""
        self._set(
            self._subscriptions,
            record.id,
            [record.stream.topic, record.consumer, record.pattern, record.fault],
        )
        self._set(self._places, record.id, [place.sequence_number, place.event_index])

    def fault(self, record: SubscriptionRecord, why: str, place: SequenceToken) -> None:
        """It gets nothing from `place` on until it is resumed."""
        self.put(replace(record, fault=why), place)

    def remove(self, subscription_id: str) -> None:
        for rows in (self._subscriptions, self._places):
            if rows.pop(subscription_id, None) is not None:
                self._edits += 1

    def unrecord(self, subscription_id: str) -> None:
        """Remove the record of an implicit subscription that no longer needs one; its place stays."""
        if subscription_id in self._subscriptions:
            del self._subscriptions[subscription_id]
            self._edits += 1

    def note(
        self, low: SequenceToken, places: Mapping[str, SequenceToken], served: Callable[[str], bool]
    ) -> None:
        """Record that consumers have everything before `low`, and those in `places` everything before theirs.

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

    async def commit(self) -> None:
        """Make all edits so far durable. Concurrent calls share a commit.

        Raises the store's error. Then the edits are part of the next commit, unless the store has failed
        permanently.
        """
        wanted = self._edits
        while self._committed < wanted:
            if self._committing is None:
                self._committing = asyncio.create_task(self._commit())
                self._committing.add_done_callback(_consume_error)
            await asyncio.shield(self._committing)

    async def close(self) -> None:
        """Wait for a commit under way, and close the store. Uncommitted edits are lost."""
        if self._committing is not None:
            await asyncio.wait([self._committing])
        await asyncio.to_thread(self._store.close)

    async def _commit(self) -> None:
        edits, now = self._edits, asyncio.get_running_loop().time
        begun = now()
        try:
            writer = self._store.begin(CheckpointKind.DIFFERENTIAL)
            self._space.save(writer)
            self.prepared_s = now() - begun
            try:
                await asyncio.to_thread(writer.commit)
            except BaseException as error:
                is_known = isinstance(error, Exception) and not isinstance(error, CommitUnknown)
                self._space.on_save_failed(unknown_outcome=not is_known)
                raise
            self._space.on_saved()
            self._committed = edits
        finally:
            self._committing = None


def _consume_error(commit: asyncio.Task[None]) -> None:
    """The waiters may be cancelled. After an error the edits are part of the next commit, or the store has
    failed.
    """
    if not commit.cancelled():
        commit.exception()
