"""`rt push`: push sessions to the nodes of their stream, beside the publishers that write them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from functools import partial

import click
import uvloop

from replicator.cli.common import FILE, on_signals, tls_of
from replicator.push_client import PushClient
from replicator.push_sessions import PushSessions
from rt.cli.options import DIRECTORY, STREAM_NAME, option
from rt.cli.signals import Interrupted
from rt.garbage import spare_what_is_loaded
from rt.log.directory import is_log_directory
from rt.log.disk import REAL

_LEFT_LOG = "push.log"
_NEW_LOG = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW


@click.command()
@click.argument("directory", metavar="DIR", type=DIRECTORY)
@option("--stream", type=STREAM_NAME, required=True, help="The stream that the sessions belong to.")
@option("--endpoints", required=True, metavar="HOST:PORT,...", help="The nodes: each gets everything.")
@option("--ca", type=FILE, help="PEM file of the CA that the nodes' certificates chain to.")
@option("--cert", type=FILE, help="PEM file of our certificate.")
@option("--key", type=FILE, help="PEM file of its private key.")
@option("--insecure", is_flag=True, help="No TLS; to nodes on this machine only.")
@option(
    "--attached",
    is_flag=True,
    help="End when stdin has ended and all is replicated: it is the publisher's who started this.",
)
def push(
    directory: str,
    stream: str,
    endpoints: str,
    ca: str | None,
    cert: str | None,
    key: str | None,
    insecure: bool,
    attached: bool,
) -> None:
    """Push the session in DIR, or all sessions of a stream where DIR is the root they are kept in.

    It runs until it is stopped; whatever fails on the way to the nodes is tried again, for ever. It ends with
    1 when all nodes refuse the session, or when a log here is damaged.
    """
    tls = tls_of(ca, cert, key, insecure=insecure)
    nodes = [endpoint.strip() for endpoint in endpoints.split(",") if endpoint.strip()]
    spare_what_is_loaded()
    make = partial(PushClient, stream=stream, endpoints=nodes, tls=tls, insecure=tls is None, waits=attached)
    if is_log_directory(REAL, directory):
        uvloop.run(_run(make(directory), is_attached=attached))
        return
    if attached:
        raise click.UsageError("--attached goes with the directory of one session.")
    make(directory)  # What is wrong with the options is said now.
    sessions = os.path.join(directory, stream, "sessions")
    uvloop.run(_run(PushSessions(sessions, make)))


async def _run(client: PushClient | PushSessions, *, is_attached: bool = False) -> None:
    """Push until it is done, or a signal ends it, in good order."""
    running = asyncio.ensure_future(client.run())
    stopped: list[int] = []

    def stop(number: int) -> None:
        stopped.append(number)
        running.cancel()

    on_signals(stop)
    if is_attached and isinstance(client, PushClient):
        _finish_with_stdin(client)
    try:
        await running
    except asyncio.CancelledError:
        if not stopped:
            raise
        raise Interrupted(stopped[0]) from None


def _finish_with_stdin(client: PushClient) -> None:
    """Let `client` finish when whoever holds the other end of stdin has closed it, or died.

    What it has to say from then on goes to a file beside the log: whoever reads the publisher's stderr would
    wait for its end as long as this process drains.
    """
    loop, stdin = asyncio.get_running_loop(), sys.stdin.fileno()

    def heard() -> None:
        if not os.read(stdin, 4096):
            loop.remove_reader(stdin)
            with contextlib.suppress(OSError):
                log = os.open(os.path.join(client.directory, _LEFT_LOG), _NEW_LOG, 0o600)
                os.dup2(log, sys.stderr.fileno())
                os.close(log)
            client.finish()

    try:
        loop.add_reader(stdin, heard)
    except PermissionError:  # A file, or nothing at all: it ends at once.
        client.finish()
