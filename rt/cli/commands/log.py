"""`rt log`: show, verify and compare log directories.

Invariants:
- Nothing is written and no lock is taken: a directory may be in use, or read-only.
- Exit status 1 means corruption, or a difference.
"""

from __future__ import annotations

import sys

import click

from rt.cli.formats.console import EventPrinter, progress, report, show
from rt.cli.formats.log_check import (
    audit_lines,
    audit_object,
    compare_lines,
    compare_object,
    verify_lines,
    verify_object,
)
from rt.cli.formats.log_dump import batch_lines, batch_objects, message_lines, pages
from rt.cli.formats.log_stat import stat_lines, stat_object
from rt.cli.formats.tables import escape
from rt.cli.formats.writers import StreamOutput, as_envelopes
from rt.cli.options import DIRECTORY, POSITION, json_option, option
from rt.cli.signals import Interrupts
from rt.errors import RtError
from rt.log.check.compare import compare as compare_logs
from rt.log.check.status import read_status
from rt.log.check.verify import Report
from rt.log.check.verify import verify as verify_log
from rt.log.read.reader import LogReader

_directories = click.argument("directories", metavar="DIR...", nargs=-1, required=True, type=DIRECTORY)


@click.group()
def log() -> None:
    """Show, verify and compare log directories."""


@log.command()
@_directories
@json_option
def stat(directories: tuple[str, ...], as_json: bool) -> None:
    """Show the identity of each DIR and its segments, including trimmed ones.

    The command reads the segment table and the end of the newest segment, not the messages.
    """
    for index, directory in enumerate(directories):
        status = read_status(directory)
        if index and not as_json:
            click.echo()
        show(status, as_json=as_json, to_object=stat_object, to_lines=stat_lines)


@log.command()
@click.argument("directory", metavar="DIR", type=DIRECTORY)
@option(
    "--from",
    "start",
    type=POSITION,
    help="First position to show; in a session, first number. Default: the start of the log.",
)
@option(
    "--to", "end", type=POSITION, help="Position to stop at; it is not shown. Default: the end of the log."
)
@option(
    "--limit",
    type=click.IntRange(min=0),
    help="Stop after this number of messages, or batches. Default: no limit.",
)
@option(
    "--topic",
    "topics",
    multiple=True,
    metavar="TOPIC",
    help="Show only this topic, or those of a pattern (*, ?, [...]). Repeatable. Default: all topics.",
)
@option("--batches", is_flag=True, help="Show batches instead of messages.")
@option("--follow", is_flag=True, help="Wait for new messages at the end of the log.")
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

    Characters that are not printable are escaped. With --json the lines are those of `rt sub --json`.
    """
    if batches:
        if follow or topics:
            raise click.UsageError("--batches excludes --follow and --topic.")
        show = batch_objects if as_json else batch_lines
        for line in show(directory, start or 0, end, limit):
            sys.stdout.write(f"{line}\n")
        return
    printer = EventPrinter()
    out = StreamOutput(sys.stdout.buffer, as_envelopes if as_json else message_lines)
    with (
        Interrupts() as interrupts,
        LogReader(
            directory,
            position="earliest" if start is None else start,
            follow=follow,
            topics=topics or None,
            on_event=printer,
        ) as reader,
    ):
        for rows in pages(reader, end, limit, interrupts):
            out.write(rows)
    if printer.has_lost:
        raise click.exceptions.Exit(1)


@log.command()
@_directories
@option("--quiet", is_flag=True, help="Show no progress bar.")
@json_option
def verify(directories: tuple[str, ...], quiet: bool, as_json: bool) -> None:
    """Verify every byte in each DIR.

    Corruption of synced bytes makes the exit status 1. A torn tail that a crash or a running writer leaves
    is reported as a note: no synced message is lost with it.
    Messages that no reader can decode, because they were published so, are reported and are not corruption.
    """
    reports = [_verified(directory, is_quiet=quiet, as_json=as_json) for directory in directories]
    if any(found is None or found.is_damaged for found in reports):
        raise click.exceptions.Exit(1)


def _verified(directory: str, *, is_quiet: bool, as_json: bool) -> Report | None:
    """Verify one directory and print the report; None, and a line on stderr, if that failed."""
    try:
        with progress(f"verifying {escape(directory)}", is_quiet=is_quiet) as bar:
            found = verify_log(directory, on_progress=bar.reach)
    except RtError as error:
        report(error)
        return None
    show(found, as_json=as_json, to_object=verify_object, to_lines=verify_lines)
    return found


@log.command()
@_directories
@option("--quiet", is_flag=True, help="Show no progress bar.")
@option(
    "--spark", is_flag=True, help="Audit merged logs with Spark, segments in parallel. One DIR is enough."
)
@option(
    "--master",
    help="With --spark: its master. Every executor must see each DIR under the same path. "
    "Default: that of spark-submit, or all cores of this machine.",
)
@json_option
def compare(
    directories: tuple[str, ...], quiet: bool, spark: bool, master: str | None, as_json: bool
) -> None:
    """Compare the bytes of two or more DIRs that must be copies of each other.

    A difference makes the exit status 1. Copies may end at different positions and may have trimmed
    different segments. With --spark every byte is verified too, and positions must be dense and the numbers
    of each session consecutive.
    """
    if master is not None and not spark:
        raise click.UsageError("--master needs --spark.")
    if spark:
        _audit(directories, master, as_json=as_json)
        return
    if len(directories) < 2:
        raise click.UsageError("Give two directories or more.")
    with progress("comparing", is_quiet=quiet) as bar:
        found = compare_logs(directories, on_progress=bar.reach)
    show(found, as_json=as_json, to_object=compare_object, to_lines=compare_lines)
    if found.differences:
        raise click.exceptions.Exit(1)


def _audit(directories: tuple[str, ...], master: str | None, *, as_json: bool) -> None:
    from rt.cli.spark.errors import spark_errors
    from rt.cli.spark.session import spark_session
    from rt.spark.export.audit_job import audit

    session = spark_session("rt log compare", master, [])
    with spark_errors("the audit has failed in Spark", None, "See the log of Spark."):
        try:
            found = audit(directories, session)
        finally:
            session.stop()
    show(found, as_json=as_json, to_object=audit_object, to_lines=audit_lines)
    if found.problems:
        raise click.exceptions.Exit(1)
