"""The object space: collections that are saved to a store. A save costs what changed.

    PersistedObjectSpace    objects by id: values, arrays, lists, queues, stacks, linked lists, sets, sorted
                            sets, dictionaries, sorted dictionaries
    VolatileObjectSpace     the same objects without a store
    SqliteStore             a store in a file; MemoryStore: in memory. Others implement `Store`,
                            `StateReader`, `StateWriter`
    Serializers             how elements become bytes: JSON, bytes, and what is registered

Invariant: after a load the space holds what the last successful commit saved, whatever crashed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rt.objects.collections.dictionary import PersistedDictionary, PersistedSortedDictionary
from rt.objects.collections.linked_list import LinkedNode, PersistedLinkedList
from rt.objects.collections.list import PersistedArray, PersistedList
from rt.objects.collections.queue import PersistedQueue, PersistedStack
from rt.objects.collections.set import PersistedSet
from rt.objects.collections.sorted_set import PersistedSortedSet, SortedView
from rt.objects.collections.value import PersistedValue
from rt.objects.core.errors import (
    CommitUnknown,
    NoSuchObject,
    NotSerializable,
    ObjectError,
    ObjectExists,
    OutOfTurn,
    StateDamaged,
    WrongKind,
    WrongType,
)
from rt.objects.core.persisted import Kind
from rt.objects.core.serializers import (
    ANY,
    BytesSerializer,
    JsonSerializer,
    PickleSerializer,
    Serializer,
    Serializers,
)
from rt.objects.core.store import CheckpointKind, StateReader, StateWriter, Store
from rt.objects.memory_store import MemoryStore
from rt.objects.registry import VolatileObjectSpace
from rt.objects.space import PersistedObjectSpace

if TYPE_CHECKING:
    from rt.objects.sqlite_store import SqliteStore

__all__ = [
    "ANY",
    "BytesSerializer",
    "CheckpointKind",
    "CommitUnknown",
    "JsonSerializer",
    "Kind",
    "LinkedNode",
    "MemoryStore",
    "NoSuchObject",
    "NotSerializable",
    "ObjectError",
    "ObjectExists",
    "OutOfTurn",
    "PersistedArray",
    "PersistedDictionary",
    "PersistedLinkedList",
    "PersistedList",
    "PersistedObjectSpace",
    "PersistedQueue",
    "PersistedSet",
    "PersistedSortedDictionary",
    "PersistedSortedSet",
    "PersistedStack",
    "PersistedValue",
    "PickleSerializer",
    "Serializer",
    "Serializers",
    "SortedView",
    "SqliteStore",
    "StateDamaged",
    "StateReader",
    "StateWriter",
    "Store",
    "VolatileObjectSpace",
    "WrongKind",
    "WrongType",
]


def __getattr__(name: str) -> Any:
    """Import `SqliteStore` on first use, so that other stores do not load sqlite3."""
    if name == "SqliteStore":
        from rt.objects.sqlite_store import SqliteStore

        return SqliteStore
    raise AttributeError(f"module 'rt.objects' has no attribute {name!r}")
