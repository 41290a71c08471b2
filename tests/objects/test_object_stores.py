"""The contract of object stores, run on each kind of store."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import rt
from rt.errors import InvalidOption
from rt.objects import (
    CheckpointKind,
    MemoryStore,
    NotSerializable,
    OutOfTurn,
    PersistedObjectSpace,
    SqliteStore,
    Store,
)
from rt.objects import sqlite_store as sqlite_module
from rt.objects.core.store import StateReader

FULL, DIFFERENTIAL = CheckpointKind.FULL, CheckpointKind.DIFFERENTIAL


def memory_store(_: Path) -> Store:
    return MemoryStore()


def sqlite_store(directory: Path) -> Store:
    return SqliteStore(directory / "state.db")


@pytest.fixture(params=[memory_store, sqlite_store, "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    make: Callable[[Path], Store] = request.param
    if request.param == "postgres":
        make = request.getfixturevalue("postgres").store
    made = make(tmp_path)
    yield made
    made.close()


def content(reader: StateReader) -> dict[str, dict[str, bytes]]:
    return {category: dict(reader.rows(category)) for category in reader.categories()}


def fill(store: Store, rows: dict[str, dict[str, bytes]]) -> None:
    writer = store.begin(FULL)
    for category, held in rows.items():
        writer.put_many(category, held.items())
    writer.commit()


def clear_all(store: Store) -> None:
    writer = store.begin(FULL)
    for category in list(store.reader().categories()):
        writer.clear(category)
    writer.commit()


def test_new_store_is_empty(store: Store) -> None:
    reader = store.reader()
    assert content(reader) == {}
    assert reader.get("a", "1") is None
    assert list(reader.rows("a")) == []


def test_rows_become_visible_only_after_commit(store: Store) -> None:
    reader, writer = store.reader(), store.begin(DIFFERENTIAL)
    writer.put("a", "1", b"one")
    writer.put_many("b", [("2", b""), ("\0é/%", b"\0\xff")])
    assert content(reader) == {}
    writer.commit()
    assert content(reader) == {"a": {"1": b"one"}, "b": {"2": b"", "\0é/%": b"\0\xff"}}
    assert reader.get("b", "2") == b""


def test_differential_commit_updates_existing_rows(store: Store) -> None:
    fill(store, {"a": {"1": b"one", "2": b"two", "3": b"three"}, "b": {"1": b"b"}, "c": {"1": b"c"}})
    writer = store.begin(DIFFERENTIAL)
    writer.put("a", "2", b"2")
    writer.delete_many("a", ["1", "never"])
    writer.clear("b")
    writer.clear("nothing")
    writer.commit()
    assert content(store.reader()) == {"a": {"2": b"2", "3": b"three"}, "c": {"1": b"c"}}


@pytest.mark.parametrize("kind", list(CheckpointKind))
def test_commit_of_each_kind_keeps_rows_of_previous_commit(store: Store, kind: CheckpointKind) -> None:
    fill(store, {"a": {"1": b"one"}, "b": {"1": b"b"}})
    writer = store.begin(kind)
    writer.put("a", "2", b"two")
    assert content(store.reader()) == {"a": {"1": b"one"}, "b": {"1": b"b"}}
    writer.commit()
    assert content(store.reader()) == {"a": {"1": b"one", "2": b"two"}, "b": {"1": b"b"}}


def test_clear_tree_deletes_only_rows_of_that_tree(store: Store) -> None:
    names = ["", "a", "a!", "a/", "a/b", "a/b/c", "a/~", "a0", "ab", "b/a", "b/a/c"]
    for root in (*names, "never"):
        fill(store, {name: {"1": b"one"} for name in names})
        writer = store.begin(FULL)
        writer.put("a/late", "1", b"before")
        writer.clear_tree(root)
        writer.put("a/b", "2", b"after")
        writer.commit()
        left = {name: {"1": b"one"} for name in names if name != root and not name.startswith(f"{root}/")}
        if root != "a":
            left["a/late"] = {"1": b"before"}
        left.setdefault("a/b", {})
        left["a/b"] = {**left["a/b"], "2": b"after"}
        assert content(store.reader()) == left, root
        clear_all(store)


def test_clear_tree_of_only_tree_empties_store(store: Store) -> None:
    fill(store, {"a": {"1": b"one"}, "a/b": {str(number): b"" for number in range(1000)}})
    writer = store.begin(FULL)
    writer.clear_tree("a")
    writer.commit()
    assert content(store.reader()) == {}


def test_claimed_tree_has_one_owner_until_released(store: Store) -> None:
    claim = store.claim("query")
    others = [store.claim("state"), store.claim("query2"), store.claim("a/query")]
    for root in ("query", "query/objects", "a"):
        with pytest.raises(OutOfTurn, match="another owner"):
            store.claim(root)
    claim.release()
    again = store.claim("query")
    claim.release()  # a second release must not end the later claim
    with pytest.raises(OutOfTurn, match="another owner"):
        store.claim("query")
    for each in (again, *others):
        each.release()
    store.claim("query")


def test_writer_applies_changes_in_call_order(store: Store) -> None:
    fill(store, {"a": {"1": b"one"}})
    writer = store.begin(DIFFERENTIAL)
    writer.clear("a")
    writer.put("a", "1", b"new")
    writer.put("a", "2", b"two")
    writer.delete_many("a", ["2"])
    writer.put("a", "1", b"newer")
    writer.commit()
    assert content(store.reader()) == {"a": {"1": b"newer"}}


def test_rollback_discards_all_changes(store: Store) -> None:
    fill(store, {"a": {"1": b"one"}})
    writer = store.begin(FULL)
    writer.put("a", "2", b"two")
    writer.rollback()
    writer.rollback()
    assert content(store.reader()) == {"a": {"1": b"one"}}


def test_writer_raises_out_of_turn_after_commit_or_rollback(store: Store) -> None:
    committed, rolled_back = store.begin(FULL), None
    committed.commit()
    rolled_back = store.begin(FULL)
    rolled_back.rollback()
    for spent in (committed, rolled_back):
        for use in (
            spent.commit,
            lambda spent=spent: spent.put("a", "1", b""),
            lambda spent=spent: spent.put_many("a", []),
            lambda spent=spent: spent.delete_many("a", []),
            lambda spent=spent: spent.clear("a"),
        ):
            with pytest.raises(OutOfTurn, match="committed or rolled back"):
                use()


def test_second_open_writer_is_rejected(store: Store) -> None:
    first = store.begin(DIFFERENTIAL)
    with pytest.raises(OutOfTurn, match="another writer is open"):
        store.begin(DIFFERENTIAL)
    first.put("a", "1", b"one")
    first.commit()
    store.begin(DIFFERENTIAL).rollback()
    assert content(store.reader()) == {"a": {"1": b"one"}}


@pytest.mark.parametrize("kind", ["full", "FULL", None, 1])
def test_invalid_checkpoint_kind_is_rejected_and_leaves_no_writer_open(store: Store, kind: Any) -> None:
    with pytest.raises(InvalidOption, match="CheckpointKind"):
        store.begin(kind)
    store.begin(DIFFERENTIAL).rollback()


@pytest.mark.parametrize("method", ["put_many", "delete_many"])
def test_error_in_row_iterator_makes_writer_unusable(store: Store, method: str) -> None:
    def rows() -> Iterator[object]:
        yield ("1", b"one") if method == "put_many" else "1"
        raise ZeroDivisionError

    fill(store, {"a": {"1": b"before"}})
    writer = store.begin(DIFFERENTIAL)
    with pytest.raises(ZeroDivisionError):
        getattr(writer, method)("a", rows())
    with pytest.raises(OutOfTurn):
        writer.commit()
    assert content(store.reader()) == {"a": {"1": b"before"}}


def test_categories_are_listed_by_prefix(store: Store) -> None:
    fill(store, {name: {"1": b""} for name in ("a", "a/b", "a/c", "ab", "b", "é")})
    reader = store.reader()
    assert list(reader.categories("a/")) == ["a/b", "a/c"]
    assert list(reader.categories("é")) == ["é"]
    assert list(reader.categories("c")) == []
    assert len(list(reader.categories())) == 6


def test_many_rows_are_restored_unchanged(store: Store) -> None:
    rows = {str(number): b"%d" % number for number in range(10_000)}
    fill(store, {"many": rows})
    assert dict(store.reader().rows("many")) == rows
    writer = store.begin(DIFFERENTIAL)
    writer.delete_many("many", list(rows)[1:])
    writer.commit()
    assert content(store.reader()) == {"many": {"0": b"0"}}


def test_readers_and_writers_report_store_id(store: Store) -> None:
    writer = store.begin(FULL)
    assert writer.store_id == store.reader().store_id
    assert writer.store_id != MemoryStore().store_id
    assert writer.kind is FULL
    writer.put("a", "1", b"one")
    assert content(writer.reader()) == {}
    writer.rollback()


def test_closed_store_raises_closed(store: Store) -> None:
    reader, writer = store.reader(), store.begin(FULL)
    store.close()
    store.close()
    writer.rollback()
    for use in (
        store.reader,
        lambda: store.begin(FULL),
        lambda: store.claim("a"),
        lambda: list(reader.rows("a")),
        lambda: reader.get("a", "1"),
    ):
        with pytest.raises(rt.Closed):
            use()


def test_too_large_value_is_rejected_and_store_stays_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(sqlite3.connect(":memory:")) as connection:
        assert connection.getlimit(sqlite3.SQLITE_LIMIT_LENGTH) > sqlite_module.VALUE_BYTES_MAX + 2**20
    monkeypatch.setattr(sqlite_module, "VALUE_BYTES_MAX", 1000)
    space = PersistedObjectSpace()
    with SqliteStore(tmp_path / "state.db") as store:
        space.load(store.reader())
        large, count = (
            space.get_or_create_value("large", b"", of=bytes),
            space.get_or_create_value("count", 0),
        )
        large.value, count.value = bytes(1001), 1
        with pytest.raises(NotSerializable, match=r"too large.*object 'large'.*got 1001 bytes"):
            space.checkpoint(store)
        large.value = bytes(1000)
        space.checkpoint(store)
    with SqliteStore(tmp_path / "state.db") as store:
        again = PersistedObjectSpace()
        again.load(store.reader())
        assert again.get_or_create_value("count", 0).value == 1
