"""The state of a cluster from the answers of all its nodes, and its text: problems first. Pure.

Nodes may answer differently, because a node may be behind or cut off. Invariants:
- The state of the cluster is taken from the node that has applied the most.
- The state of a node is its own answer, if it answered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias

from msgspec import Struct

from rt.cli.formats.tables import escape, format_size, table

Document: TypeAlias = Any
"""JSON, as REST returns it."""


class NodeAnswer(Struct, frozen=True):
    """The answer of one node, or the error of the request."""

    endpoint: str
    status: Document = None
    """The answer to /status; None if the node did not answer."""
    clients: Sequence[Document] = ()
    """The answer to /rt-clients."""
    holds: Sequence[Document] = ()
    """The answer to /holds."""
    everywhere: Document = None
    """The answer to /cluster-clients; empty if the node is too old for it."""
    error: str = ""


class ClusterSummary(Struct, frozen=True):
    """The answers of all nodes; at least one answered."""

    answers: tuple[NodeAnswer, ...]

    def __post_init__(self) -> None:
        if not any(one.status for one in self.answers):
            raise ValueError("no node answered")

    @property
    def best(self) -> NodeAnswer:
        """The best answer about the cluster: it knows a leader, of the newest term, and applied the most."""
        return max((one for one in self.answers if one.status), key=_rank)

    @property
    def alarms(self) -> list[Document]:
        """The alarms of all nodes, each once, critical ones first."""
        found = {
            (alarm["name"], alarm["text"]): alarm
            for one in self.answers
            if one.status
            for alarm in one.status["alarms"]
        }
        return sorted(found.values(), key=lambda alarm: alarm["severity"] != "critical")

    @property
    def problems(self) -> list[str]:
        """Why the cluster is not healthy; empty if it is."""
        silent = [f"{one.endpoint} does not answer" for one in self.answers if not one.status]
        critical = {alarm["name"]: None for alarm in self.alarms if alarm["severity"] == "critical"}
        return [*silent, *critical]

    @property
    def members(self) -> list[Document]:
        """The members by name; `role` and `lag...` are from the member itself, if it answered."""
        own = {one.status["node"]["name"]: one.status["node"] for one in self.answers if one.status}
        status = self.best.status
        return [_member(member, own.get(member["name"]), status) for member in status["members"]]

    @property
    def elsewhere(self) -> list[Document]:
        """The clients of nodes that did not answer or were not asked. These nodes report them to the other
        nodes.
        """
        answered = {one.status["node"]["name"] for one in self.answers if one.status}
        entries = (self.best.everywhere or {}).get("clients", [])
        return [one for one in entries if one["node"] not in answered]

    @property
    def clients(self) -> list[Document]:
        """The publishers and subscribers of all nodes: the connected ones, and those that disconnected last.

        A client that is connected to several nodes is listed for each. A client that is connected to any node
        is not listed as disconnected.
        """
        entries = [client for one in self.answers for client in one.clients]
        active = [client for client in entries if client["active"]]
        there = {_key(client) for client in active}
        disconnected = {
            _key(client): client
            for client in sorted(entries, key=lambda client: str(client["disconnectTime"]))
            if not client["active"] and _key(client) not in there
        }
        return [*active, *disconnected.values()]

    def document(self) -> Document:
        return {
            "healthy": not self.problems,
            "problems": self.problems,
            "asked": [{"endpoint": one.endpoint, "error": one.error} for one in self.answers],
            "alarms": self.alarms,
            "status": self.best.status,
            "members": self.members,
            "clients": self.clients,
            "holds": list(self.best.holds),
            "elsewhere": self.elsewhere,
        }


def _rank(answer: NodeAnswer) -> tuple[bool, bool, bool, int, int]:
    status = answer.status
    return (
        bool(status["node"]["isControlUp"]),
        status["node"]["controlSilentSeconds"] < STALE_S,
        bool(status["leader"]),
        int(status["term"]),
        int(status["node"]["appliedIndex"]),
    )


def _member(member: Document, own: Document, status: Document) -> Document:
    if own is not None:
        role, messages, size = own["role"], own["lagMessages"], own["lagBytes"]
    else:
        role = "leader" if member["isLeader"] else "follower" if member["isConnected"] else ""
        messages = max(status["committed"]["position"] - member["merged"]["position"], 0)
        size = max(status["committed"]["bytes"] - member["merged"]["bytes"], 0)
    return {**member, "role": role, "lagMessages": messages, "lagBytes": size}


def _key(client: Document) -> tuple[str, str]:
    return str(client["certificate"]), str(client["session"])


STALE_S: Final = 5.0
"""An older report does not show the current state of a member: members report twice a second."""
CLIENTS_MAX: Final = 20
"""Maximum number of lines of publishers, and of subscribers. Clients with the most lag are shown."""


def status_lines(overview: ClusterSummary) -> Iterator[str]:
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
    yield from _retention(status)
    yield ""
    yield from _publishers([one for one in overview.clients if one["session"] is not None])
    yield ""
    readers = [one for one in overview.clients if one["session"] is None and one["kind"] == "subscriber"]
    yield from _subscribers(readers, overview.best.holds)
    yield from _elsewhere(overview.elsewhere)
    if status["leases"]:
        yield ""
        yield f"leases: {status['leases']:,} held, see /leases"


def verdict(overview: ClusterSummary) -> str:
    """Whether the cluster is healthy, on one line."""
    problems = overview.problems
    return f"unhealthy: {', '.join(map(escape, problems))}" if problems else "healthy"


def _alarms(overview: ClusterSummary) -> Iterator[str]:
    yield verdict(overview)
    for alarm in overview.alarms:
        yield f"  {alarm['severity']:<8}  {escape(alarm['name'])}: {escape(alarm['text'])}"
    for note in overview.best.status.get("notes", ()):
        yield f"  note      {escape(note)}"
    for one in overview.answers:
        if not one.status:
            yield f"  no answer from {escape(one.endpoint)}: {escape(one.error)}"


def _cluster(overview: ClusterSummary) -> str:
    status = overview.best.status
    cluster = status["cluster"][:8] or "none yet"
    asked = ", ".join(one.status["node"]["name"] for one in overview.answers if one.status)
    return (
        f"stream {escape(status['stream'])}, cluster {cluster}, epoch {status['epoch']}: leader "
        f"{escape(status['leader']) or 'not known'} in term {status['term']}, reported by {escape(asked)}"
    )


# Members


def _members(members: Sequence[Document]) -> Iterator[str]:
    columns = ("member", "role", "phase", "merged", "lag", "behind", "disk", "free")
    rows = [
        (
            escape(one["name"]),
            escape(one["role"]),
            _phase(one),
            f"{one['merged']['position']:,}",
            f"{one['lagMessages']:,}",
            format_size(one["lagBytes"]),
            _percent_used(one),
            format_size(one["diskFreeBytes"]) if one["diskBytes"] else "",
        )
        for one in members
    ]
    yield from table(columns, rows, right=frozenset({"merged", "lag", "behind", "disk", "free"}))


def _phase(member: Document) -> str:
    """The current phase and its progress; also the age of the report if it is old."""
    age_s = member["reportAgeSeconds"]
    late = f" ({age_s:.0f} s ago)" if age_s >= STALE_S else ""
    return f"{_current_phase(member)}{late}"


def _current_phase(member: Document) -> str:
    if member["stopped"]:
        return "stopped"
    phase, done, total = (member.get(key) for key in ("phase", "phaseDone", "phaseTotal"))
    if not phase:
        return "" if member["isConnected"] else "unreachable"
    return f"{escape(phase)} {100 * min(done / total, 1):.0f} %" if total else escape(phase)


def _percent_used(member: Document) -> str:
    used = retention_disk_percent(member)
    return "" if used is None else f"{used:.1f} %"


def retention_disk_percent(member: Document) -> float | None:
    """How full a member's file system is; None if not reported yet."""
    size, free = member["diskBytes"], member["diskFreeBytes"]
    return 100 * (size - free) / size if size else None


