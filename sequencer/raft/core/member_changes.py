"""Changes of the members, on the leader: when a change may start, and how it ends. (Dissertation, section
4.1.)

For the loop's thread. Invariants:
- One change at a time: the leader appends no list before the list in force is applied.
- A leader appends no list before an entry of its own term is committed. Otherwise two leaders with different
  lists could commit different entries.
- A leader appends a list only after a majority of the new list has synced an entry that the leader appended
  after the request. So the leader does not rely on a disk that was lost before the request.
- A leader never removes itself.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, InvalidStateError
from typing import Final

from msgspec import Struct

from rt.errors import RtError
from sequencer.raft.core.leader import LeaderState
from sequencer.raft.core.pysyncobj_adapter import Journal, now
from sequencer.raft.core.voter_disks import PeerDisks, VoterDisks
from sequencer.raft.model.config import RaftConfig
from sequencer.raft.model.entry_codec import NO_OP, encode_members
from sequencer.raft.model.members import (
    MemberChange,
    MemberChangeNotReady,
    MemberChangeRefused,
    Members,
    PromoteLearner,
    RemoveMember,
    changed,
    is_majority,
    voters_of,
)
from sequencer.raft.model.messages import NOWHERE, LogIndex
from sequencer.raft.storage.log import DurableLog

PROMOTE_ENTRIES_MAX: Final = 1000
"""Maximum number of entries that a learner may still miss when it is promoted. It receives them within an
election timeout.
"""

logger = logging.getLogger("sequencer.raft")


class _Waiting(Struct):
    change: MemberChange
    done: Future[None]
    term: int
    confirmed_by: int
    """Index of the entry that a majority of the new list must have."""
    until: float
    appended: LogIndex = NOWHERE
    """Position of the list's entry, once it is appended."""
    members: Members | None = None


