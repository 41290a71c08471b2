"""The object space benchmark reports its figures, and a save writes rows only for the edits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from postgres_server import PostgresServer

from rt.cli.commands.bench import objects
from rt.objects import CheckpointKind, MemoryStore, PersistedObjectSpace


def test_small_run_reports_all_figures_and_removes_its_files(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        objects, ["--directory", str(tmp_path), "--rounds", "2", "--items", "1000", "--json"]
    )
    assert result.exit_code == 0, result.output
    names = [json.loads(line)["name"] for line in result.stdout.splitlines()]
    for kind in ("list", "queue", "dictionary"):
        assert f"1,000 items: {kind}, save after 10 edits" in names
    assert "10 values: save where 1 changed, CPU" in names
    assert len(names) == len(set(names)) == 2 * 12 + 12
    assert list(tmp_path.iterdir()) == []


def test_small_run_on_postgres_reports_all_figures_and_drops_its_schemas(
    postgres: PostgresServer,
) -> None:
    options = ["--rounds", "2", "--items", "1000", "--json", "--store", postgres.url]
    result = CliRunner().invoke(objects, options)
    assert result.exit_code == 0, result.output
    found = {each["name"]: each["median"] for each in map(json.loads, result.stdout.splitlines())}
    assert len(found) == 2 * 12 + 12
    assert found["10 values: stored size of one"] > 0
    assert not postgres.run("SELECT 1 FROM pg_namespace WHERE nspname LIKE 'rt_bench%'")


@pytest.mark.parametrize("items", [100, 20_000])
def test_ten_edits_write_same_number_of_rows_for_any_collection_size(items: int) -> None:
    store = MemoryStore()
    space = PersistedObjectSpace()
    listed, queue, held = space.create_list("l"), space.create_queue("q"), space.create_dictionary("d")
    listed.extend(range(items))
    queue.extend(range(items))
    held.update(dict.fromkeys(range(items), 0))
    space.checkpoint(store, CheckpointKind.FULL)
    for number in range(5):
        listed[number * 7] = -1
        listed.append(-2)
        queue.dequeue()
        queue.enqueue(-1)
        held[number * 7] = -1
        held[-1 - number] = -2
    writer = store.begin(CheckpointKind.DIFFERENTIAL)
    touched: list[object] = []
    put, put_many, delete_many = writer.put, writer.put_many, writer.delete_many

    def note_put(category: str, key: str, data: bytes) -> None:
        touched.append(key)
        put(category, key, data)

    writer.put = note_put  # type: ignore[method-assign]
    writer.put_many = lambda category, rows: put_many(category, noted(rows))  # type: ignore[method-assign]
    writer.delete_many = lambda category, keys: delete_many(category, noted(keys))  # type: ignore[method-assign]

    def noted(rows: object) -> list[object]:
        listed_rows = list(rows)  # type: ignore[call-overload]
        touched.extend(listed_rows)
        return listed_rows

    space.save(writer)
    writer.commit()
    space.on_saved()
    assert len(touched) == 10 + 1 + 10 + 2 + 10  # rows; the list's length; the queue's head and tail
