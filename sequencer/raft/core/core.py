"""PySyncObj's Raft. Each step that acknowledges before that is safe is replaced.

PySyncObj provides the order of one loop (commit, apply, take commands, call back, wait), the start of an
election, the leader's commit rule, its step-down without a majority, and the forwarding of commands to the
leader. Everything that handles a message of another node is here.

The class has the name of its base class on purpose: Python mangles `self.__x` by class name, so this code can
read and replace PySyncObj's private members. That ties it to one version; a test compares the source of every
member that it uses.

Invariants:
1. Persist, then send: handlers only queue. `_persist_then_send`, the last step before the loop waits, is
   the only place that sends, after the sync of all data that the messages depend on. `__applyLogEntries`
   syncs before it applies.
2. Commit only entries that were compared with the leader's log: `follower`.
3. Snapshots are durable before they count: `storage.snapshots`, `storage.open_directory`, `on_installed`.
4. Apply once: an entry counts as applied before anyone is notified; an exception stops the node.
5. A node that hears a leader does not start or support elections: `__connectedToAnyone`, `election`.
   Exception: the member that the leader itself calls to take over (`leadership_transfer`).
6. A wiped disk does not vote: `voter_disks`.
7. Corruption is not treated as a torn tail: `storage.log_recovery`.
8. Frames are authenticated and checked: `transport`.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Final, NoReturn

import pysyncobj.syncobj
from pysyncobj.syncobj import _RAFT_STATE as RaftState

from sequencer.raft.core.election import Election
from sequencer.raft.core.follower import FollowerRole
from sequencer.raft.core.leader import LeaderRole
from sequencer.raft.core.member_changes import MemberChanges
from sequencer.raft.core.ports import Handlers, Network, NodeCallbacks
from sequencer.raft.core.pysyncobj_adapter import (
    CommandQueue,
    Journal,
    KnownPeers,
    Peer,
    TransportAdapter,
    now,
    pysyncobj_settings,
)
from sequencer.raft.core.voter_disks import LocalVoter, PeerDisks, VoterDisks
from sequencer.raft.model.config import RaftConfig
from sequencer.raft.model.messages import NOWHERE, DiskClaim, LogIndex, Message
from sequencer.raft.storage.disk_full import DiskSpace
from sequencer.raft.storage.log import DurableLog

APPLY_SECONDS_MAX: Final = 0.02
"""Maximum time for applying entries in one round, so that heartbeats continue during a long backlog."""
TERMS_AHEAD_MAX: Final = 1 << 32
"""A term further ahead than this is invalid: accepting it could exhaust the range of terms."""

logger = logging.getLogger("sequencer.raft")


class SyncObj(pysyncobj.syncobj.SyncObj):  # type: ignore[misc]  # PySyncObj is untyped
    """One node's Raft. One thread uses it."""

    # PySyncObj's own state, besides what `__init__` replaces.
    __raftState: int
    __raftLeader: Peer | None
    __leaderCommitIndex: int
    __raftMatchIndex: dict[Peer, int]
    __lastResponseTime: dict[Peer, float]
    __newAppendEntriesTime: float

    def __init__(
        self,
        config: RaftConfig,
        host: NodeCallbacks,
        own: LocalVoter,
        log: DurableLog,
        network: Network,
        space: DiskSpace,
        rng: random.Random,
    ) -> None:
        self._host, self._own, self._log, self._network = host, own, log, network
        self._space, self._rng, self._name = space, rng, config.name
        self._heartbeat_s = config.heartbeat_ms / 1000
        self._timeouts_s = config.election_ms_min / 1000, config.election_ms_max / 1000
        entries = log.entries(log.base.index + 1)
        self.voter_disks = self._voter_disks = disks = VoterDisks(config.name, config.members, own, entries)
        self._nodes = KnownPeers()
        self.on_members: Callable[[], None] = lambda: None
        """Called when the list of members in force changed or may have changed."""
        self.peer_disks = PeerDisks(disks)
        journal, outbox = Journal(log, disks), TransportAdapter(network, disks)
        self.follower_role = FollowerRole(self, own, log, journal, config, host.on_install_snapshot)
        self.leader_role = leader = LeaderRole(self, own, self.peer_disks, log, journal, network, host)
        self.member_changes = MemberChanges(self, disks, self.peer_disks, log, journal, config)
        self._election = Election(self, own, disks, log, outbox, self.follower_role.hears_leader)
        self._may_commit = self._led = self._is_silent = False
        self.round_began = now()
        """Start of the current round. This time decides what is due in the round."""
        self._handlers: Handlers = self._election.handlers | self.follower_role.handlers | leader.handlers
        super().__init__(Peer(config.name), [], pysyncobj_settings(config), transport=outbox)
        # Replace PySyncObj's initial state with the durable state.
        self.__raftLog = journal
        self.__commandsQueue = CommandQueue()
        self.__raftCurrentTerm, self.__votedForNodeId = log.term, log.voted_for
        self.__raftCommitIndex = self.__raftLastApplied = own.state.applied.index
        disks.on_members = self._on_members
        self._on_members()
        self.__raftElectionDeadline = now() + (self.__generateRaftTimeout() if self.__otherNodes else 0.0)
        self._poller = SimpleNamespace(poll=self._wait)  # PySyncObj waits here.
        self.addOnTickCallback(self._persist_then_send)

    # Called by the node

    @property
    def leader(self) -> str | None:
        node = self.__raftLeader
        return None if node is None else node.name

    @property
    def leads(self) -> bool:
        return bool(self.__raftState == RaftState.LEADER)

    @property
    def role(self) -> str:
        return ("follower", "candidate", "leader")[self.__raftState]

    @property
    def term(self) -> int:
        return self.__raftCurrentTerm

    @property
    def committed(self) -> int:
        """Index of the last entry known to be committed."""
        return int(self.__raftCommitIndex)

    @property
    def is_counted_here(self) -> bool:
        return self._voter_disks.counts_here()

    def submit(self, content: bytes) -> None:
        """Append an entry, or forward it to the leader. It may be lost on the way."""
        self._applyCommand(content, None)

    def clear_leader(self) -> None:
        """On a blank node: stop following, so that it may follow a leader of another epoch."""
        self.__raftLeader = None
        self.follower_role.begin_term(NOWHERE, "")

    def fall_silent(self) -> None:
        self._is_silent = True

    def apply_all(self) -> None:
        """Treat the whole log as committed, and apply it. Only for a forced epoch."""
        self._sync()
        self.__raftCommitIndex = self._log.last.index
        while self.__raftCommitIndex > self.__raftLastApplied and not self._host.is_over():
            self.round_began = now()
            self.__applyLogEntries()

    def send(self, peer: str, message: Message) -> None:
        self._network.send(peer, message)

    def step(self) -> None:
        """One round of the loop: commit, apply, accept commands, queue messages, sync, send, wait.

        PySyncObj's own round runs only if it must decide something: an election, a commit, a heartbeat, or
        whether a majority still hears this leader. It is the same round, with that decision first.
        """
        self.round_began = now()
        if self._is_to_decide():
            self._may_commit = False
            self._onTick(0.0)
        else:
            self.__applyLogEntries()
            self._checkCommandsToApply()
            self.__tryLogCompaction()
            self._persist_then_send()
            self._wait()

    def _is_to_decide(self) -> bool:
        if not self.leads:
            return self.__raftElectionDeadline < self.round_began
        is_due = self.__newAppendEntriesTime < self.round_began
        return self._may_commit or not self.__otherNodes or is_due

    def wait_s(self) -> float:
        if self.__raftCommitIndex > self.__raftLastApplied and not self._host.is_over():
            return 0.0
        leads = self.leads
        if leads and not self.__otherNodes and self._log.synced.index > self.__raftCommitIndex:
            return 0.0  # Our own sync committed it: no answer will end the wait.
        due = self.__newAppendEntriesTime if leads else self.__raftElectionDeadline
        due = min(due, self.leader_role.transfer_due, self.member_changes.due)
        return max(0.0, min(due, self._host.due()) - now())

    def _wait(self, _timeout_s: float = 0.0) -> None:
        self._network.poll(self.wait_s())

    def on_up(self, peer: str, claim: DiskClaim) -> None:
        self.__onNodeConnected(self._nodes[peer])
        self.leader_role.on_up(peer, claim)

    def on_down(self, peer: str) -> None:
        """If the leader's connection ended, its process has probably ended: start an election soon."""
        self.__onNodeDisconnected(self._nodes[peer])
        self.leader_role.on_down(peer)
        if self.leader == peer:
            self.follower_role.heard_leader_at = float("-inf")
            soon = now() + self._rng.uniform(0.0, self._timeouts_s[0] / 3)
            self.__raftElectionDeadline = min(self.__raftElectionDeadline, soon)

    def on_message(self, peer: str, message: Message) -> None:
        term = getattr(message, "term", 0)
        if term > self.__raftCurrentTerm + TERMS_AHEAD_MAX:
            logger.error("term_rejected peer=%s term=%d", peer, term)
            return
        if (claim := getattr(message, "claim", None)) is not None:
            self.peer_disks.claims[peer] = claim
        self._handlers[type(message)](peer, message)

    def on_installed(self, place: LogIndex) -> None:
        """Handle a snapshot of `place`, above the commit index, that is durable and restored."""
        if self._log.term_at(place.index) != place.term:
            if place.term > self._log.term:
                self.__setCurrentTerm(place.term, None)
            self.__raftLog.reset(place)
        self.__raftCommitIndex = self.__raftLastApplied = place.index
        self.follower_role.on_installed(place)
        self._voter_disks.on_applied(place.index)
        self._voter_disks.refresh()

    # The loop's steps that are replaced

    def __generateRaftTimeout(self) -> float:
        return self._rng.uniform(*self._timeouts_s)

    def __connectedToAnyone(self) -> bool:
        """Whether an election may start. PySyncObj calls this at the election timeout.

        An election may start only on a disk that counts, and after a majority granted the pre-vote.
        """
        self._election.is_called = False
        if self._voter_disks.votes_here():
            if self._election.ballot.start():
                return True
            self.__raftLeader = None
            self._election.start_pre_vote()
        self.__raftElectionDeadline = now() + self.__generateRaftTimeout()
        return False

    def __onBecomeLeader(self) -> None:
        self.leader_role.begin_term(self._nodes)
        self.__raftMatchIndex.clear()
        # The vote for itself counts, and with one node the no-op is committed at once: both must be synced.
        self._sync()
        super().__onBecomeLeader()
        self._expect_answers()
        self._sync()
        self._may_commit = True
        self.follower_role.begin_term(LogIndex(self.__raftCommitIndex, self.__raftCurrentTerm), self._name)
        logger.info("became_leader term=%d log_end=%d", self.__raftCurrentTerm, self._log.last.index + 1)

    def __applyLogEntries(self) -> bool:
        committed, applied = self.__raftCommitIndex, self.__raftLastApplied
        if committed > applied and not self._host.is_over():
            if self._log.synced.index < committed:
                self._sync()
            begun = self.round_began
            for entry in self._log.entries(applied + 1, committed + 1):
                self.__raftLastApplied = entry.index
                self._host.on_commit(entry)
                self.follower_role.divergence.on_applied(self._own.state, begun)
                if self._host.is_over() or (entry.index < committed and now() > begun + APPLY_SECONDS_MAX):
                    break
            self._voter_disks.on_applied(self.__raftLastApplied)
        return False

    def _checkCommandsToApply(self) -> None:
        leads = self.leads
        if self._led and not leads:
            # Proposers send their commands again, to the next leader.
            self.__commandsQueue.clear()
            self.leader_role.on_deposed()
            self.member_changes.on_lost()
            self.follower_role.led_at = now()
        self._led = leads
        self._host.submit()
        if self._host.is_over():
            self.__commandsQueue.clear()
        elif self.member_changes.is_waiting and not self.leader_role.is_transferring:
            self.member_changes.advance()
        if self.leader_role.is_transferring:
            self.leader_role.continue_transfer()
        elif self.__commandsQueue:
            super()._checkCommandsToApply()

    def __sendAppendEntries(self) -> None:
        """Called by PySyncObj when a heartbeat is due, and when this node becomes leader."""
        self.__newAppendEntriesTime = now() + self._heartbeat_s
        self.leader_role.send_heartbeats()

    def __tryLogCompaction(self) -> None:
        if not self.leads:
            self.leader_role.stop_sending()
        self._host.housekeeping()

    def __loadDumpFile(self, clearJournal: bool) -> NoReturn:
        raise AssertionError("snapshots are not PySyncObj's")

    def _persist_then_send(self) -> None:
        """Sync everything that the queued messages depend on, then send them.

        A leader's messages depend on its term, which was synced when it became leader, and on committed
        entries. They do not depend on its new entries: followers sync those at the same time, and a leader
        counts only what it has synced itself. (Ongaro's dissertation, section 10.2.1.)
        """
        if self._is_silent:
            return
        leads = self.leads
        if leads:
            self.leader_role.replicate()
            self._network.flush()
        self._sync()
        if not leads:
            self._network.flush()
        self._log.record_synced_end()

    def _on_members(self) -> None:
        """The list in force changed, or may have. PySyncObj counts the nodes in `__otherNodes`."""
        self.__otherNodes = {self._nodes[name] for name in sorted(self._voter_disks.other_voters)}
        self._election.ballot.members = len(self._voter_disks.voters | {self._name})
        if self.leads:
            self._expect_answers()
            self._may_commit = True
        self.member_changes.on_lost()
        self.on_members()

    def _expect_answers(self) -> None:
        for node in self._nodes.values():
            self.__raftMatchIndex.setdefault(node, 0)
            self.__lastResponseTime.setdefault(node, now())

    def _sync(self) -> None:
        if self._log.is_dirty:
            self._space.once(self._log.sync)

    # Called by the election and the roles, which document it (`Elector`, `FollowerState`, `LeaderState`)

    @property
    def voted_for(self) -> str | None:
        return self.__votedForNodeId

    def grant_vote(self, peer: str, term: int) -> None:
        self.__setCurrentTerm(term, peer)
        self.__raftElectionDeadline = now() + self.__generateRaftTimeout()

    def start_election_soon(self) -> None:
        self.__raftElectionDeadline = 0.0

    def win(self) -> None:
        self.__onBecomeLeader()

    def adopt_term(self, term: int) -> None:
        if self.leads:
            logger.info("stepped_down term=%d", term)
        self.__setCurrentTerm(term, None)
        self.__setState(RaftState.FOLLOWER)
        self.__raftLeader = None
        self._election.withdraw()

    def follow(self, peer: str) -> None:
        if self.__raftState != RaftState.FOLLOWER:
            self.__setState(RaftState.FOLLOWER)
        if self.leader != peer:
            logger.info("became_follower leader=%s term=%d", peer, self.__raftCurrentTerm)
            self.__raftLeader = self._nodes[peer]
        if not self._election.is_called:
            self._election.ballot.withdraw()
            self.__raftElectionDeadline = now() + self.__generateRaftTimeout()

    def set_committed(self, index: int, *, leader_committed: int) -> None:
        self.__raftCommitIndex = index
        self.__leaderCommitIndex = leader_committed

    def matched(self, peer: str) -> int:
        return self.__raftMatchIndex.get(self._nodes[peer], 0)

    def on_acknowledged(self, peer: str, index: int) -> None:
        node = self._nodes[peer]
        if index > self.__raftMatchIndex.get(node, 0):
            self.__raftMatchIndex[node] = index
            self._may_commit |= index > self.__raftCommitIndex
        self.__lastResponseTime[node] = now()

    def forget_acknowledged(self, peer: str) -> None:
        self.__raftMatchIndex[self._nodes[peer]] = 0
