"""`rt streams subscriptions`: the subscriptions that a cluster keeps, and how to change them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

import click
from msgspec.structs import asdict

from rt.cli.endpoints import NodeOptions
from rt.cli.formats.tables import escape
from rt.cli.log_goals import Goal, GoalType
from rt.cli.options import json_option, option
from rt.cli.streams.queue_tables import (
    QueueTables,
    connect_option,
    filter_options,
    node_options,
    run,
    wait_option,
)
from rt.cli.streams.rows import QueueRow, SubscriptionRow, chosen, list_lines, queue_object
from rt.streams.core.stream_id import SequenceToken
from rt.streams.requests.request import QueueAnswer, QueueRequest

T = TypeVar("T")

_stream_option = option(
    "--stream", metavar="NAMESPACE/KEY", help="Only of this stream. Needed if several have that name."
)


def _options_of_one(command: Callable[..., T]) -> Callable[..., T]:
    """Which subscription, and how its owner is asked."""
    for add in (node_options, connect_option, json_option, wait_option, filter_options, _stream_option):
        command = add(command)
    return command


@click.group()
def subscriptions() -> None:
    """Show the subscriptions of the queues of a cluster, and reset, resume or end one.

    They are those that hosts keep in the cluster (`cluster_stores`). The host that owns the queue carries out
    a change; if there is none, the next one does. SUBSCRIPTION is the name of a subscription, or its id, of
    which eight digits are enough.
    """


@subscriptions.command("list")
@filter_options
@json_option
@connect_option
@node_options
def list_subscriptions(
    group: str | None, queue: str | None, as_json: bool, connect_timeout: float, nodes: NodeOptions
) -> None:
    """List the subscriptions: position, lag, state, age; and the queues with their owners.

    Hosts are not asked. An implicit subscription is listed if its position is not that of the queue.
    Positions are those that were saved. States: active; waiting, if no host serves the queue; faulted;
    paused. The age is since the subscription was made.
    """
    found = run(QueueTables(nodes, connect_timeout).queues(group, queue))
    if as_json:
        for one in found:
            click.echo(json.dumps(queue_object(one)))
    else:
        click.echo("\n".join(list_lines(found)))


@subscriptions.command()
@click.argument("subscription")
@option(
    "--to",
    "goal",
    type=GoalType(),
    required=True,
    help="Where it continues: earliest, latest, a position, or a time: RFC 3339, a date, or a duration "
    "before now such as 15m. At a time: the first message with this timestamp or a later one.",
)
@option("--dry-run", is_flag=True, help="Show what would change, and change nothing.")
@_options_of_one
def reset(
    subscription: str,
    goal: Goal,
    dry_run: bool,
    stream: str | None,
    group: str | None,
    queue: str | None,
    timeout: float,
    as_json: bool,
    connect_timeout: float,
    nodes: NodeOptions,
) -> None:
    """Move a subscription, also back.

    Its consumer gets again what lies between, or skips it, also while it runs. A consumer that answers
    `last_token` continues where it says. A faulted subscription stays faulted.
    """
    tables = QueueTables(nodes, connect_timeout)

    async def work() -> tuple[SubscriptionRow, int, QueueAnswer]:
        of_queue, row = chosen(await tables.queues(group, queue), subscription, stream)
        position = await tables.position_of(goal)
        if dry_run:
            return row, position, QueueAnswer(row.id, row.state)
        request = QueueRequest("reset", row.id, start=SequenceToken(position))
        return row, position, await tables.ask(of_queue, request, timeout)

    row, position, answer = run(work())
    if as_json:
        found = {"from": row.position, "to": position, "is_dry_run": dry_run, **_object(row, answer)}
        click.echo(json.dumps(found))
        return
    done = "Nothing was changed (--dry-run)" if dry_run else f"It is {answer.state}"
    click.echo(f"{_label(row)}: from {row.position:,} to {position:,}. {done}.")


@subscriptions.command()
@click.argument("subscription")
@_options_of_one
def resume(
    subscription: str,
    stream: str | None,
    group: str | None,
    queue: str | None,
    timeout: float,
    as_json: bool,
    connect_timeout: float,
    nodes: NodeOptions,
) -> None:
    """Continue a subscription that was stopped (faulted), where it was.

    It is `unattended` if the host has no consumer for it.
    """
    _change(
        QueueTables(nodes, connect_timeout), "resume", subscription, stream, (group, queue), timeout, as_json
    )


@subscriptions.command()
@click.argument("subscription")
@_options_of_one
def end(
    subscription: str,
    stream: str | None,
    group: str | None,
    queue: str | None,
    timeout: float,
    as_json: bool,
    connect_timeout: float,
    nodes: NodeOptions,
) -> None:
    """End a subscription for good: it holds back no messages any more.

    An implicit one cannot be ended while hosts register its pattern.
    """
    _change(
        QueueTables(nodes, connect_timeout), "end", subscription, stream, (group, queue), timeout, as_json
    )


def _change(
    tables: QueueTables,
    action: str,
    subscription: str,
    stream: str | None,
    where: tuple[str | None, str | None],
    timeout_s: float,
    as_json: bool,
) -> None:
    async def work() -> tuple[QueueRow, SubscriptionRow, QueueAnswer]:
        of_queue, row = chosen(await tables.queues(*where), subscription, stream)
        request = QueueRequest("resume" if action == "resume" else "end", row.id)
        return of_queue, row, await tables.ask(of_queue, request, timeout_s)

    _, row, answer = run(work())
    click.echo(json.dumps(_object(row, answer)) if as_json else f"{_label(row)}: it is {answer.state}.")


def _object(row: SubscriptionRow, answer: QueueAnswer) -> dict[str, object]:
    return {**asdict(row), "state": answer.state}


def _label(row: SubscriptionRow) -> str:
    return f"{escape(row.subscription)} of {escape(row.stream)}"
