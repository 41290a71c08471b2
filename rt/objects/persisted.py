"""What all objects of a space have in common: identity, and which part of them the store may not have.

An object is either *whole*, when nothing of it counts as stored, or it knows which rows may differ from the
store: those are written again by the next differential save, as they are then, present or absent. What a save
took stays in the object's *flight* until its outcome is known; if that is bad or unknown, the two are joined.
So a row that an unconfirmed save touched is always written again, and it does not matter whether that save
reached the store.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, TypeVar

from rt.objects.errors import NoSuchObject, ObjectError, StateDamaged
from rt.objects.slot_keys import decode
from rt.objects.storing import Rows, StateReader

if TYPE_CHECKING:
    from rt.objects.serializers import Serializer

T = TypeVar("T")


class Kind(enum.Enum):
    """The ten kinds of objects, by the names that are stored."""

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


class Owner(Protocol):
    """The space, as its objects see it."""

    def mark(self, changed: Persisted) -> bool:
        """Note that an object is about to change; whether it need not say so again before the next save."""


class Persisted:
    """An object of a space. Not thread-safe: edits and saves of a space must not run at once.

    After its space deleted it, edits raise `NoSuchObject`; what it held can still be read.
    """

    __slots__ = ("_flight_was_stored", "_id", "_is_marked", "_may_be_stored", "_owner", "_serializers")

    KIND: ClassVar[Kind]
    PARTS: ClassVar[tuple[str, ...]]
    """The categories that hold its rows."""

    def __init__(self, owner: Owner, object_id: str, *serializers: Serializer[Any]) -> None:
        self._owner: Owner | None = owner
        self._id: Final = object_id
        self._serializers: Final = serializers
        self._is_marked = False
        self._may_be_stored = False
        self._flight_was_stored = False

    @property
    def id(self) -> str:
        """Its id in the space."""
        return self._id

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._id!r}>"

    # What edits do before they change anything

    def _mark(self) -> None:
        if self._owner is None:
            raise NoSuchObject("the object was deleted from its space", where=self._id)
        self._is_marked = self._owner.mark(self)

    # What the space does

    def detach(self) -> None:
        """The space deleted it."""
        self._owner = None
        self._is_marked = False

    @property
    def is_deleted(self) -> bool:
        """Whether the space deleted it."""
        return self._owner is None

    @property
    def may_be_stored(self) -> bool:
        """Whether some save wrote rows of it that may be in the store."""
        return self._may_be_stored

    @property
    def types(self) -> tuple[str, ...]:
        """The stored names of its elements' serializers."""
        return tuple(serializer.name for serializer in self._serializers)

    def save(self, rows: Rows, *, is_full: bool) -> None:
        """Write what the store may not have, or all of it into a store that is empty (`is_full`).

        One of `saved` and `save_failed` must follow; the latter where this raises, too, at whatever point.
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
        self._take_off()
        self._is_marked = False

    def saved(self) -> None:
        """The save was committed."""
        self._land()

    def save_failed(self, *, unknown_outcome: bool) -> None:
        """It was not, or may not have been."""
        if not unknown_outcome:
            self._may_be_stored = self._flight_was_stored
        self._turn_back(unknown_outcome=unknown_outcome)

    def mark_again(self) -> None:
        """Count as changed, after a save that failed."""
        self._mark()

    def load(self, rows: StoredRows) -> None:
        """Become what is stored. Called once, on an object that was just made."""
        self._load(rows)
        self._may_be_stored = True

    # What each kind does

    def _is_whole(self) -> bool:
        """Whether nothing of it counts as stored."""
        raise NotImplementedError

    def _write_whole(self, rows: Rows) -> None:
        """Write every row, where none is."""
        raise NotImplementedError

    def _write_changes(self, rows: Rows) -> None:
        """Write and delete the rows that may differ."""
        raise NotImplementedError

    def _take_off(self) -> None:
        """Put what may differ aside, and count as stored what was just written.

        The flight is noted first, so that `_turn_back` undoes what an interrupt left half done.
        """
        raise NotImplementedError

    def _land(self) -> None:
        """What was put aside is stored. Twice is as once."""
        raise NotImplementedError

    def _turn_back(self, *, unknown_outcome: bool) -> None:
        """Join what was put aside, if anything was, with what was edited since. Twice is as once."""
        raise NotImplementedError

    def _load(self, rows: StoredRows) -> None:
        raise NotImplementedError


class StoredRows:
    """One object's rows in a store. What is missing, or is not what it must be, raises `StateDamaged`."""

    __slots__ = ("_base", "_reader")

    def __init__(self, reader: StateReader, base: str) -> None:
        self._reader = reader
        self._base = base

    def get(self, part: str, key: str) -> bytes:
        """The row."""
        data = self._reader.get(self._base + part, key)
        if data is None:
            raise self.damaged(part, f"row {key!r} is missing")
        return data

    def number(self, part: str, key: str) -> int:
        """A row that holds a whole number, not negative."""
        data = self.get(part, key)
        if not data.isdigit() or len(data) > 19:
            raise self.damaged(part, f"row {key!r} is no number: {data[:40]!r}")
        return int(data)

    def slots(self, part: str, load: Callable[[bytes], T]) -> Iterator[tuple[int, T]]:
        """Slots and what they hold, in any order."""
        for key, data in self._reader.rows(self._base + part):
            try:
                slot = decode(key)
                if slot < 0:
                    raise ValueError(f"a negative slot, {slot}")
                value = load(data)
            except (ObjectError, ValueError) as error:
                raise self.damaged(part, f"row {key!r}: {error}") from error
            yield slot, value

    def run(self, part: str, first: int, end: int, load: Callable[[bytes], T]) -> list[T]:
        """What slots `first` to `end` hold, when there are these and no others."""
        missing: Any = _MISSING
        try:
            found: list[T] = [missing] * (end - first)
        except (MemoryError, OverflowError):
            raise self.damaged(part, f"{end - first} items cannot be") from None
        count = 0
        for slot, value in self.slots(part, load):
            if not first <= slot < end:
                raise self.damaged(part, f"item {slot} is outside [{first}, {end})")
            found[slot - first] = value
            count += 1
        if count != end - first:
            raise self.damaged(part, f"{count} items where {end - first} must be")
        return found

    def damaged(self, part: str, what: str) -> StateDamaged:
        """The error to raise."""
        hint = "Restore the store from a copy, or delete the object."
        return StateDamaged(f"a stored object is damaged: {what}", where=self._base + part, hint=hint)


_MISSING: Final = object()


def digits(number: int) -> bytes:
    """The row of a whole number."""
    return b"%d" % number
