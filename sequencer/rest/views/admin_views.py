"""The objects that operators manage: configuration, holds, leases, resets.

Pure. Made from the replicated state, except `setByNode` (this node's settings) and resets.
"""

from __future__ import annotations

from typing import Annotated, Final, get_args

from msgspec import structs

from rt.names import session_owner
from sequencer.rest.base.admin_ports import ResetKind, ResetState, ResetStatus
from sequencer.rest.base.answer import TIME, Amount, Answer, Count, Digits, doc, one_of, time_or_empty
from sequencer.rest.base.fields import page
from sequencer.rest.base.node_snapshot import NodeSnapshot, RetainedSize
from sequencer.rest.views.context import RequestContext, Response, is_own, joined, sees_all
from sequencer.state.state import SequencerState

# Configuration


class ConfigurationReport(Answer):
    """The replicated configuration, the same on every node."""

    roll_bytes: Annotated[Count, doc("The merged log rolls to a new segment at this size, in bytes.")]
    roll_minutes: Annotated[
        Count, doc("The merged log rolls at this age of its segment, in minutes. 0: never by age.")
    ]
    session_bytes_max: Annotated[Count, doc("Maximum bytes of one session in one merge instruction.")]
    retention_minutes: Annotated[
        Count, doc("Segments are trimmed this many minutes after they were sealed. 0: never by age.")
    ]
    retention_bytes: Annotated[
        Count, doc("The oldest segments are trimmed above this total, in bytes. 0: never by size.")
    ]
    retention_disk_percent: Annotated[
        Count,
        doc(
            "The oldest segments are trimmed while the disks of a majority are fuller than this, in percent. "
            "0: never by disk usage."
        ),
    ]
    hold_bytes_max: Annotated[Count, doc("Maximum bytes kept only for holds. 0: holds are ignored.")]
    sessions_max: Annotated[Count, doc("Maximum open sessions of the cluster.")]
    sessions_per_name_max: Annotated[Count, doc("Maximum open sessions of one certificate name.")]
    session_idle_minutes: Annotated[
        Count, doc("A session without a publisher for this many minutes is closed. 0: never.")
    ]
    set_by_node: Annotated[
        list[str], doc("Fields that this node's own settings set. POST /configuration cannot change them.")
    ]


CONFIGURATION_KEYS: Final = {
    one.encode_name: one.name for one in structs.fields(ConfigurationReport) if one.name != "set_by_node"
}
"""REST field name: attribute of `sequencer.state.state.Configuration`."""


def configuration(asked: RequestContext) -> Response:
    return Response(configuration_of(asked.node, joined(asked.node)))


def configuration_of(node: NodeSnapshot, state: SequencerState) -> ConfigurationReport:
    values = {key: getattr(state.configuration, key) for key in CONFIGURATION_KEYS.values()}
    own = [name for name, key in CONFIGURATION_KEYS.items() if key in node.configured]
    return ConfigurationReport(**values, set_by_node=own)


# Holds and leases


class HoldReport(Answer):
    """Data that is kept for a named subscriber."""

    name: Annotated[str, doc("Name of the subscriber.")]
    position: Annotated[Count, doc("The subscriber has read everything below this position.")]
    lag: Annotated[Count, doc("Messages from there to the end of the merged log.")]
    bytes: Annotated[Count, doc("Approximate bytes of these messages that are kept.")]
    update_time: Annotated[str, doc("When the subscriber last acknowledged. RFC 3339.")]
    is_overridden: Annotated[bool, doc("Whether messages it has not read were trimmed.")]


def holds(asked: RequestContext) -> Response:
    """Operators see all holds, other callers their own."""
    state, kept = joined(asked.node), RetainedSize(joined(asked.node))
    return Response(
        [
            HoldReport(
                name=name,
                position=hold.position,
                lag=max(state.position - hold.position, 0),
                bytes=kept.bytes_from(hold.position),
                update_time=time_or_empty(hold.at_ns),
                is_overridden=hold.position < state.log_start,
            )
            for name, hold in sorted(state.holds.items())
            if sees_all(asked) or is_own(asked, "subscriber", session_owner(name))
        ]
    )


class LeaseReport(Answer):
    """A held lease."""

    name: Annotated[str, doc("Name of the lease: its group and its resource.")]
    owner: Annotated[str, doc("Name in the owner's certificate, possibly with a suffix.")]
    token: Annotated[Digits, doc("Fencing token, in digits: greater than every earlier token of any lease.")]
    duration_seconds: Annotated[
        Amount, doc("The lease expires if it is not renewed for this long, by the leader's clock.")
    ]
    renewals: Annotated[Count, doc("Number of renewals.")]


def leases(asked: RequestContext) -> Response:
    found = page(sorted(joined(asked.node).leases.items()), asked.query)
    return Response(
        [
            LeaseReport(name, one.owner, str(one.token), one.duration_ms / 1000, one.renewals)
            for name, one in found
        ]
    )


class LeaseTableReport(Answer):
    """A table of a lease: rows that only the lease's owner changes, and that its next owner finds."""

    name: Annotated[str, doc("Name of the lease.")]
    owner: Annotated[str, doc("Owner of the lease. Empty: it is not held.")]
    commits: Annotated[Count, doc("Number of commits.")]
    rows: Annotated[Count, doc("Number of rows.")]
    bytes: Annotated[Count, doc("Bytes of keys and values, and 128 for each row.")]


def lease_tables(asked: RequestContext) -> Response:
    state = joined(asked.node)
    found = page(sorted(state.tables.by_lease.items()), asked.query)
    return Response(
        [
            LeaseTableReport(
                name=name,
                owner=state.leases[name].owner if name in state.leases else "",
                commits=table.commits,
                rows=table.rows.count,
                bytes=table.size_bytes,
            )
            for name, table in found
        ]
    )


# Resets


class DroppedReport(Answer):
    """Messages that were replicated and not merged."""

    session: Annotated[str, doc("Session name.")]
    session_id: Annotated[Count, doc("Id of the incarnation.")]
    run_number: Annotated[Count, doc("Run number of the session.")]
    first: Annotated[Count, doc("Number of the first message.")]
    end: Annotated[Count, doc("One past the number of the last message.")]


class ResetReport(Answer):
    """The last reset that this node knows of."""

    state: Annotated[str, one_of(get_args(ResetState)), doc("idle: there was no reset.")]
    kind: Annotated[str, one_of(["", *get_args(ResetKind)]), doc("Kind of reset. Empty: there was none.")]
    epoch: Annotated[Count, doc("The cluster epoch that the reset creates.")]
    start_time: Annotated[str, doc(f"Start time. {TIME}")]
    end_time: Annotated[str, doc(f"End time. {TIME}")]
    dropped: Annotated[list[DroppedReport], doc("Messages that a hard reset dropped, by session.")]
    error: Annotated[str, doc("Why the reset failed. Empty: it did not fail.")]
    may_lose: Annotated[str, doc("What a reset without a majority may have lost. Empty: nothing.")]


def reset_status(asked: RequestContext) -> Response:
    """Status 503 while a reset runs."""
    status = asked.node.reset
    return Response(reset_report(status), 503 if status.state == "running" else 200)


def reset_report(status: ResetStatus) -> ResetReport:
    dropped = [
        DroppedReport(one.session, one.session_id, one.run, one.first, one.end) for one in status.dropped
    ]
    return ResetReport(
        state=status.state,
        kind=status.kind or "",
        epoch=status.epoch,
        start_time=time_or_empty(status.started_ns),
        end_time=time_or_empty(status.ended_ns),
        dropped=dropped,
        error=status.error,
        may_lose=status.may_lose,
    )
