"""`rt features`: the feature level of a cluster, what its members know, and how to raise it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import click

from rt.cli.endpoints import NodeOptions, operator_options
from rt.cli.formats.tables import escape, table
from rt.cli.options import json_option

_LEVEL: Final = click.IntRange(2, 2**32 - 1)


@click.group()
def features() -> None:
    """Show and raise the feature level of a cluster: the commands and formats that its members may use.

    Until the level is raised, each member can go back to the rt of the level before.
    """


@features.command("list")
@json_option
@operator_options
def list_features(as_json: bool, connect_timeout: float, nodes: NodeOptions) -> None:
    """List the level of the cluster, and for each member its rt and the highest level that it knows."""
    status = nodes.ask(connect_timeout, "/status")
    if as_json:
        found = [
            {"name": one["name"], "featureLevelLatest": _latest(one), "version": one.get("version", "")}
            for one in status["members"]
        ]
        click.echo(json.dumps({"featureLevel": status.get("featureLevel", 1), "members": found}))
    else:
        click.echo("\n".join(_lines(status)))


@features.command("raise")
@click.argument("level", type=_LEVEL)
@operator_options
def raise_level(level: int, connect_timeout: float, nodes: NodeOptions) -> None:
    """Raise the cluster to feature level LEVEL.

    A level is never lowered: afterwards an rt that does not know the level stops. The cluster refuses it
    unless all members reported in the last seconds that they know it.
    """
    raised = nodes.ask(connect_timeout, "/raise-feature-level", {"level": level})
    click.echo(f"The cluster has feature level {raised['featureLevel']}.")


def _lines(status: dict[str, Any]) -> Iterator[str]:
    yield f"feature level {status.get('featureLevel', 1)}"
    yield from map(escape, status.get("notes", ()))
    yield ""
    rows = [
        [escape(one["name"]), escape(one.get("version", "")), str(_latest(one))] for one in status["members"]
    ]
    yield from table(("member", "rt", "knows up to"), rows, right=frozenset({"knows up to"}))


def _latest(member: dict[str, Any]) -> int:
    """The latest feature level that a member knows. A node of an older rt does not report it."""
    return int(member.get("featureLevelLatest", 1))
