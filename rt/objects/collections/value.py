"""A persisted value.

    data/value    the value

Every assignment writes the row again.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from rt.objects.core.persisted import Kind, ObjectOwner, Persisted, StoredRows
from rt.objects.core.serializers import ValueSerializer
from rt.objects.core.store import DATA, ObjectRows

T = TypeVar("T")


class PersistedValue(Persisted, Generic[T]):
    """One value. An assignment is saved; a change inside the value, such as a list, is not."""

    __slots__ = ("_value",)

    KIND = Kind.VALUE
    PARTS = (DATA,)

    def __init__(self, owner: ObjectOwner, object_id: str, serializer: ValueSerializer[T]) -> None:
        super().__init__(owner, object_id, serializer)
        self._value: T

    @property
    def value(self) -> T:
        return self._value

    @value.setter
    def value(self, value: T) -> None:
        self._serializers[0].check(value)
        if not self._is_marked:
            self.mark()
        self._value = value

    def _is_whole(self) -> bool:
        return False  # Its only row is overwritten, so nothing must be cleared.

    def _write_whole(self, rows: ObjectRows) -> None:
        rows.put(DATA, "value", self._serializers[0].dump(self._value))

    _write_changes = _write_whole

    def _start_save(self) -> None:
        pass

    def saved(self) -> None:
        pass

    def _abort_save(self, *, unknown_outcome: bool) -> None:
        pass

    def _load(self, rows: StoredRows) -> None:
        self._value = self._serializers[0].load(rows.get(DATA, "value"))
