"""PySyncObj's Raft, with every step replaced that acknowledges before it is safe.

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
2. Commit only what was compared with the leader's log: `_on_append`, `follower`.
3. Snapshots are durable before they count: `storage.snapshots`, `storage.open_directory`, `on_installed`.
4. Apply once: an entry counts as applied before anyone is notified; an exception stops the node.
5. A node that hears a leader does not start or support elections: `__connectedToAnyone`, `hears_leader`,
   `election`. Exception: the member that the leader itself calls to take over (`leadership_transfer`).
6. A wiped disk does not vote: `voter_disks`.
7. Corruption is not a torn tail: `storage.log_recovery`.
8. Frames are authenticated and checked: `transport`.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable
from typing import Any, Final, NoReturn

import pysyncobj.syncobj
from pysyncobj.config import SyncObjConf
from pysyncobj.syncobj import _RAFT_STATE as RaftState

from rt.errors import DiskFull, Diverged
from sequencer.raft.core.divergence_guard import DivergenceGuard
from sequencer.raft.core.election import Election
from sequencer.raft.core.follower import AppendRejected, compare
from sequencer.raft.core.leadership_transfer import LeadershipTransfer
from sequencer.raft.core.ports import Network, NodeCallbacks
from sequencer.raft.core.pysyncobj_adapter import CommandQueue, Journal, Peer, TransportAdapter, now
from sequencer.raft.core.replication import Replication
from sequencer.raft.core.voter_disks import LocalVoter, VoterDisks
from sequencer.raft.model.config import RaftConfig
from sequencer.raft.model.entry_codec import JoinEntry, encode_join
from sequencer.raft.model.messages import (
    NOWHERE,
    Admit,
    AppendEntries,
    AppendEntriesReply,
    DiskClaim,
    Forward,
    InstallSnapshot,
    InstallSnapshotReply,
    LogIndex,
    Message,
    RequestVote,
    RequestVoteReply,
    TimeoutNow,
)
from sequencer.raft.storage.disk_full import DiskSpace
from sequencer.raft.storage.log import DurableLog

APPLY_SECONDS_MAX: Final = 0.02
"""Entries applied per round, so that heartbeats continue during a long backlog."""
TERMS_AHEAD_MAX: Final = 1 << 32
"""A term further ahead than this is invalid: accepting it could exhaust the range of terms."""
PATIENCE_ELECTIONS: Final = 10
"""A node stops if its state differs from every leader's for this many election timeouts."""

logger = logging.getLogger("sequencer.raft")


