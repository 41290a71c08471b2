"""A request that was let in, and its answer; and what of the answer is for whom. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rt.net.identity import Identity
from sequencer.rest.errors import NotReady
from sequencer.rest.node_view import NodeView
from sequencer.state import State


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was let in."""

    node: NodeView
    identity: Identity | None
    """Who asks; None on the port without certificates."""
    query: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """What goes back; `body` is text as it is, or what JSON is made of."""

    body: object
    status: int = 200


def joined(node: NodeView) -> State:
    """The replicated state; `NotReady` before there is one."""
    if node.state is None or not any(node.state.cluster):
        raise NotReady("this node has not joined its cluster yet", hint="Try again, or another node.")
    return node.state


def sees_all(asked: Asked) -> bool:
    """Whether everything is for whoever asks."""
    return asked.identity is not None and asked.identity.role == "operator"


def is_own(asked: Asked, role: str, name: str) -> bool:
    """Whether an entry of that role and name is the caller's own."""
    identity = asked.identity
    return identity is not None and (identity.role, identity.name) == (role, name)


def connected_sessions(node: NodeView) -> set[str | None]:
    """The sessions that are pushed to this node now."""
    return {one.session for one in node.clients if not one.ended_ns}
