"""`rt groups`: show the groups of a cluster with members, positions and lag; reset or delete a group."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import click

from rt.cli.endpoints import NodeOptions, ask_nodes, operator_options
from rt.cli.formats.console import show
from rt.cli.formats.group_table import (
    GroupRow,
    group_lines,
    group_object,
    groups_in,
    list_lines,
    reset_lines,
    reset_object,
)
from rt.cli.log_goals import Goal, GoalType, position_of
from rt.cli.options import json_option, option
from rt.errors import RtError


@click.group()
def groups() -> None:
    """Show the groups of workers that share the messages of a stream, and delete the positions of a group.

    A group is known by its positions. They outlive its members, and keep the nodes from trimming what is not
    handled.
    """


@groups.command("list")
@json_option
@operator_options
def list_groups(as_json: bool, connect_timeout: float, nodes: NodeOptions) -> None:
    """List the groups: partitions, those without a member, members, lag, and the bytes that nodes keep.

    The lag is that of the partition that is furthest behind, in messages of all topics.
    """
    found = asyncio.run(_Nodes(nodes, connect_timeout).groups())
    if as_json:
        for group in found:
            click.echo(json.dumps(group_object(group)))
    else:
        click.echo("\n".join(list_lines(found)))


@groups.command("show")
@click.argument("group")
@json_option
@operator_options
def show_group(group: str, as_json: bool, connect_timeout: float, nodes: NodeOptions) -> None:
    """Show the partitions of GROUP: position, lag, time of the last acknowledgement, member."""
    found = asyncio.run(_Nodes(nodes, connect_timeout).group(group))
    show(
        found,
        as_json=as_json,
        to_object=group_object,
        to_lines=lambda one: group_lines(one, time.time_ns()),
    )


@groups.command()
@click.argument("group")
@operator_options
def delete(group: str, connect_timeout: float, nodes: NodeOptions) -> None:
    """Delete the positions of GROUP: nodes keep no messages for it any more.

    It is refused while the group has members. A member that starts afterwards begins where its option
    `start` says. If the command is interrupted, repeat it.
    """
    deleted = asyncio.run(_Nodes(nodes, connect_timeout).delete(group))
    click.echo(f"Deleted {deleted} positions of {group}.")


@groups.command()
@click.argument("group")
@option(
    "--to",
    "goal",
    type=GoalType(),
    required=True,
    help="Where all partitions continue: earliest, latest, a position, or a time: RFC 3339, a date, or a "
    "duration before now such as 15m. At a time: the first message with this timestamp or a later one.",
)
@option("--dry-run", is_flag=True, help="Show what would change, and change nothing.")
@json_option
@operator_options
def reset(
    group: str, goal: Goal, dry_run: bool, as_json: bool, connect_timeout: float, nodes: NodeOptions
) -> None:
    """Move the positions of GROUP, also back: all its partitions continue there.

    It is refused while the group has members: stop them first. Members that start afterwards handle again
    what lies between, or skip it.
    """
    before, position = asyncio.run(_Nodes(nodes, connect_timeout).reset(group, goal, is_dry_run=dry_run))
    if as_json:
        click.echo(json.dumps(reset_object(before, position, is_dry_run=dry_run)))
    else:
        click.echo("\n".join(reset_lines(before, position, is_dry_run=dry_run)))


class _Nodes:
    """The answers of the nodes."""

    def __init__(self, nodes: NodeOptions, connect_s: float) -> None:
        self._endpoints, self._tls = nodes.parse()
        self._connect_s = connect_s

    async def groups(self) -> list[GroupRow]:
        return groups_in(*await asyncio.gather(self._ask("/holds"), self._ask("/leases")))

    async def group(self, name: str) -> GroupRow:
        """Return the group. `rt.RtError` if no group has that name."""
        found = await self.groups()
        for one in found:
            if one.name == name:
                return one
        raise RtError(
            "the cluster has no positions of that group",
            got=name,
            expected=f"one of {', '.join(one.name for one in found)}"[:500] if found else None,
            hint="A group has positions from its first start until they are deleted.",
        )

    async def delete(self, name: str) -> int:
        """Delete the positions of the group and return their number. `rt.RtError` if it has members."""
        await self._group_without_members(name)
        return len((await self._ask("/delete-group", {"group": name}))["holds"])

    async def reset(self, name: str, goal: Goal, *, is_dry_run: bool) -> tuple[GroupRow, int]:
        """Return the group before the reset, and the new position of its partitions. `rt.RtError` if it has
        members.
        """
        group = await self._group_without_members(name)
        position = await asyncio.to_thread(position_of, goal, self._endpoints, self._tls, self._connect_s)
        if not is_dry_run:
            position = (await self._ask("/reset-group", {"group": name, "position": position}))["position"]
        return group, position

    async def _group_without_members(self, name: str) -> GroupRow:
        """Return the group. `rt.RtError` if it has members: they would create or move its positions again."""
        group = await self.group(name)
        if group.members:
            raise RtError(
                "the group has members",
                where=name,
                got=", ".join(group.members)[:500],
                expected="none",
                hint="Stop them. The leases of one that was killed end after its `lease_s`, by default 10 s.",
            )
        return group

    async def _ask(self, target: str, body: object = None) -> Any:
        return await ask_nodes(self._endpoints, self._tls, self._connect_s, target, body)
