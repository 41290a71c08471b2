"""`rt queries`: the queries of running engines, from the programs that serve their status."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from http.client import HTTPException
from typing import Any, Final

import click
from msgspec import MsgspecError, convert

from rt.cli.formats.console import report
from rt.cli.formats.tables import escape, format_age, format_size, table
from rt.cli.options import FiniteRange, json_option, option
from rt.errors import RtError
from rt.units import format_time

_BYTES_MAX: Final = 64 * 2**20
_ERROR_MAX: Final = 200
_NAMES: Final = ("host", "engine", "query", "state", "sink")
_NUMBERS: Final = ("events", "results", "skipped", "late", "lag", "checkpoint")
_STAGE_NAMES: Final = ("host", "engine", "stage", "state")
_STAGE_NUMBERS: Final = ("events", "results", "skipped", "late", "queries", "checkpoint")
_WORKING: Final = frozenset({"running", "checkpointing"})

_hosts_argument = click.argument("hosts", nargs=-1, required=True, metavar="HOST:PORT...")
_timeout_option = option(
    "--timeout", default=5.0, type=FiniteRange(0.1, 300), help="Timeout for each host. Seconds."
)


def ask(endpoint: str, timeout_s: float) -> list[dict[str, Any]]:
    """The engines at `host:port`, as `serve_status` shows them; `rt.RtError` if it does not answer."""
    try:
        with urllib.request.urlopen(f"http://{endpoint}/queries", timeout=timeout_s) as answer:
            engines = json.loads(answer.read(_BYTES_MAX))["engines"]
            return [{"host": endpoint, **_checked(each)} for each in engines]
    except (OSError, ValueError, HTTPException, KeyError, TypeError, MsgspecError, RecursionError) as error:
        raise RtError(
            "the host does not serve the status of queries",
            where=endpoint,
            got=f"{type(error).__name__}: {error}"[:200],
            hint="Check that serve_status runs there.",
        ) from error


def _checked(engine: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `engine`. Raises `MsgspecError`, `KeyError` or `TypeError` if another program answered."""
    from rt.query.monitoring.dead_letters import DeadLetter
    from rt.query.monitoring.status import EngineStatus

    convert(engine["name"], str)
    convert(engine["status"], EngineStatus)
    for letter in engine["dead_letters"]:
        convert({"value": "", **letter}, DeadLetter)
    return engine


def problems_of(engine: Mapping[str, Any]) -> Iterator[str]:
    """The problems that need a person: first of the engine, then of its stages and queries."""
    status, name = engine["status"], engine["name"]
    if status["state"] not in _WORKING:
        yield f"{name}: the engine is {status['state']}"
    for output in status["outputs"]:
        if output["is_full"]:
            yield (
                f"{name}: output {output['name']} is full ({output['kept']:,} values are not acknowledged): "
                "all sources wait"
            )
    for stage in status["stages"]:
        if stage["state"] == "failed":
            yield f"{name}: stage {stage['name']} ended: {stage['error'][:_ERROR_MAX]}"
        elif stage["state"] == "not running":
            yield f"{name}: stage {stage['name']} is stored, but the program did not add it"
    for query in status["queries"]:
        if query["state"] == "failed":
            yield f"{name}: query {query['id']} ended: {query['error'][:_ERROR_MAX]}"
        elif query["state"] == "not running":
            yield f"{name}: query {query['id']} could not be recovered, and does not run"


