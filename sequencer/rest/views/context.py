"""An authorized request, its response, which entries the caller may see, and operators' actions. Pure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar, TypeAlias

from msgspec import Struct, field

from rt.net.grpc_errors import Unreachable
from rt.net.identity import Identity, Role
from sequencer.rest.base.admin_ports import AdminPorts
from sequencer.rest.base.errors import Conflict
from sequencer.rest.base.fields import Field
from sequencer.rest.base.node_snapshot import NodeSnapshot
from sequencer.state.apply_result import CommandRejected, Outcome
from sequencer.state.commands import Operation
from sequencer.state.state import SequencerState


class RequestContext(Struct, frozen=True):
    node: NodeSnapshot
    identity: Identity | None
    """The caller; None on the port without certificates."""
    query: Mapping[str, Any] = field(default_factory=dict)


class Response(Struct, frozen=True):
    body: object
    """Text, or a value that is encoded as JSON: an `Answer` or a list of them."""
    status: int = 200


def joined(node: NodeSnapshot) -> SequencerState:
    """The replicated state; raises `Unreachable` before the node has joined its cluster."""
    if node.state is None or not any(node.state.cluster):
        raise Unreachable("this node has not joined its cluster yet", hint="Try again, or another node.")
    return node.state


def sees_all(asked: RequestContext) -> bool:
    return asked.identity is not None and asked.identity.role == "operator"


def is_own(asked: RequestContext, role: str, name: str) -> bool:
    """Whether the caller has this role and name."""
    identity = asked.identity
    return identity is not None and (identity.role, identity.name) == (role, name)


# Actions


class ActionContext(Struct, frozen=True):
    """An authorized request for a change."""

    snapshot: Callable[[], NodeSnapshot]
    identity: Identity
    body: Mapping[str, Any]
    operations: AdminPorts

    async def run(self, command: Operation) -> Outcome:
        """Commit and apply `command`; raises `Conflict` with the reason if it was rejected."""
        joined(self.snapshot())
        outcome = await self.operations.commands.run(command)
        if isinstance(outcome, CommandRejected):
            raise Conflict(outcome.why, hint="Nothing was changed.")
        return outcome


Run: TypeAlias = Callable[[ActionContext], Awaitable[Response]]


class Action(Struct, frozen=True):
    """One path for POST."""

    roles: ClassVar[frozenset[Role]] = frozenset({"operator"})
    path: str
    summary: str
    run: Run
    fields: tuple[Field, ...]
    answer: Any
    """The type of the response's body."""
    status: int = 200
    """The status of a successful response."""
