"""The groups of a cluster, from the holds and leases that nodes report, and the output of `rt groups`. Pure.

A position is a hold `GROUP~DIGEST.PARTITION` (`rt.streams.group.partitions`). A member has the lease
`GROUP/start/MEMBER` while it starts (`rt.streams.group.group`), then `GROUP/host/MEMBER`, and
`GROUP/queue/PARTITION` for each partition that it handles (`rt.streams.balancer.lease_balancer`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from msgspec import Struct

from rt.cli.formats.tables import escape, format_age, format_size, table
from rt.units import parse_rfc3339

_POSITION: Final = re.compile(r"(?P<group>[^~]+)~[0-9a-f]{16}\.(?P<partition>p[0-9]{3})")
_LEASE: Final = re.compile(r"(?P<group>[^/]+)/(?P<kind>start|host|queue)/(?P<name>.+)")


class PartitionRow(Struct, frozen=True):
    """A partition of a group. `lag` counts the messages of all topics up to the end of the merged log."""

    hold: str
    partition: str
    position: int
    lag: int
    size_bytes: int
    acknowledged_ns: int
    member: str
    """The member that handles it; empty if there is none."""
    is_trimmed: bool
    """Whether messages that it has not handled were trimmed."""


class GroupRow(Struct, frozen=True):
    name: str
    partitions: tuple[PartitionRow, ...]
    """Sorted by name."""
    members: tuple[str, ...]

    @property
    def lag(self) -> int:
        """The lag of the partition that lags most."""
        return max((one.lag for one in self.partitions), default=0)

    @property
    def size_bytes(self) -> int:
        """The bytes that nodes keep for the group: those of the partition that lags most."""
        return max((one.size_bytes for one in self.partitions), default=0)

    @property
    def unhandled(self) -> int:
        """The number of partitions that no member handles."""
        return sum(not one.member for one in self.partitions)


def groups_in(holds: Sequence[Any], leases: Sequence[Any]) -> list[GroupRow]:
    """The groups that have positions, by name, from the answers of /holds and /leases."""
    holders: dict[tuple[str, str], str] = {}
    members: dict[str, set[str]] = {}
    for lease in leases:
        if (found := _LEASE.fullmatch(lease["name"])) is not None:
            members.setdefault(found["group"], set()).add(lease["owner"])
            if found["kind"] == "queue":
                holders[found["group"], found["name"]] = lease["owner"]
    rows: dict[str, list[PartitionRow]] = {}
    for hold in holds:
        if (found := _POSITION.fullmatch(hold["name"])) is not None:
            rows.setdefault(found["group"], []).append(
                PartitionRow(
                    hold["name"],
                    found["partition"],
                    hold["position"],
                    hold["lag"],
                    hold["bytes"],
                    parse_rfc3339(hold["updateTime"]) if hold["updateTime"] else 0,
                    holders.get((found["group"], found["partition"]), ""),
                    hold["isOverridden"],
                )
            )
    return [
        GroupRow(
            name,
            tuple(sorted(rows[name], key=lambda one: one.hold)),
            tuple(sorted(members.get(name, ()))),
        )
        for name in sorted(rows)
    ]


def list_lines(groups: Sequence[GroupRow]) -> Iterator[str]:
    """A line for each group; only the header if there is none."""
    numbers = ("partitions", "unhandled", "members", "lag")
    rows = [
        [
            escape(one.name),
            *(f"{n:,}" for n in (len(one.partitions), one.unhandled, len(one.members), one.lag)),
            format_size(one.size_bytes),
        ]
        for one in groups
    ]
    yield from table(("group", *numbers, "kept"), rows, right=frozenset({*numbers, "kept"}))


def group_lines(group: GroupRow, now_ns: int) -> Iterator[str]:
    """A line for each partition of a group, and one for its members."""
    rows = [
        [
            one.partition,
            f"{one.position:,}",
            f"{one.lag:,}",
            f"{format_age(now_ns - one.acknowledged_ns)} ago",
            (escape(one.member) or "none") + (", messages were trimmed" if one.is_trimmed else ""),
        ]
        for one in group.partitions
    ]
    header = ("partition", "position", "lag", "acknowledged", "member")
    yield from table(header, rows, right=frozenset(header[1:3]))
    yield ""
    yield f"members: {', '.join(map(escape, group.members)) or 'none'}"


def group_object(group: GroupRow) -> dict[str, Any]:
    """The group as a JSON object."""
    return {
        "group": group.name,
        "members": list(group.members),
        "lag": group.lag,
        "kept_bytes": group.size_bytes,
        "partitions": [
            {
                "partition": one.partition,
                "hold": one.hold,
                "position": one.position,
                "lag": one.lag,
                "bytes": one.size_bytes,
                "acknowledged_ns": one.acknowledged_ns,
                "member": one.member or None,
                "is_trimmed": one.is_trimmed,
            }
            for one in group.partitions
        ],
    }


def reset_lines(group: GroupRow, position: int, *, is_dry_run: bool) -> Iterator[str]:
    """A line for each partition with its old and new position, and a line with the result."""
    rows = [[one.partition, f"{one.position:,}", f"{position:,}"] for one in group.partitions]
    yield from table(("partition", "from", "to"), rows, right=frozenset({"from", "to"}))
    yield ""
    done = f"Reset {len(rows)} positions of {group.name}."
    yield "Nothing was changed (--dry-run)." if is_dry_run else done


def reset_object(group: GroupRow, position: int, *, is_dry_run: bool) -> dict[str, Any]:
    """The same as a JSON object."""
    return {
        "group": group.name,
        "position": position,
        "is_dry_run": is_dry_run,
        "partitions": [
            {"partition": one.partition, "hold": one.hold, "from": one.position, "to": position}
            for one in group.partitions
        ],
    }
