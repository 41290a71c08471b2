"""`rt bench`: measure the speed of this machine. Figures go to stdout, one a line.

Services add benchmarks as entry points of `rt.benchmarks`, so that rt never imports a service.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeVar

import click

from rt.bench.measure import Figure, one_core
from rt.cli.main import EntryPointGroup
from rt.cli.options import json_option, option
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
    """A group of measurements."""

    def run(self, report: Callable[[Figure], None], /) -> None:
        """Measure, and pass each figure to `report` as soon as it is known."""


def show_all(benchmark: Benchmark, *, as_json: bool) -> None:
    """Run a benchmark, with a line on stdout for each figure."""
    benchmark.run(lambda figure: show(figure, as_json=as_json))


directory_option = option(
    "--directory",
    "directory",
    type=click.Path(file_okay=False, exists=True),
    help="Directory to write to. Default: the temporary directory.",
)
core_option = option("--core", default=0, show_default=True, help="Processor to run on. -1: all processors.")


def rounds_option(default: int) -> Callable[[F], F]:
    """`--rounds`, as every benchmark has it."""
    bound = click.IntRange(1, 1000)
    return option(
        "--rounds",
        default=default,
        show_default=True,
        type=bound,
        help="Number of rounds of each measurement.",
    )


@click.command()
@directory_option
@rounds_option(5)
@option(
    "--size-mb",
    default=256,
    show_default=True,
    type=click.IntRange(1, 1_000_000),
    help="Size of the values in the log of a round. MiB.",
)
@core_option
@option(
    "--memory-gb",
    default=0.0,
    show_default=True,
    help="If above 0: only write and read a log of this size, and measure memory. GB.",
)
@json_option
def log(directory: str | None, rounds: int, size_mb: int, core: int, memory_gb: float, as_json: bool) -> None:
    """Measure publishing, reading and verifying log files, without network."""
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
@option(
    "--size-mb",
    default=1024,
    show_default=True,
    type=click.IntRange(1, 1_000_000),
    help="Size of the values in each log. MiB.",
)
@json_option
def spark(directory: str | None, rounds: int, size_mb: int, as_json: bool) -> None:
    """Measure reading merged logs in a local Spark session. It needs the extra spark, and Java."""
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
@option(
    "--items",
    default=1_000_000,
    show_default=True,
    type=click.IntRange(100, 100_000_000),
    help="Number of elements of each object.",
)
@json_option
def objects(directory: str | None, rounds: int, items: int, as_json: bool) -> None:
    """Measure checkpoints of large objects after a few changes."""
    from rt.bench.objects import ObjectsBench

    show_all(ObjectsBench(directory, rounds=rounds, items=items), as_json=as_json)


@click.command()
@directory_option
@rounds_option(10)
@option(
    "--queries",
    "count",
    default=10_000,
    show_default=True,
    type=click.IntRange(10, 1_000_000),
    help="Number of running queries.",
)
@json_option
def queries(directory: str | None, rounds: int, count: int, as_json: bool) -> None:
    """Measure checkpoints and throughput of an engine with many queries."""
    from rt.bench.queries import QueriesBench

    show_all(QueriesBench(directory, rounds=rounds, queries=count), as_json=as_json)


@click.command()
@directory_option
@rounds_option(5)
@option(
    "--events",
    default=1_000_000,
    show_default=True,
    type=click.IntRange(1000, 1_000_000_000),
    help="Number of events in a round.",
)
@option(
    "--streams",
    default=10_000,
    show_default=True,
    type=click.IntRange(1, 1_000_000),
    help="Number of streams in one host, each with a consumer.",
)
@core_option
@json_option
def streams(directory: str | None, rounds: int, events: int, streams: int, core: int, as_json: bool) -> None:
    """Measure the delivery of events by a stream agent, without network."""
    from rt.bench.streams import StreamsBench

    with one_core(None if core < 0 else core):
        run = StreamsBench(directory, rounds=rounds, events=events, streams=streams)
        show_all(run, as_json=as_json)
