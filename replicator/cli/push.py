"""`rt push`: push sessions to the nodes of their stream, in a process beside the publishers."""

from __future__ import annotations

import os
from functools import partial

import click
import uvloop

from replicator.cli.attached_push import push_attached
from replicator.cli.session_discovery import SessionDiscovery
from replicator.push.client import PushClient
from replicator.send.directory_watch import WatchHub
from rt.child_process import spare_what_is_loaded
from rt.cli.endpoints import NodeOptions, endpoint_options
from rt.cli.options import DIRECTORY, STREAM_NAME, option
from rt.cli.signals import run_until_signal
from rt.log.disk import REAL
from rt.log.scan.directory import is_log_directory
from rt.sidecar.systemd_notify import run_as_service


def _run_attached(ctx: click.Context, _parameter: click.Parameter, is_attached: bool) -> None:
    """Run attached to a publisher instead of the rest of the command."""
    if is_attached and not ctx.resilient_parsing:
        spare_what_is_loaded()
        uvloop.run(push_attached(ctx.find_root().params.get("log_format", "text")))
        ctx.exit()


@click.command()
@click.argument("directory", metavar="DIR", type=DIRECTORY)
@option("--stream", type=STREAM_NAME, required=True, help="Name of the stream that the sessions belong to.")
@endpoint_options(
    "publisher",
    "gRPC endpoints of the nodes, separated by commas. Each node receives every message.",
    is_required=True,
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
def push(directory: str, stream: str, nodes: NodeOptions) -> None:
    """Push the session in DIR to the nodes, or all sessions of the stream below DIR.

    The command runs until it is stopped and retries failed connections. Exit status 1 means that all nodes
    refuse the session, or that a log on this machine is corrupt.
    """
    endpoints, tls = nodes.parse()
    spare_what_is_loaded()
    make = partial(
        PushClient, stream=stream, endpoints=endpoints, tls=tls, insecure=tls is None, hub=WatchHub()
    )
    client: PushClient | SessionDiscovery = make(directory)  # Wrong options fail here.
    if not is_log_directory(REAL, directory):
        client = SessionDiscovery(os.path.join(directory, stream, "sessions"), make)
    uvloop.run(run_until_signal(run_as_service(client.run())))
