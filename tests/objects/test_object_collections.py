"""Object collections: interfaces, sort order, views, linked nodes, and errors on misuse."""

from __future__ import annotations

import math
from collections.abc import (
    Collection,
    MutableMapping,
    MutableSequence,
    MutableSet,
    Reversible,
    Sequence,
)
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rt.objects import LinkedNode, NotSerializable, VolatileObjectSpace
from rt.objects.collections import sorted_keys
from rt.objects.collections.sorted_keys import SortedKeys


@pytest.fixture
def space() -> VolatileObjectSpace:
    return VolatileObjectSpace()


def test_objects_implement_abstract_collection_of_their_kind(space: VolatileObjectSpace) -> None:
    assert isinstance(space.create_array("a", 1, 0), Sequence)
    assert isinstance(space.create_list("l"), MutableSequence)
    assert isinstance(space.create_set("s"), MutableSet)
    assert isinstance(space.create_sorted_set("ss"), MutableSet | Reversible)
    assert isinstance(space.create_dictionary("d"), MutableMapping)
    assert isinstance(space.create_sorted_dictionary("sd"), MutableMapping | Reversible)
    for made in (space.create_queue("q"), space.create_stack("st"), space.create_linked_list("ll")):
        assert isinstance(made, Collection)
        assert isinstance(made, Reversible)


# Orders


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 60)), max_size=200),
    st.integers(-5, 65),
    st.integers(-5, 65),
)
def test_sorted_keys_equal_model_set_across_bucket_splits(
    edits: list[tuple[bool, int]], low: int, high: int
) -> None:
    before = sorted_keys._BUCKET_MAX
    sorted_keys._BUCKET_MAX = 4  # type: ignore[misc]
    try:
        keys: SortedKeys[int] = SortedKeys(range(0, 60, 7))
        model = set(range(0, 60, 7))
        for is_new, key in edits:
            if is_new and key not in model:
                keys.add(key)
                model.add(key)
            elif not is_new and key in model:
                keys.remove(key)
                model.remove(key)
    finally:
        sorted_keys._BUCKET_MAX = before  # type: ignore[misc]
    inside = [key for key in sorted(model) if low <= key <= high]
    assert list(keys.between()) == sorted(model)
    assert list(keys.between_reversed()) == sorted(model, reverse=True)
    assert list(keys.between(low, high)) == inside
    assert list(keys.between_reversed(low, high)) == inside[::-1]
    assert keys.count(low, high) == len(inside)
    if model:
        assert (keys.least, keys.greatest) == (min(model), max(model))
    assert all(keys._buckets)


@pytest.mark.parametrize("kind", ["sorted_set", "sorted_dictionary"])
@pytest.mark.parametrize(
    ("bad", "error"), [("text", TypeError), (math.nan, ValueError), (None, TypeError), ((), TypeError)]
)
def test_sorted_kinds_reject_elements_without_total_order(
    space: VolatileObjectSpace, kind: str, bad: Any, error: type
) -> None:
    held = getattr(space, f"create_{kind}")("it")
    put = held.add if kind == "sorted_set" else lambda key: held.__setitem__(key, 0)
    put(1)
    for is_alone in (True, False):
        with pytest.raises(error):
            put(bad)
        assert list(held) == ([1] if is_alone else [1, 2])
        put(2)


def test_sorted_set_rejects_incomparable_first_element(space: VolatileObjectSpace) -> None:
    held = space.create_sorted_set("it")
    with pytest.raises(TypeError):
        held.add(None)
    assert len(held) == 0


@pytest.mark.parametrize("kind", ["set", "sorted_set", "dictionary", "sorted_dictionary"])
def test_size_change_during_iteration_raises_runtime_error(space: VolatileObjectSpace, kind: str) -> None:
    held = getattr(space, f"create_{kind}")("it")
    held.update({1: 1, 2: 2, 3: 3})
    iteration = iter(held)
    next(iteration)
    held.pop(1) if "dictionary" in kind else held.remove(1)
    with pytest.raises(RuntimeError, match="changed size"):
        next(iteration)


def test_set_operations_equal_those_of_python_sets(space: VolatileObjectSpace) -> None:
    held = space.create_set("it")
    assert held.add(1) is True
    assert held.add(1) is False
    assert held.discard(2) is False
    held.update([2], [3])
    assert held == {1, 2, 3}
    assert held <= {1, 2, 3, 4}
    assert held < {1, 2, 3, 4}
    assert not held < {1, 2, 3}
    assert held.issuperset([1])
    assert held.issubset(range(9))
    assert held.overlaps([3, 4])
    assert held.isdisjoint([4])
    assert (
        held.union([4]),
        held.intersection([1, 9]),
        held.difference([1]),
        held.symmetric_difference([3, 4]),
    ) == (
        {1, 2, 3, 4},
        {1},
        {2, 3},
        {1, 2, 4},
    )
    held |= {5}
    held &= {1, 5}
    held ^= {1, 6}
    held -= {6}
    assert held == {5}
    held.update(held)
    held.difference_update(held)
    assert held == set()
    with pytest.raises(KeyError):
        held.pop()


def test_in_place_set_operations_accept_set_itself_as_operand(space: VolatileObjectSpace) -> None:
    held = space.create_sorted_set("it")
    held.update([1, 2])
    held |= held
    held &= held
    assert held == {1, 2}
    held ^= held
    assert held == set()


