"""Plans trims of the merged log, and changes of the replicated configuration, for one leader.

Invariants:
- Nothing is trimmed while only a minority of the nodes reports.
- After a trim to free disk space, disk use is ignored until the nodes had time to trim and report it.

The consensus thread calls it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from itertools import dropwhile
from typing import Final, NamedTuple

from archiver.policy import DiskUse, reached_ns
from archiver.retention import plan_trim
from rt.log.format.segment_table import TrimReason
from sequencer.state.apply_result import Outcome, SegmentsTrimmed
from sequencer.state.commands import Configure, TrimSegments
from sequencer.state.retention import held_positions, policy_of
from sequencer.state.state import SequencerState

POLL_NS: Final = 10**9
DISK_AGAIN_NS: Final = 10 * 10**9
"""How long reports of disks may still count trimmed bytes as used: several times the usual delay."""


class NodeUsage(NamedTuple):
    """The latest report of a node: its clock, advanced to now, and its disk."""

    clock_ns: int
    disk: DiskUse


class RetentionPlanner:
    """Plans the trims of one leader. `configured`: the replicated settings in the configuration of the
    leader's node.
    """

    def __init__(
        self, state: SequencerState, members: int, configured: Mapping[str, int], now_ns: int
    ) -> None:
        self._state, self._members, self._configured = state, members, configured
        self._poll_ns = 0
        self._disk_ns = now_ns + DISK_AGAIN_NS  # The previous leader may have trimmed just now.
        self._freed: deque[tuple[int, int]] = deque()
        """Time and bytes of each trim that reports may not show yet."""

    def on_applied(self, outcome: Outcome, now_ns: int) -> None:
        if isinstance(outcome, SegmentsTrimmed):
            self._freed.append((now_ns, outcome.size_bytes))
            if outcome.reason is TrimReason.DISK:
                self._disk_ns = now_ns + DISK_AGAIN_NS

    def configure(self) -> Configure | None:
        """The change that makes the replicated configuration equal to this node's; None if they are equal."""
        now = self._state.configuration
        changes = {name: value for name, value in self._configured.items() if getattr(now, name) != value}
        return Configure(**changes) if changes else None

    def plan(self, heard: Collection[NodeUsage], now_ns: int) -> TrimSegments | None:
        """The trim to propose, given the reports of the nodes; None if there is none now."""
        if now_ns < self._poll_ns:
            return None
        self._poll_ns = now_ns + POLL_NS
        state = self._state
        clocks = [one.clock_ns for one in heard]
        clock_ns = reached_ns(clocks, self._members)
        if clock_ns is None or not state.segments:
            return None
        while self._freed and self._freed[0][0] <= now_ns - DISK_AGAIN_NS:
            self._freed.popleft()
        plan = plan_trim(
            [*dropwhile(lambda one: one.is_trimmed, state.segments)],
            state.merged.offset,
            policy_of(state.configuration),
            clocks,
            [one.disk for one in heard if one.disk.size_bytes] if now_ns >= self._disk_ns else [],
            held_positions(state),
            members=self._members,
            freed_bytes=sum(size_bytes for _, size_bytes in self._freed),
        )
        return None if plan is None else TrimSegments(plan.up_to, plan.reason, max(clock_ns, 1))