# The merged log against its policy


def _retention(status: Document) -> Iterator[str]:
    policy, kept = status["configuration"], status["retention"]
    yield (
        f"merged log from position {kept['logStart']:,}: {kept['segments']:,} segments kept, "
        f"{kept['segmentsTrimmed']:,} trimmed{_last_trim(kept)}"
    )
    used = [
        (percent, one["name"])
        for one in status["members"]
        if (percent := retention_disk_percent(one)) is not None
    ]
    fullest = f"{max(used)[0]:.1f} % on {escape(max(used)[1])}" if used else "not known"
    age = kept["oldestMinutes"]
    holds = f"{format_size(kept['holdBytes'])} for {kept['holds']:,} subscribers" if kept["holds"] else "none"
    rows = [
        (
            "age",
            _minutes(policy["retentionMinutes"]),
            "nothing sealed" if age < 0 else _minutes(age, zero="0 min"),
        ),
        ("size", _limit(policy["retentionBytes"]), format_size(kept["bytes"])),
        ("disk", f"{policy['retentionDiskPercent']} %" if policy["retentionDiskPercent"] else "off", fullest),
        ("holds", _limit(policy["holdBytesMax"]), holds),
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
    """Each session once, with the largest lag that a node reports."""
    by_session: dict[str, list[Any]] = {}
    for one in clients:
        by_session.setdefault(one["session"], []).append(one)
    active = {name for name, entries in by_session.items() if any(one["active"] for one in entries)}
    yield f"sessions: {len(active):,} pushed, {len(by_session) - len(active):,} disconnected within a day"
    rows = [
        (
            escape(name),
            f"{sum(one['active'] for one in entries)} nodes",
            f"{max(one['position'] for one in entries):,}",
            f"{max(one['lag'] for one in entries):,}",
            _seconds(entries),
            _rate(entries),
        )
        for name, entries in sorted(by_session.items(), key=lambda item: _order(item[1], item[0]))
        if name in active
    ]
    columns = ("session", "pushed to", "number", "lag", "waits", "rate")
    yield from _some(columns, rows)


def _subscribers(clients: Sequence[Document], holds: Sequence[Document]) -> Iterator[str]:
    held = {one["name"]: one for one in holds}
    active = [one for one in clients if one["active"]]
    names = {one["name"] for one in active}
    disconnected = {one["name"] for one in clients} - names
    yield (
        f"subscribers: {len(active):,} connected, {len(disconnected):,} disconnected within a day, "
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


def _elsewhere(clients: Sequence[Document]) -> Iterator[str]:
    """Each client that is known only from nodes other than its own."""
    if clients:
        yield ""
        yield f"connected to nodes that gave no answer here: {len(clients):,}"
        rows = [
            (
                escape(one["session"] or one["name"]),
                "pushes" if one["session"] else "pulls",
                escape(one["node"]),
                f"{one['lagSeconds']:.1f} s",
            )
            for one in clients[:CLIENTS_MAX]
        ]
        yield from table(("client", "it", "node", "waits"), rows, right=frozenset({"waits"}))
    if len(clients) > CLIENTS_MAX:
        yield f"and {len(clients) - CLIENTS_MAX:,} more: see /cluster-clients"


def _some(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if rows:
        right = frozenset({"number", "position", "lag", "waits", "rate", "held back"})
        yield from table(columns, rows[:CLIENTS_MAX], right=right)
    if len(rows) > CLIENTS_MAX:
        yield f"and {len(rows) - CLIENTS_MAX:,} more with less lag: see /rt-clients and /holds"


def _order(entries: Sequence[Document], name: str) -> tuple[float, int, str]:
    """Sort key: the longest wait first."""
    return -max(one["lagSeconds"] for one in entries), -max(one["lag"] for one in entries), name


def _seconds(entries: Sequence[Document]) -> str:
    return f"{max(one['lagSeconds'] for one in entries):.1f} s"


def _rate(entries: Sequence[Document]) -> str:
    return f"{format_size(max(one['bytesPerSecond'] for one in entries))}/s"


def _hold(hold: Document) -> str:
    if hold is None:
        return ""
    return "overridden" if hold["isOverridden"] else format_size(hold["bytes"])
