"""The object space: its contract, the rows that a save writes, and recovery after a failed commit."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest

import rt
from rt.objects import (
    CheckpointKind,
    CommitUnknown,
    JsonValueSerializer,
    MemoryStore,
    NoSuchObject,
    NotSerializable,
    ObjectError,
    ObjectExists,
    OutOfTurn,
    PersistedObjectSpace,
    PickleSerializer,
    Serializers,
    StateDamaged,
    StateReader,
    VolatileObjectSpace,
    WrongKind,
    WrongType,
)

FULL, DIFFERENTIAL = CheckpointKind.FULL, CheckpointKind.DIFFERENTIAL
EMPTY_KINDS = [
    "list",
    "queue",
    "stack",
    "linked_list",
    "set",
    "sorted_set",
    "dictionary",
    "sorted_dictionary",
]
ARGUMENTS: dict[str, tuple[Any, ...]] = {"value": (1,), "array": (3, 0)}
ALL_KINDS = ["value", "array", *EMPTY_KINDS]


def new(store: MemoryStore, **options: Any) -> PersistedObjectSpace:
    """A space loaded from a store."""
    space = PersistedObjectSpace(**options)
    space.load(store.reader())
    return space


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture(params=[PersistedObjectSpace, VolatileObjectSpace])
def twin(request: pytest.FixtureRequest) -> Any:
    return request.param()


def make(space: Any, kind: str, object_id: str = "it", **options: Any) -> Any:
    return getattr(space, f"create_{kind}")(object_id, *ARGUMENTS.get(kind, ()), **options)


# The contract of both spaces


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_get_returns_created_object_until_deleted(twin: Any, kind: str) -> None:
    made = make(twin, kind)
    assert made.id == "it"
    assert getattr(twin, f"get_{kind}")("it") is made
    assert getattr(twin, f"get_or_create_{kind}")("it", *ARGUMENTS.get(kind, ())) is made
    assert "it" in twin
    assert twin.ids() == ["it"]
    twin.delete("it")
    assert len(twin) == 0
    with pytest.raises(NoSuchObject):
        getattr(twin, f"get_{kind}")("it")
    assert getattr(twin, f"get_or_create_{kind}")("it", *ARGUMENTS.get(kind, ())) is not made


@pytest.mark.parametrize(("kind", "other"), list(itertools.pairwise([*ALL_KINDS, "value"])))
def test_id_is_unique_across_kinds(twin: Any, kind: str, other: str) -> None:
    make(twin, kind)
    with pytest.raises(ObjectExists):
        make(twin, other)
    with pytest.raises(WrongKind):
        getattr(twin, f"get_{other}")("it")
    with pytest.raises(WrongKind):
        getattr(twin, f"get_or_create_{other}")("it", *ARGUMENTS.get(other, ()))


def test_typed_list_rejects_elements_and_lookups_of_another_type(twin: Any) -> None:
    numbers = twin.create_list("numbers", of=int)
    numbers.append(1)
    for bad in ("1", 1.0, True, None):
        with pytest.raises(NotSerializable):
            numbers.append(bad)
    with pytest.raises(NotSerializable):
        numbers.extend([2, "3"])
    assert numbers == [1]
    assert twin.get_list("numbers") is numbers
    assert twin.get_list("numbers", of=int) is numbers
    with pytest.raises(WrongType, match="got str, expected int"):
        twin.get_list("numbers", of=str)
    with pytest.raises(WrongType, match="no serializer"):
        twin.create_list("other", of=complex)
    assert twin.ids() == ["numbers"]


@pytest.mark.parametrize("bad", [None, 7, b"bytes"])
def test_non_text_id_raises_type_error(twin: Any, bad: Any) -> None:
    with pytest.raises(TypeError):
        twin.create_list(bad)


@pytest.mark.parametrize("bad", ["", "x" * 1025, "\ud800"])
def test_empty_too_long_or_unencodable_id_raises_value_error(twin: Any, bad: str) -> None:
    with pytest.raises(ValueError, match="id"):
        twin.create_list(bad)


def test_delete_of_missing_object_raises_no_such_object(twin: Any) -> None:
    with pytest.raises(NoSuchObject, match="no such object: got 'it'"):
        twin.delete("it")
    with pytest.raises(KeyError):
        twin.delete("it")


@pytest.mark.parametrize("kind", EMPTY_KINDS)
def test_deleted_object_rejects_edits(twin: Any, kind: str) -> None:
    made = make(twin, kind)
    made.clear()
    twin.delete("it")
    with pytest.raises(NoSuchObject, match="deleted"):
        made.clear()
    assert list(made) == []


def test_array_rejects_negative_or_different_length(twin: Any) -> None:
    with pytest.raises(ValueError, match="-1"):
        twin.create_array("it", -1, 0)
    twin.create_array("it", 2, 0)
    with pytest.raises(ValueError, match="has 2 items, not 3"):
        twin.get_or_create_array("it", 3, 0)


def test_threads_create_and_delete_objects_concurrently(twin: Any) -> None:
    def work(name: str) -> None:
        for number in range(200):
            twin.create_value(f"{name}-{number}", number)
            twin.get_or_create_list("shared")
            if number % 2:
                twin.delete(f"{name}-{number}")

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(twin) == 4 * 100 + 1


# Loading


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_wrong_kind_or_type_is_rejected_without_reading_items(store: MemoryStore, kind: str) -> None:
    space = new(store)
    types = {"keys": int, "values": int} if "dictionary" in kind else {"of": int}
    make(space, kind, **types)
    space.checkpoint(store)
    content = {category: rows for category, rows in store.content().items() if "/item/" not in category}
    again = new(MemoryStore(content))  # the item rows are missing
    with pytest.raises(WrongKind):
        getattr(again, "get_value" if kind != "value" else "get_list")("it")
    with pytest.raises(WrongType):
        getattr(again, f"get_{kind}")("it", **dict.fromkeys(types, str))


def test_object_is_read_at_first_get(store: MemoryStore) -> None:
    space = new(store)
    space.create_list("it").append(1)
    space.checkpoint(store)
    content = store.content()
    del content["state/item/it/items"]
    damaged = MemoryStore(content)
    again = new(damaged)
    for _ in range(2):
        with pytest.raises(StateDamaged, match="0 items, expected 1"):
            again.get_list("it")
    assert "it" in again


def test_load_into_used_or_loaded_space_raises_out_of_turn(store: MemoryStore) -> None:
    used = PersistedObjectSpace()
    used.create_value("it", 1)
    for space in (used, new(store)):
        with pytest.raises(OutOfTurn):
            space.load(store.reader())


def test_ids_with_special_characters_survive_reload(store: MemoryStore) -> None:
    ids = ["a", "a/items", "..", "%2F", " ", "é☃", "\0", "state/index", "A" * 1024, "'; DROP TABLE rows"]
    space = new(store)
    for number, object_id in enumerate(ids):
        space.create_list(object_id).append(number)
    space.checkpoint(store)
    again = new(store)
    assert sorted(again.ids()) == sorted(ids)
    assert [again.get_list(object_id)[0] for object_id in ids] == list(range(len(ids)))


def test_spaces_with_different_prefixes_share_store(store: MemoryStore) -> None:
    for prefix in ("a/", "b/"):
        space = new(store, prefix=prefix)
        space.create_value("it", prefix)
        space.checkpoint(store)
    assert [new(store, prefix=prefix).get_value("it").value for prefix in ("a/", "b/")] == ["a/", "b/"]
    assert len(new(store)) == 0


def damaged(change: Callable[[dict[str, dict[str, bytes]]], object]) -> MemoryStore:
    store = MemoryStore()
    space = new(store)
    space.create_list("it").extend([1, 2])
    space.create_linked_list("linked").extend("abc")
    space.create_queue("queue").extend("abc")
    space.create_set("set").update([1, 2])
    space.create_dictionary("dictionary").update({"a": 1})
    space.checkpoint(store)
    content = store.content()
    change(content)
    return MemoryStore(content)


def test_unknown_version_is_rejected() -> None:
    with pytest.raises(rt.UnknownVersion, match="expected 1"):
        new(damaged(lambda content: content["state"].update(version=b"2")))


def test_objects_without_version_are_rejected() -> None:
    with pytest.raises(StateDamaged, match="no version"):
        new(damaged(lambda content: content.pop("state")))


@pytest.mark.parametrize(
    "row", [b"", b"7", b"{}", b'{"kind":1,"types":[]}', b'{"kind":"List","types":"int"}', b"\xff"]
)
def test_corrupt_index_is_rejected(row: bytes) -> None:
    with pytest.raises(StateDamaged, match="index"):
        new(damaged(lambda content: content["state/index"].update(it=row)))


@pytest.mark.parametrize(
    ("kind", "object_id", "part", "key", "row"),
    [
        ("list", "it", "metadata", "length", None),
        ("list", "it", "metadata", "length", b"-1"),
        ("list", "it", "metadata", "length", b"3"),
        ("list", "it", "metadata", "length", b"1"),
        ("list", "it", "metadata", "length", b"9" * 19),
        ("list", "it", "items", "1", None),
        ("list", "it", "items", "1", b"{"),
        ("list", "it", "items", "1", b'{"$":"what","of":[]}'),
        ("list", "it", "items", "not a number", b"1"),
        ("list", "it", "items", "-1", b"1"),
        ("queue", "queue", "metadata", "head", b"4"),
        ("queue", "queue", "metadata", "tail", b"4"),
        ("queue", "queue", "items", "0", None),
        ("set", "set", "items", "7", b"1"),
        ("set", "set", "items", "7", b"[1]"),
        ("dictionary", "dictionary", "items", "7", b'{"key":"a","value":2}'),
        ("dictionary", "dictionary", "items", "0", b'{"key":"a"}'),
        ("linked_list", "linked", "metadata", "0", b'{"key":-1,"value":2}'),
        ("linked_list", "linked", "metadata", "0", b'{"key":2,"value":1}'),
        ("linked_list", "linked", "metadata", "1", b'{"key":0,"value":0}'),
        ("linked_list", "linked", "metadata", "1", b'{"key":-1,"value":2}'),
        ("linked_list", "linked", "metadata", "1", b'{"key":0,"value":-1}'),
        ("linked_list", "linked", "metadata", "2", b'{"key":1,"value":7}'),
        ("linked_list", "linked", "metadata", "2", None),
        ("linked_list", "linked", "data", "2", None),
    ],
)
def test_corrupt_object_is_rejected_without_affecting_others(
    kind: str, object_id: str, part: str, key: str, row: bytes | None
) -> None:
    def change(content: dict[str, dict[str, bytes]]) -> None:
        rows = content[f"state/item/{object_id}/{part}"]
        rows.pop(key, None)
        if row is not None:
            rows[key] = row

    space = new(damaged(change))
    with pytest.raises(StateDamaged, match=f"state/item/{object_id}/"):
        getattr(space, f"get_{kind}")(object_id)
    for other in {"it": "list", "queue": "queue", "set": "set"}.items():
        if other[0] != object_id:
            getattr(space, f"get_{other[1]}")(other[0])
    space.delete(object_id)


# The order of calls


def test_save_outcome_must_be_recorded_exactly_once(store: MemoryStore) -> None:
    space = new(store)
    for tell in (space.on_saved, space.on_save_failed):
        with pytest.raises(OutOfTurn, match="no save"):
            tell()
    writer = store.begin(DIFFERENTIAL)
    space.save(writer)
    writer.commit()
    other = store.begin(DIFFERENTIAL)
    with pytest.raises(OutOfTurn, match="outcome of the last save is missing"):
        space.save(other)
    space.on_saved()
    with pytest.raises(OutOfTurn):
        space.on_saved()
    space.checkpoint(store)


def test_differential_save_to_unrelated_store_raises_out_of_turn(store: MemoryStore) -> None:
    space = PersistedObjectSpace()
    space.create_value("it", 1)
    with pytest.raises(OutOfTurn, match="was not loaded from"):
        space.checkpoint(store)
    space.checkpoint(store, FULL)
    space.checkpoint(store)
    other = MemoryStore()
    with pytest.raises(OutOfTurn, match="was not loaded from"):
        space.checkpoint(other)
    assert other.content() == {}
    space.checkpoint(other, FULL)
    assert new(other).get_value("it").value == 1
    with pytest.raises(OutOfTurn):
        space.checkpoint(store)


def test_unserializable_nested_value_fails_save_and_changes_no_rows(store: MemoryStore) -> None:
    space = new(store)
    before, bad, behind = (space.create_list(name) for name in ("before", "bad", "behind"))
    space.checkpoint(store)
    content = store.content()
    inner: list[Any] = []
    before.append(1)
    bad.append(inner)
    behind.append(2)
    inner.append(object())  # the space does not notice this change
    for kind in (DIFFERENTIAL, FULL):
        with pytest.raises(NotSerializable, match="object 'bad'"):
            space.checkpoint(store, kind)
        assert store.content() == content
    inner.clear()
    space.checkpoint(store)
    again = new(store)
    assert [again.get_list(name) for name in ("before", "bad", "behind")] == [[1], [[]], [2]]


class Failing(MemoryStore):
    """Commits raise `error`. `is_applied` tells whether they are applied nevertheless."""

    error: BaseException | None = None
    is_applied = False

    def begin(self, kind: CheckpointKind) -> Any:
        writer = super().begin(kind)
        commit = writer.commit

        def failing_commit() -> None:
            if self.error is None or self.is_applied:
                commit()
            else:
                writer.rollback()
            if self.error is not None:
                raise self.error

        writer.commit = failing_commit  # type: ignore[method-assign]
        return writer


@pytest.mark.parametrize("is_applied", [False, True])
@pytest.mark.parametrize("error", [CommitUnknown("half way"), KeyboardInterrupt()])
@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        # A save must neither lose nor leave behind these rows: lengths, and items beyond the end.
        ("list", ["pop"], [("append", 9)]),
        ("stack", [("push", 9)], ["pop"]),
        ("set", [("add", 9)], [("discard", 9)]),
        ("queue", [("enqueue", 9), "dequeue", "dequeue", "dequeue", "dequeue"], [("enqueue", 8)]),
        ("linked_list", [("add_last", 9)], ["remove_last", "remove_first"]),
        ("dictionary", [("add", 9, 9)], ["popitem", "popitem"]),
    ],
)
def test_next_save_repairs_commit_of_unknown_outcome(
    kind: str, before: list[Any], after: list[Any], is_applied: bool, error: BaseException
) -> None:
    store = Failing()
    space = new(store)
    made = make(space, kind)
    made.update({2: 2, 3: 3, 5: 5}) if kind in {"set", "dictionary"} else made.extend([2, 3, 5])
    space.checkpoint(store)
    store.is_applied = is_applied
    for steps, raised in ((before, error), (after, None)):
        for step in steps:
            name, *values = step if isinstance(step, tuple) else (step,)
            getattr(made, name)(*values)
        store.error = raised
        if raised is None:
            space.checkpoint(store)
        else:
            with pytest.raises(type(raised)):
                space.checkpoint(store)
    assert list(getattr(new(store), f"get_{kind}")("it")) == list(made)
    full = MemoryStore()
    space.checkpoint(full, FULL)
    assert full.content() == store.content()


def fill(made: Any, values: list[int]) -> None:
    made.update(dict.fromkeys(values, 0)) if hasattr(made, "update") else made.extend(values)


def take(made: Any, count: int) -> None:
    """Remove the newest element; from a queue the oldest."""
    name = {"queue": "dequeue", "linked_list": "remove_last", "dictionary": "popitem"}.get(made.id, "pop")
    for _ in range(count):
        getattr(made, name)()


def checkpoint_failing(space: PersistedObjectSpace, store: MemoryStore, end: str) -> None:
    writer = store.begin(DIFFERENTIAL)
    space.save(writer)
    writer.commit() if "applied" in end else writer.rollback()
    space.on_save_failed(unknown_outcome=end != "failed")


def check_whole(space: PersistedObjectSpace, store: MemoryStore) -> None:
    space.checkpoint(store)
    full = MemoryStore()
    space.checkpoint(full, FULL)
    assert store.content() == full.content()


ENDS = ["failed", "unknown", "unknown, applied"]


@pytest.mark.parametrize("kind", ["list", "stack", "queue", "linked_list", "set", "dictionary"])
@pytest.mark.parametrize(("first", "second"), list(itertools.product(ENDS, ENDS)))
@pytest.mark.parametrize(("grown", "taken"), [(3, 5), (3, 2), (0, 2), (2, 0)])
def test_next_save_repairs_two_consecutive_failed_checkpoints(
    kind: str, first: str, second: str, grown: int, taken: int
) -> None:
    store = MemoryStore()
    space = new(store)
    made = make(space, kind, kind)
    fill(made, [1, 2, 3, 4])
    space.checkpoint(store)
    fill(made, list(range(10, 10 + grown)))
    checkpoint_failing(space, store, first)
    take(made, taken)
    checkpoint_failing(space, store, second)
    check_whole(space, store)


@pytest.mark.parametrize("end", ENDS)
def test_next_save_includes_changes_of_failed_save(store: MemoryStore, end: str) -> None:
    space = new(store)
    items, held, linked = space.create_list("l"), space.create_dictionary("d"), space.create_linked_list("k")
    array, members = space.create_array("a", 4, 0), space.create_set("s")
    for made in (items, held, linked, members):
        fill(made, [1, 2, 3, 4])
    fill(space.create_list("doomed before"), [1])
    fill(space.create_list("doomed during"), [1])
    space.checkpoint(store)
    space.delete("doomed before")
    items[1] = array[2] = held[3] = "in the save"
    node = linked.find(2)
    assert node is not None
    node.value = "in the save"
    members.remove(1)
    writer = store.begin(DIFFERENTIAL)
    space.save(writer)
    items[2] = array[0] = held[4] = "during the save"
    members.add(5)
    linked.remove_first()
    space.delete("doomed during")
    writer.commit() if "applied" in end else writer.rollback()
    space.on_save_failed(unknown_outcome=end != "failed")
    check_whole(space, store)


@pytest.mark.parametrize("is_applied", [False, True])
def test_object_deleted_after_save_of_unknown_outcome_leaves_no_rows(
    is_applied: bool,
) -> None:
    store = Failing()
    space = new(store)
    space.create_value("kept", 1)
    space.checkpoint(store)
    content = store.content()
    space.create_list("it").append(1)
    store.is_applied, store.error = is_applied, CommitUnknown("half way")
    with pytest.raises(CommitUnknown):
        space.checkpoint(store)
    store.error = None
    space.delete("it")
    space.checkpoint(store)
    assert store.content() == content


def test_edits_between_save_and_its_outcome_belong_to_next_save(store: MemoryStore) -> None:
    space = new(store)
    items = space.create_list("it")
    items.append("in the save")
    writer = store.begin(DIFFERENTIAL)
    space.save(writer)
    items[0] = "edited"
    items.append("later")
    space.create_value("new", 1)
    writer.commit()
    space.on_saved()
    assert new(store).get_list("it") == ["in the save"]
    space.checkpoint(store)
    again = new(store)
    assert again.get_list("it") == ["edited", "later"]
    assert again.get_value("new").value == 1


# What a save writes


class Recorder:
    """A writer that records its calls."""

    def __init__(self, store: MemoryStore, kind: CheckpointKind) -> None:
        self._writer = store.begin(kind)
        self.kind, self.store_id = kind, store.store_id
        self.said: list[str] = []

    def reader(self) -> StateReader:
        return self._writer.reader()

    def clear_tree(self, root: str) -> None:
        self._writer.clear_tree(root)

    def put(self, category: str, key: str, data: bytes) -> None:
        self.said.append(f"+{category.removeprefix('state/item/')} {key} {data.decode()}")
        self._writer.put(category, key, data)

    def put_many(self, category: str, rows: Any) -> None:
        for key, data in rows:
            self.put(category, key, data)

    def delete_many(self, category: str, keys: Any) -> None:
        keys = list(keys)
        self.said.extend(f"-{category.removeprefix('state/item/')} {key}" for key in keys)
        self._writer.delete_many(category, keys)

    def clear(self, category: str) -> None:
        self.said.append(f"-{category.removeprefix('state/item/')} *")
        self._writer.clear(category)

    def commit(self) -> None:
        self._writer.commit()

    def rollback(self) -> None:
        self._writer.rollback()


def said(space: PersistedObjectSpace, store: MemoryStore, kind: CheckpointKind = DIFFERENTIAL) -> list[str]:
    recorder = Recorder(store, kind)
    space.save(recorder)
    recorder.commit()
    space.on_saved()
    return recorder.said


def test_differential_save_writes_only_changed_rows(store: MemoryStore) -> None:
    space = new(store)
    assert said(space, store) == ["+state version 1"]
    items = space.create_list("l", of=int)
    items.extend(range(100))
    space.create_value("v", "x")
    assert said(space, store)[:2] == [
        '+state/index l {"kind":"List","types":["int"]}',
        '+state/index v {"kind":"Value","types":["json"]}',
    ]
    assert said(space, store) == []
    items[62] = -1
    items[-1] = -2
    assert said(space, store) == ["+l/items 10 -1", "+l/items 1B -2"]
    items.append(7)
    items.pop()
    items.pop()
    assert said(space, store) == ["+l/metadata length 99", "-l/items 1B"]
    items.insert(98, 5)
    assert said(space, store) == ["+l/metadata length 100", "+l/items 1A 5", "+l/items 1B 98"]
    items.clear()
    items.append(1)
    assert said(space, store) == ["-l/metadata *", "-l/items *", "+l/metadata length 1", "+l/items 0 1"]


def test_queues_stacks_sets_and_dictionaries_write_only_changed_rows(store: MemoryStore) -> None:
    space = new(store)
    queue, stack, held, keyed = (
        space.create_queue("q"),
        space.create_stack("s"),
        space.create_set("h"),
        space.create_dictionary("d"),
    )
    queue.extend("abc")
    stack.extend("abc")
    held.update("abc")
    keyed.update(a=1, b=2)
    space.checkpoint(store)
    queue.dequeue()
    queue.enqueue("d")
    assert said(space, store) == ["+q/metadata head 1", "+q/metadata tail 4", "-q/items 0", '+q/items 3 "d"']
    stack.pop()
    stack.pop()
    stack.push("x")
    assert said(space, store) == ["+s/metadata count 2", '+s/items 1 "x"', "-s/items 2"]
    held.discard("a")
    held.discard("b")
    held.add("z")
    held.add("never stored")
    held.add("nor this")
    held.discard("nor this")
    assert said(space, store) == ['+h/items 0 "z"', '+h/items 1 "never stored"']
    keyed["b"] = 3
    del keyed["a"]
    assert said(space, store) == ['+d/items 1 {"key":"b","value":3}', "-d/items 0"]


def test_linked_list_writes_only_changed_node_and_neighbours(store: MemoryStore) -> None:
    space = new(store)
    linked = space.create_linked_list("k")
    linked.extend("abcd")
    space.checkpoint(store)
    node = linked.find("c")
    assert node is not None
    linked.add_before(node, "x")
    assert said(space, store) == [
        '+k/metadata 1 {"key":0,"value":4}',
        '+k/metadata 2 {"key":4,"value":3}',
        '+k/metadata 4 {"key":1,"value":2}',
        '+k/data 4 "x"',
    ]
    node.value = "C"
    assert said(space, store) == ['+k/data 2 "C"']
    linked.remove_node(node)
    assert said(space, store) == [
        '+k/metadata 3 {"key":4,"value":-1}',
        '+k/metadata 4 {"key":1,"value":3}',
        "-k/metadata 2",
        "-k/data 2",
    ]


def test_object_created_and_deleted_between_saves_writes_no_rows(store: MemoryStore) -> None:
    space = new(store)
    space.checkpoint(store)
    space.create_list("it").append(1)
    space.delete("it")
    assert said(space, store) == []


def test_object_created_again_after_delete_keeps_no_old_rows(store: MemoryStore) -> None:
    space = new(store)
    space.create_set("it").update(range(5))
    space.checkpoint(store)
    space.delete("it")
    space.create_list("it").append(1)
    assert said(space, store) == [
        '+state/index it {"kind":"List","types":["json"]}',
        "-it/items *",
        "+it/metadata length 1",
        "+it/items 0 1",
    ]
    again = new(store)
    again.delete("it")
    again.checkpoint(store)
    assert store.content() == {"state": {"version": b"1"}}


def test_full_save_includes_objects_not_yet_read(store: MemoryStore) -> None:
    space = new(store)
    for kind in ALL_KINDS:
        made = make(space, kind, kind)
        if "dictionary" in kind:
            made["a"] = "b"
        elif kind in {"set", "sorted_set"}:
            made.update("abc")
        elif kind not in ARGUMENTS:
            made.extend("abc")
    space.checkpoint(store)
    content = store.content()
    again = new(store)
    again.get_list("list")
    again.checkpoint(store, FULL)
    assert store.content() == content
    other = MemoryStore({"state/item/old/items": {"1": b""}, "theirs": {"1": b""}})
    again.checkpoint(other, FULL)
    assert other.content() == {**content, "theirs": {"1": b""}}


def test_object_of_unknown_kind_is_kept_unchanged_until_deleted(store: MemoryStore) -> None:
    space = new(store)
    space.create_list("it").append(1)
    space.checkpoint(store)
    content = store.content()
    content["state/index"]["new"] = b'{"kind":"Matrix","types":["int"],"rank":2}'
    content["state/item/new/cells"] = {"0": b"1", "1": b"2"}
    newer = MemoryStore(content)
    again = new(newer)
    with pytest.raises(WrongKind, match="expected Matrix"):
        again.get_list("new")
    with pytest.raises(ObjectExists):
        again.create_list("new")
    again.get_list("it").append(2)
    again.checkpoint(newer)
    again.checkpoint(newer, FULL)
    assert newer.content()["state/item/new/cells"] == content["state/item/new/cells"]
    assert newer.content()["state/index"]["new"] == content["state/index"]["new"]
    again.delete("new")
    again.checkpoint(newer)
    assert "state/item/new/cells" not in newer.content()


def test_set_order_after_additions_is_same_with_and_without_reload(store: MemoryStore) -> None:
    space = new(store)
    one = space.create_set("it")
    one.update(range(20))
    one.difference_update([3, 4, 11, 19, 18])
    space.checkpoint(store)
    two = new(store).get_set("it")
    for each in (one, two):
        each.update(["a", "b", "c", "d", "e", "f"])
    assert list(one) == list(two)


@pytest.mark.parametrize("kind", ["set", "dictionary"])
@pytest.mark.parametrize("around", [lambda nan: nan, lambda nan: ("a", nan)], ids=["alone", "in a tuple"])
def test_nan_is_stored_as_one_key(store: MemoryStore, kind: str, around: Callable[[float], Any]) -> None:
    space = new(store)
    held = make(space, kind)
    for _ in range(2):
        key = around(float("nan"))  # each NaN is a new object, and unequal to the previous one
        held.add(key) if kind == "set" else held.__setitem__(key, 1)
    space.checkpoint(store)
    loaded = getattr(new(store), f"get_{kind}")("it")
    assert len(held) == len(loaded) == 1
    assert around(math.nan) in held
    assert around(math.nan) in loaded


# Serializers


class Point:
    def __init__(self, x: int, y: int) -> None:
        self.x, self.y = x, y

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Point) and (self.x, self.y) == (other.x, other.y)

    def __hash__(self) -> int:
        return hash((self.x, self.y))


def registered(serializer: Any) -> Serializers:
    serializers = Serializers()
    serializers.register(Point, serializer)
    return serializers


def pairs() -> Any:
    return JsonValueSerializer(
        "point", Point, to_plain=lambda point: [point.x, point.y], from_plain=lambda plain: Point(*plain)
    )


@pytest.mark.parametrize("make_serializer", [pairs, lambda: PickleSerializer("point", Point)])
def test_registered_custom_type_survives_reload(
    store: MemoryStore, make_serializer: Callable[[], Any]
) -> None:
    space = new(store, serializers=registered(make_serializer()))
    points = space.create_set("points", of=Point)
    points.add(Point(1, 2))
    names = space.create_dictionary("names", keys=Point, values=bytes)
    names[Point(3, 4)] = b"there"
    with pytest.raises(NotSerializable):
        points.add(Point("x", object()) if isinstance(make_serializer(), JsonValueSerializer) else (1, 2))
    space.checkpoint(store)
    again = new(store, serializers=registered(make_serializer()))
    assert set(again.get_set("points")) == {Point(1, 2)}
    assert again.get_dictionary("names", keys=Point) == {Point(3, 4): b"there"}


def test_unregistered_pickled_type_is_not_unpickled(store: MemoryStore) -> None:
    space = new(store)
    space.create_value("it", Point(1, 2), of=PickleSerializer("pickled", Point))
    space.checkpoint(store)
    with pytest.raises(WrongType, match="not registered: got pickled"):
        new(store).get_value("it")
    assert new(store).get_value("it", of=PickleSerializer("pickled", Point)).value == Point(1, 2)


def test_second_registration_of_type_or_name_raises_value_error() -> None:
    serializers = Serializers()
    with pytest.raises(ValueError, match="registered already"):
        serializers.register(int, JsonValueSerializer("whole"))
    with pytest.raises(ValueError, match="registered already"):
        serializers.register(Point, JsonValueSerializer("int"))
    with pytest.raises(ValueError, match="name"):
        JsonValueSerializer("")


def test_object_errors_derive_from_rt_errors() -> None:
    assert issubclass(ObjectError, rt.RtError)
    assert issubclass(StateDamaged, rt.FormatError)
    assert issubclass(CommitUnknown, rt.StorageFailed)
    assert str(NoSuchObject("gone", where="it")) == "gone (at it)"