def list_lines(engines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The problems, then a table of all queries, then one of the stages that they share."""
    for engine in engines:
        for problem in problems_of(engine):
            yield f"  {escape(problem)}"
    rows = [
        [
            escape(engine["host"]),
            escape(engine["name"]),
            escape(query["id"]),
            "blocked" if query["blocked_by"] else query["state"],
            escape(query["sink"] or ""),
            *(_number(query[name]) for name in ("events", "results", "skipped", "late", "lag")),
            format_size(query["checkpoint_bytes"]),
        ]
        for engine in engines
        for query in engine["status"]["queries"]
    ]
    yield from table((*_NAMES, *_NUMBERS), rows, right=frozenset(_NUMBERS))
    stages = [
        [
            escape(engine["host"]),
            escape(engine["name"]),
            escape(stage["name"]),
            stage["state"],
            *(_number(stage[name]) for name in ("events", "results", "skipped", "late", "queries")),
            format_size(stage["checkpoint_bytes"]),
        ]
        for engine in engines
        for stage in engine["status"]["stages"]
    ]
    if stages:
        yield ""
        yield from table((*_STAGE_NAMES, *_STAGE_NUMBERS), stages, right=frozenset(_STAGE_NUMBERS))


def query_lines(engine: Mapping[str, Any], query: Mapping[str, Any], now_ns: int) -> Iterator[str]:
    """One query, its stages and sources, outputs, last checkpoint, and last dead letters."""
    status = engine["status"]
    checkpoints = status["checkpoints"]
    yield f"query       {escape(query['id'])} of engine {escape(engine['name'])} at {escape(engine['host'])}"
    yield f"state       {query['state']}{'  ' if query['error'] else ''}{escape(query['error'])}"
    yield f"factory     {escape(query['factory'])}, on error: {query['on_error']}"
    yield f"events      {_counts(query)}"
    for stage in status["stages"]:
        if stage["name"] in query["stages"]:
            error = f": {stage['error'][:_ERROR_MAX]}" if stage["error"] else ""
            yield (
                f"stage       {escape(stage['name'])} {stage['state']}{escape(error)}, "
                f"events {_counts(stage)}"
            )
    for source in status["sources"]:
        if source["name"] in query["sources"]:
            end = "" if source["lag"] is None else f", {source['lag']:,} behind the end"
            yield f"source      {escape(source['name'])}: processed up to {source['watermark']:,}{end}"
            yield from _time_lines(source)
    for output in status["outputs"]:
        if output["name"] in (query["sink"], *query["blocked_by"]):
            full = ": full, all sources wait" if output["is_full"] else ""
            kept = f"{output['kept']:,} of {output['limit']:,} values are not acknowledged"
            yield f"output      {escape(output['name'])}: {kept}{full}"
    outputs = {output["name"] for output in status["outputs"]}
    for operator in query["blocked_by"]:
        if operator not in outputs:
            yield f"calls       {escape(operator)}: as many as its concurrency, all sources wait"
    if checkpoints["ended_ns"] is not None:
        yield (
            f"checkpoint  {format_size(query['checkpoint_bytes'])} of {format_size(checkpoints['bytes'])} "
            f"in {checkpoints['seconds']:.3f} s, {format_age(now_ns - checkpoints['ended_ns'])} ago"
        )
    for letter in engine["dead_letters"]:
        if letter["query"] == query["id"]:
            place = "a timer" if letter["source"] is None else f"{letter['source']} {letter['sequence_id']}"
            value = f"  {letter['value']}" if letter.get("value") else ""
            yield escape(f"skipped     {place} by {letter['operator']}: {letter['error']}{value}")


def _counts(of: Mapping[str, Any]) -> str:
    return f"{of['events']:,}, results {of['results']:,}, skipped {of['skipped']:,}, late {of['late']:,}"


def _time_lines(source: Mapping[str, Any]) -> Iterator[str]:
    """The event time of a source; no line without `time_of`."""
    if (time := source["event_time"]) is not None:
        place = (
            "no value yet" if time["watermark_ns"] is None else format_time(time["watermark_ns"], digits=3)
        )
        idle = ", idle" if time["is_idle"] else ""
        yield (
            f"event time  {place}{idle}, late {time['late']:,}, refused {time['refused']:,}, "
            f"without a time {source['skipped']:,}"
        )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,}"


def _ask_all(hosts: Sequence[str], timeout_s: float) -> tuple[list[dict[str, Any]], bool]:
    """The engines of all hosts, and whether a host did not answer."""
    engines, has_failed = [], False
    for host in hosts:
        try:
            engines += ask(host, timeout_s)
        except RtError as error:
            has_failed = True
            report(error)
    return engines, has_failed


@click.group()
def queries() -> None:
    """Show the queries of running engines (`rt.query`).

    HOST:PORT is where a program serves the status of its engines with `serve_status`.
    """


@queries.command("list")
@_hosts_argument
@_timeout_option
@json_option
@click.pass_context
def list_queries(ctx: click.Context, hosts: Sequence[str], timeout: float, as_json: bool) -> None:
    """List the queries: state, events, results, skipped and late values, lag, size of the last checkpoint.

    The stages that queries share follow, each with the number of queries that read it. With --json each
    object has a "kind", "query" or "stage".

    Exit status 1 means that a host does not answer, or that there is a problem: an engine or a query does not
    run, or an output is full.
    """
    engines, has_failed = _ask_all(hosts, timeout)
    if as_json:
        for engine in engines:
            for kind, of_kind in (("query", "queries"), ("stage", "stages")):
                for each in engine["status"][of_kind]:
                    row = {"host": engine["host"], "engine": engine["name"], "kind": kind, **each}
                    click.echo(json.dumps(row))
    elif engines:
        click.echo("\n".join(list_lines(engines)))
    if has_failed or any(problem for engine in engines for problem in problems_of(engine)):
        ctx.exit(1)


@queries.command("show")
@click.argument("query")
@_hosts_argument
@_timeout_option
@json_option
@click.pass_context
def show_query(ctx: click.Context, query: str, hosts: Sequence[str], timeout: float, as_json: bool) -> None:
    """Show QUERY: its state, stages, sources, output, last checkpoint and last dead letters.

    Exit status 1 means that a host does not answer, or that no engine has the query.
    """
    engines, has_failed = _ask_all(hosts, timeout)
    found = [
        (engine, each) for engine in engines for each in engine["status"]["queries"] if each["id"] == query
    ]
    for engine, each in found:
        if as_json:
            letters = [letter for letter in engine["dead_letters"] if letter["query"] == query]
            row = {"host": engine["host"], "engine": engine["name"], **each, "dead_letters": letters}
            click.echo(json.dumps(row))
        else:
            click.echo("\n".join(query_lines(engine, each, time.time_ns())))
    if not found and not has_failed:
        raise RtError("no engine has this query", got=repr(query), hint="See `rt queries list HOST:PORT`.")
    if has_failed:
        ctx.exit(1)
