"""What the nodes of a cluster say of it, taken together. Pure.

Each node that was asked may say something else: it is behind, or cut off. The laws: what is the cluster's is
taken from the node that has applied most of it; what is a node's own, from that node where it answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Document: TypeAlias = Any
"""JSON, as REST says it."""


@dataclass(frozen=True, slots=True)
class Said:
    """What one node answered; with an `error` it did not."""

    endpoint: str
    status: Document = None
    """Of /status; None if it did not answer."""
    clients: Sequence[Document] = ()
    """Of /rt-clients."""
    holds: Sequence[Document] = ()
    """Of /holds."""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Overview:
    """What all of them said; at least one answered."""

    said: tuple[Said, ...]

    def __post_init__(self) -> None:
        if not any(one.status for one in self.said):
            raise ValueError("no node answered")

    @property
    def best(self) -> Said:
        """The one to be believed of the cluster: it knows a leader, of the newest term, and applied most."""
        return max((one for one in self.said if one.status), key=_rank)

    @property
    def alarms(self) -> list[Document]:
        """Those of all nodes, each once, critical ones first."""
        found = {
            (alarm["name"], alarm["text"]): alarm
            for one in self.said
            if one.status
            for alarm in one.status["alarms"]
        }
        return sorted(found.values(), key=lambda alarm: alarm["severity"] != "critical")

    @property
    def problems(self) -> list[str]:
        """Why the cluster is not healthy; empty: it is."""
        silent = [f"{one.endpoint} does not answer" for one in self.said if not one.status]
        critical = {alarm["name"]: None for alarm in self.alarms if alarm["severity"] == "critical"}
        return [*silent, *critical]

    @property
    def members(self) -> list[Document]:
        """The members by name; `role` and `lag...` are what each says itself, if it answered."""
        own = {one.status["node"]["name"]: one.status["node"] for one in self.said if one.status}
        status = self.best.status
        return [_member(member, own.get(member["name"]), status) for member in status["members"]]

    @property
    def clients(self) -> list[Document]:
        """The publishers and subscribers of all nodes: those that are connected, and the last gone ones.

        One that is connected to several nodes is there for each; one that is gone from a node and connected
        to another is not gone.
        """
        told = [client for one in self.said for client in one.clients]
        active = [client for client in told if client["active"]]
        there = {_key(client) for client in active}
        gone = {
            _key(client): client
            for client in sorted(told, key=lambda client: str(client["disconnectTime"]))
            if not client["active"] and _key(client) not in there
        }
        return [*active, *gone.values()]

    def document(self) -> Document:
        """All of it, for programs."""
        return {
            "healthy": not self.problems,
            "problems": self.problems,
            "asked": [{"endpoint": one.endpoint, "error": one.error} for one in self.said],
            "alarms": self.alarms,
            "status": self.best.status,
            "members": self.members,
            "clients": self.clients,
            "holds": list(self.best.holds),
        }


def _rank(said: Said) -> tuple[bool, bool, int, int]:
    status = said.status
    return (
        bool(status["node"]["isControlUp"]),
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
