"""The objects of a space by id: creating, getting, deleting. What volatile and persisted spaces share.

Every kind has `create_…` (`ObjectExists` if the id is taken), `get_…` (`NoSuchObject`, `WrongKind`;
`WrongType` if the elements are stored as another type than `of`) and `get_or_create_…`. `get` always gives
the same object. Without `of`, elements are whatever JSON can give back as it was (see `serializers.ANY`), and
`get` takes the type that is stored.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

from rt.objects.dictionaries import PersistedDictionary, PersistedSortedDictionary
from rt.objects.errors import NoSuchObject, ObjectExists, WrongKind, WrongType
from rt.objects.linked_lists import PersistedLinkedList
from rt.objects.lists import PersistedArray, PersistedList
from rt.objects.persisted import Kind, Persisted
from rt.objects.queues import PersistedQueue, PersistedStack
from rt.objects.serializers import ANY, Of, Serializer, Serializers
from rt.objects.sets import PersistedSet
from rt.objects.sorted_sets import PersistedSortedSet
from rt.objects.values import PersistedValue

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")
P = TypeVar("P", bound=Persisted)

ID_BYTES_MAX: Final = 1024
"""UTF-8 bytes of an id; any characters."""

CLASSES: Final[dict[Kind, type[Persisted]]] = {
    each.KIND: each
    for each in (
        PersistedValue,
        PersistedArray,
        PersistedList,
        PersistedQueue,
        PersistedStack,
        PersistedLinkedList,
        PersistedSet,
        PersistedSortedSet,
        PersistedDictionary,
        PersistedSortedDictionary,
    )
}


class Registry(ABC):
    """Objects by id. Any thread may create, get and delete; the objects are not thread-safe."""

    def __init__(self, serializers: Serializers | None = None) -> None:
        self._serializers: Final = serializers or Serializers()
        self._objects: dict[str, Any] = {}
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._objects)

    def __contains__(self, object_id: object) -> bool:
        return object_id in self._objects

    def ids(self) -> list[str]:
        """The ids of all objects, as they are now."""
        with self._lock:
            return list(self._objects)

    def delete(self, object_id: str) -> None:
        """Take an object out of the space, whatever its kind; `NoSuchObject` if there is none."""
        with self._lock:
            if object_id not in self._objects:
                raise _missing(object_id)
            self._deleted(object_id, self._objects.pop(object_id))

    # Value

    def create_value(self, object_id: str, initial: T, *, of: Of[T] = ANY) -> PersistedValue[T]:
        """One value, `initial` at first."""
        return self._create(PersistedValue, object_id, of, begin=lambda made: setattr(made, "value", initial))

    def get_value(self, object_id: str, *, of: Of[T] = ANY) -> PersistedValue[T]:
        """The value of that id."""
        return self._get(PersistedValue, object_id, of)

    def get_or_create_value(self, object_id: str, initial: T, *, of: Of[T] = ANY) -> PersistedValue[T]:
        """The value of that id; a new one, `initial`, if there is none."""
        with self._lock:
            if object_id in self._objects:
                return self.get_value(object_id, of=of)
            return self.create_value(object_id, initial, of=of)

    # Array

    def create_array(self, object_id: str, length: int, fill: T, *, of: Of[T] = ANY) -> PersistedArray[T]:
        """`length` items, `fill` at first; `ValueError` for a negative length."""
        if length < 0:
            raise ValueError(f"an array of {length} items")
        return self._create(PersistedArray, object_id, of, begin=lambda made: made._fill(length, fill))

    def get_array(self, object_id: str, *, of: Of[T] = ANY) -> PersistedArray[T]:
        """The array of that id."""
        return self._get(PersistedArray, object_id, of)

    def get_or_create_array(
        self, object_id: str, length: int, fill: T, *, of: Of[T] = ANY
    ) -> PersistedArray[T]:
        """The array of that id, which must be of that length (`ValueError`); a new one if there is none."""
        with self._lock:
            if object_id not in self._objects:
                return self.create_array(object_id, length, fill, of=of)
            found = self.get_array(object_id, of=of)
            if len(found) != length:
                raise ValueError(f"the array {object_id!r} has {len(found)} items, not {length}")
            return found

    # List

    def create_list(self, object_id: str, *, of: Of[T] = ANY) -> PersistedList[T]:
        """An empty list."""
        return self._create(PersistedList, object_id, of)

    def get_list(self, object_id: str, *, of: Of[T] = ANY) -> PersistedList[T]:
        """The list of that id."""
        return self._get(PersistedList, object_id, of)

    def get_or_create_list(self, object_id: str, *, of: Of[T] = ANY) -> PersistedList[T]:
        """The list of that id; an empty one if there is none."""
        return self._get_or_create(PersistedList, object_id, of)

    # Queue

    def create_queue(self, object_id: str, *, of: Of[T] = ANY) -> PersistedQueue[T]:
        """An empty queue."""
        return self._create(PersistedQueue, object_id, of)

    def get_queue(self, object_id: str, *, of: Of[T] = ANY) -> PersistedQueue[T]:
        """The queue of that id."""
        return self._get(PersistedQueue, object_id, of)

    def get_or_create_queue(self, object_id: str, *, of: Of[T] = ANY) -> PersistedQueue[T]:
        """The queue of that id; an empty one if there is none."""
        return self._get_or_create(PersistedQueue, object_id, of)

    # Stack

    def create_stack(self, object_id: str, *, of: Of[T] = ANY) -> PersistedStack[T]:
        """An empty stack."""
        return self._create(PersistedStack, object_id, of)

    def get_stack(self, object_id: str, *, of: Of[T] = ANY) -> PersistedStack[T]:
        """The stack of that id."""
        return self._get(PersistedStack, object_id, of)

    def get_or_create_stack(self, object_id: str, *, of: Of[T] = ANY) -> PersistedStack[T]:
        """The stack of that id; an empty one if there is none."""
        return self._get_or_create(PersistedStack, object_id, of)

    # Linked list

    def create_linked_list(self, object_id: str, *, of: Of[T] = ANY) -> PersistedLinkedList[T]:
        """An empty linked list."""
        return self._create(PersistedLinkedList, object_id, of)

    def get_linked_list(self, object_id: str, *, of: Of[T] = ANY) -> PersistedLinkedList[T]:
        """The linked list of that id."""
        return self._get(PersistedLinkedList, object_id, of)

    def get_or_create_linked_list(self, object_id: str, *, of: Of[T] = ANY) -> PersistedLinkedList[T]:
        """The linked list of that id; an empty one if there is none."""
        return self._get_or_create(PersistedLinkedList, object_id, of)

    # Set

    def create_set(self, object_id: str, *, of: Of[T] = ANY) -> PersistedSet[T]:
        """An empty set."""
        return self._create(PersistedSet, object_id, of)

    def get_set(self, object_id: str, *, of: Of[T] = ANY) -> PersistedSet[T]:
        """The set of that id."""
        return self._get(PersistedSet, object_id, of)

    def get_or_create_set(self, object_id: str, *, of: Of[T] = ANY) -> PersistedSet[T]:
        """The set of that id; an empty one if there is none."""
        return self._get_or_create(PersistedSet, object_id, of)

    # Sorted set

    def create_sorted_set(self, object_id: str, *, of: Of[T] = ANY) -> PersistedSortedSet[T]:
        """An empty sorted set."""
        return self._create(PersistedSortedSet, object_id, of)

    def get_sorted_set(self, object_id: str, *, of: Of[T] = ANY) -> PersistedSortedSet[T]:
        """The sorted set of that id."""
        return self._get(PersistedSortedSet, object_id, of)

    def get_or_create_sorted_set(self, object_id: str, *, of: Of[T] = ANY) -> PersistedSortedSet[T]:
        """The sorted set of that id; an empty one if there is none."""
        return self._get_or_create(PersistedSortedSet, object_id, of)

    # Dictionary

    def create_dictionary(
        self, object_id: str, *, keys: Of[K] = ANY, values: Of[V] = ANY
    ) -> PersistedDictionary[K, V]:
        """An empty dictionary."""
        return self._create(PersistedDictionary, object_id, keys, values)

    def get_dictionary(
        self, object_id: str, *, keys: Of[K] = ANY, values: Of[V] = ANY
    ) -> PersistedDictionary[K, V]:
        """The dictionary of that id."""
        return self._get(PersistedDictionary, object_id, keys, values)

    def get_or_create_dictionary(
        self, object_id: str, *, keys: Of[K] = ANY, values: Of[V] = ANY
    ) -> PersistedDictionary[K, V]:
        """The dictionary of that id; an empty one if there is none."""
        return self._get_or_create(PersistedDictionary, object_id, keys, values)

    # Sorted dictionary

    def create_sorted_dictionary(
        self, object_id: str, *, keys: Of[K] = ANY, values: Of[V] = ANY
    ) -> PersistedSortedDictionary[K, V]:
        """An empty sorted dictionary."""
        return self._create(PersistedSortedDictionary, object_id, keys, values)

    def get_sorted_dictionary(
        self, object_id: str, *, keys: Of[K] = ANY, values: Of[V] = ANY
    ) -> PersistedSortedDictionary[K, V]:
        """The sorted dictionary of that id."""
        return self._get(PersistedSortedDictionary, object_id, keys, values)

    def get_or_create_sorted_dictionary(
        self, object_id: str, *, keys: Of[K] = ANY, values: Of[V] = ANY
    ) -> PersistedSortedDictionary[K, V]:
        """The sorted dictionary of that id; an empty one if there is none."""
        return self._get_or_create(PersistedSortedDictionary, object_id, keys, values)

    # What all of them are made of

    def _create(
        self, kind: type[P], object_id: str, *of: Of[Any], begin: Callable[[P], object] | None = None
    ) -> P:
        check_id(object_id)
        serializers = [self._serializers.of(each) for each in of]
        with self._lock:
            if object_id in self._objects:
                raise ObjectExists(
                    "that id is taken", got=repr(object_id), hint="Get it, or delete it first."
                )
            made = kind(self, object_id, *serializers)
            if begin is not None:
                begin(made)
            self._objects[object_id] = made
            self._created(made)
            return made

    def _get(self, kind: type[P], object_id: str, *of: Of[Any]) -> P:
        with self._lock:
            found = self._objects.get(object_id)
            if found is None:
                raise _missing(object_id)
            if not isinstance(found, Persisted):
                found = self._objects[object_id] = self._load(object_id, found, kind.KIND, of)
            require(object_id, kind.KIND, found.KIND.value)
            for each, name in zip(of, found.types, strict=True):
                self._require_type(object_id, each, name)
            return cast(P, found)

    def _get_or_create(self, kind: type[P], object_id: str, *of: Of[Any]) -> P:
        with self._lock:
            return (
                self._get(kind, object_id, *of)
                if object_id in self._objects
                else self._create(kind, object_id, *of)
            )

    def _require_type(self, object_id: str, of: Of[Any], stored: str) -> Serializer[Any] | None:
        """`WrongType` if another type than the stored one is asked for; None where none is (ANY)."""
        if of is ANY:
            return None
        serializer = self._serializers.of(of)
        if serializer.name != stored:
            what = "the object holds elements of another type"
            raise WrongType(what, where=object_id, got=serializer.name, wanted=stored)
        return serializer

    # What a space does

    @abstractmethod
    def mark(self, changed: Persisted) -> bool:
        """See `Owner`."""

    @abstractmethod
    def _created(self, made: Persisted) -> None:
        """An object was made."""

    @abstractmethod
    def _deleted(self, object_id: str, found: Any) -> None:
        """An object was taken out."""

    @abstractmethod
    def _load(self, object_id: str, stored: Any, kind: Kind, of: tuple[Of[Any], ...]) -> Persisted:
        """Make an object of what is stored of it."""


class VolatileObjectSpace(Registry):
    """The same objects, which are never saved: for operators outside of an engine, and for tests."""

    def mark(self, changed: Persisted) -> bool:
        """Nobody wants to know; it need not say so again."""
        del changed
        return True

    def _created(self, made: Persisted) -> None:
        pass

    def _deleted(self, object_id: str, found: Any) -> None:  # noqa: ARG002
        found.detach()

    def _load(self, *_: object) -> Persisted:
        raise AssertionError("nothing is stored")


def check_id(object_id: object) -> None:
    """`TypeError` unless it is text, `ValueError` unless it is text that can be an id."""
    if not isinstance(object_id, str):
        raise TypeError(f"an id is text, not {type(object_id).__name__}")
    try:
        size = len(object_id.encode())
    except UnicodeEncodeError:
        raise ValueError("an id that is no Unicode text") from None
    if not 0 < size <= ID_BYTES_MAX:
        raise ValueError(f"an id of {size} bytes: it has 1 to {ID_BYTES_MAX}")


def require(object_id: str, asked: Kind, kind: str) -> None:
    """`WrongKind` unless the two are the same."""
    if kind != asked.value:
        raise WrongKind("the object is of another kind", where=object_id, got=asked.value, wanted=kind)


def _missing(object_id: object) -> NoSuchObject:
    return NoSuchObject("no such object", got=repr(object_id)[:200], hint="Create it, or use get_or_create.")
