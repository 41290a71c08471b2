"""Stuck pushes: when a push counts as stuck, the reason, the alarm text, and the metric."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from rest_node import OTHER, PUBLISHER, at, history, node_view, standing

from rt.exposition import exposition
from rt.v1 import sequencer_pb2 as pb
from sequencer.ipc.silence import HUNG_S
from sequencer.rest.base.node_snapshot import ClientConnection, NodeSnapshot
from sequencer.rest.views.alarms import alarms_of
from sequencer.rest.views.node_metrics import metrics_of
from sequencer.rest.views.push_stalls import STALLED_S, TOLD_MAX, stalls_of
from sequencer.state.state import ConsumedEnd, End

RUNNING = b"\2" * 16
"""The incarnation in `history` whose run is open."""
PUSH = ClientConnection(PUBLISHER, "", "feed", at(1), incarnation=RUNNING, position=50, merged=40)


def node(*clients: ClientConnection, told: pb.Standing | None = None, **changes: Any) -> NodeSnapshot:
    return node_view(
        **{
            "standing": standing() if told is None else told,
            "state": history(),
            "clients": clients,
            **changes,
        }
    )


def stuck(snapshot: NodeSnapshot) -> list[str]:
    return [one.text for one in alarms_of(snapshot) if one.name == "push-stuck"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"silent_s": HUNG_S - 0.1}, None),
        ({"silent_s": HUNG_S}, "silent"),
        ({"silent_s": HUNG_S, "ended_ns": at(2)}, "silent"),
        ({"silent_s": 0.0, "ended_ns": at(2)}, None),
        ({"stalled_s": STALLED_S}, None),
        ({"waiting_bytes": 1, "stalled_s": STALLED_S - 0.1}, None),
        ({"waiting_bytes": 1, "stalled_s": STALLED_S}, "waiting"),
        ({"waiting_bytes": 1, "stalled_s": STALLED_S, "ended_ns": at(2)}, None),
        ({"unmerged_s": STALLED_S - 0.1}, None),
        ({"unmerged_s": STALLED_S}, "unmerged"),
        ({"unmerged_s": STALLED_S, "silent_s": HUNG_S}, "silent"),
        ({"session": None, "silent_s": HUNG_S}, None),
    ],
)
def test_push_is_stuck_for_at_most_one_reason(changes: dict[str, Any], reason: str | None) -> None:
    snapshot = node(replace(PUSH, **changes))
    assert [why for _, why in stalls_of(snapshot)] == ([] if reason is None else [reason])
    assert len(stuck(snapshot)) == (reason is not None)


def test_push_lost_while_silent_stays_stuck_until_its_run_ends() -> None:
    lost = replace(PUSH, silent_s=11.0, ended_ns=at(2))
    assert "until its connection ended at 2026-01-01T00:02:00Z" in stuck(node(lost))[0]
    assert '`rt rest /close-session --data \'{"session": "feed"}\'`' in stuck(node(lost))[0]
    state = history()
    session = state.sessions[2]
    ended = replace(session.active_runs[0], is_fenced=True, end=End(0, 64, 0))
    state.sessions[2] = replace(session, active_runs=(ended,))
    assert stuck(node(lost, state=state)) == []
    assert stuck(node(replace(lost, incarnation=b"\1" * 16))) == []  # Superseded by the other directory.


@pytest.mark.parametrize(
    ("node_name", "session", "reasons"),
    [
        ("n2", "feed", []),
        ("n2", "feed~2", ["silent"]),
        ("n3", "feed", ["silent"]),
        ("n1", "feed", ["silent"]),
    ],
    ids=["connected elsewhere", "another session", "of an unreachable node", "of this node, before"],
)
def test_push_lost_by_this_node_is_not_stuck_while_another_node_reports_it(
    node_name: str, session: str, reasons: list[str]
) -> None:
    """The network between this node and the publisher is cut. Closing the session, as the alarm advises,
    would end a working push.
    """
    lost = replace(PUSH, silent_s=HUNG_S, ended_ns=at(2))
    told = standing()
    (other,) = (one for one in told.nodes if one.name == node_name)
    other.summary.clients.clients.add(role="publisher", name="feed", session=session)
    assert [why for _, why in stalls_of(node(lost, told=told))] == reasons
    assert [why for _, why in stalls_of(node(replace(lost, ended_ns=0), told=told))] == ["silent"]


def test_waiting_push_is_not_stuck_while_leader_or_state_is_unknown() -> None:
    waiting = replace(PUSH, waiting_bytes=1, stalled_s=60.0)
    assert stuck(node(waiting, told=standing(leader=""))) == []
    assert stuck(node(waiting, state=None)) == []


def test_stuck_push_alarm_names_session_node_and_next_command() -> None:
    (silent,) = stuck(node(replace(PUSH, silent_s=7.0)))
    assert "The push of session feed has reported nothing to n1 for 7 s" in silent
    assert "`rt pushes list`" in silent
    assert "`kill -CONT PID`" in silent
    (waiting,) = stuck(node(replace(PUSH, waiting_bytes=2048, stalled_s=12.0)))
    assert "n1, which has stored nothing of it for 12 s although 2,048 bytes wait" in waiting
    assert "`rt pushes list`" in waiting
    (unmerged,) = stuck(node(replace(PUSH, unmerged_s=13.0)))
    assert "10 messages of session feed at n1 have not been merged for 13 s" in unmerged
    assert "`rt rest '/sessions?name=feed'`" in unmerged


@pytest.mark.parametrize(
    ("dedup_id", "consumed", "position", "is_told"),
    [
        ("d1", None, 50, True),
        ("d1", None, 40, False),
        ("d1", ConsumedEnd(End(0, 128, 45), 7), 50, False),
        ("new", None, 50, False),
        (None, None, 50, False),
    ],
    ids=["after a gap", "of known numbers", "it is being merged", "the first of its id", "without an id"],
)
def test_unmerged_push_alarm_names_next_number_only_after_gap_in_dedup_id(
    dedup_id: str | None, consumed: ConsumedEnd | None, position: int, is_told: bool
) -> None:
    """The next number of `d1` is 40. A new directory with the same name would wait for this one, so it cannot
    help.
    """
    state = history()
    state.sessions[2] = replace(state.sessions[2], dedup_id=dedup_id, consumed=consumed)
    (text,) = stuck(node(replace(PUSH, unmerged_s=13.0, position=position, merged=0), state=state))
    assert ("after number 40, the next one of dedup id d1" in text) == is_told
    assert ("another session, with another name" in text) == is_told


def test_stuck_pushes_of_one_certificate_do_not_hide_those_of_others() -> None:
    many = [replace(PUSH, session=f"feed~{number}", silent_s=HUNG_S) for number in range(1000)]
    other = replace(PUSH, identity=OTHER, session="other", silent_s=HUNG_S)
    texts = stuck(node(*many, other))
    assert len(texts) == TOLD_MAX + 2
    assert "session feed~0 " in texts[0]
    assert "session other " in texts[TOLD_MAX]
    assert texts[-1].startswith(f"{1000 - TOLD_MAX} more pushes of {PUBLISHER.name} to n1 are stuck.")
    assert 'rt_stuck_pushes{reason="silent"} 1001' in exposition(metrics_of(node(*many, other)))


def test_stuck_push_is_counted_by_reason_and_raises_no_replication_lag_alarm() -> None:
    snapshot = node(replace(PUSH, unmerged_s=40.0, lag_ns=40 * 10**9))
    assert "replication-lag" not in {one.name for one in alarms_of(snapshot)}
    text = exposition(metrics_of(snapshot))
    assert 'rt_stuck_pushes{reason="unmerged"} 1' in text
    assert 'rt_stuck_pushes{reason="silent"} 0' in text
