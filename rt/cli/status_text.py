"""An overview of a cluster as text, for whoever is called at night: what is wrong first. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from rt.cli.overview import Document, Overview
from rt.cli.text import escape, format_size, table

CLIENTS_MAX: Final = 20
"""Lines of publishers, and of subscribers: those that are farthest behind."""


def status_lines(overview: Overview) -> Iterator[str]:
    """All of it."""
    status = overview.best.status
    yield from _alarms(overview)
    yield ""
    yield _cluster(overview)
    committed = status["committed"]
    since = f" at {status['sequencedTime'][:19]}Z" if status["sequencedTime"] else ""
    yield (
        f"committed up to position {committed['position']:,}{since}, instruction "
        f"{committed['instruction']:,}, {format_size(committed['bytes'])} in all"
    )
    yield ""
    yield from _members(overview.members)
    yield ""
    yield from _archive(status)
    yield ""
    yield from _publishers([one for one in overview.clients if one["session"] is not None])
    yield ""
    readers = [one for one in overview.clients if one["session"] is None and one["kind"] == "subscriber"]
    yield from _subscribers(readers, overview.best.holds)
    if status["leases"]:
        yield ""
        yield f"leases: {status['leases']:,} held, see /leases"


def verdict(overview: Overview) -> str:
    """Whether it is healthy, in a line."""
    problems = overview.problems
    return f"unhealthy: {', '.join(map(escape, problems))}" if problems else "healthy"


def _alarms(overview: Overview) -> Iterator[str]:
    yield verdict(overview)
    for alarm in overview.alarms:
        yield f"  {alarm['severity']:<8}  {escape(alarm['name'])}: {escape(alarm['text'])}"
    for one in overview.said:
        if not one.status:
            yield f"  no answer of {escape(one.endpoint)}: {escape(one.error)}"


def _cluster(overview: Overview) -> str:
    status = overview.best.status
    cluster = status["cluster"][:8] or "none yet"
    asked = ", ".join(one.status["node"]["name"] for one in overview.said if one.status)
    return (
        f"stream {escape(status['stream'])}, cluster {cluster}, epoch {status['epoch']}: leader "
        f"{escape(status['leader']) or 'not known'} in term {status['term']}, told by {escape(asked)}"
    )


# Members


def _members(members: Sequence[Document]) -> Iterator[str]:
    columns = ("member", "role", "step", "merged", "lag", "behind", "disk", "free")
    rows = [
        (
            escape(one["name"]),
            escape(one["role"]),
            _step(one),
            f"{one['merged']['position']:,}",
            f"{one['lagMessages']:,}",
            format_size(one["lagBytes"]),
            _percent_used(one),
            format_size(one["diskFreeBytes"]),
        )
        for one in members
    ]
    yield from table(columns, rows, right=frozenset({"merged", "lag", "behind", "disk", "free"}))


def _step(member: Document) -> str:
    """What it is doing, and how far it is."""
    if member["stopped"]:
        return "stopped"
    step, done, total = (member.get(key) for key in ("step", "stepDone", "stepTotal"))
    if not step:
        return "" if member["isConnected"] else "away"
    return f"{escape(step)} {100 * min(done / total, 1):.0f} %" if total else escape(step)


def _percent_used(member: Document) -> str:
    used = disk_percent(member)
    return "" if used is None else f"{used:.1f} %"


def disk_percent(member: Document) -> float | None:
    """How full a member's file system is; None before it told."""
    size, free = member["diskBytes"], member["diskFreeBytes"]
    return 100 * (size - free) / size if size else None


# The merged log against its policy


