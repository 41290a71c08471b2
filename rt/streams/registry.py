"""Who consumes what of a queue, and how far: kept in an object space, so that the next owner goes on.

    fence           the owner that wrote last
    low             every subscription below has everything before it, unless `places` says otherwise
    subscriptions   id -> [topic, consumer, pattern, fault]
    places          id -> [sequence number, event index]: the first token that it has not got

Laws. A subscription without a place has everything before `low`. One that does not (nobody is attached, it is
faulted, it reads for itself, it went back) has a place of its own, so that `low` does not carry it along; if
it is implicit, also a record, so that the next owner serves it though nothing new comes of its stream.
What `commit` returned for is what the next owner finds. An owner with a lower fence than one before it is
refused.
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
from rt.streams.balancing import Fence
from rt.streams.ids import QueueId, SequenceToken, StreamId, stream_of

Stores: TypeAlias = Callable[[QueueId], Store]
"""Opens what a queue's registry is kept in, in a thread: for one owner at a time (`rt.DirectoryLocked`)."""


@dataclass(frozen=True, slots=True)
class SubscriptionRecord:
    """A subscription. `consumer` is the name by which its observer is made again, `pattern` the name of the
    implicit subscription that it comes from; `fault` says why it was given up.
    """

    id: str
    stream: StreamId
    consumer: str | None = None
    pattern: str | None = None
    fault: str | None = None

    @property
    def is_implicit(self) -> bool:
        """Whether it is there for every stream of a pattern, without being asked for."""
        return self.pattern is not None


def implicit_id(pattern: str, stream: StreamId) -> str:
    """The same on every host and at all times."""
    return blake2b(f"{pattern}\0{stream.topic}".encode(), digest_size=16).hexdigest()


class QueueRegistry:
    """Of one queue, in `store`, which `close` closes. Reads the disk when it is made."""

    def __init__(self, store: Store, queue: QueueId, fence: Fence) -> None:
        self._store = store
        self._space = PersistedObjectSpace()
        self._space.load(store.reader())
        owner = self._space.get_or_create_value("fence", 0, of=int)
        if owner.value > fence:
            hint = "A balancer without leases cannot go on with the books of one with leases: give it others."
            raise Fenced(
                "another host took the queue over", where=queue, got=fence, wanted=owner.value, hint=hint
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

    @property
    def low(self) -> SequenceToken | None:
        """None before anything was read."""
        return None if self._low.value is None else SequenceToken(*self._low.value)

    def records(self) -> Iterator[SubscriptionRecord]:
        """Every subscription that is recorded: all explicit ones, and the implicit ones that need it."""
        for subscription_id, (topic, consumer, pattern, fault) in list(self._subscriptions.items()):
            yield SubscriptionRecord(subscription_id, stream_of(topic), consumer, pattern, fault)

    def record(self, subscription_id: str) -> SubscriptionRecord | None:
        """One of them."""
        row = self._subscriptions.get(subscription_id)
        return None if row is None else SubscriptionRecord(subscription_id, stream_of(row[0]), *row[1:])

    def place(self, subscription_id: str) -> SequenceToken | None:
        """What it wants next, where that is not `low`."""
        row = self._places.get(subscription_id)
        return None if row is None else SequenceToken(*row)

    # Edits: durable with the next `commit`

    def put(self, record: SubscriptionRecord, place: SequenceToken) -> None:
        """Record it, with a place of its own."""
        self._set(
            self._subscriptions,
            record.id,
            [record.stream.topic, record.consumer, record.pattern, record.fault],
        )
        self._set(self._places, record.id, [place.sequence_number, place.event_index])

    def fault(self, record: SubscriptionRecord, why: str, place: SequenceToken) -> None:
        """It gets nothing from `place` on before it is resumed."""
        self.put(replace(record, fault=why), place)

    def remove(self, subscription_id: str) -> None:
        """Forget it."""
        for rows in (self._subscriptions, self._places):
            if rows.pop(subscription_id, None) is not None:
                self._edits += 1

    def unrecord(self, subscription_id: str) -> None:
        """An implicit one needs no record any more; its place stays."""
        if self._subscriptions.pop(subscription_id, None) is not None:
            self._edits += 1

    def note(
        self, low: SequenceToken, places: Mapping[str, SequenceToken], served: Callable[[str], bool]
    ) -> None:
        """What consumers have got by now: everything before `low`, and those of `places` before theirs.

        `served` says whether a subscription has everything before `low`: then a place says no more.
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
        """Whether there are edits that no commit has."""
        return self._committed < self._edits

    async def commit(self) -> None:
        """Make all edits so far durable; those who ask at once share a commit.

        Raises what the store raises: then the edits are part of the next commit, unless the store is dead.
        """
        wanted = self._edits
        while self._committed < wanted:
            if self._committing is None:
                self._committing = asyncio.create_task(self._commit())
                self._committing.add_done_callback(_looked_at)
            await asyncio.shield(self._committing)

    async def close(self) -> None:
        """Wait for a commit under way, and close the store. Edits that were not committed are lost."""
        if self._committing is not None:
            await asyncio.wait([self._committing])
        await asyncio.to_thread(self._store.close)

    async def _commit(self) -> None:
        edits = self._edits
        try:
            writer = self._store.begin(CheckpointKind.DIFFERENTIAL)
            self._space.save(writer)
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


def _looked_at(commit: asyncio.Task[None]) -> None:
    """Whoever waited for it may be gone: the edits are part of the next one, or the store is dead."""
    if not commit.cancelled():
        commit.exception()
