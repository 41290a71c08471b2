"""The objects of one operator in the object space."""

from __future__ import annotations

from typing import Any, Final, TypeVar

from rt.objects import (
    ANY,
    PersistedDictionary,
    PersistedList,
    PersistedQueue,
    PersistedSet,
    PersistedSortedDictionary,
    PersistedSortedSet,
    PersistedStack,
    PersistedValue,
)
from rt.objects.core.serializers import Of
from rt.objects.registry import Registry

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")


class ScopedObjects:
    """The collections of the operator, by name. A collection that does not exist is made.

    The cost to save them in a checkpoint depends only on the changes. They are deleted with the operator. A
    loaded operator must get all its collections in `on_open` and `load_state`, so that they are known here.
    """

    __slots__ = ("_held", "_scope", "_space")

    def __init__(self, space: Registry, scope: str) -> None:
        self._space: Final = space
        self._scope: Final = scope
        self._held: set[str] = set()

    def value(self, name: str, initial: T, *, of: Of[T] = ANY) -> PersistedValue[T]:
        return self._space.get_or_create_value(self._id(name), initial, of=of)

    def list(self, name: str, *, of: Of[T] = ANY) -> PersistedList[T]:
        return self._space.get_or_create_list(self._id(name), of=of)

    def queue(self, name: str, *, of: Of[T] = ANY) -> PersistedQueue[T]:
        return self._space.get_or_create_queue(self._id(name), of=of)

    def stack(self, name: str, *, of: Of[T] = ANY) -> PersistedStack[T]:
        return self._space.get_or_create_stack(self._id(name), of=of)

    def set(self, name: str, *, of: Of[T] = ANY) -> PersistedSet[T]:
        return self._space.get_or_create_set(self._id(name), of=of)

    def sorted_set(self, name: str, *, of: Of[T] = ANY) -> PersistedSortedSet[T]:
        return self._space.get_or_create_sorted_set(self._id(name), of=of)

    def dictionary(self, name: str, *, keys: Of[K] = ANY, values: Of[V] = ANY) -> PersistedDictionary[K, V]:
        return self._space.get_or_create_dictionary(self._id(name), keys=keys, values=values)

    def sorted_dictionary(
        self, name: str, *, keys: Of[K] = ANY, values: Of[V] = ANY
    ) -> PersistedSortedDictionary[K, V]:
        return self._space.get_or_create_sorted_dictionary(self._id(name), keys=keys, values=values)

    def delete(self, name: str) -> None:
        """Does nothing if there is no such collection."""
        self._delete(self._id(name))

    def delete_all(self) -> None:
        """Delete every collection that was requested here."""
        for object_id in list(self._held):
            self._delete(object_id)

    def _delete(self, object_id: str) -> None:
        self._held.discard(object_id)
        if object_id in self._space:
            self._space.delete(object_id)

    def _id(self, name: str) -> str:
        object_id = f"{self._scope}#{name}"
        self._held.add(object_id)
        return object_id


def owner_of(object_id: Any) -> str:
    """The id of the operator group that owns the object."""
    return str(object_id).split("#", 1)[0]