class MemberChanges:
    """The member change that is in progress on this node while it leads."""

    def __init__(
        self,
        raft: LeaderState,
        disks: VoterDisks,
        peers: PeerDisks,
        log: DurableLog,
        journal: Journal,
        config: RaftConfig,
    ) -> None:
        self._raft, self._disks, self._peers = raft, disks, peers
        self._log, self._journal = log, journal
        self._name, self._patience_s = config.name, config.election_ms_max / 1000
        self._waiting: _Waiting | None = None

    @property
    def is_waiting(self) -> bool:
        return self._waiting is not None

    @property
    def due(self) -> float:
        waiting = self._waiting
        return float("inf") if waiting is None or waiting.appended != NOWHERE else waiting.until

    def start(self, change: MemberChange, done: Future[None], *, is_held: bool) -> None:
        """Start a change. `is_held`: the leader appends nothing now."""
        if not done.set_running_or_notify_cancel():
            return
        raft = self._raft
        try:
            if not raft.leads:
                raise _not_ready("this node does not lead", f"leader {raft.leader}", "Ask the leader.")
            if is_held:
                raise _not_ready("the leader appends nothing now", None, "Try again soon.")
            self._check_one_at_a_time()
            self._check_own_term()
            self._check(change, 0)
        except RtError as error:
            complete(done, error)
            return
        index = self._append(NO_OP).index
        self._waiting = _Waiting(change, done, raft.term, index, now() + self._patience_s)
        self.advance()

    def advance(self) -> None:
        """Continue the waiting change. Called in each round of a leader that has a waiting change."""
        waiting = self._waiting
        if waiting is None or waiting.appended != NOWHERE or self._is_lost(waiting):
            return
        try:
            members = self._check(waiting.change, waiting.confirmed_by)
        except MemberChangeNotReady as error:
            if self._raft.round_began >= waiting.until:
                self._end(error)
            return
        except RtError as error:
            self._end(error)
            return
        waiting.members, waiting.appended = members, self._append(encode_members(members))
        logger.warning("members_changing change=%r index=%d", waiting.change, waiting.appended.index)

    def on_applied(self, place: LogIndex) -> None:
        """A list of members was applied."""
        waiting = self._waiting
        if waiting is not None and waiting.appended != NOWHERE and place.index >= waiting.appended.index:
            self._end(None if place == waiting.appended else _rolled_back())

    def on_restored(self) -> None:
        """A snapshot was restored. Its index may be above the index of the list."""
        waiting = self._waiting
        if waiting is not None and waiting.appended != NOWHERE:
            self._end(None if self._disks.applied_members == waiting.members else _rolled_back())

    def on_lost(self) -> None:
        """Called when this node may have ceased to lead. An appended list may still be committed, unless it
        was truncated.
        """
        waiting = self._waiting
        if waiting is not None:
            self._is_lost(waiting)

    def close(self, error: BaseException) -> None:
        self._end(error)

    def _is_lost(self, waiting: _Waiting) -> bool:
        """Whether the change has ended because this node ceased to lead, or its list was truncated."""
        if waiting.appended != NOWHERE:
            known = self._log.term_at(waiting.appended.index)
            is_lost = known != waiting.appended.term and self._log.base.index < waiting.appended.index
        else:
            is_lost = not self._raft.leads or self._raft.term != waiting.term
        if is_lost:
            self._end(_rolled_back())
        return is_lost

    def _append(self, content: bytes) -> LogIndex:
        place = LogIndex(self._log.last.index + 1, self._raft.term)
        self._journal.add(content, *place)
        return place

    def _end(self, error: BaseException | None) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            complete(waiting.done, error)

    # The rules

    def _check_one_at_a_time(self) -> None:
        if self._waiting is not None or self._disks.is_change_pending:
            hint = "Try again when it is done."
            raise _not_ready("another change of the members is in flight", self._disks.members_index, hint)

    def _check_own_term(self) -> None:
        raft = self._raft
        if self._log.term_at(raft.committed) != raft.term:
            hint = "Try again soon."
            raise _not_ready("the leader has not committed an entry of its own term yet", raft.term, hint)

    def _check(self, change: MemberChange, index: int) -> Members:
        """The new list, if a majority of it is connected and has the entry `index`."""
        members = changed(self._disks.members, change)
        unknown = [name for name, member in members.items() if not member.address]
        if unknown:
            raise MemberChangeRefused(
                "the address of a member is not known",
                where=", ".join(sorted(unknown)),
                hint="Configure the addresses of all members on the leader.",
            )
        if isinstance(change, RemoveMember) and change.name == self._name:
            hint = "Transfer the leadership first, then ask the new leader."
            raise _not_ready("a leader does not remove itself", change.name, hint)
        if isinstance(change, PromoteLearner):
            self._check_learner(change.name)
        self._check_quorum(members, index)
        return members

    def _check_learner(self, name: str) -> None:
        matched, last = self._raft.matched(name), self._log.last.index
        is_counted = name in self._peers.connected and self._peers.is_counted(name)
        if not is_counted or matched + PROMOTE_ENTRIES_MAX < last:
            raise MemberChangeNotReady(
                "the learner does not match the leader's log closely",
                where=name,
                got=f"index {matched}" if is_counted else "not connected, or its disk has not joined",
                expected=f"connected, and index {max(last - PROMOTE_ENTRIES_MAX, 1)} or later",
                hint="Wait until it has caught up.",
            )

    def _check_quorum(self, members: Members, index: int) -> None:
        voters = voters_of(members)
        ready = sorted(name for name in voters if self._has(name, index))
        if not is_majority(len(ready), len(voters)):
            raise MemberChangeNotReady(
                "too few voters of the new list are connected, with a disk that counts",
                got=", ".join(ready),
                expected=f"{len(voters) // 2 + 1} of {', '.join(sorted(voters))}",
                hint="Start the missing nodes and wait until they have joined.",
            )

    def _has(self, name: str, index: int) -> bool:
        if name == self._name:
            return True
        is_counted = name in self._peers.connected and bool(self._peers.is_counted(name))
        return is_counted and self._raft.matched(name) >= index


def _not_ready(what: str, got: object, hint: str) -> MemberChangeNotReady:
    return MemberChangeNotReady(what, got=got, hint=hint)


def _rolled_back() -> MemberChangeNotReady:
    what = "this node ceased to lead before the change of the members was committed"
    return _not_ready(what, None, "Look at the members: the change may be in force. If not, try again.")


def complete(done: Future[None], error: BaseException | None = None) -> None:
    try:
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)
    except InvalidStateError:
        pass
    except BaseException:  # A callback's SystemExit must not end the loop.
        logger.exception("callback_failed")
