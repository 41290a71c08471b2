"""An authorized request, its response, and which entries the caller may see. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rt.net.identity import Identity
from sequencer.rest.base.errors import NotReady
from sequencer.rest.base.node_snapshot import NodeSnapshot
from sequencer.state.state import SequencerState


@dataclass(frozen=True, slots=True)
class RequestContext:
    node: NodeSnapshot
    identity: Identity | None
    """The caller; None on the port without certificates."""
    query: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Response:
    body: object
    """Text, or what is encoded as JSON: an `Answer` or a list of them."""
    status: int = 200


def joined(node: NodeSnapshot) -> SequencerState:
    """The replicated state; raises `NotReady` before the node has joined its cluster."""
    if node.state is None or not any(node.state.cluster):
        raise NotReady("this node has not joined its cluster yet", hint="Retry, or use another node.")
    return node.state


def sees_all(asked: RequestContext) -> bool:
    return asked.identity is not None and asked.identity.role == "operator"


def is_own(asked: RequestContext, role: str, name: str) -> bool:
    """Whether the caller has this role and name."""
    identity = asked.identity
    return identity is not None and (identity.role, identity.name) == (role, name)
