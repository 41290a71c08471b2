"""The object space: collections that are saved to a store. A save costs what changed.

    PersistedObjectSpace    objects by id: values, arrays, lists, queues, stacks, linked lists, sets, sorted
                            sets, dictionaries, sorted dictionaries
    VolatileObjectSpace     the same objects without a store
    SqliteStore             a store in a file; PostgresStore: on a server; MemoryStore: in memory. Others
                            implement `Store`, `StateReader`, `StateWriter`
    check_store, back_up_store    verify and copy the file of a store, also while it is open
    check_postgres          verify a store on a server
    Serializers             how elements become bytes: JSON, bytes, and what is registered

Invariant: after a load the space holds what the last successful commit saved, whatever crashed. A store that
lost that commit is refused.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any, Final

from rt.objects.claims import Claims
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
    StoreUnavailable,
    WrongKind,
    WrongType,
)
from rt.objects.core.persisted import Kind
from rt.objects.core.serializers import (
    ANY,
    BytesSerializer,
    JsonValueSerializer,
    PickleSerializer,
    Serializers,
    ValueSerializer,
)
from rt.objects.core.store import CheckpointKind, Claim, Owners, StateReader, StateWriter, Store
from rt.objects.core.store_status import StoreStatus
from rt.objects.memory_store import MemoryStore
from rt.objects.registry import VolatileObjectSpace
from rt.objects.space import PersistedObjectSpace

if TYPE_CHECKING:
    from rt.objects.postgres.check import check_postgres
    from rt.objects.postgres.store import PostgresStore
    from rt.objects.sqlite_backup import back_up_store, check_store
    from rt.objects.sqlite_store import SqliteStore

__all__ = [
    "ANY",
    "BytesSerializer",
    "CheckpointKind",
    "Claim",
    "Claims",
    "CommitUnknown",
    "JsonValueSerializer",
    "Kind",
    "LinkedNode",
    "MemoryStore",
    "NoSuchObject",
    "NotSerializable",
    "ObjectError",
    "ObjectExists",
    "OutOfTurn",
    "Owners",
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
    "PostgresStore",
    "Serializers",
    "SortedView",
    "SqliteStore",
    "StateDamaged",
    "StateReader",
    "StateWriter",
    "Store",
    "StoreStatus",
    "StoreUnavailable",
    "ValueSerializer",
    "VolatileObjectSpace",
    "WrongKind",
    "WrongType",
    "back_up_store",
    "check_postgres",
    "check_store",
]

if not TYPE_CHECKING and importlib.util.find_spec("psycopg") is None:
    # `from rt.objects import *` imports all names. Without the extra `postgres` only those of a server fail.
    __all__.remove("PostgresStore")
    __all__.remove("check_postgres")

_ON_FIRST_USE: Final = {
    "PostgresStore": "rt.objects.postgres.store",
    "check_postgres": "rt.objects.postgres.check",
    "SqliteStore": "rt.objects.sqlite_store",
    "back_up_store": "rt.objects.sqlite_backup",
    "check_store": "rt.objects.sqlite_backup",
}


def __getattr__(name: str) -> Any:
    """Import a store on first use, so that programs without this store do not load sqlite3 or psycopg."""
    if name in _ON_FIRST_USE:
        return getattr(importlib.import_module(_ON_FIRST_USE[name]), name)
    raise AttributeError(f"module 'rt.objects' has no attribute {name!r}")
