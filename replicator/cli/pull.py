"""`rt pull`: keep a local copy of a stream's merged log up to date."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from typing import get_args

import click
import uvloop

from replicator.protocol.handshake import Wanted
from replicator.pull.client import PullClient
from replicator.pull.copy_repair import CopyRepairer, RepairingPull
from replicator.pull.local_copy import LocalCopy, Retention
from replicator.pull.sidecar_copy import SidecarCopy
from rt.child_process import ForwardedLog, spare_what_is_loaded, write_line
from rt.cli.endpoints import NodeOptions, endpoint_options
from rt.cli.formats.console import report
from rt.cli.options import (
    PLACE,
    SINCE,
    SINCE_FORMS,
    STREAM_NAME,
    SUBSCRIBER_NAME,
    connect_timeout_option,
    option,
)
from rt.cli.signals import listen_in_loop, run_until_signal
from rt.errors import RtError
from rt.line_protocol import encode_line
from rt.log.read.start_position import StartTime
from rt.net.memory_guard import keep_freed_memory
from rt.net.tls import TLS
from rt.sidecar.protocol import ErrorReported, PullReport
from rt.sidecar.systemd_notify import run_as_service


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False))
@option("--stream", type=STREAM_NAME, required=True, help="Name of the stream whose merged log is pulled.")
@endpoint_options(
    "subscriber",
    "gRPC endpoints of the nodes, separated by commas. One node is used; if it fails, the next one.",
    is_required=True,
    cert_help="PEM file of the client certificate; its role must be subscriber, operator or node.",
)
@option(
    "--position",
    type=PLACE,
    help="Position at which a new copy starts. The copy starts with the segment that holds it. Default: "
    "earliest.",
)
@option(
    "--since",
    type=SINCE,
    help="Start a new copy at the first message with this timestamp or a later one, with the segment that "
    f"holds it. {SINCE_FORMS}",
)
@option(
    "--topic",
    "--topics",
    "topics",
    multiple=True,
    metavar="TOPIC",
    help="Pull only this topic, or those of a pattern (*, ?, [...]). Repeatable. Default: all topics.",
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
    help="Who trims the copy: follow trims what the nodes trim, own leaves it to the subscriber.",
)
@option(
    "--repair",
    is_flag=True,
    help="Verify every segment of DIR, repair corrupt ones from the nodes, and end. "
    "Another rt pull may run on DIR at the same time.",
)
@connect_timeout_option(
    "If no node is reached in this time, log why each one failed and go on. --repair ends with status 1.",
    least=0,
)
@option(
    "--attached",
    is_flag=True,
    help="For the subscriber that starts this command: end with stdin, and write reports to stdout.",
)
def pull(
    directory: str,
    stream: str,
    nodes: NodeOptions,
    position: Wanted | None,
    since: StartTime | None,
    topics: tuple[str, ...],
    name: str | None,
    retention: Retention,
    repair: bool,
    attached: bool,
    connect_timeout: float,
) -> None:
    """Keep a copy of the merged log of a stream in DIR.

    A copy that exists is continued, from any of the nodes. `rt sub DIR` reads it. The command runs until it
    is stopped and retries failed connections. It repairs corrupt bytes of the copy from the nodes.
    """
    if repair and attached:
        raise click.UsageError("--repair excludes --attached.")
    if position is not None and since is not None:
        raise click.UsageError("--position excludes --since.")
    with _reported() if attached else contextlib.nullcontext():
        endpoints, tls = nodes.parse(name)
        copy = SidecarCopy(
            directory,
            stream,
            report=_report if attached else _ignore,
            position=since or ("earliest" if position is None else position),
            topics=topics,
            retention=retention,
            name=name,
            subscriber=_subscriber(tls, name),
        )
        # If attached, the subscriber itself reports that no node is reached.
        connect_s = None if attached else connect_timeout or None
        make_client = partial(_client, stream, endpoints, tls, connect_s)
        if repair:
            asyncio.run(_repair(LocalCopy(directory, stream, topics=topics), make_client))
            return
        keep_freed_memory()
        spare_what_is_loaded()
        running = RepairingPull(copy, make_client).run()
        if not attached:
            running = run_as_service(running)
        uvloop.run(run_until_signal(running, listen=_stop_with_stdin if attached else None))


def _subscriber(tls: TLS | None, name: str | None) -> str | None:
    """The subscriber whose acknowledgements are sent to the nodes."""
    if tls is None:
        return name
    return tls.identity.name if tls.identity.role == "subscriber" else None


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """Log to the parent process, and report to it why this one ends."""
    logging.getLogger().handlers[:] = [ForwardedLog()]
    try:
        yield
    except RtError as error:
        _report(ErrorReported.of(error))
        raise
    except (ValueError, OSError) as error:
        _report(ErrorReported.of(RtError(str(error))))
        raise


def _report(report: PullReport) -> None:
    with contextlib.suppress(OSError):  # The parent has ended; the end of stdin stops this process.
        write_line(encode_line(report))


def _ignore(_: PullReport) -> None:
    """There is no parent to report to."""


def _client(
    stream: str, nodes: tuple[str, ...], tls: TLS | None, connect_s: float | None, copy: LocalCopy
) -> PullClient:
    return PullClient(
        copy,
        stream,
        nodes,
        tls,
        insecure=tls is None,
        raises_damage=True,
        connect_timeout_s=connect_s,
    )


async def _repair(copy: LocalCopy, make_client: Callable[[LocalCopy], PullClient]) -> None:
    """Repair corrupt segments, and report them."""
    repairer = CopyRepairer(copy, make_client)
    try:
        changed = await repairer.repair_all()
    finally:
        repairer.close()
    for segment, count in changed.items():
        report(f"repaired {os.path.join(copy.path, segment.file_name)}: {count} bytes")
    if not changed:
        report(f"nothing is corrupt in {copy.path}")


def _stop_with_stdin(stop: Callable[[int], None]) -> None:
    """Stop when the process at the other end of stdin has closed it or ended."""
    listen_in_loop(lambda _: None, partial(stop, signal.SIGTERM))
