"""Commits the limits that publishers promise (`max_silence`), and measures which are silent for longer.

For one event loop. Invariants:
- The replicated state records that a publisher promised a limit, and that it was closed in order: see
  `sequencer.state.run_lifecycle`. Only the time of silence is measured by each node for itself.
- Time counts only while the node knows a leader and its process runs. After a time without a leader,
  `RECOVERY_S` remain until a publisher counts as silent. So a publisher does not count as silent because of
  an election, or because a node was cut off or paused. Elections do not hide a silent publisher.
- A node that starts knows nothing about the time before its start. It reports a silent publisher one limit
  after its start.
- Without promises there is no work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from replicator.protocol.handshake import PushHello, SilenceLimit
from sequencer.ipc.silence import SilenceDetector
from sequencer.ipc.state_follower import StateFollower
from sequencer.rest.base.node_snapshot import SilentPublisher
from sequencer.state.command_codec import encode_command
from sequencer.state.run_lifecycle import is_promise_settled
from sequencer.state.session_commands import LimitSilence
from sequencer.state.state import Session

GRACE_S: Final = 4.0
"""A message may take this long from its publisher to this node. So a program that publishes as often as it
promised raises no alarm.
"""
RECOVERY_S: Final = 30.0
"""In this time after one without a leader, pushes connect again, and a node that was cut off catches up."""
CONTROL_SILENT_S: Final = 2.0
"""A control process that is silent for longer is stopped or has ended: a running one reports every 500 ms."""
PROPOSE_AGAIN_S: Final = 1.0
"""A command that is not applied after this time may have been lost. A peer cannot cause more than one command
for a session in this time.
"""


class _Silence:
    def __init__(self) -> None:
        self.detector = SilenceDetector()
        self.merged: object = None
        """How far the session is merged."""
        self.received_ns = 0


class PublisherSilence:
    """Call `update` about once a second. `propose` sends an encoded command to the leader."""

    def __init__(self, follower: StateFollower, propose: Callable[[bytes], None]) -> None:
        self._follower, self._propose = follower, propose
        self._silences: dict[int, _Silence] = {}
        """By id of the session."""
        self._proposed_s: dict[int, float] = {}

    def commit(self, hello: PushHello, limit: SilenceLimit) -> SilenceLimit | None:
        """Have a limit committed. Return the limit when nothing is left to commit, or None if it must be
        stated again later.
        """
        state = self._follower.joined_state
        session = state.session_of(hello.session)
        if session is None or session.incarnation != hello.incarnation:
            key = hello.session, hello.incarnation
            return limit if key in state.by_incarnation or key in state.forgotten else None
        if is_promise_settled(session, limit.run, limit.milliseconds):
            return limit
        now_s = asyncio.get_running_loop().time()
        is_due = now_s >= self._proposed_s.get(session.id, 0.0) + PROPOSE_AGAIN_S
        if session.last_run == limit.run and is_due:
            self._proposed_s[session.id] = now_s
            self._propose(encode_command(LimitSilence(session.id, limit.run, limit.milliseconds)))
        return None

    def update(
        self, now_s: float, get_received_ns: Callable[[], Mapping[str, int]], control_silent_s: float = 0.0
    ) -> None:
        """`get_received_ns` returns for each session when its bytes were last received here.

        `control_silent_s`: how long this node's control process, which knows the leader, has been silent.
        """
        if self._proposed_s:
            recent = self._proposed_s.items()
            self._proposed_s = {one: at for one, at in recent if now_s < at + PROPOSE_AGAIN_S}
        state = self._follower.state
        if state is None or not (state.promising or self._silences):
            return
        is_led = bool(self._follower.standing.leader) and control_silent_s < CONTROL_SILENT_S
        received_ns = get_received_ns()
        silences = {one: self._silences.get(one) or _Silence() for one in state.promising}
        for session_id, silence in silences.items():
            session = state.sessions[session_id]
            merged = session.last_run, session.consumed, session.done
            # Any change of this time counts, also to an earlier time: the clock may have been set back.
            received = received_ns.get(session.name, 0) or silence.received_ns
            silent_s = silence.detector.silent_s
            silence.detector.update(now_s)
            if merged != silence.merged or received != silence.received_ns:
                silence.detector.record_message()
            elif not is_led:
                due_s = session.silence_ms_max / 1000 + GRACE_S
                silence.detector.silent_s = min(silent_s, max(due_s - RECOVERY_S, 0.0))
            silence.merged, silence.received_ns = merged, received
        self._silences = silences

    def silent(self) -> tuple[SilentPublisher, ...]:
        """The publishers that are silent for longer than they promised, by session."""
        state = self._follower.state
        if state is None:
            return ()
        known = ((state.sessions.get(one), silence) for one, silence in self._silences.items())
        found = (_silent(session, silence) for session, silence in known if session is not None)
        return tuple(sorted((one for one in found if one is not None), key=lambda one: one.session))


def _silent(session: Session, silence: _Silence) -> SilentPublisher | None:
    limit_s, silent_s = session.silence_ms_max / 1000, silence.detector.silent_s
    if not limit_s or silent_s < limit_s + GRACE_S:
        return None
    return SilentPublisher(session.name, silent_s, limit_s)
