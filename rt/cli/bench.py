"""`rt bench`: measure this machine. Figures go to stdout, one a line.

Services add theirs as entry points of `rt.benchmarks`, so that rt never imports a service.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeVar

import click

from rt.bench.measure import Figure, one_core
from rt.cli.main import EntryPointGroup
from rt.errors import RtError

F = TypeVar("F", bound=Callable[..., Any])

BENCHMARKS_GROUP: Final = "rt.benchmarks"


@click.group(cls=EntryPointGroup, entry_point_group=BENCHMARKS_GROUP)
def bench() -> None:
    """Measure the speed of rt on this machine."""


def show(figure: Figure, *, as_json: bool) -> None:
    """One line on stdout."""
    click.echo(json.dumps(figure.as_dict()) if as_json else figure.as_line())


class Benchmark(Protocol):
    """Measurements of one kind."""

    def run(self, report: Callable[[Figure], None], /) -> None:
        """Make them, and give each figure to `report` as soon as it is known."""


def show_all(benchmark: Benchmark, *, as_json: bool) -> None:
    """Run it, with a line on stdout for each figure."""
    benchmark.run(lambda figure: show(figure, as_json=as_json))


directory_option = click.option(
    "--dir",
    "directory",
    type=click.Path(file_okay=False, exists=True),
    help="Where to write (default: the temporary directory).",
)
core_option = click.option(
    "--core", default=0, show_default=True, help="The one processor to run on; -1: all."
)
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")


def rounds_option(default: int) -> Callable[[F], F]:
    """`--rounds`, as every benchmark has it."""
    bound = click.IntRange(1, 1000)
    return click.option(
        "--rounds", default=default, show_default=True, type=bound, help="Rounds of each measurement."
    )


@click.command()
@directory_option
@rounds_option(5)
@click.option(
    "--size-mb",
    default=256,
    show_default=True,
    type=click.IntRange(1, 1_000_000),
    help="Value bytes of a round's log.",
)
@core_option
@click.option(
    "--memory-gb",
    default=0.0,
    show_default=True,
    help="Instead: write and read a log of this size and watch memory.",
)
@json_option
def log(directory: str | None, rounds: int, size_mb: int, core: int, memory_gb: float, as_json: bool) -> None:
    """Publish, read and verify log files; no network."""
    from rt.bench.log import LogBench

    run = LogBench(directory, rounds=rounds, size_bytes=size_mb * 2**20)
    with one_core(None if core < 0 else core):
        if memory_gb:
            show(run.run_memory(int(memory_gb * 1e9)), as_json=as_json)
        else:
            show_all(run, as_json=as_json)


@click.command()
@directory_option
@rounds_option(5)
@click.option(
    "--size-mb",
    default=1024,
    show_default=True,
    type=click.IntRange(1, 1_000_000),
    help="Value bytes of each log.",
)
@json_option
def spark(directory: str | None, rounds: int, size_mb: int, as_json: bool) -> None:
    """Read merged logs in a local Spark session; needs the extra spark, and Java."""
    try:
        import pyspark  # noqa: F401
    except ModuleNotFoundError as error:
        raise RtError("pyspark is not installed", hint="pip install 'rt-transport[spark]'") from error
    from rt.bench.spark import SparkBench

    run = SparkBench(directory, rounds=rounds, size_bytes=size_mb * 2**20)
    show_all(run, as_json=as_json)


@click.command()
@directory_option
@rounds_option(20)
@click.option(
    "--items",
    default=1_000_000,
    show_default=True,
    type=click.IntRange(100, 100_000_000),
    help="Elements of each object.",
)
@json_option
def objects(directory: str | None, rounds: int, items: int, as_json: bool) -> None:
    """Save large objects of an object space after a few edits."""
    from rt.bench.objects import ObjectsBench

    show_all(ObjectsBench(directory, rounds=rounds, items=items), as_json=as_json)


@click.command()
@directory_option
@rounds_option(10)
@click.option(
    "--queries",
    "count",
    default=10_000,
    show_default=True,
    type=click.IntRange(10, 1_000_000),
    help="Standing queries.",
)
@json_option
def queries(directory: str | None, rounds: int, count: int, as_json: bool) -> None:
    """Checkpoint an engine with many standing queries, and feed it."""
    from rt.bench.queries import QueriesBench

    show_all(QueriesBench(directory, rounds=rounds, queries=count), as_json=as_json)


@click.command()
@directory_option
@rounds_option(5)
@click.option(
    "--events",
    default=1_000_000,
    show_default=True,
    type=click.IntRange(1000, 1_000_000_000),
    help="Through the agent, a round.",
)
@click.option(
    "--streams",
    default=10_000,
    show_default=True,
    type=click.IntRange(1, 1_000_000),
    help="With a consumer each, in one host.",
)
@core_option
@json_option
def streams(directory: str | None, rounds: int, events: int, streams: int, core: int, as_json: bool) -> None:
    """Hand out events through a stream agent; no network."""
    from rt.bench.streams import StreamsBench

    with one_core(None if core < 0 else core):
        run = StreamsBench(directory, rounds=rounds, events=events, streams=streams)
        show_all(run, as_json=as_json)
