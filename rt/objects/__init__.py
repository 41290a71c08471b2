"""The object space: collections that remember, saved at a cost of what changed.

    PersistedObjectSpace    objects by id: values, arrays, lists, queues, stacks, linked lists, sets, sorted
                            sets, dictionaries, sorted dictionaries; saved whole or by differences
    VolatileObjectSpace     the same objects without a store
    SqliteStore             a file; MemoryStore: none. Others need `Store`, `StateReader`, `StateWriter`
    Serializers             how elements become bytes: JSON, bytes, and what is registered

Law: what is loaded is what the last commit left, however the process or the machine ended, and whatever
became of the commits before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rt.objects.dictionaries import PersistedDictionary, PersistedSortedDictionary
from rt.objects.errors import (
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
from rt.objects.linked_lists import LinkedNode, PersistedLinkedList
from rt.objects.lists import PersistedArray, PersistedList
from rt.objects.memory_store import MemoryStore
from rt.objects.persisted import Kind
from rt.objects.queues import PersistedQueue, PersistedStack
from rt.objects.registry import VolatileObjectSpace
from rt.objects.serializers import (
    ANY,
    BytesSerializer,
    JsonSerializer,
    PickleSerializer,
    Serializer,
    Serializers,
)
from rt.objects.sets import PersistedSet
from rt.objects.sorted_sets import PersistedSortedSet, SortedView
from rt.objects.space import PersistedObjectSpace
from rt.objects.storing import CheckpointKind, StateReader, StateWriter, Store
from rt.objects.values import PersistedValue

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
    """`SqliteStore` at its first use: who keeps state elsewhere need not load sqlite3."""
    if name == "SqliteStore":
        from rt.objects.sqlite_store import SqliteStore

        return SqliteStore
    raise AttributeError(f"module 'rt.objects' has no attribute {name!r}")
