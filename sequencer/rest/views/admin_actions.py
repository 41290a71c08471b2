"""The actions of operators: the only list from which routes and OpenAPI are made.

Invariants:
- Each action needs POST, a certificate of role operator and a JSON body. No other request changes anything.
- When an action answers, the cluster and this node have applied it (resets: have started it).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated, Final

import msgspec

from rt.log.format.constants import NUMBER_MAX
from rt.log.format.segment_table import TrimReason
from sequencer.rest.base.admin_ports import ResetKind
from sequencer.rest.base.answer import Answer, Count, doc
from sequencer.rest.base.errors import Conflict
from sequencer.rest.base.fields import Field, flag, hold_of, lease_of, name_of, session_of, size, whole
from sequencer.rest.views.admin_views import (
    CONFIGURATION_KEYS,
    ConfigurationReport,
    HoldReport,
    LeaseTableReport,
    ResetReport,
    configuration,
    holds,
    lease_tables,
    reset_report,
)
from sequencer.rest.views.context import Action, ActionContext, RequestContext, Response, joined
from sequencer.rest.views.member_actions import MEMBER_ACTIONS
from sequencer.state.apply_result import (
    FeatureLevelRaised,
    GroupReset,
    RunFenced,
    SegmentsTrimmed,
)
from sequencer.state.commands import (
    Configure,
    RaiseFeatureLevel,
    ReleaseHold,
    ResetGroup,
    TrimSegments,
)
from sequencer.state.configuration import CONFIGURABLE
from sequencer.state.feature_level import check_raise
from sequencer.state.leases.tables import DeleteTable
from sequencer.state.session_commands import CloseSession


class TrimReport(Answer):
    """The result of a trim."""

    log_start: Annotated[Count, doc("First position that is kept.")]
    segments: Annotated[Count, doc("Number of segments trimmed.")]
    bytes: Annotated[Count, doc("Bytes of these segments.")]
    holds_overridden: Annotated[list[str], doc("Subscribers whose holds were overridden.")]


class ResetGroupReport(Answer):
    """The positions of a group after a reset."""

    group: Annotated[str, doc("Name of the group.")]
    position: Annotated[Count | None, doc("Where all its partitions are now. Null: they were deleted.")]
    holds: Annotated[list[str], doc("Names of the positions.")]


class ClosedSession(Answer):
    """A session that is being closed."""

    session: Annotated[str, doc("Name of the session.")]
    id: Annotated[Count, doc("Id of the incarnation in this cluster.")]
    run_number: Annotated[Count, doc("Number of the run that is fenced.")]


class RaisedFeatureLevel(Answer):
    """The feature level of the cluster after it was raised."""

    feature_level: Annotated[Count, doc("Feature level of the cluster.")]


async def raise_feature_level(acting: ActionContext) -> Response:
    """The request is checked here first, because a member whose rt has no feature levels could not read it.

    A request for the current level of the cluster is already done. An operator may repeat a request that got
    no answer.
    """
    node, level = acting.snapshot(), acting.body["level"]
    if level == joined(node).feature_level:
        return Response(RaisedFeatureLevel(level))
    check_raise(level, joined(node).feature_level, node.member_levels)
    outcome = await acting.run(RaiseFeatureLevel(level))
    assert isinstance(outcome, FeatureLevelRaised), outcome
    return Response(RaisedFeatureLevel(outcome.level))


async def release_hold(acting: ActionContext) -> Response:
    await acting.run(ReleaseHold(acting.body["name"]))
    return holds(RequestContext(acting.snapshot(), acting.identity))


async def delete_lease_table(acting: ActionContext) -> Response:
    await acting.run(DeleteTable(acting.body["lease"]))
    return lease_tables(RequestContext(acting.snapshot(), acting.identity))


async def reset_group(acting: ActionContext) -> Response:
    return await _reset_group(acting, acting.body["position"], is_deletion=False)


async def delete_group(acting: ActionContext) -> Response:
    return await _reset_group(acting, 0, is_deletion=True)


async def _reset_group(acting: ActionContext, position: int, *, is_deletion: bool) -> Response:
    group = acting.body["group"]
    outcome = await acting.run(ResetGroup(group, position, time.time_ns(), is_deletion))
    assert isinstance(outcome, GroupReset), outcome
    return Response(ResetGroupReport(group, outcome.position, list(outcome.names)))


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
    overridden = list(outcome.overridden)
    return Response(TrimReport(outcome.log_start, outcome.segments, outcome.size_bytes, overridden))


async def close_session(acting: ActionContext) -> Response:
    outcome = await acting.run(CloseSession(acting.body["session"]))
    assert isinstance(outcome, RunFenced), outcome
    return Response(ClosedSession(acting.body["session"], outcome.session_id, outcome.run))


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
    return Response(reset_report(started), 202)


def _configurable() -> Iterator[Field]:
    """A field for each value of the configuration, described as in the response."""
    described = msgspec.json.schema(ConfigurationReport)["$defs"]["ConfigurationReport"]["properties"]
    for name, key in CONFIGURATION_KEYS.items():
        kind = size if "bytes" in key else whole
        low, end = CONFIGURABLE[key]
        yield kind(name, described[name]["description"], low=low, high=end - 1)


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
        tuple(_configurable()),
        ConfigurationReport,
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
        TrimReport,
    ),
    Action(
        "/release-hold",
        "Releases a subscriber's hold, until it acknowledges again. Responds with the remaining holds.",
        release_hold,
        (hold_of("name", "Name of the hold: of a subscriber, or of a group's position."),),
        list[HoldReport],
    ),
    Action(
        "/delete-lease-table",
        "Deletes the table of a lease that is not held. Responds with the remaining tables.",
        delete_lease_table,
        (lease_of("lease", "Name of the lease."),),
        list[LeaseTableReport],
    ),
    Action(
        "/reset-group",
        "Moves all positions of a group, also back, but not before the first message that is kept. Refused "
        "while it has members.",
        reset_group,
        (
            name_of("group", "Name of the group.", "group"),
            whole(
                "position",
                "The next position for all its partitions.",
                low=0,
                high=NUMBER_MAX - 1,
                is_required=True,
            ),
        ),
        ResetGroupReport,
    ),
    Action(
        "/delete-group",
        "Deletes all positions of a group. Refused while it has members.",
        delete_group,
        (name_of("group", "Name of the group.", "group"),),
        ResetGroupReport,
    ),
    Action(
        "/close-session",
        "Closes a session at the end of what a majority holds; the cluster accepts no more bytes of its run. "
        "Runs in the background: see /sessions. A publisher that opens it again starts a new run.",
        close_session,
        (session_of("session", "Name of an open session."),),
        ClosedSession,
    ),
    Action(
        "/raise-feature-level",
        "Permits what the feature levels up to this one introduce. It cannot be undone: an rt that does "
        "not know the level stops. Refused unless all members know it.",
        raise_feature_level,
        (whole("level", "The new feature level.", low=2, high=2**32 - 1, is_required=True),),
        RaisedFeatureLevel,
    ),
    Action(
        "/soft-reset",
        "Rebuilds the consensus of the cluster from its state, as the next epoch, without data loss. "
        "Runs in the background: see /reset-status.",
        soft_reset,
        (_FORCE,),
        ResetReport,
        202,
    ),
    Action(
        "/hard-reset",
        "Rebuilds the consensus, and deletes all session copies and merged logs. Messages that were "
        "replicated and not merged are lost; /reset-status lists them by session.",
        hard_reset,
        (name_of("stream", "The stream's name, as confirmation.", "stream"), _FORCE),
        ResetReport,
        202,
    ),
    *MEMBER_ACTIONS,
)
