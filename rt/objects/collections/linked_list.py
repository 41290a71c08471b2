"""A persisted doubly linked list.

    metadata/<slot>    {"key": slot of the previous node, "value": slot of the next node}, -1: none
    data/<slot>        the value

An insertion or a removal writes the node and the links of its neighbours.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Reversible
from typing import Any, Final, Generic, TypeVar

from rt.objects.collections.dictionary import Pairs
from rt.objects.collections.slots import Edits, Slots, write_all
from rt.objects.core.persisted import Kind, ObjectOwner, Persisted, StoredRows
from rt.objects.core.serializers import JsonValueSerializer, ValueSerializer
from rt.objects.core.store import DATA, METADATA, ObjectRows

T = TypeVar("T")

_NONE: Final = -1
_SLOT: Final = JsonValueSerializer[int]("int", int)
_LINKS: Final = Pairs(_SLOT, _SLOT)


class LinkedNode(Generic[T]):
    """A node of a linked list. Before it is added and after it is removed: only a value."""

    __slots__ = ("_list", "_next", "_previous", "_slot", "_value")

    def __init__(self, value: T) -> None:
        self._value = value
        self._list: PersistedLinkedList[T] | None = None
        self._previous: LinkedNode[T] | None = None
        self._next: LinkedNode[T] | None = None
        self._slot = _NONE

    @property
    def list(self) -> PersistedLinkedList[T] | None:
        return self._list

    @property
    def previous(self) -> LinkedNode[T] | None:
        return self._previous

    @property
    def next(self) -> LinkedNode[T] | None:
        return self._next

    @property
    def value(self) -> T:
        return self._value

    @value.setter
    def value(self, value: T) -> None:
        if self._list is not None:
            self._list._assign(self, value)
        self._value = value


class PersistedLinkedList(Persisted, Collection[T], Reversible[T]):
    """Values in an order that can be edited anywhere at constant cost.

    Methods that add a value also accept a `LinkedNode` that is in no list, and return the node.
    """

    __slots__ = ("_data", "_first", "_last", "_length", "_links", "_slots")

    KIND = Kind.LINKED_LIST
    PARTS = (METADATA, DATA)

    def __init__(self, owner: ObjectOwner, object_id: str, serializer: ValueSerializer[T]) -> None:
        super().__init__(owner, object_id, serializer)
        self._first: LinkedNode[T] | None = None
        self._last: LinkedNode[T] | None = None
        self._length = 0
        self._slots: Slots[LinkedNode[T]] = Slots()
        self._links = Edits()
        self._data = Edits()

    @property
    def first(self) -> LinkedNode[T] | None:
        return self._first

    @property
    def last(self) -> LinkedNode[T] | None:
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
        """Nodes from the first on. The caller may remove the node that it got last."""
        node = self._first
        while node is not None:
            following = node._next
            yield node
            # If the node is still in this list, its next node may have changed.
            node = node._next if node._list is self else following

    def find(self, value: object) -> LinkedNode[T] | None:
        """The first node with an equal value."""
        return next((node for node in self.nodes() if node._value == value), None)

    def find_last(self, value: object) -> LinkedNode[T] | None:
        """The last node with an equal value."""
        node = self._last
        while node is not None and node._value != value:
            node = node._previous
        return node

    # Edits

    def add_first(self, value: T | LinkedNode[T]) -> LinkedNode[T]:
        return self._insert(value, None, self._first)

    def add_last(self, value: T | LinkedNode[T]) -> LinkedNode[T]:
        return self._insert(value, self._last, None)

    append = add_last

    def add_before(self, node: LinkedNode[T], value: T | LinkedNode[T]) -> LinkedNode[T]:
        """Insert before `node`; `ValueError` if it is not in this list."""
        self._require_own(node)
        return self._insert(value, node._previous, node)

    def add_after(self, node: LinkedNode[T], value: T | LinkedNode[T]) -> LinkedNode[T]:
        """Insert after `node`; `ValueError` if it is not in this list."""
        self._require_own(node)
        return self._insert(value, node, node._next)

    def extend(self, values: Iterable[T]) -> None:
        """Append all values, or none if one is refused."""
        for value in self._checked(values):
            self._insert(LinkedNode(value), self._last, None)

    def remove(self, value: object) -> bool:
        """Remove the first equal value. Returns whether there was one."""
        node = self.find(value)
        if node is not None:
            self.remove_node(node)
        return node is not None

    def remove_node(self, node: LinkedNode[T]) -> None:
        """Remove the node; `ValueError` if it is not in this list."""
        self._require_own(node)
        if not self._is_marked:
            self.mark()
        self._link(node._previous, node._next)
        self._length -= 1
        self._touch(node)
        self._slots.remove(node._slot)
        _release(node)

    def remove_first(self) -> T:
        """Remove and return the first value; `IndexError` if the list is empty."""
        return self._pop(self._first)

    def remove_last(self) -> T:
        """Remove and return the last value; `IndexError` if the list is empty."""
        return self._pop(self._last)

    def clear(self) -> None:
        self.mark()
        for node in list(self.nodes()):
            _release(node)
        self._first = self._last = None
        self._length = 0
        self._slots.clear()
        self._links.mark_all()
        self._data.mark_all()

    def _pop(self, node: LinkedNode[T] | None) -> T:
        if node is None:
            raise IndexError("the linked list is empty")
        self.remove_node(node)
        return node._value

    def _insert(
        self, value: T | LinkedNode[T], before: LinkedNode[T] | None, after: LinkedNode[T] | None
    ) -> LinkedNode[T]:
        node: LinkedNode[T] = value if isinstance(value, LinkedNode) else LinkedNode(value)
        if node._list is not None:
            raise ValueError("the node is already in a list")
        self._serializers[0].check(node._value)
        if not self._is_marked:
            self.mark()
        node._list = self
        node._slot = self._slots.add(node)
        self._link(before, node)
        self._link(node, after)
        self._length += 1
        self._touch(node)
        return node

    def _assign(self, node: LinkedNode[T], value: T) -> None:
        self._serializers[0].check(value)
        if not self._is_marked:
            self.mark()
        self._data.touch(node._slot)

    def _link(self, before: LinkedNode[T] | None, after: LinkedNode[T] | None) -> None:
        """Make the two neighbours. None: the end of the list."""
        if before is None:
            self._first = after
        else:
            before._next = after
            self._links.touch(before._slot)
        if after is None:
            self._last = before
        else:
            after._previous = before
            self._links.touch(after._slot)

    def _touch(self, node: LinkedNode[T]) -> None:
        self._links.touch(node._slot)
        self._data.touch(node._slot)

    def _require_own(self, node: LinkedNode[T]) -> None:
        if node._list is not self:
            raise ValueError("the node is not in this list")

    # Saving and loading

    def _is_whole(self) -> bool:
        return self._links.edited is None

    def _write_whole(self, rows: ObjectRows) -> None:
        write_all(rows, METADATA, self._slots, _dump_links)
        write_all(rows, DATA, self._slots, self._dump_value)

    def _write_changes(self, rows: ObjectRows) -> None:
        self._links.write(rows, METADATA, self._slots, _dump_links)
        self._data.write(rows, DATA, self._slots, self._dump_value)

    def _dump_value(self, node: LinkedNode[T]) -> bytes:
        return self._serializers[0].dump(node._value)

    def _start_save(self) -> None:
        for edits in (self._links, self._data):
            edits.start_save(len(self._slots.entries))

    def saved(self) -> None:
        for edits in (self._links, self._data):
            edits.finish_save()

    def _abort_save(self, *, unknown_outcome: bool) -> None:
        for edits in (self._links, self._data):
            edits.abort_save(unknown_outcome=unknown_outcome)

    def _load(self, rows: StoredRows) -> None:
        links = dict(rows.slots(METADATA, _LINKS.load))
        values = dict(rows.slots(DATA, self._serializers[0].load))
        if links.keys() != values.keys():
            raise rows.damaged(METADATA, "links and values have different slots")
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
            edits.mark_none(len(self._slots.entries))

    def _chain(
        self, rows: StoredRows, links: dict[int, tuple[int, int]], nodes: dict[int, Any]
    ) -> Iterator[LinkedNode[T]]:
        """The nodes in order, after a check that all links form one chain."""
        heads = [slot for slot, (previous, _) in links.items() if previous == _NONE]
        if len(heads) != bool(links):
            raise rows.damaged(METADATA, f"{len(heads)} nodes have no previous node")
        before, slot, count = _NONE, heads[0] if heads else _NONE, 0
        while slot != _NONE:
            if slot not in links or links[slot][0] != before:
                raise rows.damaged(METADATA, f"node {before} links to {slot}, which does not link back")
            node = nodes[slot]
            node._slot = slot
            yield node
            before, slot = slot, links[slot][1]
            count += 1
        if count != len(links):
            raise rows.damaged(METADATA, f"{len(links) - count} nodes are not linked with the others")


def _dump_links(node: LinkedNode[Any]) -> bytes:
    previous, following = node._previous, node._next
    return _LINKS.dump(
        _NONE if previous is None else previous._slot, _NONE if following is None else following._slot
    )


def _release(node: LinkedNode[Any]) -> None:
    node._list = node._previous = node._next = None
    node._slot = _NONE
