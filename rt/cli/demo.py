"""`rt demo`: see rt work on this machine, with real data, a killed publisher and a check of every byte."""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import click
from tqdm import tqdm


@click.command()
@click.option(
    "--publishers", default=4, show_default=True, type=click.IntRange(1, 64), help="How many publish."
)
@click.option(
    "--data",
    type=click.Path(exists=True, path_type=Path),
    help="A text file, or a directory of them (default: the sources of Python's standard library).",
)
@click.option(
    "--keep", type=click.Path(file_okay=False, path_type=Path), help="Write the logs here and keep them."
)
def demo(publishers: int, data: Path | None, keep: Path | None) -> None:
    """Publish real data from several processes, kill one on the way, check every byte read back."""
    from rt.demo.publish import STREAM
    from rt.demo.run import Demo
    from rt.demo.source import standard_library

    with ExitStack() as stack:
        root = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rt-demo-")))
        run = Demo(root.absolute(), (data or standard_library()).absolute(), publishers)
        click.echo(
            f"{publishers} publishers, {run.total:,} lines; the first one is killed on the way", err=True
        )
        with tqdm(total=run.total, unit=" lines", disable=None, file=sys.stderr) as bar:
            outcome = run.run(bar.update)
        rate = outcome.value_bytes / 1e6 / outcome.seconds
        click.echo(f"published  {outcome.messages:,} messages, {outcome.value_bytes / 1e6:.1f} MB")
        click.echo(
            f"took       {outcome.seconds:.1f} s with {outcome.kills} kill -9 and a restart ({rate:.0f} MB/s)"
        )
        if outcome.problems:
            raise click.ClickException("; ".join(outcome.problems))
        click.echo("checked    nothing lost, duplicated or reordered; every checksum holds")
        if keep:
            click.echo(f"kept       {keep}: try `rt log stat {root / STREAM / 'sessions' / 'publisher-0'}`")
