"""The actions of operators: the only list from which routes and OpenAPI are made.

Invariants:
- Each action needs POST, a certificate of role operator and a JSON body. No other request changes anything.
- When an action answers, the cluster and this node have applied it (resets: have started it).
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeAlias

from rt.log.format.constants import NUMBER_MAX
from rt.log.format.segment_table import TrimReason
from rt.net.identity import Identity, Role
from sequencer.rest.base.admin_ports import AdminPorts, ResetKind
from sequencer.rest.base.errors import Conflict
from sequencer.rest.base.json_body import Field, flag, name_of, session_of, size, whole
from sequencer.rest.base.node_snapshot import NodeSnapshot
from sequencer.rest.base.schema_kinds import Schema
from sequencer.rest.views import admin_schemas
from sequencer.rest.views.admin_schemas import CONFIGURATION_KEYS
from sequencer.rest.views.admin_views import configuration, holds, reset_answer
from sequencer.rest.views.context import RequestContext, Response, joined
from sequencer.state.apply_result import CommandRejected, Outcome, RunFenced, SegmentsTrimmed
from sequencer.state.commands import CloseSession, Configure, Operation, ReleaseHold, TrimSegments
from sequencer.state.state import CONFIGURABLE


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
        outcome = await self.operations.commanding.run(command)
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
    schema: Schema
    """Of the response."""
    status: int = 200
    """Of a successful response."""


async def release_hold(acting: ActionContext) -> Response:
    await acting.run(ReleaseHold(acting.body["name"]))
    return holds(RequestContext(acting.snapshot(), acting.identity))


async def configure(acting: ActionContext) -> Response:
    """Change the named fields; responds with the new configuration."""
    configured = acting.snapshot().configured
    changes = {CONFIGURATION_KEYS[name]: value for name, value in acting.body.items()}
    if fixed := [name for name in acting.body if CONFIGURATION_KEYS[name] in configured]:
        raise Conflict(
            "this node's own settings set this value, and a leader applies them again",
            where=", ".join(f"field {name}" for name in fixed),
            hint="Change it in the settings of all nodes, or remove it from them.",
        )
    if changes:
        await acting.run(Configure(**changes))
    return configuration(RequestContext(acting.snapshot(), acting.identity))


async def trim(acting: ActionContext) -> Response:
    """Idempotent: segments that are already trimmed are no error."""
    outcome = await acting.run(TrimSegments(acting.body["position"], TrimReason.REQUEST, time.time_ns()))
    assert isinstance(outcome, SegmentsTrimmed), outcome
    return Response(
        {
            "logStart": outcome.log_start,
            "segments": outcome.segments,
            "bytes": outcome.size_bytes,
            "holdsOverridden": list(outcome.overridden),
        }
    )


async def close_session(acting: ActionContext) -> Response:
    outcome = await acting.run(CloseSession(acting.body["session"]))
    assert isinstance(outcome, RunFenced), outcome
    return Response({"session": acting.body["session"], "id": outcome.session_id, "x": outcome.x})


async def soft_reset(acting: ActionContext) -> Response:
    return await _reset(acting, "soft")


async def hard_reset(acting: ActionContext) -> Response:
    """The request must name the stream, to guard against the wrong cluster."""
    stream = acting.snapshot().stream
    if acting.body["stream"] != stream:
        got = acting.body["stream"]
        raise Conflict("this node serves another stream", where="field stream", got=got, expected=stream)
    return await _reset(acting, "hard")


async def _reset(acting: ActionContext, kind: ResetKind) -> Response:
    started = await acting.operations.resets.begin(kind, force=acting.body.get("force", False))
    return Response(reset_answer(started), 202)


def _size(name: str, description: str) -> Field:
    low, end = CONFIGURABLE[CONFIGURATION_KEYS[name]]
    return size(name, description, low=low, high=end - 1)


def _whole(name: str, description: str) -> Field:
    low, end = CONFIGURABLE[CONFIGURATION_KEYS[name]]
    return whole(name, description, low=low, high=end - 1)


_FORCE: Final = flag(
    "force",
    "Reset even without a majority, from this node's data. Data that only other nodes have is lost. "
    "Default: false.",
)

ACTIONS: Final[tuple[Action, ...]] = (
    Action(
        "/configuration",
        "Changes the named fields of the replicated configuration. Responds with the new configuration.",
        configure,
        (
            _size("rollBytes", "Roll the merged log to a new segment at this size, in bytes."),
            _whole(
                "rollMinutes", "Roll the merged log at this age of its segment, in minutes. 0: never by age."
            ),
            _size("sessionBytesMax", "Maximum bytes of one session in one merge instruction."),
            _whole(
                "retentionMinutes", "Trim segments this many minutes after they were sealed. 0: never by age."
            ),
            _size("retentionBytes", "Trim the oldest segments above this total, in bytes. 0: never by size."),
            _whole(
                "retentionDiskPercent",
                "Trim the oldest segments while the disks of a majority are fuller than this, in percent. "
                "0: never by disk usage.",
            ),
            _size("holdBytesMax", "Maximum bytes kept only for subscribers' holds. 0: ignore holds."),
            _whole("sessionsMax", "Maximum open sessions of the cluster."),
            _whole("sessionsPerNameMax", "Maximum open sessions of one certificate name."),
            _whole(
                "sessionIdleMinutes",
                "Close a session without a publisher for this many minutes. 0: never.",
            ),
        ),
        admin_schemas.CONFIGURATION,
    ),
    Action(
        "/trim",
        "Trims the sealed merged segments that end at or below a position, despite holds.",
        trim,
        (
            whole(
                "position",
                "The first position to keep. A segment that contains it is kept whole.",
                low=0,
                high=NUMBER_MAX - 1,
                is_required=True,
            ),
        ),
        admin_schemas.TRIMMED,
    ),
    Action(
        "/release-hold",
        "Releases a subscriber's hold, until it acknowledges again. Responds with the remaining holds.",
        release_hold,
        (name_of("subscriber", "Name of the subscriber.", field="name"),),
        admin_schemas.HOLDS,
    ),
    Action(
        "/close-session",
        "Closes a session at the end of what a majority holds; the cluster accepts no more bytes of its run. "
        "Runs in the background: see /sessions. A publisher that opens it again starts a new run.",
        close_session,
        (session_of("Name of an open session.", field="session"),),
        admin_schemas.CLOSED_SESSION,
    ),
    Action(
        "/soft-reset",
        "Rebuilds the consensus of the cluster from its state, as the next epoch, without data loss. "
        "Runs in the background: see /reset-status.",
        soft_reset,
        (_FORCE,),
        admin_schemas.RESET_STATUS,
        202,
    ),
    Action(
        "/hard-reset",
        "Rebuilds the consensus, and deletes all session copies and merged logs. Messages that were "
        "replicated and not merged are lost; /reset-status lists them by session.",
        hard_reset,
        (name_of("stream", "The stream's name, as confirmation.", field="stream"), _FORCE),
        admin_schemas.RESET_STATUS,
        202,
    ),
)
