"""`rt streams queues`: pause the delivery of a queue, and continue it."""

from __future__ import annotations

import click

from rt.cli.endpoints import NodeOptions
from rt.cli.formats.tables import escape
from rt.cli.options import option
from rt.cli.streams.queue_tables import (
    QueueTables,
    connect_option,
    node_options,
    one_queue,
    run,
    wait_option,
)
from rt.streams.requests.request import QueueRequest

_group_option = option(
    "--group", metavar="NAME", help="The group of leases. Needed if several have a queue of that name."
)


@click.group()
def queues() -> None:
    """Pause a queue, and resume it."""


@queues.command()
@click.argument("queue")
@_group_option
@wait_option
@connect_option
@node_options
def pause(queue: str, group: str | None, timeout: float, connect_timeout: float, nodes: NodeOptions) -> None:
    """Deliver nothing of QUEUE to its consumers, on whichever host it is, until it is resumed.

    Positions stay, and nodes keep what comes for the subscriptions. A call of a consumer under way ends.
    """
    _set(QueueTables(nodes, connect_timeout), queue, group, timeout, is_paused=True)


@queues.command()
@click.argument("queue")
@_group_option
@wait_option
@connect_option
@node_options
def resume(queue: str, group: str | None, timeout: float, connect_timeout: float, nodes: NodeOptions) -> None:
    """Deliver QUEUE again, from where its subscriptions are."""
    _set(QueueTables(nodes, connect_timeout), queue, group, timeout, is_paused=False)


def _set(tables: QueueTables, queue: str, group: str | None, timeout_s: float, *, is_paused: bool) -> None:
    async def work() -> None:
        found = one_queue(await tables.queues(group, queue))
        await tables.ask(found, QueueRequest("pause" if is_paused else "continue"), timeout_s)

    run(work())
    click.echo(f"Queue {escape(queue)} is {'paused' if is_paused else 'resumed'}.")
