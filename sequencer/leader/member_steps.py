"""Decides the leader's next step of a change of the members that an operator requested.

Pure. Raft changes its list by one member in each step. Each majority before a step shares a node with each
majority after it (docs/raft.md). This module keeps the same property for bytes of sessions, which are not in
the Raft log.

Invariant: if bytes were acknowledged as replicated, or if a merge instruction names them, each majority of
voters with whole disks has a voter that holds or has merged them. Proof, for a list of n voters:

- If n is odd, a majority of the n voters holds them. If the previous list had n - 1 voters, (n - 1)/2 + 1
  disks with the bytes are still in the list. If it had n + 1 voters, at least (n + 1)/2 + 1 - 1 are. Both are
  a majority of n.
- If n is even, it is possible that only n/2 voters hold them, for the same reasons. Each majority still has
  one of these voters. A second change could break that. So an even list is not changed before a majority has
  everything that n/2 voters may hold (`_Spread`). A voter that has not reported may hold anything. A voter
  whose disk is not whole may have held anything. A voter that counts with an older list may have acknowledged
  more than it reported.
- Publishers count acknowledgements with a list of the nodes, maybe with an older one. Before anything is
  changed, a majority of the voters has reported that it counts with the current list. Each majority of the
  previous list has one of these voters, so from then on nothing is acknowledged with the previous list.
- A disk that replaced a lost disk is not whole until it has everything that others had:
  `sequencer.leader.session_close`. Nothing is changed before all disks are whole, except the disk of a voter
  that is removed. A new voter's disk lost nothing.

A learner is promoted once its merged log is nearly at the end, so that the rest takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple, TypeAlias

from sequencer.leader.replication_tracker import ReplicationTracker
from sequencer.raft.model.members import (
    AddLearner,
    MemberChange,
    Members,
    PromoteLearner,
    RemoveMember,
    voters_of,
)
from sequencer.state.operations.membership import SettleMembers
from sequencer.state.state import MemberRequest, SequencerState

NEAR_NS: Final = 5 * 10**9
"""A learner is near the end if it needs at most this time to merge up to the end as it was at the start of
that time.
"""


class CommittedMembers(NamedTuple):
    """The committed list of members, as the leader `own` knows it. `version` 0: they never changed."""

    own: str
    members: Members
    version: int = 0


class TransferLeadership(NamedTuple):
    """This leader is to be removed, so another node must lead. The new leader removes this node."""


MemberStep: TypeAlias = MemberChange | TransferLeadership | SettleMembers


class MemberSteps:
    """The steps of one leader with one list of members."""

    def __init__(
        self, state: SequencerState, committed: CommittedMembers, tracker: ReplicationTracker
    ) -> None:
        self._state, self._tracker = state, tracker
        self._own, self._members, self._version = committed
        self._known: dict[str, int] = {}
        """By voter: the version of the list with which its acknowledgements are counted."""
        self.voters = voters_of(committed.members)
        self._merged: dict[str, int] = {}
        """By node, learners too: the last instruction that it has merged durably."""
        self._target: tuple[int, int] | None = None
        """The instruction up to which the learner must merge next, and since when."""
        self._spread: _Spread | None = None
        self.waits_for = ""
        """What the change that is being carried out waits for; empty: nothing."""

    def on_merged(self, node: str, instruction: int) -> None:
        """A node reported the last instruction that it has merged durably."""
        self._merged[node] = instruction

    def on_reported(self, voter: str, instruction: int, members_version: int) -> None:
        """A voter reported what it has merged durably, and the list that its clients count with."""
        self.on_merged(voter, instruction)
        self._known[voter] = max(members_version, self._known.get(voter, 0))

    def next_step(self, joins: Mapping[str, int], now_ns: int, planned: int = 0) -> MemberStep | None:
        """Return the step to take now. It is returned again until it is applied. None if nothing is
        requested, or if the change waits: see `waits_for`.

        `joins`: by voter, the number of disks that had joined at its last report that the tracker has
        completely. `planned`: the last instruction in flight.
        """
        self.waits_for = ""
        request = self._state.member_request
        if request is None:
            return None
        step = self._step(request, joins, now_ns, max(planned, self._state.instruction))
        if isinstance(step, str):
            self.waits_for = step
            return None
        return step

    def _step(
        self, request: MemberRequest, joins: Mapping[str, int], now_ns: int, last: int
    ) -> MemberStep | str:
        added, removed = self._members.get(request.adds), self._members.get(request.removes)
        if request.adds and added is None:
            return AddLearner(request.adds, request.address)
        if added is not None and not added.votes:
            why = self._why_not_near(request.adds, now_ns, last) or self._why_not_safe(
                joins, last, going=request.removes
            )
            return why or PromoteLearner(request.adds)
        if added is not None and not self._is_whole(request.adds):
            return f"{request.adds} is a voter, and its data process starts"
        if removed is None:
            return SettleMembers(request.number)
        if removed.votes:
            if self.voters == {request.removes}:
                return SettleMembers(
                    request.number, f"{request.removes} is the only voter: add another node first"
                )
            why = self._why_not_safe(joins, last, going=request.removes)
            if why:
                return why
            if request.removes == self._own:
                return TransferLeadership()
        return RemoveMember(request.removes)

    def _why_not_near(self, learner: str, now_ns: int, last: int) -> str:
        """Why the learner is not promoted yet; empty if its merged log is nearly at the end."""
        merged = self._merged.get(learner)
        if merged is None:
            return f"{learner} is not connected: start it with its configuration"
        if self._target is None:
            self._target = last, now_ns
        target, since_ns = self._target
        if merged >= target:
            if now_ns - since_ns <= NEAR_NS:
                return ""
            self._target = last, now_ns  # It took so long that the log has grown a lot since.
        return f"{learner} copies the merged log: instruction {merged} of {last}"

    def _why_not_safe(self, joins: Mapping[str, int], last: int, *, going: str) -> str:
        """Why the list of voters cannot be changed yet; empty if it can. `going`: the node to be removed,
        which may be lost permanently.
        """
        late = sorted(name for name in self.voters if self._known.get(name, 0) < self._version)
        if 2 * len(late) >= len(self.voters):
            return f"{', '.join(late)} must learn the last change of the members"
        broken = sorted(name for name in self.voters if name != going and not self._is_whole(name))
        if broken:
            return f"{', '.join(broken)} must be up, and have what was lost with its disk"
        if len(self.voters) % 2:
            return ""
        heard = frozenset(
            name for name in self.voters if name not in late and joins.get(name, 0) >= self._state.joins
        )
        if self._spread is None or not self._spread.heard >= heard:
            self._spread = _Spread(self._state, self._tracker, self.voters, heard, last)
        missing = self._spread.missing(self._merged)
        return (
            f"{', '.join(missing)} must report, and get what other voters have of the sessions"
            if missing
            else ""
        )

    def _is_whole(self, name: str) -> bool:
        disk = self._state.disks.get(name)
        return disk is not None and disk.is_whole


class _Spread:
    """Everything that voters held at one time, and whether a majority of an even list of voters has it by
    now.
    """

    def __init__(
        self,
        state: SequencerState,
        tracker: ReplicationTracker,
        voters: frozenset[str],
        heard: frozenset[str],
        last: int,
    ) -> None:
        """`heard`: the voters of which the tracker has everything. `last`: the last instruction planned."""
        self.heard = heard
        self._state, self._tracker, self._voters, self._last = state, tracker, voters, last
        known = {name for name in heard if name in state.disks and state.disks[name].is_whole}
        self._unknown = voters - known
        self._holders = len(voters) // 2 - len(self._unknown)
        """If fewer known voters than this hold something, it was not acknowledged."""
        self._ends = dict(self._held_by(self._holders)) if self._holders > 0 else {}

    def _held_by(self, count: int) -> Iterable[tuple[tuple[int, int], tuple[int, int]]]:
        """For each run that is not merged completely, the furthest end that `count` nodes reported."""
        for session in self._state.sessions.values():
            for active in session.active_runs:
                tops = (self._tracker.top(node, session.id, active.run) for node in self.heard)
                ends = sorted((top for top in tops if top is not None), reverse=True)
                if len(ends) >= count:
                    yield (session.id, active.run), ends[count - 1]

    def missing(self, merged: Mapping[str, int]) -> list[str]:
        """The nodes that must get something, so that a majority has everything. Empty if a majority has
        everything.
        """
        if self._holders <= 0:
            return sorted(self._unknown)
        for (session_id, run), end in [*self._ends.items()]:
            left = self._left(session_id, run, end)
            if left is None:
                # From now on its holders may drop the run once they merged it.
                del self._ends[session_id, run]
                self._last = max(self._last, self._state.instruction)
            else:
                self._ends[session_id, run] = left
        having = [node for node in self.heard if merged.get(node, 0) >= self._last and self._has_all(node)]
        if len(having) > len(self._voters) // 2:
            return []
        return sorted(self._voters.difference(having))

    def _left(self, session_id: int, run: int, end: tuple[int, int]) -> tuple[int, int] | None:
        """The end up to which a run must still be merged; at most `end`. None if the run is merged that
        far.
        """
        session = self._state.sessions.get(session_id)
        active = session.run_of(run) if session is not None else None
        if session is None or active is None:
            return None
        if active.end is not None:
            end = min(end, active.end[:2])
        consumed = session.consumed if session.active is active else None
        return None if consumed is not None and consumed.end[:2] >= end else end

    def _has_all(self, node: str) -> bool:
        for (session_id, run), end in self._ends.items():
            top = self._tracker.top(node, session_id, run)
            if top is None or top < end:
                return False
        return True
