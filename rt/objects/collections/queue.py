"""A persisted queue and a persisted stack.

    queue: metadata/head, metadata/tail    the numbers of the first item, and of the next new item
           items/head … items/tail-1
    stack: metadata/count                  items/0 (the bottom) … items/count-1

Head and tail of a queue only grow.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Reversible
from typing import Generic, NamedTuple, TypeVar

from rt.objects.collections.item_run import ItemRun
from rt.objects.core.persisted import Kind, ObjectOwner, Persisted, StoredRows, digits
from rt.objects.core.serializers import ValueSerializer
from rt.objects.core.slot_keys import encode
from rt.objects.core.store import ITEMS, METADATA, ObjectRows

T = TypeVar("T")


class _Flight(NamedTuple):
    written: int
    stored_head: int | None
    stored_tail: int | None
    low: int
    high: int


class PersistedQueue(Persisted, Collection[T], Reversible[T], Generic[T]):
    """First in, first out. Iterates from the head.

    Items below `_written` are stored. Other rows may be stored only from `_low` to `_high`.
    """

    __slots__ = ("_flight", "_head", "_high", "_items", "_low", "_stored_head", "_stored_tail", "_written")

    KIND = Kind.QUEUE
    PARTS = (METADATA, ITEMS)

    def __init__(self, owner: ObjectOwner, object_id: str, serializer: ValueSerializer[T]) -> None:
        super().__init__(owner, object_id, serializer)
        self._items: deque[T] = deque()
        self._head = 0
        self._written = self._low = self._high = 0
        self._stored_head: int | None = None  # None: unknown
        self._stored_tail: int | None = None
        self._flight: _Flight | None = None

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def __reversed__(self) -> Iterator[T]:
        return reversed(self._items)

    def __contains__(self, value: object) -> bool:
        return value in self._items

    def enqueue(self, value: T) -> None:
        self._serializers[0].check(value)
        if not self._is_marked:
            self.mark()
        self._items.append(value)

    def extend(self, values: Iterable[T]) -> None:
        """Append all values, or none if one is refused."""
        new = self._checked(values)
        self.mark()
        self._items.extend(new)

    def dequeue(self) -> T:
        """Remove and return the head; `IndexError` if the queue is empty."""
        if not self._items:
            raise IndexError("dequeue from an empty queue")
        if not self._is_marked:
            self.mark()
        self._head += 1
        return self._items.popleft()

    def peek(self) -> T:
        """The head; `IndexError` if the queue is empty."""
        if not self._items:
            raise IndexError("peek at an empty queue")
        return self._items[0]

    def clear(self) -> None:
        self.mark()
        self._head += len(self._items)
        self._items.clear()

    def _is_whole(self) -> bool:
        return self._written <= self._head

    def _write_whole(self, rows: ObjectRows) -> None:
        rows.put(METADATA, "head", digits(self._head))
        rows.put(METADATA, "tail", digits(self._tail))
        self._write_items(rows, self._head)

    def _write_changes(self, rows: ObjectRows) -> None:
        if self._stored_head != self._head:
            rows.put(METADATA, "head", digits(self._head))
        if self._stored_tail != self._tail:
            rows.put(METADATA, "tail", digits(self._tail))
        deleted = range(self._low, min(self._head, self._high))
        if deleted:
            rows.delete_many(ITEMS, map(encode, deleted))
        self._write_items(rows, self._written)

    @property
    def _tail(self) -> int:
        return self._head + len(self._items)

    def _write_items(self, rows: ObjectRows, first: int) -> None:
        dump = self._serializers[0].dump
        # From the right: a deque reaches only its ends in constant time.
        newest = itertools.islice(reversed(self._items), self._tail - first)
        numbers = range(self._tail - 1, first - 1, -1)
        rows.put_many(
            ITEMS, ((encode(number), dump(item)) for number, item in zip(numbers, newest, strict=True))
        )

    def _start_save(self) -> None:
        self._flight = _Flight(self._written, self._stored_head, self._stored_tail, self._low, self._high)
        self._stored_head = self._low = self._head
        self._stored_tail = self._written = self._high = self._tail

    def saved(self) -> None:
        self._flight = None

    def _abort_save(self, *, unknown_outcome: bool) -> None:
        flight = self._flight
        if flight is None:
            return
        self._written = flight.written
        self._low = flight.low
        self._high = max(self._high, flight.high) if unknown_outcome else flight.high
        self._stored_head = None if unknown_outcome else flight.stored_head
        self._stored_tail = None if unknown_outcome else flight.stored_tail
        self._flight = None

    def _load(self, rows: StoredRows) -> None:
        head, tail = rows.number(METADATA, "head"), rows.number(METADATA, "tail")
        if head > tail:
            raise rows.damaged(METADATA, f"the head {head} is greater than the tail {tail}")
        self._items = deque(rows.run(ITEMS, head, tail, self._serializers[0].load))
        self._head = self._low = self._stored_head = head
        self._written = self._high = self._stored_tail = tail


class PersistedStack(ItemRun[T], Collection[T], Reversible[T]):
    """Last in, first out. Iterates from the top."""

    __slots__ = ()

    KIND = Kind.STACK
    LENGTH = "count"

    def __iter__(self) -> Iterator[T]:
        return reversed(self._items)

    def __reversed__(self) -> Iterator[T]:
        return iter(self._items)

    def push(self, value: T) -> None:
        self._serializers[0].check(value)
        if not self._is_marked:
            self.mark()
        self._items.append(value)

    def extend(self, values: Iterable[T]) -> None:
        """Push all values, or none if one is refused."""
        self._extend(values)

    def pop(self) -> T:
        """Remove and return the top; `IndexError` if the stack is empty."""
        if not self._items:
            raise IndexError("pop from an empty stack")
        self._move(len(self._items) - 1)
        return self._items.pop()

    def peek(self) -> T:
        """The top; `IndexError` if the stack is empty."""
        if not self._items:
            raise IndexError("peek at an empty stack")
        return self._items[-1]

    def clear(self) -> None:
        self._move(0)
        self._items.clear()
