"""`rt holds`: which holds keep the nodes from trimming the merged log, since when, and how to release
them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import click

from rt.cli.endpoints import NodeOptions, operator_options
from rt.cli.formats.tables import escape, format_age, format_size, table
from rt.cli.options import json_option
from rt.errors import InvalidName
from rt.names import check_hold_name
from rt.units import parse_rfc3339

_NUMBERS: Final = ("position", "lag", "kept")


@click.group()
def holds() -> None:
    """Show the holds: the positions from which nodes keep the merged log for those who still need it.

    A hold has the name of a subscriber. NAME~store-ID is that of the subscriptions in one subscription store
    of stream hosts, and the other names with a ~ are positions of groups (`rt groups`).
    """


@holds.command("list")
@json_option
@operator_options
def list_holds(as_json: bool, connect_timeout: float, nodes: NodeOptions) -> None:
    """List the holds, the oldest position first: position, lag, kept bytes, time since it moved.

    A hold with a lag that has not moved for long is of a subscriber that is stuck, stopped or retired.
    """
    found = sorted(nodes.ask(connect_timeout, "/holds"), key=lambda one: (one["position"], one["name"]))
    if as_json:
        for one in found:
            click.echo(json.dumps(one))
    else:
        click.echo("\n".join(_lines(found, time.time_ns())))


@holds.command()
@click.argument("name")
@operator_options
def release(name: str, connect_timeout: float, nodes: NodeOptions) -> None:
    """Release the hold NAME: the nodes keep nothing for it any more.

    Use it for a subscriber or a subscription store that does not come back. One that still runs gets a new
    hold within a minute, but what was trimmed until then is lost to it.
    """
    try:
        check_hold_name(name)
    except InvalidName as error:
        raise click.BadParameter(str(error), param_hint="NAME") from None
    nodes.ask(connect_timeout, "/release-hold", {"name": name})
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
