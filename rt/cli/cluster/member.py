"""`rt member`: the members of a cluster, and changes of them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any, Final

import click

from rt.cli.endpoints import NodeOptions, operator_options
from rt.cli.formats.tables import escape, table
from rt.cli.options import json_option
from rt.errors import RtError

_wait_option = click.option(
    "--wait/--no-wait",
    "waits",
    default=True,
    help="Wait until the change is done, and show what it waits for. Default: --wait. A change goes on if "
    "its wait is interrupted.",
)
POLL_S: Final = 0.5


class MemberChangeFailed(RtError):
    """The cluster did not complete the change of its members."""


@click.group()
def member() -> None:
    """Show and change the members of a cluster, one at a time, while it runs.

    Members can be changed from feature level 2 on: see `rt features`.
    """


@member.command("list")
@json_option
@operator_options
def list_members(as_json: bool, connect_timeout: float, nodes: NodeOptions) -> None:
    """List the members with their roles, addresses and progress, and the change that is being carried out."""
    status = nodes.ask(connect_timeout, "/status")
    if as_json:
        keys = ("memberChange", "memberChangeWaitsFor", "settledMemberChange")
        found = [{key: one.get(key) for key in _KEYS} for one in status["members"]]
        click.echo(json.dumps({"members": found, **{key: status.get(key) for key in keys}}))
    else:
        click.echo("\n".join(_lines(status)))


@member.command("add")
@click.argument("name")
@click.argument("raft_address")
@_wait_option
@operator_options
def add(name: str, raft_address: str, waits: bool, connect_timeout: float, nodes: NodeOptions) -> None:
    """Add node NAME, whose Raft port the members reach at RAFT_ADDRESS (host:port).

    Start the node with `bootstrap = false`, its own name and at least one member in its configuration, and a
    certificate for its name. It copies the merged log and the state, then it votes.
    """
    body = {"name": name, "raftAddress": raft_address}
    _change(nodes, connect_timeout, "/member-add", body, waits=waits)


@member.command("remove")
@click.argument("name")
@_wait_option
@operator_options
def remove(name: str, waits: bool, connect_timeout: float, nodes: NodeOptions) -> None:
    """Remove node NAME, dead or alive. A node that runs ends, and does not start again as a member.

    It waits until the other nodes have everything that only this one may be needed for. A leader transfers
    its leadership first.
    """
    _change(nodes, connect_timeout, "/member-remove", {"name": name}, waits=waits)


@member.command("replace")
@click.argument("name")
@click.argument("new_name")
@click.argument("raft_address")
@_wait_option
@operator_options
def replace(
    name: str, new_name: str, raft_address: str, waits: bool, connect_timeout: float, nodes: NodeOptions
) -> None:
    """Add node NEW_NAME at RAFT_ADDRESS as `add` does, then remove node NAME, dead or alive."""
    body = {"name": name, "newName": new_name, "raftAddress": raft_address}
    _change(nodes, connect_timeout, "/member-replace", body, waits=waits)


@member.command("cancel")
@operator_options
def cancel(connect_timeout: float, nodes: NodeOptions) -> None:
    """End the change that is being carried out. What was done stays: see `rt member list`."""
    settled = nodes.ask(connect_timeout, "/member-cancel", {})
    click.echo(f"Change {settled['number']} was cancelled.")


_KEYS: Final = ("name", "role", "raftAddress", "address", "isLeader", "isConnected", "isCounted", "phase")


def _lines(status: dict[str, Any]) -> Iterator[str]:
    rows = [
        [
            escape(one["name"]),
            "leader" if one["isLeader"] else one["role"],
            escape(one["raftAddress"]),
            escape(one["address"]),
            "yes" if one["isConnected"] else "no",
            one["phase"],
        ]
        for one in status["members"]
    ]
    yield from table(("member", "role", "raft", "data", "connected", "phase"), rows, right=frozenset())
    change, settled = status.get("memberChange"), status.get("settledMemberChange")
    if change is not None:
        waits_for = status.get("memberChangeWaitsFor", "")
        yield ""
        yield f"change {change['number']}: {_brief(change)}"
        if waits_for:
            yield f"waits: {escape(waits_for)}"
    elif settled is not None and settled["why"]:
        yield ""
        yield f"change {settled['number']} was not carried out whole: {escape(settled['why'])}"


def _brief(change: dict[str, Any]) -> str:
    adds, removes = escape(change["adds"]), escape(change["removes"])
    if adds and removes:
        return f"replace {removes} by {adds}"
    return f"add {adds}" if adds else f"remove {removes}"


def _change(nodes: NodeOptions, connect_s: float, target: str, body: dict[str, str], *, waits: bool) -> None:
    change = nodes.ask(connect_s, target, body)
    click.echo(f"Change {change['number']} has started: {_brief(change)}.")
    said = ""
    while waits:
        status = nodes.ask(connect_s, "/status")
        settled = status["settledMemberChange"]
        if settled is not None and settled["number"] >= change["number"]:
            if settled["number"] == change["number"] and settled["why"]:
                raise MemberChangeFailed(
                    "the change of the members was not carried out whole",
                    got=settled["why"],
                    hint="`rt member list` shows what was done.",
                )
            click.echo("Done.")
            return
        waits_for = status["memberChangeWaitsFor"]
        if waits_for != said and waits_for:
            click.echo(f"Waits: {escape(waits_for)}")
        said = waits_for
        time.sleep(POLL_S)
