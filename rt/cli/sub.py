"""`rt sub`: write the messages of a log as lines, CSV, JSON lines, files or envelopes.

Law: what a named subscriber acknowledges has been written before; so a message may be written twice, but is
never missing. Messages that are missing from the log are told on stderr.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal, get_args

import click
from click.core import ParameterSource

from rt.cli.endpoints import endpoint_options, endpoints_tls
from rt.cli.files import FileOutput
from rt.cli.options import PLACE, STREAM_NAME, SUBSCRIBER_NAME, TIME, option
from rt.cli.outputs import (
    CsvEncoder,
    Encoder,
    Output,
    StreamOutput,
    as_envelopes,
    as_json_lines,
    as_lines,
)
from rt.cli.reading import Named, Pulled, Source, Unnamed
from rt.cli.signals import Interrupts
from rt.cli.told import Told
from rt.errors import NotALog
from rt.log.directory import is_log_directory, merged_directory
from rt.log.disk import REAL
from rt.log.reader import LogReader, Place
from rt.subscriber import Subscriber

if TYPE_CHECKING:
    from rt.net.tls import TLS

Format = Literal["lines", "csv", "json", "files"]

_MOST = 2**62


@click.command()
@click.argument("directory", metavar="[DIR]", required=False, type=click.Path(exists=True, file_okay=False))
@option("--path", "root", metavar="DIR", help="Where the logs of this host are kept, instead of DIR.")
@option("--stream", type=STREAM_NAME, help="With --path: the stream whose merged log is read.")
@endpoint_options
@option("--position", type=PLACE, help="Where to begin.  [default: earliest, or where NAME acknowledged]")
@option("--since", type=TIME, help="Begin with the first message that is not older.")
@option("--name", type=SUBSCRIBER_NAME, help="Acknowledge what is written, and go on there the next time.")
@option("--topic", "topics", multiple=True, metavar="TOPIC", help="Only this topic; repeatable.")
@option("--follow/--no-follow", default=False, help="Wait for more at the end, or stop there (default).")
@option("--limit", type=click.IntRange(min=0), help="Stop after that many messages.")
@option(
    "--format",
    "style",
    type=click.Choice(get_args(Format)),
    default="lines",
    show_default=True,
    help="What is written.",
)
@option("--columns", metavar="A,B,...", help="With csv: these columns; by default the first message's keys.")
@option("--no-header", is_flag=True, help="With csv: no header record.")
@option("--output", metavar="DIR", help="With files: where they go.")
@option("--json", "as_json", is_flag=True, help="One JSON object a line: position, time, topic and all.")
@click.pass_context
def sub(
    ctx: click.Context,
    directory: str | None,
    root: str | None,
    stream: str | None,
    endpoints: tuple[str, ...],
    ca: str | None,
    cert: str | None,
    key: str | None,
    position: Place | None,
    since: int | None,
    name: str | None,
    topics: tuple[str, ...],
    follow: bool,
    limit: int | None,
    style: Format,
    columns: str | None,
    no_header: bool,
    output: str | None,
    as_json: bool,
) -> None:
    """Write the messages of the log in DIR, or of the merged log of a stream.

    With --endpoint they are pulled from the nodes into a copy below --path, which is kept; only what the
    copy lacks is pulled, and the nodes filter by --topic. NAME must be the certificate's then.

    lines: each value and a newline.
    csv: a record for each value, which must be a JSON object; a header from the first one.
    json: each value, which must be JSON, as a line.
    files: each value to the file that its topic names, below --output.
    """
    encoder = _encoder(ctx, style, columns, no_header=no_header, as_json=as_json)
    if (output is None) == (encoder is None):
        raise click.UsageError("--output goes with --format files, and it with --output.")
    if position is not None and since is not None:
        raise click.UsageError("--position and --since exclude each other.")
    tls = endpoints_tls(endpoints, ca, cert, key)
    told = Told()
    make: Callable[[], Source]
    if tls is not None:
        if directory is not None or root is None or stream is None or since is not None:
            raise click.UsageError("--endpoint goes with --path and --stream, without DIR and --since.")
        make = partial(
            _pulled, root, stream, endpoints, tls, position, topics, told, name=name, is_following=follow
        )
    else:
        path = _log_directory(directory, root, stream)
        if since is not None:
            position = _position_at(path, since)
        make = partial(_local, path, position, topics, told, name=name, is_following=follow)
    with contextlib.ExitStack() as opened:
        interrupts = opened.enter_context(Interrupts())
        source = make()
        opened.callback(source.close)
        out: Output
        if encoder is None:
            out = FileOutput(str(output), is_durable=name is not None)
            opened.callback(out.close)
        else:
            out = StreamOutput(sys.stdout.buffer, encoder)
        _copy(source, out, interrupts, limit)
    if told.has_lost:
        ctx.exit(1)


def _local(
    path: str,
    position: Place | None,
    topics: tuple[str, ...],
    told: Told,
    *,
    name: str | None,
    is_following: bool,
) -> Source:
    """A log that is here."""
    if name is None:
        return Unnamed(path, position, topics, told, is_following=is_following)
    subscriber = Subscriber(path, "local", position=position, topics=topics or None, on_event=told, name=name)
    return Named(subscriber, is_following=is_following)


def _pulled(
    root: str,
    stream: str,
    endpoints: tuple[str, ...],
    tls: TLS,
    position: Place | None,
    topics: tuple[str, ...],
    told: Told,
    *,
    name: str | None,
    is_following: bool,
) -> Source:
    """What the nodes have."""
    subscriber = Subscriber(
        root,
        stream,
        endpoints=endpoints,
        tls=tls,
        position=position,
        topics=topics or None,
        on_event=told,
        name=name,
    )
    return Pulled(subscriber, is_following=is_following)


def _encoder(
    ctx: click.Context, style: Format, columns: str | None, *, no_header: bool, as_json: bool
) -> Encoder | None:
    """The encoder of a format; None for files. Misuse where options do not go together."""
    is_chosen = ctx.get_parameter_source("style") is not ParameterSource.DEFAULT
    if as_json and is_chosen:
        raise click.UsageError("--json and --format exclude each other: --json is a format of its own.")
    if style != "csv" and (columns is not None or no_header):
        raise click.UsageError("--columns and --no-header go with --format csv only.")
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
    """Where the log is; `rt.NotALog`, naming the sessions that are there, if it is not."""
    if directory is not None:
        if root is not None or stream is not None:
            raise click.UsageError("Give either DIR, or --path and --stream.")
        return directory
    if root is None or stream is None:
        raise click.UsageError("Give DIR, or --path and --stream.")
    path = merged_directory(root, stream)
    if is_log_directory(REAL, path):
        return path
    sessions = os.path.join(root, stream, "sessions")
    found = sorted(os.listdir(sessions)) if os.path.isdir(sessions) else []
    hint = (
        f"Sessions can be read by their own directory, {sessions}/…: {', '.join(found)}." if found else None
    )
    raise NotALog(f"no merged log of {stream}", where=path, hint=hint)


def _position_at(path: str, since_ns: int) -> int:
    with LogReader(path) as reader:
        return reader.position_at(since_ns)


def _copy(source: Source, out: Output, interrupts: Interrupts, limit: int | None) -> None:
    """From `source` to `out` until the end, `limit` messages or a signal; acknowledges what was written."""
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
