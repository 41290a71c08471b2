"""`rt store show` lists the objects of each owner and their sizes, for files and PostgreSQL servers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from postgres_server import PostgresServer
from query_engines import Numbers

from rt.cli.commands.store import store as command
from rt.objects import PersistedObjectSpace, SqliteStore, Store
from rt.objects.core.store_status import ObjectSize, object_sizes
from rt.query import Factories, Observable, QueryEngine, Source
from rt.query.operators import scan

factories = Factories()


@factories("sums")
def sums() -> Observable[int]:
    return Source("in").pipe(scan(lambda total, value: total + value, 0))


@pytest.fixture(params=["file", "server"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """The arguments that name the store."""
    if request.param == "file":
        return [str(tmp_path / "state.db")]
    server: PostgresServer = request.getfixturevalue("postgres")
    return [server.url, "--schema", server.schema(tmp_path)]


def opened(place: list[str], request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if len(place) == 1:
        return SqliteStore(place[0])
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.store(tmp_path)


def fill(store: Store) -> None:
    for prefix, count in (("", 3), ("totals/", 40), ("t", 5)):
        space = PersistedObjectSpace(prefix=prefix)
        space.load(store.reader())
        space.create_list("a/b é").extend(range(count))
        space.checkpoint(store)
    engine, source = QueryEngine(store, factories), Numbers()
    engine.add_source("in", source)
    engine.add_sink("out")
    engine.recover()
    engine.start("q", "sums", sink="out")
    source.pump(5)
    engine.checkpoint()
    engine.unload()


def run(*arguments: str) -> str:
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_show_lists_objects_by_owner(
    place: list[str], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    with opened(place, request, tmp_path) as store:
        fill(store)
        used = json.loads(run("show", *place, "--json"))
    assert used["is_in_use"]
    found = {(each["owner"], each["object"]): each for each in used["objects"]}
    assert {owner: found[owner, "a/b é"]["rows"] for owner in ("", "totals", "t")} == {
        "": 3 + 1,
        "totals": 40 + 1,
        "t": 5 + 1,
    }
    assert ("query", "@sink/out") in found
    assert ("query", "") in found
    checked = json.loads(run("check", *place, "--json"))
    assert used["rows"] == checked["rows"] == sum(each["rows"] for each in used["objects"])
    assert (used["categories"], used["commit"]) == (checked["categories"], checked["commit"])
    lines = run("show", *place, "--top", "1").splitlines()
    assert lines[1].split() == ["owner", "object", "rows", "size"]
    assert lines[3].startswith(f"{len(found) - 1} more with ")
    assert len(run("show", *place, "--top", "0").splitlines()) == 2 + len(found)


def test_show_rejects_missing_store(place: list[str]) -> None:
    result = CliRunner().invoke(command, ["show", *place])
    assert "no such object store" in str(result.exception)


def test_rows_without_object_are_counted_for_their_owner() -> None:
    sizes = object_sizes(
        [
            ("state", 1, 1),
            ("state/index", 2, 20),
            ("own/deep/state", 1, 1),
            ("query/query", 3, 5),
            ("x/y", 1, 9),
        ]
    )
    assert sizes == (
        ObjectSize("", "", 3, 21),
        ObjectSize("x", "", 1, 9),
        ObjectSize("query", "", 3, 5),
        ObjectSize("own/deep", "", 1, 1),
    )
