"""A persisted value.

    data/value    the value

The row is written again whenever the value was assigned.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from rt.objects.persisted import Kind, Owner, Persisted, StoredRows
from rt.objects.serializers import Serializer
from rt.objects.storing import DATA, Rows

T = TypeVar("T")


class PersistedValue(Persisted, Generic[T]):
    """One value. What is assigned is seen by the next save; a change inside a list, say, is not."""

    __slots__ = ("_value",)

    KIND = Kind.VALUE
    PARTS = (DATA,)

    def __init__(self, owner: Owner, object_id: str, serializer: Serializer[T]) -> None:
        super().__init__(owner, object_id, serializer)
        self._value: T

    @property
    def value(self) -> T:
        """What was assigned last."""
        return self._value

    @value.setter
    def value(self, value: T) -> None:
        self._serializers[0].check(value)
        if not self._is_marked:
            self._mark()
        self._value = value

    def _is_whole(self) -> bool:
        return False  # Its only row is overwritten: there is nothing to clear.

    def _write_whole(self, rows: Rows) -> None:
        rows.put(DATA, "value", self._serializers[0].dump(self._value))

    _write_changes = _write_whole

    def _take_off(self) -> None:
        pass

    def _land(self) -> None:
        pass

    def _turn_back(self, *, unknown_outcome: bool) -> None:
        pass

    def _load(self, rows: StoredRows) -> None:
        self._value = self._serializers[0].load(rows.get(DATA, "value"))