def _archive(status: Document) -> Iterator[str]:
    said, kept = status["configuration"], status["archive"]
    yield (
        f"merged log from position {kept['logStart']:,}: {kept['segments']:,} segments kept, "
        f"{kept['segmentsTrimmed']:,} trimmed{_last_trim(kept)}"
    )
    used = [(percent, one["name"]) for one in status["members"] if (percent := disk_percent(one)) is not None]
    fullest = f"{max(used)[0]:.1f} % on {escape(max(used)[1])}" if used else "not known"
    age = kept["oldestMinutes"]
    holds = f"{format_size(kept['holdBytes'])} behind {kept['holds']:,}" if kept["holds"] else "none"
    rows = [
        ("age", _minutes(said["timeMinutes"]), "nothing sealed" if age < 0 else _minutes(age, zero="0 min")),
        ("size", _limit(said["limit"]), format_size(kept["bytes"])),
        ("disk", f"{said['diskPercent']} %" if said["diskPercent"] else "off", fullest),
        ("holds", _limit(said["holdLimit"]), holds),
    ]
    yield from table(("rule", "policy", "now"), rows, right=frozenset())


def _last_trim(kept: Document) -> str:
    if not kept["lastTrimTime"]:
        return ""
    return f", the last at {kept['lastTrimTime'][:19]}Z ({escape(kept['lastTrimReason'])})"


def _limit(size: int) -> str:
    return format_size(size) if size else "off"


def _minutes(count: int, *, zero: str = "off") -> str:
    if not count:
        return zero
    for unit, length in (("days", 1440), ("h", 60)):
        if count >= 2 * length:
            return f"{count / length:.1f} {unit}"
    return f"{count} min"


# Publishers and subscribers


def _publishers(clients: Sequence[Document]) -> Iterator[str]:
    """Each session once: connected to several nodes, it is told by the one where it is farthest behind."""
    by_session: dict[str, list[Any]] = {}
    for one in clients:
        by_session.setdefault(one["session"], []).append(one)
    active = {name for name, told in by_session.items() if any(one["active"] for one in told)}
    yield f"sessions: {len(active):,} pushed, {len(by_session) - len(active):,} gone within a day"
    rows = [
        (
            escape(name),
            f"{sum(one['active'] for one in told)} nodes",
            f"{max(one['position'] for one in told):,}",
            f"{max(one['lag'] for one in told):,}",
            _seconds(told),
            _rate(told),
        )
        for name, told in sorted(by_session.items(), key=lambda item: _order(item[1], item[0]))
        if name in active
    ]
    columns = ("session", "pushed to", "number", "lag", "waits", "rate")
    yield from _some(columns, rows)


def _subscribers(clients: Sequence[Document], holds: Sequence[Document]) -> Iterator[str]:
    held = {one["name"]: one for one in holds}
    active = [one for one in clients if one["active"]]
    names = {one["name"] for one in active}
    gone = {one["name"] for one in clients} - names
    yield (
        f"subscribers: {len(active):,} connected, {len(gone):,} gone within a day, "
        f"{len(held):,} holding data back"
    )
    rows = [
        (
            escape(one["name"]),
            escape(one["node"]),
            f"{one['position']:,}",
            f"{one['lag']:,}",
            _seconds([one]),
            _rate([one]),
            _hold(held.get(one["name"])),
        )
        for one in sorted(active, key=lambda one: _order([one], one["name"]))
    ]
    rows += [
        (escape(one["name"]), "", f"{one['position']:,}", f"{one['lag']:,}", "", "", _hold(one))
        for name, one in sorted(held.items())
        if name not in names
    ]
    yield from _some(("subscriber", "node", "position", "lag", "waits", "rate", "held back"), rows)


def _some(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if rows:
        right = frozenset({"number", "position", "lag", "waits", "rate", "held back"})
        yield from table(columns, rows[:CLIENTS_MAX], right=right)
    if len(rows) > CLIENTS_MAX:
        yield f"and {len(rows) - CLIENTS_MAX:,} more that are less behind: see /rt-clients and /holds"


def _order(told: Sequence[Document], name: str) -> tuple[float, int, str]:
    """The one that waits longest first."""
    return -max(one["lagSeconds"] for one in told), -max(one["lag"] for one in told), name


def _seconds(told: Sequence[Document]) -> str:
    return f"{max(one['lagSeconds'] for one in told):.1f} s"


def _rate(told: Sequence[Document]) -> str:
    return f"{format_size(max(one['bytesPerSecond'] for one in told))}/s"


def _hold(hold: Document) -> str:
    if hold is None:
        return ""
    return "overridden" if hold["isOverridden"] else format_size(hold["bytes"])
