"""`rt streams`: hosts of streams, and the subscriptions that their clusters keep."""

from __future__ import annotations

import click

from rt.cli.streams.hosts import hosts
from rt.cli.streams.queues import queues
from rt.cli.streams.subscriptions import subscriptions


@click.group()
def streams() -> None:
    """Show hosts of streams, and show and change the subscriptions that a cluster keeps for them."""


for command in (hosts, subscriptions, queues):
    streams.add_command(command)
