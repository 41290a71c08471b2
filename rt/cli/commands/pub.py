"""`rt pub`: publish lines, CSV, JSON lines or files.

Invariants:
- Exit status 0 means that everything that was read is synced to disk, once and in order, and has reached the
  level that was asked for.
- However the command ends, it reports which numbers were published and what they have reached.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, get_args

import click

from rt.cli.endpoints import NodeOptions, endpoint_options
from rt.cli.formats import parsers
from rt.cli.formats.console import progress, report
from rt.cli.formats.level_wait import Level, WaitOutcome, wait_for_level
from rt.cli.formats.parsers import STDIN, Fields, Parser
from rt.cli.formats.publish_loop import OnFull, PublishedCount, PublishLoop
from rt.cli.formats.tables import count_of, escape, format_size
from rt.cli.options import DEDUP_ID, SESSION_NAME, STREAM_NAME, ExistingPath, FiniteRange, json_option, option
from rt.cli.signals import Interrupts
from rt.client.publisher import Publisher
from rt.client.settings import SILENCE_SECONDS_MIN, FsyncPolicy
from rt.errors import InvalidHeader, RtError
from rt.log.format.constants import BATCH_BYTES_MAX, TOPIC_BYTES_MAX
from rt.log.format.headers import Headers, checked_headers
from rt.names import session_owner
from rt.option_checks import TIMEOUT_SECONDS_MAX

Format = Literal["lines", "csv", "json", "files"]
Feeding = Callable[[str, Parser, PublishLoop], None]


def _choice(kind: object) -> click.Choice[str]:
    return click.Choice([str(name) for name in get_args(kind)])


@click.command()
@click.argument("paths", metavar="[PATH]...", nargs=-1, type=ExistingPath(allow_dash=True))
@option(
    "--path",
    "root",
    metavar="DIR",
    help="Directory that holds the logs of this host. Required without nodes. Default with nodes: "
    "~/.local/state/rt.",
)
@option("--stream", type=STREAM_NAME, help="Name of the stream to publish to. Required.")
@option(
    "--name",
    "--publisher-id",
    "publisher_id",
    type=SESSION_NAME,
    help="Name of the session. It has its own directory. Default: the name in the certificate, else of this "
    "host.",
)
@endpoint_options(
    "publisher",
    "gRPC endpoints of the nodes, separated by commas. Empty: write only the log on this machine.",
)
@option(
    "--dedup-id",
    type=DEDUP_ID,
    help="Id shared by publishers that send the same messages: each is merged once. Default: none.",
)
@option("--topic", default="", help="Topic of messages whose record names none. Default: the empty topic.")
@option(
    "--header",
    "headers",
    multiple=True,
    metavar="KEY=VALUE",
    help="A header of messages whose record names none. Repeatable. Default: none.",
)
@option("--format", "style", type=_choice(Format), default="lines", help="Format of the input: see above.")
@option(
    "--topic-field",
    "--topic-column",
    metavar="NAME",
    help="With json or csv: the field that holds the topic. Default: none.",
)
@option(
    "--timestamp-field",
    "--timestamp-column",
    metavar="NAME",
    help="With json or csv: the field that holds the timestamp, as RFC 3339 or as nanoseconds since 1970. "
    "Default: the time of publishing.",
)
@option("--envelope", is_flag=True, help="With json: each line is an envelope as `rt sub --json` writes it.")
@option("--no-header", is_flag=True, help="With csv: the first record is a message, not a header.")
@option(
    "--batch-bytes",
    type=click.IntRange(4096, BATCH_BYTES_MAX),
    default=256 * 1024,
    help="Write a batch at this size. Bytes.",
)
@option(
    "--linger-ms",
    type=FiniteRange(0, 60_000),
    default=1.0,
    help="Write a batch at this age, if it is smaller. Milliseconds. 0: write each message at once.",
)
@option(
    "--roll-bytes",
    type=click.IntRange(4096, 2**40),
    default=128 * 2**20,
    help="Start a new log file at this size. Bytes.",
)
@option(
    "--fsync",
    type=_choice(FsyncPolicy),
    default="interval",
    help="When to sync written batches: after each batch, every 100 ms, or never before a file ends. "
    "Everything is synced at the end of the command.",
)
@option(
    "--max-silence",
    type=FiniteRange(SILENCE_SECONDS_MIN, TIMEOUT_SECONDS_MAX),
    help="Promise a message at least this often: if the nodes get none for longer, they raise the alarm "
    "publisher-silent. The promise ends when the command ends by itself or is interrupted. Seconds. "
    "Default: no promise.",
)
@option("--compression", type=click.Choice(["none", "zstd"]), default="none", help="Compression of batches.")
@option(
    "--on-full",
    type=_choice(OnFull),
    default="wait",
    help="What to do if the disk is full: wait for space, or fail.",
)
@option(
    "--level",
    type=_choice(Level),
    help="What to wait for: flushed is synced on this machine, replicated is synced on a majority of the "
    "nodes, merged is in the merged log. Default: merged with --endpoints, flushed without.",
)
@option(
    "--timeout",
    type=FiniteRange(0, TIMEOUT_SECONDS_MAX),
    default=30.0,
    help="Longest wait for --level after the end of the input. Seconds.",
)
@option("--quiet", is_flag=True, help="No progress bar and no summary on stderr. Errors are shown.")
@json_option
def pub(
    paths: tuple[str, ...],
    root: str | None,
    stream: str | None,
    publisher_id: str | None,
    nodes: NodeOptions,
    topic: str,
    headers: tuple[str, ...],
    style: Format,
    topic_field: str | None,
    timestamp_field: str | None,
    envelope: bool,
    no_header: bool,
    compression: Literal["none", "zstd"],
    on_full: OnFull,
    level: Level | None,
    timeout: float,
    quiet: bool,
    as_json: bool,
    **settings: Any,
) -> None:
    """Publish the contents of each PATH, or of stdin.

    \b
    lines  each line is a message, without its newline; a carriage return is kept
    csv    each record is a message: a JSON object of strings
    json   each line is a message and must be valid JSON
    files  each file is a message; its path below PATH is the topic

    A malformed record ends the command: the records before it are published, those after it are not. If
    the command is interrupted, it publishes what it has read, without an unfinished line.

    With --endpoints a separate process pushes the messages to the nodes. The command waits until they have
    reached --level. If that takes longer than --timeout, the command reports what they have reached, and its
    exit status is 1. An interrupt ends the wait in the same way. The messages stay on disk, and that process
    continues to send them after the command has ended: `rt pushes list` shows it.
    """  # noqa: D301 - click's mark of a block that is not wrapped
    fields = Fields(topic, topic_field, timestamp_field)
    own = _headers(headers)
    feeding = _feeding(style, fields, envelope=envelope, has_header=not no_header)
    paths = _checked_paths(paths or (STDIN,), style)
    root, stream = nodes.path(root), nodes.stream(stream)
    endpoints, tls = nodes.parse(None if publisher_id is None else session_owner(publisher_id))
    if publisher_id is None and tls is not None:
        publisher_id = tls.identity.name
    if level in {"replicated", "merged"} and not endpoints:
        raise click.UsageError(f"--level {level} needs --endpoints: without nodes nothing is {level}.")
    level = level or ("merged" if endpoints else "flushed")
    with Interrupts() as interrupts:
        publisher = Publisher(
            root,
            stream,
            publisher_id=publisher_id,
            endpoints=endpoints,
            tls=tls,
            compression="zstd" if compression == "zstd" else None,
            **settings,
        )
        published, outcome, started = PublishedCount(), WaitOutcome(level), time.monotonic()
        try:
            try:
                make_loop = partial(
                    PublishLoop, publisher, interrupts, published, on_full=on_full, headers=own
                )
                _publish(make_loop, feeding, paths, interrupts, is_quiet=quiet)
            finally:
                if published.is_flushed:
                    wait_for_level(publisher, published, outcome, timeout, interrupts, is_quiet=quiet)
                _close(publisher, outcome)
        finally:
            seconds = time.monotonic() - started
            _report(published, outcome, publisher, seconds, as_json=as_json, is_quiet=quiet)
        if not outcome.is_level_reached:
            raise click.exceptions.Exit(1)


def _headers(given: Sequence[str]) -> Headers:
    """The headers of `--header`; `click.UsageError` if one is invalid."""
    pairs = []
    for each in given:
        key, equals, value = each.partition("=")
        if not equals:
            raise click.UsageError(f"--header needs KEY=VALUE, not {each!r}.")
        pairs.append((key, os.fsencode(value)))
    try:
        return checked_headers(pairs)
    except InvalidHeader as error:
        raise click.UsageError(f"--header: {error}") from error


def _close(publisher: Publisher, outcome: WaitOutcome) -> None:
    """Close the publisher, and leave the rest to the push process.

    An error that blocks the rest is ignored if the level is reached, or if the outcome already reports a
    problem.
    """
    try:
        publisher.close(timeout=0)
    except RtError:
        if not outcome.is_level_reached and outcome.problem is None:
            raise


def _feeding(style: Format, fields: Fields, *, envelope: bool, has_header: bool) -> Feeding:
    """The reader of a format, with its options; `click.UsageError` if they do not go together."""
    has_fields = fields.topic_field is not None or fields.timestamp_field is not None
    for is_wrong, what in (
        (envelope and style != "json", "--envelope needs --format json."),
        (not has_header and style != "csv", "--no-header needs --format csv."),
        (
            has_fields and (envelope or style not in {"csv", "json"}),
            "--topic-field and --timestamp-field need --format csv, or --format json without --envelope.",
        ),
        (fields.topic and style == "files", "--topic excludes --format files: the paths are the topics."),
        (
            len(fields.topic.encode(errors="replace")) > TOPIC_BYTES_MAX,
            f"--topic is too long: the limit is {TOPIC_BYTES_MAX} bytes.",
        ),
    ):
        if is_wrong:
            raise click.UsageError(what)
    match style:
        case "lines":
            return partial(parsers.feed_lines, fields=fields)
        case "csv":
            return partial(parsers.feed_csv, fields=fields, has_header=has_header)
        case "json":
            return partial(parsers.feed_envelopes if envelope else parsers.feed_json, fields=fields)
        case "files":
            return parsers.feed_files


def _checked_paths(paths: Sequence[str], style: Format) -> tuple[str, ...]:
    for path in paths:
        if style == "files" and path == STDIN:
            raise click.UsageError("--format files needs a PATH, since stdin has no name.")
        if style != "files" and path != STDIN and os.path.isdir(path):
            raise click.UsageError(f"{path} is a directory: --format files publishes the files in it.")
    return tuple(paths)


def _publish(
    make_loop: Callable[..., PublishLoop],
    feeding: Feeding,
    paths: Sequence[str],
    interrupts: Interrupts,
    *,
    is_quiet: bool,
) -> None:
    """Publish all input; then flush, also after an error or a signal."""
    total = parsers.total_bytes(paths)
    unit = "msg" if total is None else "B"
    with progress("publishing", total=total, unit=unit, is_quiet=is_quiet) as bar:
        feed = make_loop(bar=bar if total is None else None)
        reading = Parser(interrupts, feed.push, _ignore if total is None else bar.add)
        try:
            for path in paths:
                feeding(path, reading, feed)
        finally:
            feed.finish()


def _ignore(size: int) -> None:
    """Count no bytes: the bar counts messages."""


def _report(
    published: PublishedCount,
    outcome: WaitOutcome,
    publisher: Publisher,
    seconds: float,
    *,
    as_json: bool,
    is_quiet: bool,
) -> None:
    last = None if published.end is None else published.end - 1
    directory = os.path.abspath(publisher.directory)
    if as_json:
        summary = {
            "messages": published.message_count,
            "bytes": published.size_bytes,
            "seconds": round(seconds, 6),
            "first": published.first,
            "last": last,
            "is_flushed": published.is_flushed,
            "level": outcome.level,
            "is_reached": outcome.is_level_reached,
            "replicated": outcome.replicated,
            "merged": outcome.merged,
            "reason": outcome.reason,
            "push_pid": outcome.push_pid,
            "session": publisher.session,
            "directory": directory,
        }
        click.echo(json.dumps(summary))
    if not is_quiet:
        click.echo(_summary(published, outcome, seconds, directory), err=True)
    if outcome.problem is not None:
        report(outcome.problem)


def _summary(published: PublishedCount, outcome: WaitOutcome, seconds: float, directory: str) -> str:
    """One line: "3 messages merged, numbers 0 to 2, 12 B in 0.02 s (600 B/s), in DIR"."""
    counts = [(published.message_count, "flushed" if published.is_flushed else "published")]
    if outcome.is_level_reached:
        counts = [(published.message_count, outcome.level)]
    elif published.is_flushed:
        counts += [(outcome.replicated, "replicated"), (outcome.merged, "merged")]
    (first, level), *more = counts
    text = f"{count_of(first, 'message')} {level}" + "".join(f", {count:,} {name}" for count, name in more)
    if published.first is not None and published.end is not None:
        last = published.end - 1
        text += f", number {last}" if published.first == last else f", numbers {published.first} to {last}"
    if not published.is_flushed:
        text += "; the last of them may not be synced to disk"
    rate = published.size_bytes / max(seconds, 1e-9)
    return (
        f"{text}, {format_size(published.size_bytes)} in {seconds:.2f} s ({format_size(rate)}/s), "
        f"in {escape(directory)}"
    )
