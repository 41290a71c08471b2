"""`rt bench`: measure the speed of this machine. Figures go to stdout, one a line.

Services add benchmarks as entry points of `rt.benchmarks`, so that rt never imports a service.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final, TypeVar

import click

from rt.bench.measure import Figure, one_core, scratch_directory
from rt.cli.main import EntryPointGroup
from rt.cli.options import ExistingPath, FiniteRange, json_option, option
from rt.errors import RtError

F = TypeVar("F", bound=Callable[..., Any])

BENCHMARKS_GROUP: Final = "rt.benchmarks"


@click.group(cls=EntryPointGroup, entry_point_group=BENCHMARKS_GROUP)
def bench() -> None:
    """Measure the speed of rt on this machine."""


def show_all(figures: Generator[Figure, None, None], *, as_json: bool) -> None:
    """Measure, with a line on stdout for each figure as soon as it is known."""
    with contextlib.closing(figures):
        for figure in figures:
            click.echo(json.dumps(figure.as_dict()) if as_json else figure.as_line())


def number_option(name: str, default: float, least: float, most: int, text: str) -> Callable[[F], F]:
    """An option for a number from `least` to `most`; for an integer if `default` and `least` are integers."""
    kind: click.IntRange | FiniteRange = FiniteRange(least, most)
    if isinstance(default, int) and isinstance(least, int):
        kind = click.IntRange(least, most)
    return option(name, default=default, type=kind, help=text)


def rounds_option(default: int) -> Callable[[F], F]:
    return number_option("--rounds", default, 1, 1000, "Number of rounds of each measurement.")


def parts_option(parts: Sequence[str]) -> Callable[[F], F]:
    """An option that selects parts. The parameter is named `parts`."""
    text = "Measure only this part. Repeatable. Default: all parts."
    return option("--part", "parts", multiple=True, type=click.Choice(parts), help=text)


directory_option = option(
    "--directory",
    "directory",
    type=ExistingPath(file_okay=False),
    help="Directory to write to. Default: the temporary directory.",
)
core_option = option("--core", default=0, help="Processor to run on. -1: all processors.")


@click.command()
@directory_option
@rounds_option(5)
@number_option("--size-mb", 256, 1, 1_000_000, "Size of the values in the log of a round. MiB.")
@core_option
@option(
    "--memory-gb",
    default=0.0,
    help="If above 0: only write and read a log of this size, and measure memory. GB.",
)
@json_option
def log(directory: str | None, rounds: int, size_mb: int, core: int, memory_gb: float, as_json: bool) -> None:
    """Measure publishing, reading and verifying log files, without network."""
    from rt.bench.log import LogBench

    with one_core(None if core < 0 else core), scratch_directory(directory) as root:
        run = LogBench(root, rounds, size_mb * 2**20)
        show_all(run.memory_figures(int(memory_gb * 1e9)) if memory_gb else run.figures(), as_json=as_json)


@click.command()
@directory_option
@rounds_option(5)
@number_option("--size-mb", 1024, 1, 1_000_000, "Size of the values in each log. MiB.")
@json_option
def spark(directory: str | None, rounds: int, size_mb: int, as_json: bool) -> None:
    """Measure reading merged logs in a local Spark session. It needs the extra spark, and Java."""
    _require_pyspark()
    from rt.bench.spark import SparkBench

    with scratch_directory(directory) as root:
        show_all(SparkBench(root, rounds, size_mb * 2**20).figures(), as_json=as_json)


def _require_pyspark() -> None:
    try:
        import pyspark  # noqa: F401
    except ModuleNotFoundError as error:
        raise RtError("pyspark is not installed", hint="pip install 'rt-transport[spark]'") from error


@click.command()
@directory_option
@rounds_option(20)
@number_option("--items", 1_000_000, 100, 100_000_000, "Number of elements of each object.")
@option(
    "--store",
    metavar="URL",
    help="Store on a PostgreSQL server (postgresql://user@host/database), in schemas rt_bench_... that are "
    "dropped at the end. Default: SQLite files.",
)
@json_option
def objects(directory: str | None, rounds: int, items: int, store: str | None, as_json: bool) -> None:
    """Measure checkpoints of large objects, and of many small ones, after a few changes."""
    from rt.bench.objects import ObjectsBench
    from rt.bench.store_places import store_place

    with scratch_directory(directory) as root, contextlib.closing(store_place(store, root)) as place:
        show_all(ObjectsBench(place, rounds, items).figures(), as_json=as_json)


@click.command()
@directory_option
@rounds_option(10)
@number_option("--queries", 10_000, 10, 1_000_000, "Number of running queries.")
@number_option("--users", 100_000, 10, 10_000_000, "Number of open sessions.")
@option("--spark", "on_spark", is_flag=True, help="Only measure one keyed query, in an engine and on Spark.")
@number_option("--keys", 10_000, 10, 100_000_000, "Number of keys. Only with --spark.")
@json_option
def queries(
    directory: str | None, rounds: int, queries: int, users: int, on_spark: bool, keys: int, as_json: bool
) -> None:
    """Measure checkpoints and throughput of an engine with many queries, and of queries with many keys.

    --spark needs the extra spark, and Java. It starts a local cluster with two workers.
    """
    if on_spark:
        _require_pyspark()
        from rt.bench.spark_queries import SparkQueriesBench

        with scratch_directory(directory) as root:
            show_all(SparkQueriesBench(root, keys).figures(), as_json=as_json)
        return
    from rt.bench.queries import QueriesBench
    from rt.bench.query_patterns import QueryPatternsBench
    from rt.bench.routed_queries import RoutedQueriesBench

    with scratch_directory(directory) as root:
        show_all(QueriesBench(root, rounds, queries).figures(), as_json=as_json)
        show_all(QueryPatternsBench(root, rounds, users).figures(), as_json=as_json)
        show_all(RoutedQueriesBench(root, rounds, queries).figures(), as_json=as_json)


@click.command()
@directory_option
@rounds_option(5)
@number_option("--events", 1_000_000, 1000, 1_000_000_000, "Number of events in a round.")
@number_option("--streams", 10_000, 1, 1_000_000, "Number of streams in one host, each with a consumer.")
@core_option
@json_option
def streams(directory: str | None, rounds: int, events: int, streams: int, core: int, as_json: bool) -> None:
    """Measure the delivery of events by a stream agent, without network."""
    from rt.bench.streams import StreamsBench

    with one_core(None if core < 0 else core), scratch_directory(directory) as root:
        show_all(StreamsBench(root, rounds, events, streams).figures(), as_json=as_json)
