"""`rt queries` lists and shows the queries, stages and problems that engine hosts report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from query_engines import Numbers

from rt.cli.commands.queries import queries
from rt.cli.main import cli
from rt.objects import MemoryStore
from rt.query import Factories, Observable, QueryEngine, Source, VirtualScheduler
from rt.query import operators as ops
from rt.query.monitoring import status_server
from rt.query.monitoring.status_server import serve_status

factories = Factories()


@factories("inverse")
def inverse() -> Observable[Any]:
    return Source("numbers").pipe(ops.map(lambda v: 1 // (v - 3)))


@factories("reader")
def reader() -> Observable[Any]:
    return Source("shared")


@factories("counts")
def counts() -> Observable[Any]:
    return Source("numbers").pipe(ops.tumbling_window(5, ops.Fold.count()))


@pytest.fixture
def engine() -> Iterator[QueryEngine]:
    engine = QueryEngine(MemoryStore(), factories)
    engine.add_source("numbers", Numbers())
    engine.add_sink("out", limit=8)
    engine.recover()
    yield engine
    engine.unload()


def feed(engine: QueryEngine, end: int) -> None:
    source: Any = engine._edges.inputs["numbers"].source
    source.pump(end)


def run(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(queries, [*arguments, "--timeout", "300"])
    return done.exit_code, done.stdout, done.stderr


def test_list_shows_queries_of_all_engines(engine: QueryEngine) -> None:
    engine.start("q", "inverse", sink="out")
    feed(engine, 5)
    with serve_status({"one": engine, "two": engine}, port=0) as port:
        code, text, _ = run("list", f"127.0.0.1:{port}")
        assert code == 0
        cells = [line.split() for line in text.splitlines()]
        assert cells[0][:5] == ["host", "engine", "query", "state", "sink"]
        assert [row[1:8] for row in cells[1:]] == [
            [name, "q", "running", "out", "5", "4", "1"] for name in ("one", "two")
        ]
        code, text, _ = run("list", "--json", f"127.0.0.1:{port}")
        rows = [json.loads(line) for line in text.splitlines()]
        assert [(row["engine"], row["id"], row["skipped"]) for row in rows] == [
            ("one", "q", 1),
            ("two", "q", 1),
        ]


@pytest.mark.parametrize(
    "answer",
    [
        '{"engines": [{"name": "e"}]}',
        '{"engines": ' + "[" * 100_000,
        '{"engines": [{"name": "e", "status": {"state": "running"}, "dead_letters": []}]}',
        '{"engines": [null]}',
        "[]",
    ],
)
def test_invalid_answer_of_host_gives_one_line_error(engine: QueryEngine, answer: str) -> None:
    with serve_status({"one": engine}, port=0) as port, pytest.MonkeyPatch.context() as patch:
        patch.setattr(status_server, "json", SimpleNamespace(dumps=lambda _: answer))
        for arguments in (("list",), ("show", "q")):
            code, _, text = run(*arguments, f"127.0.0.1:{port}")
            assert (code, text.count("\n")) == (1, 1)
            assert text.startswith(f"rt: the host does not serve the status of queries (at 127.0.0.1:{port})")


def test_list_shows_table_of_stages_and_show_prints_stage_of_query() -> None:
    engine = QueryEngine(MemoryStore(), factories)
    engine.add_source("numbers", Numbers())
    engine.add_stage("shared", Source("numbers").pipe(ops.map(lambda v: 1 // (v - 3))))
    engine.add_stage("ended", Source("numbers").pipe(ops.map(lambda v: 1 // v)), on_error="stop")
    engine.recover()
    engine.start("q", "reader")
    engine.start("other", "reader")
    feed(engine, 5)
    with serve_status({"one": engine}, port=0) as port:
        code, text, _ = run("list", f"127.0.0.1:{port}")
        assert code == 1
        assert "one: stage ended ended: ZeroDivisionError" in text
        cells = [line.split() for line in text.splitlines()]
        header = ["host", "engine", "stage", "state", "events", "results", "skipped", "late", "queries"]
        place = next(at for at, row in enumerate(cells) if row[:9] == header)
        assert cells[place + 1][1:9] == ["one", "shared", "running", "5", "4", "1", "0", "2"]
        rows = [json.loads(line) for line in run("list", "--json", f"127.0.0.1:{port}")[1].splitlines()]
        assert [(row["kind"], row.get("id") or row["name"]) for row in rows] == [
            ("query", "q"),
            ("query", "other"),
            ("stage", "shared"),
            ("stage", "ended"),
        ]
        text = run("show", "q", f"127.0.0.1:{port}")[1]
        assert "stage       shared running, events 5, results 4, skipped 1" in text
        assert "source      numbers: processed up to 4" in text
    engine.unload()


def test_late_values_and_event_time_of_source_are_shown() -> None:
    engine = QueryEngine(MemoryStore(), factories, VirtualScheduler())
    times = [1, 12, 3, -1, 900]
    source, timing = Numbers(), {"max_jump_s": 60, "late": "late", "on_bad_time": lambda error: None}
    engine.add_sink("late")
    engine.add_source("numbers", source, time_of=lambda number: times[number] * 10**9, **timing)
    engine.recover()
    engine.start("q", "counts")
    with serve_status({"one": engine}, port=0) as port:
        assert "event time  no value yet, late 0," in run("show", "q", f"127.0.0.1:{port}")[1]
        feed(engine, 5)
        cells = [line.split() for line in run("list", f"127.0.0.1:{port}")[1].splitlines()]
        # The sink column is empty, which shifts the cells by one.
        assert cells[1][cells[0].index("late") - 1] == "1"
        text = run("show", "q", f"127.0.0.1:{port}")[1]
        assert "events      5, results 1, skipped 0, late 1" in text
        assert "event time  1970-01-01T00:00:12.000Z, late 1, refused 1, without a time 1" in text
    engine.unload()


def test_list_reports_problems_and_exits_with_1(engine: QueryEngine) -> None:
    engine.start("bad", "inverse", on_error="stop")
    engine.start("q", "inverse", sink="out")
    feed(engine, 9)
    with serve_status({"one": engine}, port=0) as port:
        code, text, _ = run("list", f"127.0.0.1:{port}")
        assert code == 1
        assert "one: query bad ended: ZeroDivisionError" in text
        assert "one: output out is full (8 values are not acknowledged): all sources wait" in text
        assert "blocked" in text
        engine.unload()
        assert "one: the engine is unloaded" in run("list", f"127.0.0.1:{port}")[1]


def test_show_prints_sources_output_checkpoint_and_dead_letters(engine: QueryEngine) -> None:
    engine.start("q", "inverse", sink="out")
    feed(engine, 5)
    engine.checkpoint()
    with serve_status({"one": engine}, port=0, show_values=True) as port:
        code, text, _ = run("show", "q", f"127.0.0.1:{port}")
        assert code == 0
        for expected in (
            "state       running",
            "factory     inverse, on error: skip",
            "events      5, results 4, skipped 1",
            "source      numbers: processed up to 4",
            "output      out: 4 of 8 values are not acknowledged",
            "checkpoint  ",
            "skipped     numbers 3 by map: ZeroDivisionError",
        ):
            assert expected in text
        (row,) = map(json.loads, run("show", "q", "--json", f"127.0.0.1:{port}")[1].splitlines())
        assert row["dead_letters"][0]["value"] == "3"


def test_unknown_query_or_unreachable_host_exits_with_1(engine: QueryEngine) -> None:
    with serve_status({"one": engine}, port=0) as port:
        command = ["queries", "show", "q", f"127.0.0.1:{port}", "--timeout", "300"]
        found = CliRunner().invoke(cli, command)
        assert found.exit_code == 1
        assert "no engine has this query" in found.stderr
    code, _, error = run("list", f"127.0.0.1:{port}")
    assert code == 1
    assert "the host does not serve the status of queries" in error
