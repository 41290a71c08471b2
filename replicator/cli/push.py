"""`rt push`: push sessions to the nodes of their stream, beside the publishers that write them."""

from __future__ import annotations

import asyncio
import os
from functools import partial

import click
import uvloop

from replicator.cli.attached_push import push_attached
from replicator.cli.common import FILE, on_signals, tls_of
from replicator.push_client import PushClient
from replicator.push_sessions import PushSessions
from replicator.watch_hub import WatchHub
from rt.cli.options import DIRECTORY, STREAM_NAME, option
from rt.cli.signals import Interrupted
from rt.garbage import spare_what_is_loaded
from rt.log.directory import is_log_directory
from rt.log.disk import REAL


def _run_attached(ctx: click.Context, _parameter: click.Parameter, is_attached: bool) -> None:
    """In place of all else that the command does."""
    if is_attached and not ctx.resilient_parsing:
        spare_what_is_loaded()
        uvloop.run(push_attached())
        ctx.exit()


@click.command()
@click.argument("directory", metavar="DIR", type=DIRECTORY)
@option("--stream", type=STREAM_NAME, required=True, help="The stream that the sessions belong to.")
@option("--endpoints", required=True, metavar="HOST:PORT,...", help="The nodes: each gets everything.")
@option("--ca", type=FILE, help="PEM file of the CA that the nodes' certificates chain to.")
@option("--cert", type=FILE, help="PEM file of our certificate.")
@option("--key", type=FILE, help="PEM file of its private key.")
@option("--insecure", is_flag=True, help="No TLS; to nodes on this machine only.")
@click.option(
    "--attached",
    is_flag=True,
    is_eager=True,
    hidden=True,
    expose_value=False,
    allow_from_autoenv=False,
    callback=_run_attached,
    help="Push what is asked for on stdin: it is a publisher that started this.",
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
    """Push the session in DIR, or all sessions of a stream where DIR is the root they are kept in.

    It runs until it is stopped; whatever fails on the way to the nodes is tried again, for ever. It ends with
    1 when all nodes refuse the session, or when a log here is damaged.
    """
    tls = tls_of(ca, cert, key, insecure=insecure)
    nodes = [endpoint.strip() for endpoint in endpoints.split(",") if endpoint.strip()]
    spare_what_is_loaded()
    make = partial(PushClient, stream=stream, endpoints=nodes, tls=tls, insecure=tls is None, hub=WatchHub())
    client = make(directory)  # What is wrong with the options is said now.
    if is_log_directory(REAL, directory):
        uvloop.run(_run(client))
    else:
        uvloop.run(_run(PushSessions(os.path.join(directory, stream, "sessions"), make)))


async def _run(client: PushClient | PushSessions) -> None:
    """Push until it is done, or a signal ends it, in good order."""
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
