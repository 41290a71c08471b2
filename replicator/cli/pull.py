"""`rt pull`: keep a local copy of a stream's merged log up to date, for as long as it runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import get_args

import click
import uvloop

from replicator.attached_copy import AttachedCopy
from replicator.cli.common import FILE, on_signals, tls_of
from replicator.handshake import HoldRefused, Wanted
from replicator.pull_client import PullClient
from replicator.pull_copy import Retention
from rt.cli.options import PLACE, STREAM_NAME, SUBSCRIBER_NAME, option
from rt.cli.signals import Interrupted
from rt.errors import RtError
from rt.garbage import spare_what_is_loaded
from rt.net.rpc import keep_freed_memory
from rt.net.tls import TLS
from rt.pull_reports import Failed, PullReport, Reached, Refused, encode_report


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False))
@option("--stream", type=STREAM_NAME, required=True, help="The stream whose merged log is pulled.")
@option(
    "--endpoints",
    required=True,
    metavar="HOST:PORT,...",
    help="The nodes; one of them is followed, the next one when it fails.",
)
@option("--ca", type=FILE, help="PEM file of the CA that the nodes' certificates chain to.")
@option("--cert", type=FILE, help="PEM file of our certificate.")
@option("--key", type=FILE, help="PEM file of its private key.")
@option("--insecure", is_flag=True, help="No TLS; to nodes on this machine only.")
@option(
    "--position",
    type=PLACE,
    default="earliest",
    show_default=True,
    help="Where a new copy begins: with the segment that holds it.",
)
@option("--topic", "--topics", "topics", multiple=True, metavar="TOPIC", help="Only this topic; repeatable.")
@option("--name", type=SUBSCRIBER_NAME, help="Whose copy it is, to the nodes: our certificate's name.")
@option(
    "--retention",
    type=click.Choice(get_args(Retention)),
    default="follow",
    show_default=True,
    help="Trim what the nodes trim, or what the subscriber says.",
)
@option(
    "--attached",
    is_flag=True,
    help="End when stdin has ended, and report on stdout: it is the subscriber's who started this.",
)
def pull(
    directory: str,
    stream: str,
    endpoints: str,
    ca: str | None,
    cert: str | None,
    key: str | None,
    insecure: bool,
    position: Wanted,
    topics: tuple[str, ...],
    name: str | None,
    retention: Retention,
    attached: bool,
) -> None:
    """Keep DIR a copy of the merged log of a stream.

    The copy goes on where it ends, with any of the nodes. Read it with `rt sub DIR`. It runs until it is
    stopped; whatever fails on the way to the nodes is tried again, for ever.
    """
    with _reported() if attached else contextlib.nullcontext():
        tls = tls_of(ca, cert, key, insecure=insecure)
        nodes = [endpoint.strip() for endpoint in endpoints.split(",") if endpoint.strip()]
        copy = AttachedCopy(
            directory,
            stream,
            on_reached=_report_end if attached else _ignore,
            on_refused=_report_refusal if attached else _ignore,
            position=position,
            topics=topics,
            retention=retention,
            name=name,
            subscriber=_subscriber(tls, name),
        )
        keep_freed_memory()
        spare_what_is_loaded()
        raise Interrupted(uvloop.run(_run(copy, stream, nodes, tls, is_attached=attached)))


def _subscriber(tls: TLS | None, name: str | None) -> str | None:
    """Whose acknowledgements the nodes are told."""
    if tls is None:
        return name
    return tls.identity.name if tls.identity.role == "subscriber" else None


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """Tell whoever started this why it ends."""
    try:
        yield
    except RtError as error:
        _report(Failed(error))
        raise
    except (ValueError, OSError) as error:
        _report(Failed(RtError(str(error))))
        raise


def _report(report: PullReport) -> None:
    with contextlib.suppress(OSError):  # Nobody listens any more: the end of stdin says so too.
        os.write(sys.stdout.fileno(), encode_report(report))


def _report_end(end: int) -> None:
    _report(Reached(end))


def _report_refusal(refused: HoldRefused) -> None:
    _report(Refused(refused.name, refused.why))


def _ignore(_: object) -> None:
    """Nobody is there to be told."""


async def _run(
    copy: AttachedCopy, stream: str, nodes: list[str], tls: TLS | None, *, is_attached: bool
) -> int:
    """Pull until a signal ends it, or with `is_attached` the end of stdin, in good order; which signal."""
    client = PullClient(copy, stream, nodes, tls, insecure=tls is None)
    running = asyncio.ensure_future(client.run())
    stopped: list[int] = []

    def stop(number: int) -> None:
        stopped.append(number)
        running.cancel()

    on_signals(stop)
    if is_attached:
        _stop_with_stdin(stop)
    try:
        await running
    except asyncio.CancelledError:
        if not stopped:
            raise
    return stopped[0]


def _stop_with_stdin(stop: Callable[[int], None]) -> None:
    """Stop when whoever holds the other end of stdin has closed it, or died."""
    loop, stdin = asyncio.get_running_loop(), sys.stdin.fileno()

    def heard() -> None:
        if not os.read(stdin, 4096):
            loop.remove_reader(stdin)
            stop(signal.SIGTERM)

    try:
        loop.add_reader(stdin, heard)
    except PermissionError:  # A file, or nothing at all: it ends at once.
        stop(signal.SIGTERM)
