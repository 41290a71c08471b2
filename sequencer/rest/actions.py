"""What operators may change, and how it is asked for: the one list that routes and OpenAPI are made of.

Laws. Everything here wants POST, a certificate of role operator and a JSON body; nothing else changes
anything. What an action answers, the cluster has applied, and this node too.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeAlias

from rt.log.layout import NUMBER_MAX
from rt.log.table import TrimReason
from rt.net.identity import Identity, Role
from sequencer.commands import Configure, Operation, Release, Trim
from sequencer.outcomes import Outcome, Refused, Trimmed
from sequencer.rest import operating_schemas
from sequencer.rest.asking import Answer, Asked, joined
from sequencer.rest.body import Field, flag, name_of, size, whole
from sequencer.rest.errors import Conflict
from sequencer.rest.node_view import NodeView
from sequencer.rest.operating_schemas import CONFIGURATION_KEYS
from sequencer.rest.operating_views import configuration, holds, reset_answer
from sequencer.rest.operations import Operations, ResetKind
from sequencer.rest.schema_kinds import Schema
from sequencer.state import CONFIGURABLE


@dataclass(frozen=True, slots=True)
class Acting:
    """A request to change something, that was let in. `look` sees the node as it is then."""

    look: Callable[[], NodeView]
    identity: Identity
    body: Mapping[str, Any]
    operations: Operations

    async def run(self, command: Operation) -> Outcome:
        """Have the cluster carry it out; `Conflict` with the reason if it refused to."""
        joined(self.look())
        outcome = await self.operations.commanding.run(command)
        if isinstance(outcome, Refused):
            raise Conflict(outcome.why, hint="Nothing was changed.")
        return outcome


Run: TypeAlias = Callable[[Acting], Awaitable[Answer]]


@dataclass(frozen=True, slots=True)
class Action:
    """One path that is asked with POST."""

    roles: ClassVar[frozenset[Role]] = frozenset({"operator"})
    path: str
    summary: str
    run: Run
    fields: tuple[Field, ...]
    schema: Schema
    """Of the answer."""
    status: int = 200
    """Of the answer, if all is well."""


async def release_hold(acting: Acting) -> Answer:
    """Nothing is kept for that subscriber any more."""
    await acting.run(Release(acting.body["name"]))
    return holds(Asked(acting.look(), acting.identity))


async def configure(acting: Acting) -> Answer:
    """Change what is said; the configuration behind it."""
    configured = acting.look().configured
    changes = {CONFIGURATION_KEYS[name]: value for name, value in acting.body.items()}
    if fixed := [name for name in acting.body if CONFIGURATION_KEYS[name] in configured]:
        raise Conflict(
            "this node's own settings say that, and a leader has them applied again",
            where=", ".join(f"field {name}" for name in fixed),
            hint="Change the nodes' settings, or take it out of them.",
        )
    if changes:
        await acting.run(Configure(**changes))
    return configuration(Asked(acting.look(), acting.identity))


async def trim(acting: Acting) -> Answer:
    """Trim the sealed segments that end at or below a position; what is gone already is as it should be."""
    outcome = await acting.run(Trim(acting.body["position"], TrimReason.REQUEST, time.time_ns()))
    assert isinstance(outcome, Trimmed), outcome
    return Answer(
        {
            "logStart": outcome.log_start,
            "segments": outcome.segments,
            "bytes": outcome.size_bytes,
            "holdsOverridden": list(outcome.overridden),
        }
    )


async def soft_reset(acting: Acting) -> Answer:
    """Rebuild consensus, without loss."""
    return await _reset(acting, "soft")


async def hard_reset(acting: Acting) -> Answer:
    """The same, and drop session copies and merged logs; who asks must say of which stream."""
    stream = acting.look().stream
    if acting.body["stream"] != stream:
        got = acting.body["stream"]
        raise Conflict("this is another stream", where="field stream", got=got, wanted=stream)
    return await _reset(acting, "hard")


async def _reset(acting: Acting, kind: ResetKind) -> Answer:
    begun = await acting.operations.resets.begin(kind, force=acting.body.get("force", False))
    return Answer(reset_answer(begun), 202)


def _size(name: str, description: str) -> Field:
    low, end = CONFIGURABLE[CONFIGURATION_KEYS[name]]
    return size(name, description, low=low, high=end - 1)


def _whole(name: str, description: str) -> Field:
    low, end = CONFIGURABLE[CONFIGURATION_KEYS[name]]
    return whole(name, description, low=low, high=end - 1)


_FORCE: Final = flag(
    "force",
    "Also without a majority, from what this node has: what only others have is lost. Default: false.",
)

ACTIONS: Final[tuple[Action, ...]] = (
    Action(
        "/configuration",
        "Changes the replicated configuration; what is not named stays. The configuration behind it.",
        configure,
        (
            _size("rollBytes", "A merged segment of that size is followed by the next."),
            _whole("rollMinutes", "So is one of that age; 0: never by age."),
            _size("sessionBytesMax", "Most bytes of one session in one instruction."),
            _whole("timeMinutes", "Segments are trimmed so long after they were sealed; 0: never by age."),
            _size("limit", "So are the oldest while more bytes are kept; 0: never by size."),
            _whole("diskPercent", "And while most disks are fuller; 0: never for want of space."),
            _size("holdLimit", "Most bytes that are kept for subscribers' holds alone; 0: none."),
        ),
        operating_schemas.CONFIGURATION,
    ),
    Action(
        "/trim",
        "Trims the sealed merged segments that end at or below a position, whoever holds them back.",
        trim,
        (
            whole(
                "position",
                "The first to be kept, at the latest.",
                low=0,
                high=NUMBER_MAX - 1,
                is_required=True,
            ),
        ),
        operating_schemas.TRIMMED,
    ),
    Action(
        "/release-hold",
        "Nothing is kept for that subscriber any more, until it acknowledges again. The holds that are left.",
        release_hold,
        (name_of("subscriber", "The name of a subscriber that holds data back.", field="name"),),
        operating_schemas.HOLDS,
    ),
    Action(
        "/soft-reset",
        "Rebuilds the consensus of the cluster from its state, as its next epoch, without loss. It goes on "
        "behind the answer: see /reset-status.",
        soft_reset,
        (_FORCE,),
        operating_schemas.RESET_STATUS,
        202,
    ),
    Action(
        "/hard-reset",
        "The same, and drops session copies and all that is merged: what was replicated and not merged is "
        "lost, and told by session in /reset-status.",
        hard_reset,
        (name_of("stream", "The stream's name, to be sure.", field="stream"), _FORCE),
        operating_schemas.RESET_STATUS,
        202,
    ),
)
