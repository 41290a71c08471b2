"""`rt holds`: who keeps the nodes from trimming the merged log, since when, and how to release it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import click

from rt.cli.endpoints import NodeOptions, endpoint_options
from rt.cli.formats.tables import escape, format_age, format_size, table
from rt.cli.options import connect_timeout_option, json_option
from rt.errors import InvalidName
from rt.names import check_hold_name
from rt.units import parse_rfc3339

_node_options = endpoint_options(
    "operator",
    "gRPC endpoints of the nodes, separated by commas. They are asked in turn until one answers.",
    is_required=True,
)
_connect_option = connect_timeout_option(
    "A node that cannot be connected to in this time is left for the next one."
)
_NUMBERS: Final = ("position", "lag", "kept")


@click.group()
def holds() -> None:
    """Show the holds: the positions from which nodes keep the merged log for those who still need it.

    A hold has the name of a subscriber. NAME~book-ID is that of the subscriptions in one subscription store
    of stream hosts, and the other names with a ~ are positions of groups (`rt groups`).
    """


@holds.command("list")
@json_option
@_connect_option
@_node_options
def list_holds(as_json: bool, connect_timeout: float, nodes: NodeOptions) -> None:
    """List the holds, the oldest position first: position, lag, kept bytes, time since it moved.

    A hold with a lag that has not moved for long is of a subscriber that is stuck, stopped or retired.
    """
    found = sorted(_ask(nodes, connect_timeout, "/holds"), key=lambda one: (one["position"], one["name"]))
    if as_json:
        for one in found:
            click.echo(json.dumps(one))
    else:
        click.echo("\n".join(_lines(found, time.time_ns())))


@holds.command()
@click.argument("name")
@_connect_option
@_node_options
def release(name: str, connect_timeout: float, nodes: NodeOptions) -> None:
    """Release the hold NAME: the nodes keep nothing for it any more.

    Use it for a subscriber or a subscription store that does not come back. One that still runs gets a new
    hold within a minute, but what was trimmed until then is lost to it.
    """
    try:
        check_hold_name(name)
    except InvalidName as error:
        raise click.BadParameter(str(error), param_hint="NAME") from None
    _ask(nodes, connect_timeout, "/release-hold", {"name": name})
    click.echo(f"Released {name}.")


def _lines(found: Sequence[dict[str, Any]], now_ns: int) -> Iterator[str]:
    rows = [
        [
            escape(one["name"]),
            f"{one['position']:,}",
            f"{one['lag']:,}",
            format_size(one["bytes"]),
            f"{format_age(now_ns - parse_rfc3339(one['updateTime']))} ago" if one["updateTime"] else "",
            "messages were trimmed" if one["isOverridden"] else "",
        ]
        for one in found
    ]
    yield from table(("hold", *_NUMBERS, "moved", ""), rows, right=frozenset(_NUMBERS))


def _ask(nodes: NodeOptions, connect_s: float, target: str, body: object = None) -> Any:
    from rt.net.rest_client import ask, check

    endpoints, tls = nodes.parse()
    method, data = ("GET", None) if body is None else ("POST", json.dumps(body).encode())
    answer = asyncio.run(ask(endpoints, tls, method, target, data, connect_timeout_s=connect_s))
    return json.loads(check(answer).body)
