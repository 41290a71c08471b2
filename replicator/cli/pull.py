"""`rt pull`: keep a local copy of a stream's merged log up to date."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import get_args

import click
import uvloop

from replicator.cli.common import on_signals
from replicator.protocol.handshake import HoldRejected, Wanted
from replicator.pull.client import PullClient
from replicator.pull.copy_repair import CopyRepairer, RepairingPull
from replicator.pull.local_copy import LocalCopy, Retention
from replicator.pull.sidecar_copy import SidecarCopy
from rt.cli.endpoints import endpoint_options, parse_endpoints, parse_tls
from rt.cli.options import PLACE, STREAM_NAME, SUBSCRIBER_NAME, option
from rt.cli.signals import Interrupted
from rt.errors import RtError
from rt.net.grpc_channel import keep_freed_memory
from rt.net.tls import TLS
from rt.sidecar.pull_protocol import (
    HoldDenied,
    NodeReached,
    NoGoodBytes,
    PullFailed,
    PullReport,
    encode_report,
)
from rt.sidecar.restart_backoff import spare_what_is_loaded


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False))
@option("--stream", type=STREAM_NAME, required=True, help="Name of the stream whose merged log is pulled.")
@endpoint_options(
    "gRPC endpoints of the nodes, separated by commas. One node is used; if it fails, the next one.",
    is_required=True,
    can_be_insecure=True,
    cert_help="PEM file of the client certificate; its role must be subscriber.",
)
@option(
    "--position",
    type=PLACE,
    default="earliest",
    show_default=True,
    help="Position at which a new copy starts. The copy starts with the segment that holds it.",
)
@option(
    "--topic",
    "--topics",
    "topics",
    multiple=True,
    metavar="TOPIC",
    help="Pull only this topic. Repeatable. Default: all topics.",
)
@option(
    "--name",
    type=SUBSCRIBER_NAME,
    help="Name of the subscriber; it must be the name in the certificate. "
    "The nodes keep messages that it has not acknowledged. Default: none.",
)
@option(
    "--retention",
    type=click.Choice(get_args(Retention)),
    default="follow",
    show_default=True,
    help="Who trims the copy: follow trims what the nodes trim, own leaves it to the subscriber.",
)
@option(
    "--repair",
    "mend",
    is_flag=True,
    help="Verify every segment of DIR, repair corrupt ones from the nodes, and end. "
    "Another rt pull may run on DIR at the same time.",
)
@option(
    "--attached",
    is_flag=True,
    help="For the subscriber that starts this command: end with stdin, and write reports to stdout.",
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
    mend: bool,
    attached: bool,
) -> None:
    """Keep a copy of the merged log of a stream in DIR.

    A copy that exists is continued, from any of the nodes. `rt sub DIR` reads it. The command runs until it
    is stopped and retries failed connections. It repairs corrupt bytes of the copy from the nodes.
    """
    if mend and attached:
        raise click.UsageError("--repair excludes --attached.")
    with _reported() if attached else contextlib.nullcontext():
        nodes, tls = parse_endpoints(endpoints), parse_tls(ca, cert, key, insecure=insecure)
        copy = SidecarCopy(
            directory,
            stream,
            on_reached=_report_end if attached else _ignore,
            on_refused=_report_refusal if attached else _ignore,
            on_no_good_bytes=_report_corrupt if attached else _ignore,
            position=position,
            topics=topics,
            retention=retention,
            name=name,
            subscriber=_subscriber(tls, name),
        )
        make_client = partial(_client, stream, nodes, tls)
        if mend:
            asyncio.run(_mend(LocalCopy(directory, stream, topics=topics), make_client))
            return
        keep_freed_memory()
        spare_what_is_loaded()
        raise Interrupted(uvloop.run(_run(RepairingPull(copy, make_client), is_attached=attached)))


def _subscriber(tls: TLS | None, name: str | None) -> str | None:
    """The subscriber whose acknowledgements are sent to the nodes."""
    if tls is None:
        return name
    return tls.identity.name if tls.identity.role == "subscriber" else None


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """Report to the parent process why this one ends."""
    try:
        yield
    except RtError as error:
        _report(PullFailed(error))
        raise
    except (ValueError, OSError) as error:
        _report(PullFailed(RtError(str(error))))
        raise


def _report(report: PullReport) -> None:
    with contextlib.suppress(OSError):  # The parent has ended; the end of stdin stops this process.
        os.write(sys.stdout.fileno(), encode_report(report))


def _report_end(end: int) -> None:
    _report(NodeReached(end))


def _report_refusal(refused: HoldRejected) -> None:
    _report(HoldDenied(refused.name, refused.why))


def _report_corrupt(start: int, end: int | None, why: str) -> None:
    _report(NoGoodBytes(start, end, why))


def _ignore(*_: object) -> None:
    """There is no parent to report to."""


def _client(stream: str, nodes: tuple[str, ...], tls: TLS | None, copy: LocalCopy) -> PullClient:
    return PullClient(copy, stream, nodes, tls, insecure=tls is None, raises_damage=True)


async def _mend(copy: LocalCopy, make_client: Callable[[LocalCopy], PullClient]) -> None:
    """Repair corrupt segments, and report them."""
    mender = CopyRepairer(copy, make_client)
    try:
        changed = await mender.repair_all()
    finally:
        mender.close()
    for segment, count in changed.items():
        click.echo(f"rt: repaired {os.path.join(copy.path, segment.file_name)}: {count} bytes", err=True)
    if not changed:
        click.echo(f"rt: nothing is corrupt in {copy.path}", err=True)


async def _run(pull: RepairingPull, *, is_attached: bool) -> int:
    """Pull until a signal, or with `is_attached` the end of stdin, stops it; returns the signal."""
    running = asyncio.ensure_future(pull.run())
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
    """Stop when the process at the other end of stdin has closed it or ended."""
    loop, stdin = asyncio.get_running_loop(), sys.stdin.fileno()

    def heard() -> None:
        if not os.read(stdin, 4096):
            loop.remove_reader(stdin)
            stop(signal.SIGTERM)

    try:
        loop.add_reader(stdin, heard)
    except PermissionError:  # Stdin is a file or closed: it ends at once.
        stop(signal.SIGTERM)
