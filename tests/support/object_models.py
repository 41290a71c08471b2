"""Each kind of object and the Python collection that it must equal.

A `Subject` says how to create, get and edit an object. An edit is drawn once and applied to both. Both must
return the same or raise the same error.
"""

from __future__ import annotations

import copy
import operator
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from rt.objects import PersistedObjectSpace

Draw = Callable[[st.SearchStrategy[Any]], Any]
Step = Callable[[Any], Any]
Edit = Callable[[Draw], "tuple[Step, Step]"]

NUMBERS = st.integers(0, 12)
ITEMS = NUMBERS | st.text(max_size=3) | st.tuples(NUMBERS, st.binary(max_size=2))
INDEXES = st.integers(-8, 8)
SLICES = st.builds(slice, st.none() | INDEXES, st.none() | INDEXES, st.sampled_from([None, None, 1, 2, -1]))
MANY = st.lists(ITEMS, max_size=5)
LENGTH = 7


@dataclass(frozen=True)
class Subject:
    create: Callable[[PersistedObjectSpace, str], Any]
    get: Callable[[PersistedObjectSpace, str], Any]
    model: Callable[[], Any]
    edits: list[Edit]
    look: Callable[[Any], Any] = list
    """The content of the object, in its order."""
    plain: Callable[[Any], Any] = list
    """The content of the model, which must equal `tidy(look(object))`."""
    tidy: Callable[[Any], Any] = lambda seen: seen


def alike(step: Step) -> tuple[Step, Step]:
    return step, step


def one(name: str, *arguments: st.SearchStrategy[Any], answers: bool = True) -> Edit:
    """Return an edit that calls the same method of the object and the model."""

    def edit(draw: Draw) -> tuple[Step, Step]:
        values = [draw(each) for each in arguments]

        def step(target: Any) -> Any:
            answer = getattr(target, name)(*copy.deepcopy(values))
            return answer if answers else None

        return alike(step)

    return edit


def two(theirs: Callable[..., Any], ours: Callable[..., Any], *arguments: st.SearchStrategy[Any]) -> Edit:
    """Return an edit with different calls for the object and the model."""

    def edit(draw: Draw) -> tuple[Step, Step]:
        values = [draw(each) for each in arguments]
        return (lambda target: theirs(target, *values)), (lambda target: ours(target, *values))

    return edit


def set_slice(target: Any, place: slice, values: list[Any]) -> None:
    target[place] = values


def set_places(target: Any, place: slice, value: Any) -> None:
    target[place] = [value] * len(range(len(target))[place])


def method(name: str) -> Callable[..., Any]:
    return lambda target, *values: getattr(target, name)(*values)


def answered(name: str) -> Callable[..., Any]:
    return lambda target, *values: bool(getattr(target, name)(*values)) and None


def node_at(linked: Any, index: int) -> Any:
    nodes = list(linked.nodes())
    return nodes[index] if index < len(nodes) else None


def at_node(act: Callable[[Any, Any, Any], Any]) -> Callable[..., Any]:
    def step(linked: Any, index: int, value: Any = None) -> None:
        node = node_at(linked, index)
        if node is not None:
            act(linked, node, value)

    return step


def at_index(act: Callable[[list[Any], int, Any], Any]) -> Callable[..., Any]:
    def step(model: list[Any], index: int, value: Any = None) -> None:
        if index < len(model):
            act(model, index, value)

    return step


def set_value(node: Any, value: Any) -> None:
    node.value = value


def move_first_to_last(linked: Any) -> None:
    node = linked.first
    if node is not None:
        linked.remove_node(node)
        linked.add_last(node)


PLACES = st.integers(0, 8)

LIST_EDITS = [
    *[one("append", ITEMS)] * 4,
    *[one("extend", MANY)] * 3,
    one("insert", INDEXES, ITEMS),
    *[one("__setitem__", INDEXES, ITEMS)] * 6,
    one("__delitem__", INDEXES),
    one("__delitem__", SLICES),
    *[one("pop")] * 3,
    one("pop", INDEXES),
    one("remove", ITEMS),
    one("reverse"),
    one("clear"),
    two(set_slice, set_slice, SLICES, MANY),
    two(lambda target: target.sort(key=repr), lambda target: target.sort(key=repr)),
]

SET_EDITS = [
    *[one("add", NUMBERS, answers=False)] * 4,
    *[one("discard", NUMBERS, answers=False)] * 3,
    one("remove", NUMBERS),
    one("clear"),
    one("update", st.sets(NUMBERS)),
    one("difference_update", st.sets(NUMBERS)),
    one("intersection_update", st.sets(NUMBERS, min_size=6)),
    one("symmetric_difference_update", st.sets(NUMBERS)),
    two(
        lambda own, other: operator.ixor(own, other) and None,
        lambda own, other: own.__ixor__(other) and None,
        st.sets(NUMBERS),
    ),
    two(lambda own, other: own.issubset(other), lambda own, other: own <= other, st.sets(NUMBERS)),
    two(lambda own, other: own | other, lambda own, other: own | other, st.sets(NUMBERS)),
]

DICTIONARY_EDITS = [
    *[one("__setitem__", NUMBERS, ITEMS)] * 5,
    *[one("__delitem__", NUMBERS)] * 3,
    one("pop", NUMBERS),
    one("pop", NUMBERS, st.none()),
    one("setdefault", NUMBERS, ITEMS),
    one("update", st.dictionaries(NUMBERS, ITEMS, max_size=4)),
    one("get", NUMBERS),
    one("clear"),
]

