"""Several object spaces and an engine in one store: full saves, moves, owners and stale spaces."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rt
from rt.objects import CheckpointKind, MemoryStore, OutOfTurn, PersistedObjectSpace, SqliteStore, Store
from rt.query import Factories, QueryEngine, Source

FULL, DIFFERENTIAL = CheckpointKind.FULL, CheckpointKind.DIFFERENTIAL
PREFIXES = ["", "a", "ab", "a/", "a/b", "mystate", "state"]


def memory_store(_: Path, name: str = "state") -> Store:
    del name
    return MemoryStore()


def sqlite_store(directory: Path, name: str = "state") -> Store:
    return SqliteStore(directory / f"{name}.db")


@pytest.fixture(params=[memory_store, sqlite_store, "postgres"])
def make(request: pytest.FixtureRequest) -> Callable[..., Store]:
    if request.param == "postgres":
        return request.getfixturevalue("postgres").store  # type: ignore[no-any-return]
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def store(make: Callable[..., Store], tmp_path: Path) -> Iterator[Store]:
    made = make(tmp_path)
    yield made
    made.close()


def loaded(store: Store, prefix: str = "") -> PersistedObjectSpace:
    space = PersistedObjectSpace(prefix=prefix)
    space.load(store.reader())
    return space


def held(store: Store, prefix: str) -> dict[str, Any]:
    space = loaded(store, prefix)
    return {each: dict(space.get_dictionary(each)) for each in space.ids()}


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(PREFIXES, 2)))
def test_full_save_of_one_prefix_keeps_objects_of_another(store: Store, first: str, second: str) -> None:
    spaces = {prefix: loaded(store, prefix) for prefix in (first, second)}
    for prefix, space in spaces.items():
        space.create_dictionary("kept").update({"of": prefix})
        space.create_dictionary("deleted")["of"] = prefix
        space.checkpoint(store)
    spaces[first].delete("deleted")
    spaces[first].checkpoint(store, FULL)
    spaces[second].get_dictionary("kept")["more"] = 1
    spaces[second].checkpoint(store)
    assert held(store, first) == {"kept": {"of": first}}
    assert held(store, second) == {"kept": {"of": second, "more": 1}, "deleted": {"of": second}}


@pytest.mark.parametrize("kind", list(CheckpointKind))
def test_engine_and_space_keep_separate_objects_in_one_store(store: Store, kind: CheckpointKind) -> None:
    factories = Factories()
    factories.add("empty", lambda: Source("none"))
    engine = QueryEngine(store, factories)
    engine.recover()
    engine.define("mine", "empty")
    space = loaded(store)
    space.create_dictionary("mine")["of"] = "space"
    space.checkpoint(store, kind)
    engine.checkpoint(FULL)
    space.checkpoint(store, FULL)
    engine.unload()
    again = QueryEngine(store, factories)
    assert list(again.definitions) == ["mine"]
    again.unload()
    assert held(store, "") == {"mine": {"of": "space"}}


@pytest.mark.parametrize(
    "prefix", ["state/", "a/state/", "state/item/x/", "query/", "query/objects", "\ud800"]
)
def test_reserved_or_invalid_prefix_is_rejected(prefix: str) -> None:
    with pytest.raises(ValueError, match="prefix"):
        PersistedObjectSpace(prefix=prefix)
    with pytest.raises(TypeError, match="prefix"):
        PersistedObjectSpace(prefix=None)  # type: ignore[arg-type]


def test_moved_space_reads_and_saves_to_new_store(make: Callable[..., Store], tmp_path: Path) -> None:
    old, new = make(tmp_path, "old"), make(tmp_path, "new")
    before = loaded(old)
    for name in ("one", "two"):
        before.create_dictionary(name)["of"] = name
    before.checkpoint(old)
    moved = loaded(old)  # the space has read no object yet
    moved.checkpoint(new, FULL)
    old.close()
    assert moved.get_dictionary("one") == {"of": "one"}
    moved.checkpoint(new, FULL)
    moved.delete("one")
    moved.checkpoint(new)
    assert held(new, "") == {"two": {"of": "two"}}
    new.close()


def test_space_reads_old_store_after_failed_move(make: Callable[..., Store], tmp_path: Path) -> None:
    old, new = make(tmp_path, "old"), make(tmp_path, "new")
    before = loaded(old)
    before.create_dictionary("one")["of"] = "one"
    before.checkpoint(old)
    space = loaded(old)
    writer = new.begin(FULL)
    space.save(writer)
    writer.rollback()
    space.on_save_failed(unknown_outcome=False)
    new.close()
    assert space.get_dictionary("one") == {"of": "one"}
    space.checkpoint(old)
    old.close()


def test_second_engine_on_store_is_rejected_until_first_is_unloaded(store: Store) -> None:
    first = QueryEngine(store, Factories())
    with pytest.raises(OutOfTurn, match="another owner"):
        QueryEngine(store, Factories())
    first.recover()
    with pytest.raises(OutOfTurn, match="another owner"):
        QueryEngine(store, Factories())
    first.unload()
    second = QueryEngine(store, Factories())
    first.unload()
    with pytest.raises(OutOfTurn, match="another owner"):
        QueryEngine(store, Factories())
    second.unload()


def test_engine_with_unknown_store_version_releases_the_store(store: Store) -> None:
    writer = store.begin(DIFFERENTIAL)
    writer.put("query/meta", "version", b"7")
    writer.commit()
    for _ in range(2):
        with pytest.raises(rt.UnknownVersion):
            QueryEngine(store, Factories())


@pytest.mark.parametrize("kind", list(CheckpointKind))
@pytest.mark.parametrize("prefix", ["", "a/"])
def test_stale_space_is_rejected_after_another_space_saved(
    store: Store, prefix: str, kind: CheckpointKind
) -> None:
    first = loaded(store, prefix)
    first.create_dictionary("it")["of"] = "first"
    first.checkpoint(store)
    second, third = loaded(store, prefix), loaded(store, prefix)
    first.get_dictionary("it")["more"] = 1
    first.checkpoint(store)
    for stale in (second, third):
        stale.get_dictionary("it")["of"] = "stale"
        for _ in range(2):
            with pytest.raises(OutOfTurn, match="another space with this prefix"):
                stale.checkpoint(store, kind)
    fourth = loaded(store, prefix)
    fourth.get_dictionary("it")["more"] = 2
    fourth.checkpoint(store, kind)
    with pytest.raises(OutOfTurn, match="another space with this prefix"):
        first.checkpoint(store, kind)
    assert held(store, prefix) == {"it": {"of": "first", "more": 2}}


def test_failed_save_with_unknown_outcome_rejects_other_space_and_can_be_retried(store: Store) -> None:
    first, second = loaded(store), loaded(store)
    for is_unknown in (False, True):
        writer = store.begin(DIFFERENTIAL)
        first.get_or_create_dictionary("it")["of"] = "first"
        first.save(writer)
        writer.rollback()
        first.on_save_failed(unknown_outcome=is_unknown)
        second.get_or_create_dictionary("it")["of"] = "second"
        if is_unknown:
            with pytest.raises(OutOfTurn, match="another space with this prefix"):
                second.checkpoint(store)
    first.checkpoint(store)
