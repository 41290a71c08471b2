"""`rt sub`: write the messages of a log as lines, CSV, JSON lines, files or envelopes.

Invariants:
- A named subscriber acknowledges only what was written: a message may be written twice, but is never missing.
- Messages that are missing from the log are reported on stderr.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Literal, get_args

import click
from click.core import ParameterSource

from rt.cli.endpoints import NodeOptions, endpoint_options
from rt.cli.formats.console import EventPrinter
from rt.cli.formats.read_source import AnonymousReader, NamedSubscriber, PulledLog, ReadSource
from rt.cli.formats.writers import (
    CsvEncoder,
    Encoder,
    FileOutput,
    StreamOutput,
    as_envelopes,
    as_json_lines,
    as_lines,
)
from rt.cli.options import (
    DIRECTORY,
    PLACE,
    SINCE,
    SINCE_FORMS,
    STREAM_NAME,
    SUBSCRIBER_NAME,
    connect_timeout_option,
    option,
)
from rt.cli.signals import Interrupts
from rt.client.connection import subscriber_root
from rt.client.subscriber import Subscriber
from rt.errors import LogNotFound
from rt.log.disk import REAL
from rt.log.read.reader import Place
from rt.log.read.start_position import StartTime
from rt.log.scan.directory import is_log_directory, merged_directory

Format = Literal["lines", "csv", "json", "files"]

_MOST = 2**62


@click.command()
@click.argument("directory", metavar="[DIR]", required=False, type=DIRECTORY)
@option(
    "--path",
    "root",
    metavar="DIR",
    help="Directory that holds the logs of this host. Use it with --stream, instead of DIR. Default with "
    "nodes: ~/.local/state/rt/subscribers/NAME.",
)
@option("--stream", type=STREAM_NAME, help="Without DIR: name of the stream whose merged log is read.")
@endpoint_options(
    "subscriber",
    "gRPC endpoints of the nodes, separated by commas. Empty: read only logs on this machine.",
)
@connect_timeout_option(
    "With --endpoints: end with an error that names the reasons if no node is reached in this time.", least=0
)
@option(
    "--position",
    type=PLACE,
    help="Position to start at. Default: earliest, or the position that --name acknowledged.",
)
@option(
    "--since",
    type=SINCE,
    help=f"Start at the first message with this timestamp or a later one. {SINCE_FORMS}",
)
@option(
    "--name",
    type=SUBSCRIBER_NAME,
    help="Name of the subscriber. What was written is acknowledged, and the next start continues there. "
    "Default: none, and nothing is acknowledged.",
)
@option(
    "--topic",
    "topics",
    multiple=True,
    metavar="TOPIC",
    help="Read only this topic, or those of a pattern (*, ?, [...]). Repeatable. Default: all topics.",
)
@option(
    "--follow/--no-follow",
    default=False,
    help="Wait for new messages at the end of the log, or stop there (default).",
)
@option("--limit", type=click.IntRange(min=0), help="Stop after this number of messages. Default: no limit.")
@option(
    "--format",
    "style",
    type=click.Choice(get_args(Format)),
    default="lines",
    help="Format of the output: see above.",
)
@option(
    "--columns",
    metavar="A,B,...",
    help="With csv: the columns to write. Default: the keys of the first message.",
)
@option("--no-header", is_flag=True, help="With csv: write no header record.")
@option("--output", metavar="DIR", help="With files: the directory to write to.")
@option(
    "--json",
    "as_json",
    is_flag=True,
    help="Write one JSON object a line, with position, timestamp, session, number, topic, value and headers.",
)
@click.pass_context
def sub(
    ctx: click.Context,
    directory: str | None,
    root: str | None,
    stream: str | None,
    nodes: NodeOptions,
    position: Place | None,
    since: StartTime | None,
    name: str | None,
    topics: tuple[str, ...],
    follow: bool,
    limit: int | None,
    style: Format,
    columns: str | None,
    no_header: bool,
    output: str | None,
    as_json: bool,
    connect_timeout: float,
) -> None:
    """Write the messages of the log in DIR, or of the merged log of a stream.

    With nodes the messages are pulled into a copy below --path. The copy is kept, and
    the next start pulls only new messages. The nodes filter by --topic. --name must be the name in the
    certificate.

    \b
    lines  each value and a newline
    csv    a record for each value, which must be a JSON object; the first one gives the header
    json   each value, which must be valid JSON, on a line
    files  each value, in the file below --output that its topic names
    """  # noqa: D301 - click's mark of a block that is not wrapped
    encoder = _encoder(ctx, style, columns, no_header=no_header, as_json=as_json)
    if (output is None) == (encoder is None):
        raise click.UsageError("--output and --format files need each other.")
    if position is not None and since is not None:
        raise click.UsageError("--position excludes --since.")
    is_local = directory is not None and not nodes.is_given
    endpoints, tls = ((), None) if is_local else nodes.parse(name)
    position = since or position
    printer = EventPrinter()
    if tls is not None:
        if directory is not None:
            raise click.UsageError("--endpoints excludes DIR.")
        copies = root or subscriber_root(nodes.path(None), name or tls.identity.name)
        where = (copies, nodes.stream(stream))
    else:
        where = (_log_directory(directory, root, stream), "local")
    with contextlib.ExitStack() as opened:
        interrupts = opened.enter_context(Interrupts())
        source: ReadSource
        if tls is None and name is None:
            source = AnonymousReader(where[0], position, topics, printer, is_following=follow)
        else:
            subscriber = Subscriber(
                *where,
                endpoints=endpoints,
                tls=tls,
                position=position,
                topics=topics or None,
                on_event=printer,
                name=name,
                connect_timeout=connect_timeout or None,
            )
            kind = NamedSubscriber if tls is None else PulledLog
            source = kind(subscriber, is_following=follow)
        opened.callback(source.close)
        out: StreamOutput | FileOutput
        if encoder is None:
            out = FileOutput(str(output), is_durable=name is not None)
            opened.callback(out.close)
        else:
            out = StreamOutput(sys.stdout.buffer, encoder)
        _copy(source, out, interrupts, limit)
    if printer.has_lost:
        ctx.exit(1)


def _encoder(
    ctx: click.Context, style: Format, columns: str | None, *, no_header: bool, as_json: bool
) -> Encoder | None:
    """The encoder of a format; None for files. `click.UsageError` if options do not go together."""
    is_chosen = ctx.get_parameter_source("style") is not ParameterSource.DEFAULT
    if as_json and is_chosen:
        raise click.UsageError("--json excludes --format: it is a format of its own.")
    if style != "csv" and (columns is not None or no_header):
        raise click.UsageError("--columns and --no-header need --format csv.")
    if as_json:
        return as_envelopes
    match style:
        case "lines":
            return as_lines
        case "json":
            return as_json_lines
        case "csv":
            return CsvEncoder(None if columns is None else columns.split(","), has_header=not no_header)
        case "files":
            return None


def _log_directory(directory: str | None, root: str | None, stream: str | None) -> str:
    """The directory of the log. If it does not exist, `rt.LogNotFound`, which lists the sessions that
    exist.
    """
    if directory is not None:
        if root is not None or stream is not None:
            raise click.UsageError("Give either DIR, or --path and --stream.")
        return directory
    if root is None or stream is None:
        raise click.UsageError("Give DIR, or --path and --stream, or nodes (--endpoints, RT_URL, a profile).")
    path = merged_directory(root, stream)
    if is_log_directory(REAL, path):
        return path
    sessions = os.path.join(root, stream, "sessions")
    found = sorted(os.listdir(sessions)) if os.path.isdir(sessions) else []
    hint = (
        f"To read a session, give its directory {sessions}/NAME. There is: {', '.join(found)}."
        if found
        else None
    )
    raise LogNotFound(f"there is no merged log of stream {stream}", where=path, hint=hint)


def _copy(
    source: ReadSource, out: StreamOutput | FileOutput, interrupts: Interrupts, limit: int | None
) -> None:
    """Copy until the end of the log, `limit` messages or a signal. Acknowledges what was written."""
    left = _MOST if limit is None else limit
    try:
        while left:
            with interrupts.waiting():
                rows = source.next(left)
            if rows is None:
                return
            out.write(rows)
            left -= len(rows)
            source.written()
    finally:
        source.acknowledge()