SUBJECTS = {
    "value": Subject(
        lambda space, name: space.create_value(name, 0),
        lambda space, name: space.get_value(name),
        lambda: [0],
        [two(set_value, lambda model, value: model.__setitem__(0, value), ITEMS | MANY)],
        look=lambda value: [value.value],
    ),
    "array": Subject(
        lambda space, name: space.create_array(name, LENGTH, None),
        lambda space, name: space.get_array(name),
        lambda: [None] * LENGTH,
        [
            one("__setitem__", INDEXES, ITEMS),
            two(set_places, set_places, SLICES, ITEMS),
            one("__getitem__", SLICES),
        ],
    ),
    "list": Subject(
        lambda space, name: space.create_list(name),
        lambda space, name: space.get_list(name),
        list,
        LIST_EDITS,
    ),
    "queue": Subject(
        lambda space, name: space.create_queue(name),
        lambda space, name: space.get_queue(name),
        deque,
        [
            *[two(method("enqueue"), method("append"), ITEMS)] * 3,
            *[two(method("dequeue"), method("popleft"))] * 4,
            *[one("extend", MANY)] * 3,
            one("clear"),
            two(method("peek"), lambda model: model[0]),
        ],
    ),
    "stack": Subject(
        lambda space, name: space.create_stack(name),
        lambda space, name: space.get_stack(name),
        list,
        [
            *[two(method("push"), method("append"), ITEMS)] * 3,
            *[one("pop")] * 4,
            *[one("extend", MANY)] * 2,
            one("clear"),
            two(method("peek"), lambda model: model[-1]),
        ],
        plain=lambda model: model[::-1],
    ),
    "linked_list": Subject(
        lambda space, name: space.create_linked_list(name),
        lambda space, name: space.get_linked_list(name),
        list,
        [
            two(lambda linked, value: linked.add_last(value) and None, method("append"), ITEMS),
            two(
                lambda linked, value: linked.add_first(value) and None,
                lambda model, value: model.insert(0, value),
                ITEMS,
            ),
            two(at_node(method("add_before")), at_index(list.insert), PLACES, ITEMS),
            two(
                at_node(method("add_after")),
                at_index(lambda model, at, value: model.insert(at + 1, value)),
                PLACES,
                ITEMS,
            ),
            two(
                at_node(lambda linked, node, _: linked.remove_node(node)),
                at_index(lambda model, at, _: model.pop(at)),
                PLACES,
            ),
            two(
                at_node(lambda _, node, value: set_value(node, value)),
                at_index(list.__setitem__),
                PLACES,
                ITEMS,
            ),
            two(method("remove"), lambda model, value: value in model and not model.remove(value), ITEMS),
            two(move_first_to_last, lambda model: model and model.append(model.pop(0))),
            two(method("remove_first"), lambda model: model.pop(0)),
            two(method("remove_last"), lambda model: model.pop()),
            one("extend", MANY),
            one("clear"),
        ],
    ),
    "set": Subject(
        lambda space, name: space.create_set(name),
        lambda space, name: space.get_set(name),
        set,
        SET_EDITS,
        plain=sorted,
        tidy=sorted,
    ),
    "sorted_set": Subject(
        lambda space, name: space.create_sorted_set(name),
        lambda space, name: space.get_sorted_set(name),
        set,
        [
            *SET_EDITS,
            two(method("min"), min),
            two(method("max"), max),
            two(lambda own: list(reversed(own)), lambda model: sorted(model, reverse=True)),
            two(
                lambda own, low, more: list(own.view(low, low + more)),
                lambda model, low, more: [each for each in sorted(model) if low <= each <= low + more],
                NUMBERS,
                NUMBERS,
            ),
            two(
                lambda own, low, more: own.view(low, low + more).clear(),
                lambda model, low, more: model.difference_update(range(low, low + more + 1)),
                NUMBERS,
                NUMBERS,
            ),
        ],
        plain=sorted,
    ),
    "dictionary": Subject(
        lambda space, name: space.create_dictionary(name),
        lambda space, name: space.get_dictionary(name),
        dict,
        DICTIONARY_EDITS,
        look=lambda held: list(held.items()),
        plain=lambda model: sorted(model.items(), key=lambda pair: pair[0]),
        tidy=lambda pairs: sorted(pairs, key=lambda pair: pair[0]),
    ),
    "sorted_dictionary": Subject(
        lambda space, name: space.create_sorted_dictionary(name),
        lambda space, name: space.get_sorted_dictionary(name),
        dict,
        [
            *DICTIONARY_EDITS,
            two(method("min"), min),
            two(method("max"), max),
            two(lambda own: list(reversed(own)), lambda model: sorted(model, reverse=True)),
            two(
                lambda own, low, high: list(own.between(low, high)),
                lambda model, low, high: [each for each in sorted(model) if low <= each <= high],
                NUMBERS,
                NUMBERS,
            ),
        ],
        look=lambda held: list(held.items()),
        plain=lambda model: sorted(model.items(), key=lambda pair: pair[0]),
    ),
}


def outcome(step: Step, target: Any) -> Any:
    """Return the result of `step`, or the kind of error that it raises."""
    try:
        answer = step(target)
    except (IndexError, KeyError, ValueError) as error:
        return next(kind for kind in (IndexError, KeyError, ValueError) if isinstance(error, kind))
    return None if answer is target else answer
