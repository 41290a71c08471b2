"""`rt log`: look into log directories, verify them, compare them.

Laws. Nothing is written and no lock is taken: the directories may be live, or read-only. Data is on stdout;
exit status 1 means damage, or a difference.
"""

from __future__ import annotations

import json
import sys
import time

import click

from rt.cli.log_check import (
    audit_lines,
    audit_object,
    compare_lines,
    compare_object,
    verify_lines,
    verify_object,
)
from rt.cli.log_dump import batch_lines, batch_objects, message_lines, pages
from rt.cli.log_stat import stat_lines, stat_object
from rt.cli.options import DIRECTORY, POSITION, json_option, option
from rt.cli.outputs import StreamOutput, as_envelopes
from rt.cli.progress import progress
from rt.cli.signals import Interrupts
from rt.cli.text import escape
from rt.cli.told import Told
from rt.errors import RtError
from rt.log.compare import compare as compare_logs
from rt.log.reader import LogReader
from rt.log.status import read_status
from rt.log.verify import Report
from rt.log.verify import verify as verify_log

_directories = click.argument("directories", metavar="DIR...", nargs=-1, required=True, type=DIRECTORY)


@click.group()
def log() -> None:
    """Look into log directories, verify them, compare them."""


@log.command()
@_directories
@json_option
def stat(directories: tuple[str, ...], as_json: bool) -> None:
    """Show what each DIR is, and its segments, trimmed ones too.

    It reads the table and the end of the newest segment, not the messages.
    """
    for index, directory in enumerate(directories):
        status = read_status(directory)
        if as_json:
            click.echo(json.dumps(stat_object(status)))
        else:
            click.echo("\n" * (index > 0) + "\n".join(stat_lines(status, time.time_ns())))


@log.command()
@click.argument("directory", metavar="DIR", type=DIRECTORY)
@option("--from", "start", type=POSITION, help="The first position; of a session, number.")
@option("--to", "end", type=POSITION, help="The position to stop at; it is not shown.")
@option("--limit", type=click.IntRange(min=0), help="Stop after that many messages, or batches.")
@option("--topic", "topics", multiple=True, metavar="TOPIC", help="Only this topic; repeatable.")
@option("--batches", is_flag=True, help="The batches, without what is in them.")
@option("--follow", is_flag=True, help="Wait for more at the end.")
@json_option
def dump(
    directory: str,
    start: int | None,
    end: int | None,
    limit: int | None,
    topics: tuple[str, ...],
    batches: bool,
    follow: bool,
    as_json: bool,
) -> None:
    """Show the messages in DIR: position, time, session and number, topic, value.

    What is not printable is escaped. With --json they are those of `rt sub --json`.
    """
    if batches:
        if follow or topics:
            raise click.UsageError("--batches goes neither with --follow nor with --topic.")
        show = batch_objects if as_json else batch_lines
        for line in show(directory, start or 0, end, limit):
            sys.stdout.write(f"{line}\n")
        return
    told = Told()
    out = StreamOutput(sys.stdout.buffer, as_envelopes if as_json else message_lines)
    with (
        Interrupts() as interrupts,
        LogReader(
            directory,
            position="earliest" if start is None else start,
            follow=follow,
            topics=topics or None,
            on_event=told,
        ) as reader,
    ):
        for rows in pages(reader, end, limit, interrupts):
            out.write(rows)
    if told.has_lost:
        raise click.exceptions.Exit(1)


@log.command()
@_directories
@option("--quiet", is_flag=True, help="No progress bar.")
@json_option
def verify(directories: tuple[str, ...], quiet: bool, as_json: bool) -> None:
    """Verify every byte that is kept in each DIR.

    Damage, which makes the exit status 1, is what was good once and is not. Notes are what a crash or a
    writer at work leaves, and costs nobody a message.
    """
    reports = [_verified(directory, is_quiet=quiet, as_json=as_json) for directory in directories]
    if any(report is None or report.is_damaged for report in reports):
        raise click.exceptions.Exit(1)


def _verified(directory: str, *, is_quiet: bool, as_json: bool) -> Report | None:
    """Verify one and print; None, and a line on stderr, if it could not be: the others still are."""
    try:
        with progress(f"verifying {escape(directory)}", is_quiet=is_quiet) as bar:
            report = verify_log(directory, on_progress=bar.reach)
    except RtError as error:
        click.echo(f"rt: {escape(str(error))}", err=True)
        return None
    lines = [json.dumps(verify_object(report))] if as_json else verify_lines(report)
    click.echo("\n".join(lines))
    return report


@log.command()
@_directories
@option("--quiet", is_flag=True, help="No progress bar.")
@option(
    "--spark", is_flag=True, help="Audit merged logs with Spark, segments in parallel; one DIR is enough."
)
@option("--master", help="With --spark: its master. Executors see each DIR under the same path.")
@json_option
def compare(
    directories: tuple[str, ...], quiet: bool, spark: bool, master: str | None, as_json: bool
) -> None:
    """Compare the bytes of two or more DIRs that should be copies of each other.

    How far each has got, and what it has trimmed, is no difference. One makes the exit status 1. With --spark
    every byte is verified as well, and that positions are dense and sessions in order, without gap or repeat.
    """
    if master is not None and not spark:
        raise click.UsageError("--master goes with --spark.")
    if spark:
        _audit(directories, master, as_json=as_json)
        return
    if len(directories) < 2:
        raise click.UsageError("Two directories or more are needed.")
    with progress("comparing", is_quiet=quiet) as bar:
        found = compare_logs(directories, on_progress=bar.reach)
    lines = [json.dumps(compare_object(found))] if as_json else compare_lines(found)
    click.echo("\n".join(lines))
    if found.differences:
        raise click.exceptions.Exit(1)


def _audit(directories: tuple[str, ...], master: str | None, *, as_json: bool) -> None:
    from rt.cli.export import spark_session
    from rt.spark.auditing import audit

    session = spark_session("rt log compare", master, [])
    try:
        found = audit(directories, session)
    finally:
        session.stop()
    lines = [json.dumps(audit_object(found))] if as_json else audit_lines(found)
    click.echo("\n".join(lines))
    if found.problems:
        raise click.exceptions.Exit(1)
