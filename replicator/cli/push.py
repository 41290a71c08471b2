"""`rt push`: push sessions to the nodes of their stream, in a process beside the publishers."""

from __future__ import annotations

import asyncio
import os
from functools import partial

import click
import uvloop

from replicator.cli.attached_push import push_attached
from replicator.cli.common import on_signals
from replicator.push.client import PushClient
from replicator.push.session_discovery import SessionDiscovery
from replicator.send.directory_watch import WatchHub
from rt.cli.endpoints import endpoint_options, parse_endpoints, parse_tls
from rt.cli.options import DIRECTORY, STREAM_NAME, option
from rt.cli.signals import Interrupted
from rt.log.disk import REAL
from rt.log.scan.directory import is_log_directory
from rt.sidecar.restart_backoff import spare_what_is_loaded


def _run_attached(ctx: click.Context, _parameter: click.Parameter, is_attached: bool) -> None:
    """Run attached to a publisher instead of the rest of the command."""
    if is_attached and not ctx.resilient_parsing:
        spare_what_is_loaded()
        uvloop.run(push_attached())
        ctx.exit()


@click.command()
@click.argument("directory", metavar="DIR", type=DIRECTORY)
@option("--stream", type=STREAM_NAME, required=True, help="Name of the stream that the sessions belong to.")
@endpoint_options(
    "gRPC endpoints of the nodes, separated by commas. Each node receives every message.",
    is_required=True,
    can_be_insecure=True,
    cert_help="PEM file of the client certificate; its role must be publisher.",
)
@click.option(
    "--attached",
    is_flag=True,
    is_eager=True,
    hidden=True,
    expose_value=False,
    allow_from_autoenv=False,
    callback=_run_attached,
    help="Push what a publisher asks for on stdin.",
)
def push(
    directory: str,
    stream: str,
    endpoints: str,
    ca: str | None,
    cert: str | None,
    key: str | None,
    insecure: bool,
) -> None:
    """Push the session in DIR to the nodes, or all sessions of the stream below DIR.

    The command runs until it is stopped and retries failed connections. Exit status 1 means that all nodes
    refuse the session, or that a log on this machine is corrupt.
    """
    nodes, tls = parse_endpoints(endpoints), parse_tls(ca, cert, key, insecure=insecure)
    spare_what_is_loaded()
    make = partial(PushClient, stream=stream, endpoints=nodes, tls=tls, insecure=tls is None, hub=WatchHub())
    client = make(directory)  # Wrong options fail here.
    if is_log_directory(REAL, directory):
        uvloop.run(_run(client))
    else:
        uvloop.run(_run(SessionDiscovery(os.path.join(directory, stream, "sessions"), make)))


async def _run(client: PushClient | SessionDiscovery) -> None:
    """Push until all is done; a signal stops it cleanly."""
    running = asyncio.ensure_future(client.run())
    stopped: list[int] = []

    def stop(number: int) -> None:
        stopped.append(number)
        running.cancel()

    on_signals(stop)
    try:
        await running
    except asyncio.CancelledError:
        if not stopped:
            raise
        raise Interrupted(stopped[0]) from None
