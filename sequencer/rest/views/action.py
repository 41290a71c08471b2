"""What an action of an operator is: a path for POST, with the command that it runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from rt.net.identity import Identity, Role
from sequencer.rest.base.admin_ports import AdminPorts
from sequencer.rest.base.errors import Conflict
from sequencer.rest.base.fields import Field
from sequencer.rest.base.node_snapshot import NodeSnapshot
from sequencer.rest.views.context import Response, joined
from sequencer.state.apply_result import CommandRejected, Outcome
from sequencer.state.commands import Operation


@dataclass(frozen=True, slots=True)
class ActionContext:
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


@dataclass(frozen=True, slots=True)
class Action:
    """One path for POST."""

    roles: ClassVar[frozenset[Role]] = frozenset({"operator"})
    path: str
    summary: str
    run: Run
    fields: tuple[Field, ...]
    answer: Any
    """The type of the response's body."""
    status: int = 200
    """Of a successful response."""