class SyncObj(pysyncobj.syncobj.SyncObj):  # type: ignore[misc]  # PySyncObj is untyped
    """One node's Raft. One thread uses it."""

    # PySyncObj's own state.
    __selfNode: Peer
    __raftState: int
    __raftCurrentTerm: int
    __votedForNodeId: str | None
    __votesCount: int
    __raftLeader: Peer | None
    __raftElectionDeadline: float
    __raftLog: Journal
    __raftCommitIndex: int
    __raftLastApplied: int
    __leaderCommitIndex: int
    __raftMatchIndex: dict[Peer, int]
    __lastResponseTime: dict[Peer, float]
    __newAppendEntriesTime: float
    __commandsQueue: CommandQueue

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
        self._space, self._rng = space, rng
        self._name = config.name
        self._heartbeat_s = config.heartbeat_ms / 1000
        self._timeouts_s = config.election_ms_min / 1000, config.election_ms_max / 1000
        self._nodes = {name: Peer(name) for name in config.peers}
        self._voter_disks = VoterDisks(config.name, own, log.entries(log.base.index + 1))
        self._replication = Replication(log, network, host.open_snapshot)
        outbox = TransportAdapter(network, self._voter_disks)
        self._election = Election(self, own, self._voter_disks, log, outbox, list(self._nodes))
        self._divergence = DivergenceGuard(PATIENCE_ELECTIONS * self._timeouts_s[1])
        self._claims: dict[str, DiskClaim] = {}
        self._untrusted: set[bytes] = set()
        """Disks that lost entries which they had acknowledged to this leader."""
        self._up: dict[str, None] = {}
        """Connected peers, of this cluster or blank."""
        self._heard_leader_at = float("-inf")
        self.leader_gap_s = 0.0
        """The longest time between two messages of the current leader, in this term."""
        self._led_at = now()
        """When this node last heard a leader, or started."""
        self._leader_committed = 0
        self._verified = NOWHERE
        """The term of the leader with which the log was compared, and the index up to which they agree."""
        self._verified_by = ""
        """That leader; this node itself while it leads."""
        self._pumped = (0, 0)
        self._lacking: set[str] = set()
        """Peers that answered, so more may be sent to them."""
        self._may_commit = False
        self._led = False
        self._transfer: LeadershipTransfer | None = None
        self._is_silent = False
        self.round_began = now()
        """Start of the current round: the time for everything that is due in it."""
        self._handlers: dict[type, Callable[[str, Any], None]] = {
            RequestVote: self._election.on_request,
            TimeoutNow: self._election.on_timeout_now,
            RequestVoteReply: self._election.on_reply,
            AppendEntries: self._on_append,
            AppendEntriesReply: self._on_append_reply,
            InstallSnapshot: self._on_install_snapshot,
            InstallSnapshotReply: self._on_install_snapshot_reply,
            Forward: self._on_forward,
            Admit: host.on_admit,
        }
        conf = SyncObjConf(
            autoTick=False,
            raftMinTimeout=self._timeouts_s[0],
            raftMaxTimeout=self._timeouts_s[1],
            leaderFallbackTimeout=self._timeouts_s[1],
            connectionTimeout=self._timeouts_s[1],
            appendEntriesPeriod=self._heartbeat_s,
        )
        super().__init__(Peer(config.name), list(self._nodes.values()), conf, transport=outbox)
        # Replace PySyncObj's initial state with the durable state.
        self.__raftLog = Journal(log, self._voter_disks)
        self.__commandsQueue = CommandQueue()
        self.__raftCurrentTerm, self.__votedForNodeId = log.term, log.voted_for
        self.__raftCommitIndex = self.__raftLastApplied = own.state.applied.index
        self.__raftElectionDeadline = now() + (self.__generateRaftTimeout() if self._nodes else 0.0)
        self._poller = _Poller(self)
        self.addOnTickCallback(self._persist_then_send)

    # Called by the node

    @property
    def leader(self) -> str | None:
        """The leader of the current term, if known."""
        node = self.__raftLeader
        return None if node is None else node.name

    @property
    def leaderless_s(self) -> float:
        """For how long no leader was heard."""
        return 0.0 if self.leads else now() - self._led_at

    @property
    def leads(self) -> bool:
        """Whether this node believes that it leads."""
        return bool(self.__raftState == RaftState.LEADER)

    @property
    def role(self) -> str:
        """Overrides PySyncObj."""
        return ("follower", "candidate", "leader")[self.__raftState]

    @property
    def term(self) -> int:
        return self.__raftCurrentTerm

    @property
    def committed(self) -> int:
        """Index of the last entry known to be committed."""
        return int(self.__raftCommitIndex)

    @property
    def leader_committed(self) -> int:
        """The commit index that a leader last sent."""
        return max(self.committed, self._leader_committed)

    @property
    def is_counted_here(self) -> bool:
        """Whether this node's own disk counts. If not, it may neither vote nor lead."""
        return self._voter_disks.counts_here()

    def is_counted(self, peer: str) -> bool | None:
        """Whether the peer's disk counts. None if the peer was never connected."""
        claim = self._claims.get(peer)
        if claim is None:
            return None
        return self._voter_disks.counts(peer, claim) and claim.disk not in self._untrusted

    def match_index(self, peer: str) -> int | None:
        """Up to which index a peer's log agrees. None unless this node leads."""
        return self._replication.match_index(peer) if self.__raftState == RaftState.LEADER else None

    def keep_from(self) -> int | None:
        """As leader, the first index that a connected follower will need."""
        leads = self.__raftState == RaftState.LEADER
        return self._replication.keep_from(self._up) if leads else None

    def disks_to_admit(self) -> list[JoinEntry]:
        """On a leader: the joins that its connected peers need."""
        return [
            JoinEntry(peer, self._claims[peer].disk)
            for peer in self._up
            if self._claims[peer].disk != self._voter_disks.disk_of(peer).disk
        ]

    def submit(self, content: bytes) -> None:
        """Append an entry, or forward it to the leader. It may be lost on the way."""
        self._applyCommand(content, None)

    def admit(self, join: JoinEntry) -> None:
        """As leader, append a join at once: a delayed one could replace a disk that joined later."""
        assert self.__raftState == RaftState.LEADER
        self.__raftLog.add(encode_join(join), self._log.last.index + 1, self.__raftCurrentTerm)

    def clear_leader(self) -> None:
        """On a blank node: stop following, so that it may follow a leader of another epoch."""
        self.__raftLeader = None
        self._verified, self._verified_by = NOWHERE, ""

    def fall_silent(self) -> None:
        """Stop sending."""
        self._is_silent = True

    def apply_all(self) -> None:
        """Treat the whole log as committed, and apply it. Only for a forced epoch."""
        self._sync()
        self.__raftCommitIndex = self._log.last.index
        while self.__raftCommitIndex > self.__raftLastApplied and not self._host.is_over():
            self.round_began = now()
            self.__applyLogEntries()

    def transfer_leadership(self, until: float) -> None:
        """As leader, let the most up-to-date member lead; keep leading if none does by `until`.

        Until then nothing is appended. Forwarded and submitted commands wait.
        """
        assert self.__raftState == RaftState.LEADER
        self._transfer = LeadershipTransfer(until)

    @property
    def is_transferring(self) -> bool:
        return self._transfer is not None

    def send(self, peer: str, message: Message) -> None:
        """Queue a message; it is sent after the next sync."""
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
            self._poller.poll(0.0)

    def _is_to_decide(self) -> bool:
        if self.__raftState != RaftState.LEADER:
            return self.__raftElectionDeadline < self.round_began
        is_alone = not self._nodes
        return self._may_commit or is_alone or self.__newAppendEntriesTime < self.round_began

    def wait_s(self) -> float:
        """How long the loop may wait if nothing arrives."""
        if self.__raftCommitIndex > self.__raftLastApplied and not self._host.is_over():
            return 0.0
        leads = self.__raftState == RaftState.LEADER
        if leads and not self._nodes and self._log.synced.index > self.__raftCommitIndex:
            return 0.0  # Our own sync committed it: no answer will end the wait.
        due = self.__newAppendEntriesTime if leads else self.__raftElectionDeadline
        if self._transfer is not None:
            due = min(due, self._transfer.until)
        return max(0.0, min(due, self._host.due()) - now())

    def close(self) -> None:
        """Release the snapshots that were being sent."""
        self._replication.stop_sending()

    def on_up(self, peer: str, claim: DiskClaim) -> None:
        node = self._nodes[peer]
        if self._claims.get(peer, claim).disk != claim.disk:
            self.__raftMatchIndex[node] = 0  # The previous disk acknowledged it.
        self._claims[peer] = claim
        self._up[peer] = None
        self.__onNodeConnected(node)
        self._replication.start(peer, matched=self.__raftMatchIndex.get(node, 0))
        if self.__raftState == RaftState.LEADER:
            self._pump([peer], is_heartbeat=True)

    def on_down(self, peer: str) -> None:
        """If it was the leader's connection, the leader's process has probably ended: start an
        election soon.
        """
        self._up.pop(peer, None)
        self.__onNodeDisconnected(self._nodes[peer])
        self._replication.stop_sending(peer)
        if self.leader == peer:
            self._heard_leader_at = float("-inf")
            soon = now() + self._rng.uniform(0.0, self._timeouts_s[0] / 3)
            self.__raftElectionDeadline = min(self.__raftElectionDeadline, soon)

    def on_message(self, peer: str, message: Message) -> None:
        if getattr(message, "term", 0) > self.__raftCurrentTerm + TERMS_AHEAD_MAX:
            logger.error("term_rejected peer=%s term=%d", peer, getattr(message, "term", 0))
            return
        claim = getattr(message, "claim", None)
        if claim is not None:
            self._claims[peer] = claim
        self._handlers[type(message)](peer, message)

    def on_installed(self, place: LogIndex) -> None:
        """A snapshot of `place`, above the commit index, is durable and restored."""
        if self._log.term_at(place.index) != place.term:
            if place.term > self._log.term:
                self.__setCurrentTerm(place.term, None)
            self.__raftLog.reset(place)
        self.__raftCommitIndex = self.__raftLastApplied = place.index
        self._verified = LogIndex(max(self._verified.index, place.index), self._verified.term)
        self._voter_disks.on_applied(place.index)

    # The loop's steps that are replaced

    def __generateRaftTimeout(self) -> float:
        return self._rng.uniform(*self._timeouts_s)

    def __connectedToAnyone(self) -> bool:
        """Called by PySyncObj at the election timeout: may an election start?

        Only on a disk that counts, and after a majority granted the pre-vote.
        """
        self._election.is_called = False
        if self._voter_disks.counts_here():
            if self._election.ballot.start():
                return True
            self.__raftLeader = None
            self._election.start_pre_vote()
        self.__raftElectionDeadline = now() + self.__generateRaftTimeout()
        return False

    def __onBecomeLeader(self) -> None:
        self._transfer = None
        for peer in self._nodes:
            self._replication.start(peer, matched=0)
        # The vote for itself counts, and with one node the no-op is committed at once: both must be synced.
        self._sync()
        super().__onBecomeLeader()
        self._sync()
        self._may_commit = True
        self._verified, self._verified_by = (
            LogIndex(self.__raftCommitIndex, self.__raftCurrentTerm),
            self._name,
        )
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
                self._divergence.on_applied(self._own.state, begun)
                if self._host.is_over():
                    break
                if entry.index < committed and now() > begun + APPLY_SECONDS_MAX:
                    break
            self._voter_disks.on_applied(self.__raftLastApplied)
        return False

    def _checkCommandsToApply(self) -> None:
        leads = self.__raftState == RaftState.LEADER
        if self._led and not leads:
            # Proposers send their commands again, to the next leader.
            self.__commandsQueue.clear()
            self._transfer = None
            self._led_at = now()
        self._led = leads
        self._host.submit()
        if self._host.is_over():
            self.__commandsQueue.clear()
        if self._transfer is not None:
            self._continue_transfer()
        elif self.__commandsQueue:
            super()._checkCommandsToApply()

    def __sendAppendEntries(self) -> None:
        """Called by PySyncObj when a heartbeat is due, and when this node becomes leader."""
        self.__newAppendEntriesTime = now() + self._heartbeat_s
        self._pump(self._up, is_heartbeat=True)
        self._lacking.clear()

    def __tryLogCompaction(self) -> None:
        if self.__raftState != RaftState.LEADER:
            self._replication.stop_sending()
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
        leads = self.__raftState == RaftState.LEADER
        if leads:
            reached = (self._log.last.index, self.__raftCommitIndex)
            if reached != self._pumped:
                self._pumped = reached
                self._pump(self._up, is_heartbeat=False)
            elif self._lacking:
                self._pump([peer for peer in self._up if peer in self._lacking], is_heartbeat=False)
            self._lacking.clear()
            self._network.flush()
        self._sync()
        if not leads:
            self._network.flush()
        self._log.record_synced_end()

    def _sync(self) -> None:
        if not self._log.is_dirty:
            return
        try:
            self._log.sync()
        except DiskFull as error:
            self._space.retry(error, self._log.sync)

    # Elections

    @property
    def voted_for(self) -> str | None:
        """The member that got this node's vote in the current term."""
        return self.__votedForNodeId

    def hears_leader(self) -> bool:
        """Whether this node hears a leader; then it votes for no other member."""
        if self.__raftState == RaftState.LEADER:
            return True
        return now() - self._heard_leader_at < self._timeouts_s[0]

    def grant_vote(self, peer: str, term: int) -> None:
        """Record the vote for `peer` in `term`, and give it time to win."""
        self.__setCurrentTerm(term, peer)
        self.__raftElectionDeadline = now() + self.__generateRaftTimeout()

    def start_election_soon(self) -> None:
        """Start an election in the next round."""
        self.__raftElectionDeadline = 0.0

    def count_votes(self, count: int) -> None:
        """Set the number of votes for this node in the current term, its own included."""
        self.__votesCount = count

    def win(self) -> None:
        self.__onBecomeLeader()

    def adopt_term(self, term: int) -> None:
        """Become a follower in a later term."""
        if self.__raftState == RaftState.LEADER:
            logger.info("stepped_down term=%d", term)
        self.__setCurrentTerm(term, None)
        self.__setState(RaftState.FOLLOWER)
        self.__raftLeader = None
        self._election.withdraw()

    # Following

    def _follow(self, peer: str, term: int) -> None:
        """`peer` leads `term`, which is not earlier than ours."""
        if term > self.__raftCurrentTerm:
            self.adopt_term(term)
        if self._verified.term == term and self._verified_by != peer:
            got = f"{self._verified_by}, {peer}"
            raise Diverged("two leaders in one term", where=f"term {term}", got=got)
        if self.__raftState != RaftState.FOLLOWER:
            self.__setState(RaftState.FOLLOWER)
        if self.leader != peer:
            logger.info("became_follower leader=%s term=%d", peer, term)
            self.__raftLeader = self._nodes[peer]
            self._led_at, self.leader_gap_s = now(), 0.0
        last_heard_at = self._led_at
        self._heard_leader_at = self._led_at = now()
        self.leader_gap_s = max(self.leader_gap_s, self._led_at - last_heard_at)
        election = self._election
        if not election.is_called:
            election.ballot.withdraw()
            self.__raftElectionDeadline = self._heard_leader_at + self.__generateRaftTimeout()
        if self._verified.term != term:
            self._verified, self._verified_by = LogIndex(self.__raftCommitIndex, term), peer

    def _on_append(self, peer: str, message: AppendEntries) -> None:
        term, committed, claim = self.__raftCurrentTerm, self.__raftCommitIndex, self._own.claim
        if message.term < term:  # Tells a deposed leader the new term.
            self.send(peer, AppendEntriesReply(term, False, message.prev.index, committed, claim))
            return
        if not self._divergence.check(peer, message, self._own.state, now()):
            logger.error("diverged leader=%s applied=%d", peer, message.applied)
            return
        self._follow(peer, message.term)
        self._leader_committed = message.commit
        verdict = compare(message, self._log, committed)
        if isinstance(verdict, AppendRejected):
            self.send(peer, AppendEntriesReply(message.term, False, message.prev.index, verdict.hint, claim))
            return
        if verdict.cut is not None:
            if verdict.cut <= self._verified.index:
                where = f"term {message.term}, index {verdict.cut}"
                raise Diverged("a leader replaced its own entries", where=where, got=peer)
            self.__raftLog.truncate(verdict.cut)
        for entry in verdict.new:
            self.__raftLog.add(*entry)
        # The commit index never passes what was compared with this leader in this term.
        self._verified = LogIndex(max(self._verified.index, verdict.matched), message.term)
        self.__raftCommitIndex = max(committed, min(message.commit, self._verified.index))
        self.__leaderCommitIndex = message.commit
        if message.wants_reply:
            self.send(
                peer, AppendEntriesReply(message.term, True, message.prev.index, verdict.matched, claim)
            )

    def _on_install_snapshot(self, peer: str, chunk: InstallSnapshot) -> None:
        if chunk.term < self.__raftCurrentTerm:
            return
        self._follow(peer, chunk.term)
        if chunk.snapshot.index <= self.__raftCommitIndex:
            reached = chunk.offset + len(chunk.data)
            claim = self._own.claim
            self.send(
                peer, InstallSnapshotReply(chunk.term, chunk.snapshot, reached, chunk.length, True, claim)
            )
        else:
            self._host.on_install_snapshot(peer, chunk)

    # Leading

    def _continue_transfer(self) -> None:
        """Send TimeoutNow to the successor once it is chosen, or abort the transfer."""
        assert self._transfer is not None
        term = self.__raftCurrentTerm
        if self.round_began >= self._transfer.until:
            logger.warning("leadership_transfer_failed term=%d successor=%s", term, self._transfer.successor)
            self._transfer = None
            return
        matched = {
            peer: self.__raftMatchIndex[self._nodes[peer]] for peer in self._up if self.is_counted(peer)
        }
        successor = self._transfer.choose(matched, self._log.last.index)
        if successor is not None:
            logger.info("leadership_transfer_started term=%d successor=%s", term, successor)
            self.send(successor, TimeoutNow(term))

    def _on_forward(self, peer: str, message: Forward) -> None:
        if self.__raftState == RaftState.LEADER and self._host.on_forward(peer, message):
            self._applyCommand(message.content, None)

    def _pump(self, peers: Iterable[str], *, is_heartbeat: bool) -> None:
        term, committed = self.__raftCurrentTerm, self.__raftCommitIndex
        self._replication.pump(peers, term, committed, self._own.state, is_heartbeat=is_heartbeat)

    def _on_append_reply(self, peer: str, reply: AppendEntriesReply) -> None:
        if not self._is_answer(reply.term):
            return
        if self._replication.has_lost(peer, reply):
            self._distrust(peer, reply.claim)
        self._on_acknowledged(peer, reply.claim, self._replication.on_append_reply(peer, reply))

    def _distrust(self, peer: str, claim: DiskClaim) -> None:
        """The disk was restored from a copy, or did not store what it synced."""
        logger.error(
            "disk_lost_entries peer=%s disk=%s: empty the directory of that node, so that it rejoins",
            *(peer, claim.disk.hex()),
        )
        self._untrusted.add(claim.disk)
        self.__raftMatchIndex[self._nodes[peer]] = 0
        self._replication.start(peer, matched=0)

    def _on_install_snapshot_reply(self, peer: str, reply: InstallSnapshotReply) -> None:
        if self._is_answer(reply.term):
            self._on_acknowledged(peer, reply.claim, self._replication.on_install_snapshot_reply(peer, reply))

    def _is_answer(self, term: int) -> bool:
        """Whether a reply answers this leader in this term. A later term deposes it."""
        if term > self.__raftCurrentTerm:
            self.adopt_term(term)
        return self.__raftState == RaftState.LEADER and term == self.__raftCurrentTerm

    def _on_acknowledged(self, peer: str, claim: DiskClaim, matched: int) -> None:
        """The peer's log agrees up to `matched`. It counts for commits if its disk counts."""
        if self._voter_disks.counts(peer, claim) and claim.disk not in self._untrusted:
            node = self._nodes[peer]
            if matched > self.__raftMatchIndex[node]:
                self.__raftMatchIndex[node] = matched
                self._may_commit |= matched > self.__raftCommitIndex
            self.__lastResponseTime[node] = now()
        self._lacking.add(peer)


class _Poller:
    """PySyncObj waits here."""

    def __init__(self, raft: SyncObj) -> None:
        self._raft = raft

    def poll(self, _timeout_s: float) -> None:
        self._raft._network.poll(self._raft.wait_s())
