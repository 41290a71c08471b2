"""The objects of a space by id: create, get, delete. Base of the volatile and the persisted space.

Every kind has three methods:

- `create_…`: `ObjectExists` if the id is in use.
- `get_…`: `NoSuchObject`, `WrongKind`, or `WrongType` if the stored element type is not `of`. Always returns
  the same object.
- `get_or_create_…`: errors as for `get_…`.

Without `of`, elements are any values that JSON restores unchanged (see `serializers.ANY`), and `get` accepts
every stored type.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

from rt.errors import InvalidOption
from rt.objects.collections.dictionary import PersistedDictionary, PersistedSortedDictionary
from rt.objects.collections.linked_list import PersistedLinkedList
from rt.objects.collections.list import PersistedArray, PersistedList
from rt.objects.collections.queue import PersistedQueue, PersistedStack
from rt.objects.collections.set import PersistedSet
from rt.objects.collections.sorted_set import PersistedSortedSet
from rt.objects.collections.value import PersistedValue
from rt.objects.core.errors import NoSuchObject, ObjectExists, WrongKind, WrongType
from rt.objects.core.persisted import Kind, Persisted
from rt.objects.core.serializers import ANY, Of, Serializers, ValueSerializer

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")
P = TypeVar("P", bound=Persisted)

ID_BYTES_MAX: Final = 1024
"""Maximum length of an id in UTF-8 bytes. All characters are allowed."""

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
    """Objects by id. Any thread may create, get and delete; the objects themselves are not thread-safe."""

    def __init__(self, serializers: Serializers | None = None) -> None:
        self._serializers: Final = serializers or Serializers()
        self._objects: dict[str, Any] = {}
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._objects)

    def __contains__(self, object_id: object) -> bool:
        return object_id in self._objects

    def ids(self) -> list[str]:
        with self._lock:
            return list(self._objects)

    def delete(self, object_id: str) -> None:
        """Delete an object of any kind; `NoSuchObject` if there is none."""
        with self._lock:
            if object_id not in self._objects:
                raise _missing(object_id)
            self._deleted(object_id, self._objects.pop(object_id))

    # Each kind

    def create_value(self, object_id: str, initial: T, *, of: Of[T] = ANY) -> PersistedValue[T]:
        return self._create(
            PersistedValue, object_id, of, initialize=lambda made: setattr(made, "value", initial)
        )

    def get_value(self, object_id: str, *, of: Of[T] = ANY) -> PersistedValue[T]:
        return self._get(PersistedValue, object_id, of)

    def get_or_create_value(self, object_id: str, initial: T, *, of: Of[T] = ANY) -> PersistedValue[T]:
        with self._lock:
            if object_id in self._objects:
                return self.get_value(object_id, of=of)
            return self.create_value(object_id, initial, of=of)

    def create_array(self, object_id: str, length: int, fill: T, *, of: Of[T] = ANY) -> PersistedArray[T]:
        """Create an array of `length` items, each `fill`. `ValueError` for a negative length."""
        if length < 0:
            raise InvalidOption(f"the length of an array must be 0 or more, got {length}")
        return self._create(PersistedArray, object_id, of, initialize=lambda made: made._fill(length, fill))

    def get_array(self, object_id: str, *, of: Of[T] = ANY) -> PersistedArray[T]:
        return self._get(PersistedArray, object_id, of)

    def get_or_create_array(
        self, object_id: str, length: int, fill: T, *, of: Of[T] = ANY
    ) -> PersistedArray[T]:
        """`ValueError` if the existing array has another length."""
        with self._lock:
            if object_id not in self._objects:
                return self.create_array(object_id, length, fill, of=of)
            found = self.get_array(object_id, of=of)
            if len(found) != length:
                raise InvalidOption(f"the array {object_id!r} has {len(found)} items, not {length}")
            return found

    def create_list(self, object_id: str, *, of: Of[T] = ANY) -> PersistedList[T]:
        return self._create(PersistedList, object_id, of)

    def get_list(self, object_id: str, *, of: Of[T] = ANY) -> PersistedList[T]:
        return self._get(PersistedList, object_id, of)

    def get_or_create_list(self, object_id: str, *, of: Of[T] = ANY) -> PersistedList[T]:
        return self._get_or_create(PersistedList, object_id, of)

    def create_queue(self, object_id: str, *, of: Of[T] = ANY) -> PersistedQueue[T]:
        return self._create(PersistedQueue, object_id, of)

    def get_queue(self, object_id: str, *, of: Of[T] = ANY) -> PersistedQueue[T]:
        return self._get(PersistedQueue, object_id, of)

    def get_or_create_queue(self, object_id: str, *, of: Of[T] = ANY) -> PersistedQueue[T]:
        return self._get_or_create(PersistedQueue, object_id, of)

    def create_stack(self, object_id: str, *, of: Of[T] = ANY) -> PersistedStack[T]:
        return self._create(PersistedStack, object_id, of)

    def get_stack(self, object_id: str, *, of: Of[T] = ANY) -> PersistedStack[T]:
        return self._get(PersistedStack, object_id, of)

    def get_or_create_stack(self, object_id: str, *, of: Of[T] = ANY) -> PersistedStack[T]:
        return self._get_or_create(PersistedStack, object_id, of)

    def create_linked_list(self, object_id: str, *, of: Of[T] = ANY) -> PersistedLinkedList[T]:
        return self._create(PersistedLinkedList, object_id, of)

    def get_linked_list(self, object_id: str, *, of: Of[T] = ANY) -> PersistedLinkedList[T]:
        return self._get(PersistedLinkedList, object_id, of)

    def get_or_create_linked_list(self, object_id: str, *, of: Of[T] = ANY) -> PersistedLinkedList[T]:
        return self._get_or_create(PersistedLinkedList, object_id, of)

    def create_set(self, object_id: str, *, of: Of[T] = ANY) -> PersistedSet[T]:
        return self._create(PersistedSet, object_id, of)

    def get_set(self, object_id: str, *, of: Of[T] = ANY) -> PersistedSet[T]:
        return self._get(PersistedSet, object_id, of)

    def get_or_create_set(self, object_id: str, *, of: Of[T] = ANY) -> PersistedSet[T]:
        return self._get_or_create(PersistedSet, object_id, of)

    def create_sorted_set(self, object_id: str, *, of: Of[T] = ANY) -> PersistedSortedSet[T]:
        return self._create(PersistedSortedSet, object_id, of)

    def get_sorted_set(self, object_id: str, *, of: Of[T] = ANY) -> PersistedSortedSet[T]:
        return self._get(PersistedSortedSet, object_id, of)

    def get_or_create_sorted_set(self, object_id: str, *, of: Of[T] = ANY) -> PersistedSortedSet[T]:
        return self._get_or_create(PersistedSortedSet, object_id, of)

    def create_dictionary(
        self, object_id: str, *, keys: Of[K] = ANY, values: Of[V] = ANY
    ) -> PersistedDictionary[K, V]:
        return self._create(PersistedDictionary, object_id, keys, values)

    def get_dictionary(
        self, object_id: str, *, keys: Of[K] = ANY, values: Of[V] = ANY
    ) -> PersistedDictionary[K, V]:
        return self._get(PersistedDictionary, object_id, keys, values)

    def get_or_create_dictionary(
        self, object_id: str, *, keys: Of[K] = ANY, values: Of[V] = ANY
    ) -> PersistedDictionary[K, V]:
        return self._get_or_create(PersistedDictionary, object_id, keys, values)

    def create_sorted_dictionary(
        self, object_id: str, *, keys: Of[K] = ANY, values: Of[V] = ANY
    ) -> PersistedSortedDictionary[K, V]:
        return self._create(PersistedSortedDictionary, object_id, keys, values)

    def get_sorted_dictionary(
        self, object_id: str, *, keys: Of[K] = ANY, values: Of[V] = ANY
    ) -> PersistedSortedDictionary[K, V]:
        return self._get(PersistedSortedDictionary, object_id, keys, values)

    def get_or_create_sorted_dictionary(
        self, object_id: str, *, keys: Of[K] = ANY, values: Of[V] = ANY
    ) -> PersistedSortedDictionary[K, V]:
        return self._get_or_create(PersistedSortedDictionary, object_id, keys, values)

    # Shared by all kinds

    def _create(
        self, kind: type[P], object_id: str, *of: Of[Any], initialize: Callable[[P], object] | None = None
    ) -> P:
        check_id(object_id)
        serializers = [self._serializers.of(each) for each in of]
        with self._lock:
            if object_id in self._objects:
                raise ObjectExists(
                    "an object has this id", got=repr(object_id), hint="Get it, or delete it first."
                )
            made = kind(self, object_id, *serializers)
            if initialize is not None:
                initialize(made)
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
            require_kind(object_id, kind.KIND, found.KIND.value)
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

    def _require_type(self, object_id: str, of: Of[Any], stored: str) -> ValueSerializer[Any] | None:
        """The serializer of `of`; None for ANY. `WrongType` if `of` is not the stored type."""
        if of is ANY:
            return None
        serializer = self._serializers.of(of)
        if serializer.name != stored:
            what = "the object has elements of another type"
            raise WrongType(what, where=object_id, got=serializer.name, expected=stored)
        return serializer

    # Implemented by each space

    @abstractmethod
    def mark(self, changed: Persisted) -> bool:
        """See `ObjectOwner.mark`."""

    @abstractmethod
    def _created(self, made: Persisted) -> None: ...

    @abstractmethod
    def _deleted(self, object_id: str, found: Any) -> None:
        """Called after an object was removed from `_objects`."""

    @abstractmethod
    def _load(self, object_id: str, stored: Any, kind: Kind, of: tuple[Of[Any], ...]) -> Persisted: ...


class VolatileObjectSpace(Registry):
    """The same objects without a store: for operators outside an engine, and for tests."""

    def mark(self, changed: Persisted) -> bool:
        del changed
        return True

    def _created(self, made: Persisted) -> None:
        pass

    def _deleted(self, object_id: str, found: Any) -> None:  # noqa: ARG002
        found.detach()

    def _load(self, *_: object) -> Persisted:
        raise AssertionError("nothing is stored")


def check_id(object_id: object) -> None:
    """Raise `TypeError` or `ValueError` unless `object_id` is a valid id."""
    if not isinstance(object_id, str):
        raise TypeError(f"an id must be a str, got {type(object_id).__name__}")
    try:
        size = len(object_id.encode())
    except UnicodeEncodeError:
        raise InvalidOption(f"an id must be valid Unicode, got {object_id!r}") from None
    if not 0 < size <= ID_BYTES_MAX:
        raise InvalidOption(f"an id must have 1 to {ID_BYTES_MAX} bytes, got {size}")


def require_kind(object_id: str, asked: Kind, kind: str) -> None:
    """Raise `WrongKind` unless `kind`, the kind of the object, is `asked`."""
    if kind != asked.value:
        raise WrongKind("the object has another kind", where=object_id, got=asked.value, expected=kind)


def _missing(object_id: object) -> NoSuchObject:
    return NoSuchObject("no such object", got=repr(object_id)[:200], hint="Create it, or use get_or_create.")
