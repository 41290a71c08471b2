"""A persisted doubly linked list.

    metadata/<slot>    {"key": slot of the previous node, "value": slot of the next one}, -1: there is none
    data/<slot>        the value

An insertion or a removal anywhere writes the node, and where its neighbours are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Reversible
from typing import Any, Final, Generic, TypeVar

from rt.objects.errors import StateDamaged
from rt.objects.pairs import Pairs
from rt.objects.persisted import Kind, Owner, Persisted, StoredRows
from rt.objects.serializers import JsonSerializer, Serializer
from rt.objects.slots import Edits, Slots, write_all
from rt.objects.storing import DATA, METADATA, Rows

T = TypeVar("T")

_NONE: Final = -1
_SLOT: Final = JsonSerializer[int]("int", int)
_LINKS: Final = Pairs(_SLOT, _SLOT)


class LinkedNode(Generic[T]):
    """A place in a linked list, or, before it is added and after it was removed, a value without one."""

    __slots__ = ("_list", "_next", "_previous", "_slot", "_value")

    def __init__(self, value: T) -> None:
        self._value = value
        self._list: PersistedLinkedList[T] | None = None
        self._previous: LinkedNode[T] | None = None
        self._next: LinkedNode[T] | None = None
        self._slot = _NONE

    @property
    def list(self) -> PersistedLinkedList[T] | None:
        """The list it is in."""
        return self._list

    @property
    def previous(self) -> LinkedNode[T] | None:
        """The node before it."""
        return self._previous

    @property
    def next(self) -> LinkedNode[T] | None:
        """The node behind it."""
        return self._next

    @property
    def value(self) -> T:
        """What it holds."""
        return self._value

    @value.setter
    def value(self, value: T) -> None:
        if self._list is not None:
            self._list._assign(self, value)
        self._value = value


class PersistedLinkedList(Persisted, Collection[T], Reversible[T]):
    """Values in an order in which anything can be put in or taken out anywhere.

    Where a value is added, a `LinkedNode` that is in no list can be given instead; the node is returned.
    """

    __slots__ = ("_data", "_first", "_last", "_length", "_links", "_slots")

    KIND = Kind.LINKED_LIST
    PARTS = (METADATA, DATA)

    def __init__(self, owner: Owner, object_id: str, serializer: Serializer[T]) -> None:
        super().__init__(owner, object_id, serializer)
        self._first: LinkedNode[T] | None = None
        self._last: LinkedNode[T] | None = None
        self._length = 0
        self._slots: Slots[LinkedNode[T]] = Slots()
        self._links = Edits()
        self._data = Edits()

    @property
    def first(self) -> LinkedNode[T] | None:
        """The first node."""
        return self._first

    @property
    def last(self) -> LinkedNode[T] | None:
        """The last node."""
        return self._last

    def __len__(self) -> int:
        return self._length

    def __contains__(self, value: object) -> bool:
        return any(each is value or each == value for each in self)

    def __iter__(self) -> Iterator[T]:
        return (node._value for node in self.nodes())

    def __reversed__(self) -> Iterator[T]:
        node = self._last
        while node is not None:
            yield node._value
            node = node._previous

    def nodes(self) -> Iterator[LinkedNode[T]]:
        """Nodes from the first on; the one that was got last may be removed meanwhile."""
        node = self._first
        while node is not None:
            following = node._next
            yield node
            # One that is still here may have got another neighbour.
            node = node._next if node._list is self else following

    def find(self, value: object) -> LinkedNode[T] | None:
        """The first node whose value equals it."""
        return next((node for node in self.nodes() if node._value == value), None)

    def find_last(self, value: object) -> LinkedNode[T] | None:
        """The last such node."""
        node = self._last
        while node is not None and node._value != value:
            node = node._previous
        return node

    # Edits

    def add_first(self, value: T | LinkedNode[T]) -> LinkedNode[T]:
        """Put it before all others."""
        return self._insert(value, None, self._first)

    def add_last(self, value: T | LinkedNode[T]) -> LinkedNode[T]:
        """Put it behind all others."""
        return self._insert(value, self._last, None)

    append = add_last

    def add_before(self, node: LinkedNode[T], value: T | LinkedNode[T]) -> LinkedNode[T]:
        """Put it before `node`; `ValueError` if that is not of this list."""
        self._require_own(node)
        return self._insert(value, node._previous, node)

    def add_after(self, node: LinkedNode[T], value: T | LinkedNode[T]) -> LinkedNode[T]:
        """Put it behind `node`; `ValueError` if that is not of this list."""
        self._require_own(node)
        return self._insert(value, node, node._next)

    def extend(self, values: Iterable[T]) -> None:
        """Put all of them behind all others, or none."""
        new = list(values)
        for value in new:
            self._serializers[0].check(value)
        for value in new:
            self._insert(LinkedNode(value), self._last, None)

    def remove(self, value: object) -> bool:
        """Take out the first that equals `value`; whether there was one."""
        node = self.find(value)
        if node is not None:
            self.remove_node(node)
        return node is not None

    def remove_node(self, node: LinkedNode[T]) -> None:
        """Take that node out; `ValueError` if it is not of this list."""
        self._require_own(node)
        if not self._is_marked:
            self._mark()
        self._join(node._previous, node._next)
        self._length -= 1
        self._touch(node)
        self._slots.remove(node._slot)
        _release(node)

    def remove_first(self) -> T:
        """Take the first out; `IndexError` if it is empty."""
        return self._take(self._first)

    def remove_last(self) -> T:
        """Take the last out; `IndexError` if it is empty."""
        return self._take(self._last)

    def clear(self) -> None:
        """Take all out."""
        if not self._is_marked:
            self._mark()
        for node in list(self.nodes()):
            _release(node)
        self._first = self._last = None
        self._length = 0
        self._slots.clear()
        self._links.forget()
        self._data.forget()

    def _take(self, node: LinkedNode[T] | None) -> T:
        if node is None:
            raise IndexError("the linked list is empty")
        self.remove_node(node)
        return node._value

    def _insert(
        self, value: T | LinkedNode[T], before: LinkedNode[T] | None, behind: LinkedNode[T] | None
    ) -> LinkedNode[T]:
        node: LinkedNode[T] = value if isinstance(value, LinkedNode) else LinkedNode(value)
        if node._list is not None:
            raise ValueError("the node is in a list already")
        self._serializers[0].check(node._value)
        if not self._is_marked:
            self._mark()
        node._list = self
        node._slot = self._slots.add(node)
        self._join(before, node)
        self._join(node, behind)
        self._length += 1
        self._touch(node)
        return node

    def _assign(self, node: LinkedNode[T], value: T) -> None:
        self._serializers[0].check(value)
        if not self._is_marked:
            self._mark()
        self._data.touch(node._slot)

    def _join(self, before: LinkedNode[T] | None, behind: LinkedNode[T] | None) -> None:
        """Make the two neighbours; None is the end of the list."""
        if before is None:
            self._first = behind
        else:
            before._next = behind
            self._links.touch(before._slot)
        if behind is None:
            self._last = before
        else:
            behind._previous = before
            self._links.touch(behind._slot)

    def _touch(self, node: LinkedNode[T]) -> None:
        self._links.touch(node._slot)
        self._data.touch(node._slot)

    def _require_own(self, node: LinkedNode[T]) -> None:
        if node._list is not self:
            raise ValueError("the node is not in this list")

    # Saving and loading

    def _is_whole(self) -> bool:
        return self._links.edited is None

    def _write_whole(self, rows: Rows) -> None:
        write_all(rows, METADATA, self._slots, _dump_links)
        write_all(rows, DATA, self._slots, self._dump_value)

    def _write_changes(self, rows: Rows) -> None:
        self._links.write(rows, METADATA, self._slots, _dump_links)
        self._data.write(rows, DATA, self._slots, self._dump_value)

    def _dump_value(self, node: LinkedNode[T]) -> bytes:
        return self._serializers[0].dump(node._value)

    def _take_off(self) -> None:
        for edits in (self._links, self._data):
            edits.take_off(len(self._slots.entries))

    def _land(self) -> None:
        for edits in (self._links, self._data):
            edits.land()

    def _turn_back(self, *, unknown_outcome: bool) -> None:
        for edits in (self._links, self._data):
            edits.turn_back(unknown_outcome=unknown_outcome)

    def _load(self, rows: StoredRows) -> None:
        links = dict(rows.slots(METADATA, _LINKS.load))
        values = dict(rows.slots(DATA, self._serializers[0].load))
        if links.keys() != values.keys():
            raise rows.damaged(METADATA, "links and values are not of the same nodes")
        nodes = {slot: LinkedNode(value) for slot, value in values.items()}
        self._slots.load(rows, METADATA, nodes.items())
        for node in self._chain(rows, links, nodes):
            node._previous, node._list = self._last, self
            if self._last is None:
                self._first = node
            else:
                self._last._next = node
            self._last = node
        self._length = len(nodes)
        for edits in (self._links, self._data):
            edits.loaded(len(self._slots.entries))

    def _chain(
        self, rows: StoredRows, links: dict[int, tuple[int, int]], nodes: dict[int, Any]
    ) -> Iterator[LinkedNode[T]]:
        """The nodes in order, when each is linked with its neighbours, and they are one chain."""
        heads = [slot for slot, (previous, _) in links.items() if previous == _NONE]
        if len(heads) != bool(links):
            raise rows.damaged(METADATA, f"{len(heads)} nodes have none before them")
        before, slot, count = _NONE, heads[0] if heads else _NONE, 0
        while slot != _NONE:
            if slot not in links or links[slot][0] != before:
                raise _broken(rows, before, slot)
            node = nodes[slot]
            node._slot = slot
            yield node
            before, slot = slot, links[slot][1]
            count += 1
        if count != len(links):
            raise rows.damaged(METADATA, f"{len(links) - count} nodes are linked with none of the others")


def _dump_links(node: LinkedNode[Any]) -> bytes:
    previous, following = node._previous, node._next
    return _LINKS.dump(
        _NONE if previous is None else previous._slot, _NONE if following is None else following._slot
    )


def _release(node: LinkedNode[Any]) -> None:
    node._list = node._previous = node._next = None
    node._slot = _NONE


def _broken(rows: StoredRows, before: int, slot: int) -> StateDamaged:
    return rows.damaged(METADATA, f"node {before} is followed by {slot}, which does not say so")