def test_sorted_set_and_its_view_share_edits(space: VolatileObjectSpace) -> None:
    held = space.create_sorted_set("it")
    held.update(range(10))
    view = held.view(3, 6)
    assert (list(view), len(view), view.min(), view.max(), list(reversed(view))) == (
        [3, 4, 5, 6],
        4,
        3,
        6,
        [6, 5, 4, 3],
    )
    held.discard(4)
    assert 4 not in view
    view.add(4)
    view.discard(5)
    assert view.discard(9) is False
    assert list(held) == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    with pytest.raises(ValueError, match="outside"):
        view.add(7)
    with pytest.raises(ValueError, match="not inside"):
        view.view(2, 4)
    with pytest.raises(ValueError, match="less"):
        held.view(5, 4)
    assert list(view.view(4, 5)) == [4]
    assert view & {3, 7} == {3}
    view.clear()
    assert list(held) == [0, 1, 2, 7, 8, 9]
    with pytest.raises(ValueError, match="empty"):
        view.min()


# Lists and arrays


def test_list_misuse_raises_errors_of_python_lists(space: VolatileObjectSpace) -> None:
    held = space.create_list("it")
    held.extend([1, 2, 3])
    for step in (
        lambda: held[3],
        lambda: held.pop(7),
        lambda: held.__setitem__(-4, 0),
        lambda: held.__delitem__(3),
    ):
        with pytest.raises(IndexError):
            step()
    with pytest.raises(ValueError, match="attempt to assign"):
        held[::2] = [1, 2, 3]
    with pytest.raises(TypeError):
        held.sort(key=lambda value: [value, "x"][value % 2])
    assert held == [1, 2, 3]
    held += [4]
    held += held
    assert held == [1, 2, 3, 4] * 2
    assert held != (1, 2, 3, 4)
    held.insert(10**9, "end")
    held.insert(-(10**9), "start")
    assert (held[0], held[-1]) == ("start", "end")
    with pytest.raises(TypeError):
        hash(held)


def test_list_is_unchanged_after_rejecting_unserializable_value(space: VolatileObjectSpace) -> None:
    held = space.create_list("it")
    held.extend([1, 2])
    bad = object()
    for step in (
        lambda: held.append(bad),
        lambda: held.extend([3, bad]),
        lambda: held.insert(0, bad),
        lambda: held.__setitem__(0, bad),
        lambda: held.__setitem__(slice(0, 1), [3, bad]),
        lambda: held.__setitem__(slice(None), [3, bad]),
    ):
        with pytest.raises(NotSerializable):
            step()
        assert held == [1, 2]


def test_array_slice_assignment_keeps_length(space: VolatileObjectSpace) -> None:
    held = space.create_array("it", 3, 0)
    with pytest.raises(ValueError, match="3 values to 2 places"):
        held[:2] = [1, 2, 3]
    held[1:] = [1, 2]
    assert held == [0, 1, 2]
    assert not hasattr(held, "append")


def test_empty_queue_stack_and_linked_list_raise_index_error(space: VolatileObjectSpace) -> None:
    queue, stack, linked = space.create_queue("q"), space.create_stack("s"), space.create_linked_list("l")
    for step in (queue.dequeue, queue.peek, stack.pop, stack.peek, linked.remove_first, linked.remove_last):
        with pytest.raises(IndexError, match="empty"):
            step()
    stack.extend([1, 2])
    assert (list(stack), list(reversed(stack)), stack.peek(), 2 in stack) == ([2, 1], [1, 2], 2, True)


# Linked lists


def test_linked_nodes_report_their_list_and_neighbours(space: VolatileObjectSpace) -> None:
    linked, other = space.create_linked_list("it"), space.create_linked_list("other")
    two = linked.add_last(2)
    one = linked.add_before(two, 1)
    three = linked.add_after(two, LinkedNode(3))
    assert (linked.first, linked.last, two.previous, two.next, two.list) == (one, three, one, three, linked)
    for step in (
        lambda: linked.add_last(two),
        lambda: other.add_last(two),
        lambda: other.remove_node(two),
        lambda: other.add_before(two, 0),
        lambda: linked.add_after(LinkedNode(9), 0),
    ):
        with pytest.raises(ValueError, match="list"):
            step()
    linked.remove_node(two)
    assert (two.list, two.previous, two.next) == (None, None, None)
    two.value = "free"
    other.add_first(two)
    assert (list(linked), list(other), linked.find(9), linked.find_last(3)) == ([1, 3], ["free"], None, three)
    with pytest.raises(NotSerializable):
        three.value = object()
    assert three.value == 3
    linked.clear()
    assert (three.list, linked.first, linked.last) == (None, None, None)


def test_linked_list_allows_node_removal_during_iteration(space: VolatileObjectSpace) -> None:
    linked = space.create_linked_list("it")
    linked.extend(range(10))
    for node in linked.nodes():
        if node.value % 2:
            linked.remove_node(node)
    assert list(linked) == [0, 2, 4, 6, 8]


def test_dictionary_add_rejects_existing_key(space: VolatileObjectSpace) -> None:
    for kind in ("dictionary", "sorted_dictionary"):
        held = getattr(space, f"create_{kind}")(kind)
        held.add("a", 1)
        with pytest.raises(ValueError, match="the key exists"):
            held.add("a", 2)
        with pytest.raises(KeyError):
            held["b"]
        assert held == {"a": 1}
        assert (held.get("a"), held.get("b", 7), list(held.items()), held.popitem()) == (
            1,
            7,
            [("a", 1)],
            ("a", 1),
        )
        with pytest.raises(KeyError):
            held.popitem()
