"""`rt pub`: publish lines, CSV, JSON lines or files.

Law: exit status 0 means that everything read is on the medium, once and in order. However it ends, it says
which numbers were published.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, get_args

import click

from rt.cli import formats, inputs
from rt.cli.endpoints import endpoint_options, endpoints_tls
from rt.cli.feed import Fed, Feed, OnFull
from rt.cli.formats import Fields
from rt.cli.inputs import STDIN, Reading
from rt.cli.options import DEDUP_ID, SESSION_NAME, STREAM_NAME, json_option, option
from rt.cli.progress import progress
from rt.cli.signals import Interrupts
from rt.cli.text import escape, format_size
from rt.log.layout import BATCH_BYTES_MAX, TOPIC_BYTES_MAX
from rt.publisher import Publisher
from rt.publisher_settings import FsyncPolicy

Format = Literal["lines", "csv", "json", "files"]
Feeding = Callable[[str, Reading, Feed], None]


def _choice(kind: object) -> click.Choice[str]:
    return click.Choice([str(name) for name in get_args(kind)])


@click.command()
@click.argument("paths", metavar="[PATH]...", nargs=-1, type=click.Path(exists=True, allow_dash=True))
@option("--path", "root", required=True, metavar="DIR", help="Where the logs of this host are kept.")
@option("--stream", required=True, type=STREAM_NAME, help="The stream to publish to.")
@option(
    "--name",
    "--publisher-id",
    "publisher_id",
    type=SESSION_NAME,
    help="The session, a directory of its own; by default this host's name.",
)
@endpoint_options
@option("--dedup-id", type=DEDUP_ID, help="Shared by publishers that send the same messages.")
@option("--topic", default="", help="Topic of the messages that do not say.")
@option("--format", "style", type=_choice(Format), default="lines", show_default=True, help="What is read.")
@option("--topic-field", "--topic-column", metavar="NAME", help="Where json or csv say the topic.")
@option(
    "--timestamp-field",
    "--timestamp-column",
    metavar="NAME",
    help="Where json or csv say the time: RFC 3339, or ns since 1970.",
)
@option("--envelope", is_flag=True, help="With json: take back what `rt sub --json` wrote.")
@option("--no-header", is_flag=True, help="With csv: the first record is a message too.")
@option(
    "--batch-bytes",
    type=click.IntRange(4096, BATCH_BYTES_MAX),
    default=256 * 1024,
    show_default=True,
    help="A batch is written when it is that large,",
)
@option(
    "--linger-ms",
    type=click.FloatRange(0, 60_000),
    default=1.0,
    show_default=True,
    help="or that old.",
)
@option(
    "--roll-bytes",
    type=click.IntRange(4096, 2**40),
    default=128 * 2**20,
    show_default=True,
    help="A log file is ended when it is that large.",
)
@option(
    "--fsync",
    type=_choice(FsyncPolicy),
    default="interval",
    show_default=True,
    help="When what is written is synced, beside the end: each batch, every 100 ms, or with its file.",
)
@option("--compression", type=click.Choice(["none", "zstd"]), default="none", show_default=True)
@option(
    "--on-full",
    type=_choice(OnFull),
    default="wait",
    show_default=True,
    help="What to do when the disk is full: wait for space, or give up.",
)
@option("--quiet", is_flag=True, help="No progress bar and no summary on stderr.")
@json_option
def pub(
    paths: tuple[str, ...],
    root: str,
    stream: str,
    publisher_id: str | None,
    endpoints: tuple[str, ...],
    ca: str | None,
    cert: str | None,
    key: str | None,
    dedup_id: str | None,
    topic: str,
    style: Format,
    topic_field: str | None,
    timestamp_field: str | None,
    envelope: bool,
    no_header: bool,
    batch_bytes: int,
    linger_ms: float,
    roll_bytes: int,
    fsync: FsyncPolicy,
    compression: Literal["none", "zstd"],
    on_full: OnFull,
    quiet: bool,
    as_json: bool,
) -> None:
    """Publish what is in each PATH, or comes from stdin.

    lines: each line is a message, without its newline; a carriage return before it stays.
    csv: each record is a message, a JSON object of strings.
    json: each line is a message, and must be JSON.
    files: each file is a message, its path below PATH the topic.

    A record that is none ends the command: what precedes it is published, nothing that follows. Interrupted,
    it publishes what it has read, without an unfinished line.

    With --endpoint a process of its own pushes all that to the nodes. The command waits for it up to 30
    seconds; then, or interrupted again, it ends, and the process goes on.
    """
    fields = Fields(topic, topic_field, timestamp_field)
    feeding = _feeding(style, fields, envelope=envelope, has_header=not no_header)
    paths = _checked_paths(paths or (STDIN,), style)
    tls = endpoints_tls(endpoints, ca, cert, key)
    with Interrupts() as interrupts:
        publisher = Publisher(
            root,
            stream,
            publisher_id=publisher_id,
            dedup_id=dedup_id,
            endpoints=endpoints,
            tls=tls,
            batch_bytes=batch_bytes,
            linger_ms=linger_ms,
            roll_bytes=roll_bytes,
            fsync=fsync,
            compression="zstd" if compression == "zstd" else None,
        )
        fed, started = Fed(), time.monotonic()
        try:
            _publish(
                publisher,
                feeding,
                paths,
                interrupts,
                fed,
                has_nodes=bool(endpoints),
                on_full=on_full,
                is_quiet=quiet,
            )
        finally:
            _report(fed, publisher, time.monotonic() - started, as_json=as_json, is_quiet=quiet)


def _feeding(style: Format, fields: Fields, *, envelope: bool, has_header: bool) -> Feeding:
    """The reader of a format, with its options; misuse where they do not go together."""
    has_fields = fields.topic_field is not None or fields.timestamp_field is not None
    for is_wrong, what in (
        (envelope and style != "json", "--envelope goes with --format json only."),
        (not has_header and style != "csv", "--no-header goes with --format csv only."),
        (
            has_fields and (envelope or style not in {"csv", "json"}),
            "--topic-field and --timestamp-field go with csv, or json without --envelope.",
        ),
        (fields.topic and style == "files", "--topic does not go with --format files: paths are the topics."),
        (
            len(fields.topic.encode(errors="replace")) > TOPIC_BYTES_MAX,
            f"--topic has {TOPIC_BYTES_MAX} bytes at most.",
        ),
    ):
        if is_wrong:
            raise click.UsageError(what)
    match style:
        case "lines":
            return partial(formats.feed_lines, fields=fields)
        case "csv":
            return partial(formats.feed_csv, fields=fields, has_header=has_header)
        case "json":
            return partial(formats.feed_envelopes if envelope else formats.feed_json, fields=fields)
        case "files":
            return formats.feed_files


def _checked_paths(paths: Sequence[str], style: Format) -> tuple[str, ...]:
    for path in paths:
        if style == "files" and path == STDIN:
            raise click.UsageError("--format files needs a PATH: stdin has no name.")
        if style != "files" and path != STDIN and os.path.isdir(path):
            raise click.UsageError(f"{path} is a directory: publish what is in it with --format files.")
    return tuple(paths)


def _publish(
    publisher: Publisher,
    feeding: Feeding,
    paths: Sequence[str],
    interrupts: Interrupts,
    fed: Fed,
    *,
    has_nodes: bool,
    on_full: OnFull,
    is_quiet: bool,
) -> None:
    """Publish all, or up to what ends it; then flush and close, whatever it was."""
    total = inputs.total_bytes(paths)
    unit = "msg" if total is None else "B"
    with progress("publishing", total=total, unit=unit, is_quiet=is_quiet) as bar:
        feed = Feed(publisher, interrupts, fed, on_full=on_full, bar=bar if total is None else None)
        reading = Reading(interrupts, feed.push, _ignore if total is None else bar.add)
        try:
            for path in paths:
                feeding(path, reading, feed)
        finally:
            feed.finish()
            if has_nodes:
                _linger(publisher, interrupts)
            publisher.close()


def _linger(publisher: Publisher, interrupts: Interrupts) -> None:
    """Close when the nodes have it, or after a while; a signal ends the wait."""
    try:
        with interrupts.waiting():
            publisher.close()
    finally:
        publisher.close(linger=0)


def _ignore(size: int) -> None:
    """The bar counts messages."""


def _report(fed: Fed, publisher: Publisher, seconds: float, *, as_json: bool, is_quiet: bool) -> None:
    last = None if fed.end is None else fed.end - 1
    rate = fed.size_bytes / max(seconds, 1e-9)
    directory = os.path.abspath(publisher.directory)
    if as_json:
        summary = {
            "messages": fed.message_count,
            "bytes": fed.size_bytes,
            "seconds": round(seconds, 6),
            "first": fed.first,
            "last": last,
            "is_flushed": fed.is_flushed,
            "session": publisher.session,
            "directory": directory,
        }
        click.echo(json.dumps(summary))
    if not is_quiet:
        numbers = "" if fed.first is None else f", numbers {fed.first} to {last}"
        flushed = "" if fed.is_flushed else "; the last of them may not be on the medium"
        click.echo(
            f"Published {fed.message_count:,} messages{numbers}{flushed}, {format_size(fed.size_bytes)} "
            f"in {seconds:.2f} s ({format_size(rate)}/s), in {escape(directory)}",
            err=True,
        )
