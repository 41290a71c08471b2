"""Base of all objects of a space: identity, and which rows may differ from the store.

An object is either *whole*, if none of its rows counts as stored, or it knows which rows may differ. The next
differential save writes those rows again, as they are then: present or deleted. The rows of a save in flight
are kept until its outcome is known. If the save failed or its outcome is unknown, they are joined with the
rows edited since. So every row of an unconfirmed save is written again, whether or not it reached the store.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, TypeVar

from rt.objects.core.errors import NoSuchObject, ObjectError, StateDamaged
from rt.objects.core.slot_keys import decode
from rt.objects.core.store import ObjectRows, StateReader

if TYPE_CHECKING:
    from rt.objects.core.serializers import ValueSerializer

T = TypeVar("T")


class Kind(enum.Enum):
    """The ten kinds of objects. The values are stored."""

    VALUE = "Value"
    ARRAY = "Array"
    LIST = "List"
    QUEUE = "Queue"
    STACK = "Stack"
    LINKED_LIST = "LinkedList"
    SET = "Set"
    SORTED_SET = "SortedSet"
    DICTIONARY = "Dictionary"
    SORTED_DICTIONARY = "SortedDictionary"


class ObjectOwner(Protocol):
    """The space, as its objects see it."""

    def mark(self, changed: Persisted) -> bool:
        """Called before an object changes.

        Returns whether further calls can be left out until the next save.
        """


class Persisted:
    """An object of a space. Not thread-safe: edits and saves of a space must not run at the same time.

    After the space deleted the object, edits raise `NoSuchObject`; reads still work.
    """

    __slots__ = ("_flight_was_stored", "_id", "_is_marked", "_may_be_stored", "_owner", "_serializers")

    KIND: ClassVar[Kind]
    PARTS: ClassVar[tuple[str, ...]]
    """The categories that hold its rows."""

    def __init__(self, owner: ObjectOwner, object_id: str, *serializers: ValueSerializer[Any]) -> None:
        self._owner: ObjectOwner | None = owner
        self._id: Final = object_id
        self._serializers: Final = serializers
        self._is_marked = False
        self._may_be_stored = False
        self._flight_was_stored = False

    @property
    def id(self) -> str:
        return self._id

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._id!r}>"

    def mark(self) -> None:
        """Called by edits before they change anything, and by the space after a failed save."""
        if self._owner is None:
            raise NoSuchObject("the object was deleted from its space", where=self._id)
        self._is_marked = self._owner.mark(self)

    def _checked(self, values: Iterable[T]) -> list[T]:
        """The values as a list, after a check that each can be stored."""
        found = list(values)
        for value in found:
            self._serializers[0].check(value)
        return found

    # Called by the space

    def detach(self) -> None:
        self._owner = None
        self._is_marked = False

    @property
    def is_deleted(self) -> bool:
        return self._owner is None

    @property
    def may_be_stored(self) -> bool:
        """Whether a save may have written rows of it to the store."""
        return self._may_be_stored

    @property
    def types(self) -> tuple[str, ...]:
        return tuple(serializer.name for serializer in self._serializers)

    def save(self, rows: ObjectRows, *, is_full: bool) -> None:
        """Write the rows that may differ, or all rows into an empty store (`is_full`).

        `saved` or `save_failed` must follow; `save_failed` also if this raised.
        """
        self._flight_was_stored = self._may_be_stored
        if is_full:
            self._write_whole(rows)
        elif self._is_whole():
            if self._may_be_stored:
                for part in self.PARTS:
                    rows.clear(part)
            self._write_whole(rows)
        else:
            self._write_changes(rows)
        self._may_be_stored = True
        self._start_save()
        self._is_marked = False

    def save_failed(self, *, unknown_outcome: bool) -> None:
        """The save was not committed, or its outcome is unknown."""
        if not unknown_outcome:
            self._may_be_stored = self._flight_was_stored
        self._abort_save(unknown_outcome=unknown_outcome)

    def load(self, rows: StoredRows) -> None:
        """Load the stored state. Called once, on a new object."""
        self._load(rows)
        self._may_be_stored = True

    # Implemented by each kind

    def _is_whole(self) -> bool:
        """Return whether none of its rows counts as stored."""
        raise NotImplementedError

    def _write_whole(self, rows: ObjectRows) -> None:
        """Write every row. This method may assume that no row is stored."""
        raise NotImplementedError

    def _write_changes(self, rows: ObjectRows) -> None:
        """Write and delete the rows that may differ."""
        raise NotImplementedError

    def _start_save(self) -> None:
        """Move the rows that may differ into the flight, and count them as stored.

        Must set the flight first, so that `_abort_save` can undo an interrupted call.
        """
        raise NotImplementedError

    def saved(self) -> None:
        """The save was committed: the rows of the flight are stored. Idempotent."""
        raise NotImplementedError

    def _abort_save(self, *, unknown_outcome: bool) -> None:
        """Join the rows of the flight with the rows edited since. Idempotent; the flight may be empty."""
        raise NotImplementedError

    def _load(self, rows: StoredRows) -> None:
        raise NotImplementedError


class StoredRows:
    """One object's rows in a store. A missing or wrong row raises `StateDamaged`."""

    __slots__ = ("_base", "_reader")

    def __init__(self, reader: StateReader, base: str) -> None:
        self._reader = reader
        self._base = base

    def get(self, part: str, key: str) -> bytes:
        data = self._reader.get(self._base + part, key)
        if data is None:
            raise self.damaged(part, f"row {key!r} is missing")
        return data

    def number(self, part: str, key: str) -> int:
        """A row that holds a number of 0 or more."""
        data = self.get(part, key)
        if not data.isdigit() or len(data) > 19:
            raise self.damaged(part, f"row {key!r} is not a number: {data[:40]!r}")
        return int(data)

    def slots(self, part: str, load: Callable[[bytes], T]) -> Iterator[tuple[int, T]]:
        """Slots and their values, in any order."""
        for key, data in self._reader.rows(self._base + part):
            try:
                slot = decode(key)
                if slot < 0:
                    raise ValueError(f"the slot {slot} is negative")
                value = load(data)
            except (ObjectError, ValueError) as error:
                raise self.damaged(part, f"row {key!r}: {error}") from error
            yield slot, value

    def run(self, part: str, first: int, end: int, load: Callable[[bytes], T]) -> list[T]:
        """The values of slots `first` to `end`. No other slots may be stored."""
        missing: Any = _MISSING
        try:
            found: list[T] = [missing] * (end - first)
        except (MemoryError, OverflowError):
            raise self.damaged(part, f"{end - first} items do not fit into memory") from None
        count = 0
        for slot, value in self.slots(part, load):
            if not first <= slot < end:
                raise self.damaged(part, f"item {slot} is outside [{first}, {end})")
            found[slot - first] = value
            count += 1
        if count != end - first:
            raise self.damaged(part, f"{count} items, expected {end - first}")
        return found

    def damaged(self, part: str, what: str) -> StateDamaged:
        hint = "Restore the store from a backup, or delete the object."
        return StateDamaged(f"damaged object: {what}", where=self._base + part, hint=hint)


_MISSING: Final = object()


def digits(number: int) -> bytes:
    return b"%d" % number
