"""What the leader proposes so that of the merged log as much is kept as the policy says.

Law: nothing is trimmed while only a minority of nodes is heard of; and after a trim for want of space disks
are looked at again only once nodes have had the time to trim, and to say so. The consensus thread uses it.
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

LOOK_NS: Final = 10**9
DISK_AGAIN_NS: Final = 10 * 10**9
"""So long what was trimmed may still count as used in reports of disks: several times what they take."""


class NodeUsage(NamedTuple):
    """What a node said just now: its clock, moved on to now, and its disk."""

    clock_ns: int
    disk: DiskUse


class RetentionPlanner:
    """What one leader knows of trims. `wanted` is what its node is told of the replicated configuration."""

    def __init__(self, state: SequencerState, members: int, wanted: Mapping[str, int], now_ns: int) -> None:
        self._state, self._members, self._wanted = state, members, wanted
        self._look_ns = 0
        self._disk_ns = now_ns + DISK_AGAIN_NS  # The leader before may have trimmed just now.
        self._freed: deque[tuple[int, int]] = deque()
        """When so many bytes were trimmed, as long as reports may not show it."""

    def on_applied(self, outcome: Outcome, now_ns: int) -> None:
        """A command was applied."""
        if isinstance(outcome, SegmentsTrimmed):
            self._freed.append((now_ns, outcome.size_bytes))
            if outcome.reason is TrimReason.DISK:
                self._disk_ns = now_ns + DISK_AGAIN_NS

    def configure(self) -> Configure | None:
        """What is to be changed for the configuration to be what this node is told; None: nothing."""
        now = self._state.configuration
        changes = {name: value for name, value in self._wanted.items() if getattr(now, name) != value}
        return Configure(**changes) if changes else None

    def plan(self, heard: Collection[NodeUsage], now_ns: int) -> TrimSegments | None:
        """What is to be trimmed, by what was heard of nodes; None: nothing now."""
        if now_ns < self._look_ns:
            return None
        self._look_ns = now_ns + LOOK_NS
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
