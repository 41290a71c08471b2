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
        self._admissions = VoterDisks(config.name, own, log.entries(log.base.index + 1))
        self._followers = Replication(log, network, host.open_snapshot)
        outbox = TransportAdapter(network, self._admissions)
        self._voting = Election(self, own, self._admissions, log, outbox, list(self._nodes))
        self._agreement = DivergenceGuard(PATIENCE_ELECTIONS * self._timeouts_s[1])
        self._claims: dict[str, DiskClaim] = {}
        self._untrusted: set[bytes] = set()
        """Disks that lost entries which they had acknowledged to this leader."""
        self._up: dict[str, None] = {}
        """Peers of this cluster, or blank ones, that are connected."""
        self._heard_leader_at = float("-inf")
        self.leader_gap_s = 0.0
        """The longest time between two messages of the leader that this node follows, in this term."""
        self._led_at = now()
        """When this node last heard a leader, or started."""
        self._leader_committed = 0
        self._verified = NOWHERE
        """The term of the leader that our log was compared with, and up to which index it agrees."""
        self._verified_by = ""
        """That leader; this node itself while it leads."""
        self._pumped = (0, 0)
        self._lacking: set[str] = set()
        """Peers that may be sent more since they answered."""
        self._may_commit = False
        self._led = False
        self._hand_over: LeadershipTransfer | None = None
        self._is_silent = False
        self.round_began = now()
        """When the present round began: near enough for all that is due in it."""
        self._handlers: dict[type, Callable[[str, Any], None]] = {
            RequestVote: self._voting.on_request,
            TimeoutNow: self._voting.on_stand_now,
            RequestVoteReply: self._voting.on_reply,
            AppendEntries: self._on_append,
            AppendEntriesReply: self._on_append_reply,
            InstallSnapshot: self._on_chunk,
            InstallSnapshotReply: self._on_chunk_reply,
            Forward: self._on_forward,
            Admit: host.on_adopt,
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
        # What the constructor made is replaced by what was kept.
        self.__raftLog = Journal(log, self._admissions)
        self.__commandsQueue = CommandQueue()
        self.__raftCurrentTerm, self.__votedForNodeId = log.term, log.voted_for
        self.__raftCommitIndex = self.__raftLastApplied = own.state.applied.index
        self.__raftElectionDeadline = now() + (self.__generateRaftTimeout() if self._nodes else 0.0)
        self._poller = _Poller(self)
        self.addOnTickCallback(self._persist_then_send)

    # What the node asks

    @property
    def leader(self) -> str | None:
        """Name of the leader of the present term, if this node has heard of it."""
        node = self.__raftLeader
        return None if node is None else node.name

    @property
    def leaderless_s(self) -> float:
        """For how long this node has heard of no leader."""
        return 0.0 if self.leads else now() - self._led_at

    @property
    def leads(self) -> bool:
        """Whether this node leads, as far as it knows."""
        return bool(self.__raftState == RaftState.LEADER)

    @property
    def role(self) -> str:
        """Overrides PySyncObj."""
        return ("follower", "candidate", "leader")[self.__raftState]

    @property
    def term(self) -> int:
        """The present term."""
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
        """Whether this node's own disk counts: before, it may neither vote nor lead."""
        return self._admissions.counts_here()

    def is_counted(self, peer: str) -> bool | None:
        """Whether the peer's disk counts; None if it was not heard of."""
        claim = self._claims.get(peer)
        if claim is None:
            return None
        return self._admissions.counts(peer, claim) and claim.disk not in self._untrusted

    def match_index(self, peer: str) -> int | None:
        """How far a peer's log is known to agree; None unless this node leads."""
        return self._followers.match_index(peer) if self.__raftState == RaftState.LEADER else None

    def keep_from(self) -> int | None:
        """As leader, the first index that a connected follower will need."""
        leads = self.__raftState == RaftState.LEADER
        return self._followers.keep_from(self._up) if leads else None

    def unknown_disks(self) -> list[JoinEntry]:
        """On a leader: the joins that its connected peers need."""
        return [
            JoinEntry(peer, self._claims[peer].disk)
            for peer in self._up
            if self._claims[peer].disk != self._admissions.disk_of(peer).disk
        ]

    def submit(self, content: bytes) -> None:
        """Append an entry if this node leads, or send it to the leader; it may be lost on the way."""
        self._applyCommand(content, None)

    def admit(self, join: JoinEntry) -> None:
        """As leader, append a join: at once, as one that waited could unseat a disk that joined since."""
        assert self.__raftState == RaftState.LEADER
        self.__raftLog.add(encode_join(join), self._log.last.index + 1, self.__raftCurrentTerm)

    def forget_leader(self) -> None:
        """On a blank node, which has nothing of any log: begin to follow the leaders of another epoch."""
        self.__raftLeader = None
        self._verified, self._verified_by = NOWHERE, ""

    def fall_silent(self) -> None:
        """Stop sending."""
        self._is_silent = True

    def apply_all(self) -> None:
        """Take the whole log for committed, and apply it: an operator says that there is no other log."""
        self._sync()
        self.__raftCommitIndex = self._log.last.index
        while self.__raftCommitIndex > self.__raftLastApplied and not self._host.is_over():
            self.round_began = now()
            self.__applyLogEntries()

    def hand_over(self, until: float) -> None:
        """As leader, have the most up-to-date member lead; go on leading if none does by `until`.

        Nothing is appended meanwhile: what others forward waits, as what is to be submitted does.
        """
        assert self.__raftState == RaftState.LEADER
        self._hand_over = LeadershipTransfer(until)

    @property
    def is_handing_over(self) -> bool:
        """Whether this node leads, and would have another one lead."""
        return self._hand_over is not None

    def send(self, peer: str, message: Message) -> None:
        """Queue a message; it is sent after the next sync."""
        self._network.send(peer, message)

    def step(self) -> None:
        """One round of the loop: commit, apply, take commands, queue messages, sync, send, wait.

        PySyncObj is asked only when there is something for it to decide: an election, a commit, a heartbeat,
        and with that whether a majority still hears this leader. Its own round is this one with that before.
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
            return 0.0  # Committed by our own sync: no answer will come that would end the wait.
        due = self.__newAppendEntriesTime if leads else self.__raftElectionDeadline
        if self._hand_over is not None:
            due = min(due, self._hand_over.until)
        return max(0.0, min(due, self._host.due()) - now())

    def close(self) -> None:
        """Release the snapshots that were being sent."""
        self._followers.stop_sending()

    def on_up(self, peer: str, claim: DiskClaim) -> None:
        """A peer of this cluster, or a blank one, is connected."""
        node = self._nodes[peer]
        if self._claims.get(peer, claim).disk != claim.disk:
            self.__raftMatchIndex[node] = 0  # What the other disk acknowledged is gone with it.
        self._claims[peer] = claim
        self._up[peer] = None
        self.__onNodeConnected(node)
        self._followers.begin(peer, matched=self.__raftMatchIndex.get(node, 0))
        if self.__raftState == RaftState.LEADER:
            self._pump([peer], is_heartbeat=True)

    def on_down(self, peer: str) -> None:
        """The connection is closed. If it was the leader's, its process has probably ended: elect soon."""
        self._up.pop(peer, None)
        self.__onNodeDisconnected(self._nodes[peer])
        self._followers.stop_sending(peer)
        if self.leader == peer:
            self._heard_leader_at = float("-inf")
            soon = now() + self._rng.uniform(0.0, self._timeouts_s[0] / 3)
            self.__raftElectionDeadline = min(self.__raftElectionDeadline, soon)

    def on_message(self, peer: str, message: Message) -> None:
        """A message of a connected peer."""
        if getattr(message, "term", 0) > self.__raftCurrentTerm + TERMS_AHEAD_MAX:
            logger.error("term_rejected peer=%s term=%d", peer, getattr(message, "term", 0))
            return
        claim = getattr(message, "claim", None)
        if claim is not None:
            self._claims[peer] = claim
        self._handlers[type(message)](peer, message)

    def on_installed(self, place: LogIndex) -> None:
        """The node has a durable snapshot of `place`, above what was committed, and is restored from it."""
        if self._log.term_at(place.index) != place.term:
            if place.term > self._log.term:
                self.__setCurrentTerm(place.term, None)
            self.__raftLog.reset(place)
        self.__raftCommitIndex = self.__raftLastApplied = place.index
        self._verified = LogIndex(max(self._verified.index, place.index), self._verified.term)
        self._admissions.on_applied(place.index)

    # The loop's steps that are replaced

    def __generateRaftTimeout(self) -> float:
        return self._rng.uniform(*self._timeouts_s)

    def __connectedToAnyone(self) -> bool:
        """Called by PySyncObj at the election timeout: may an election start?

        Only on a disk that counts, and when a majority said beforehand that it would vote for this node.
        """
        self._voting.is_called = False
        if self._admissions.counts_here():
            if self._voting.ballot.stand():
                return True
            self.__raftLeader = None
            self._voting.ask()
        self.__raftElectionDeadline = now() + self.__generateRaftTimeout()
        return False

    def __onBecomeLeader(self) -> None:
        self._hand_over = None
        for peer in self._nodes:
            self._followers.begin(peer, matched=0)
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
                self._agreement.on_applied(self._own.state, begun)
                if self._host.is_over():
                    break
                if entry.index < committed and now() > begun + APPLY_SECONDS_MAX:
                    break
            self._admissions.on_applied(self.__raftLastApplied)
        return False

    def _checkCommandsToApply(self) -> None:
        leads = self.__raftState == RaftState.LEADER
        if self._led and not leads:
            # What others wanted of this leader and did not get they want of the next one, by themselves.
            self.__commandsQueue.clear()
            self._hand_over = None
            self._led_at = now()
        self._led = leads
        self._host.submit()
        if self._host.is_over():
            self.__commandsQueue.clear()
        if self._hand_over is not None:
            self._hand_on()
        elif self.__commandsQueue:
            super()._checkCommandsToApply()

    def __sendAppendEntries(self) -> None:
        """PySyncObj asks for this when a heartbeat is due, and when this node begins to lead."""
        self.__newAppendEntriesTime = now() + self._heartbeat_s
        self._pump(self._up, is_heartbeat=True)
        self._lacking.clear()

    def __tryLogCompaction(self) -> None:
        if self.__raftState != RaftState.LEADER:
            self._followers.stop_sending()
        self._host.housekeeping()

    def __loadDumpFile(self, clearJournal: bool) -> NoReturn:
        raise AssertionError("snapshots are not PySyncObj's")

    def _persist_then_send(self) -> None:
        """The barrier: whatever the queued messages depend on is synced, then they leave.

        A leader's depend on its term, which was synced when it began to lead, and on what is committed, never
        on its new entries: followers sync them while it does, and no answer is read before it has. So it
        counts only what it synced. (Ongaro's thesis, section 10.2.1.)
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
        self._log.note_synced()

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

    def give_vote(self, peer: str, term: int) -> None:
        """Keep that `peer` has the vote of `term`, and wait for it to win."""
        self.__setCurrentTerm(term, peer)
        self.__raftElectionDeadline = now() + self.__generateRaftTimeout()

    def stand_soon(self) -> None:
        """Start an election in the next round."""
        self.__raftElectionDeadline = 0.0

    def count_votes(self, count: int) -> None:
        """Set the number of votes for this node in the current term, its own included."""
        self.__votesCount = count

    def win(self) -> None:
        """Begin to lead."""
        self.__onBecomeLeader()

    def adopt_term(self, term: int) -> None:
        """Become a follower in a later term."""
        if self.__raftState == RaftState.LEADER:
            logger.info("stepped_down term=%d", term)
        self.__setCurrentTerm(term, None)
        self.__setState(RaftState.FOLLOWER)
        self.__raftLeader = None
        self._voting.withdraw()

    # Following

    def _follow(self, peer: str, term: int) -> None:
        """`peer` leads `term`, which is not below ours."""
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
        voting = self._voting
        if not voting.is_called:
            voting.ballot.withdraw()
            self.__raftElectionDeadline = self._heard_leader_at + self.__generateRaftTimeout()
        if self._verified.term != term:
            self._verified, self._verified_by = LogIndex(self.__raftCommitIndex, term), peer

    def _on_append(self, peer: str, message: AppendEntries) -> None:
        term, committed, claim = self.__raftCurrentTerm, self.__raftCommitIndex, self._own.claim
        if message.term < term:  # A deposed leader learns of it.
            self.send(peer, AppendEntriesReply(term, False, message.prev.index, committed, claim))
            return
        if not self._agreement.check(peer, message, self._own.state, now()):
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
                raise Diverged("a leader took its own entries back", where=where, got=peer)
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

    def _on_chunk(self, peer: str, chunk: InstallSnapshot) -> None:
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
            self._host.on_chunk(peer, chunk)

    # Leading

    def _hand_on(self) -> None:
        """Send TimeoutNow to the successor once it is chosen, or abort the transfer."""
        assert self._hand_over is not None
        term = self.__raftCurrentTerm
        if self.round_began >= self._hand_over.until:
            logger.warning("leadership_transfer_failed term=%d successor=%s", term, self._hand_over.successor)
            self._hand_over = None
            return
        matched = {
            peer: self.__raftMatchIndex[self._nodes[peer]] for peer in self._up if self.is_counted(peer)
        }
        successor = self._hand_over.choose(matched, self._log.last.index)
        if successor is not None:
            logger.info("leadership_transfer_started term=%d successor=%s", term, successor)
            self.send(successor, TimeoutNow(term))

    def _on_forward(self, peer: str, message: Forward) -> None:
        if self.__raftState == RaftState.LEADER and self._host.on_forward(peer, message):
            self._applyCommand(message.content, None)

    def _pump(self, peers: Iterable[str], *, is_heartbeat: bool) -> None:
        term, committed = self.__raftCurrentTerm, self.__raftCommitIndex
        self._followers.pump(peers, term, committed, self._own.state, is_heartbeat=is_heartbeat)

    def _on_append_reply(self, peer: str, reply: AppendEntriesReply) -> None:
        if not self._is_answer(reply.term):
            return
        if self._followers.has_lost(peer, reply):
            self._distrust(peer, reply.claim)
        self._on_acknowledged(peer, reply.claim, self._followers.on_append_reply(peer, reply))

    def _distrust(self, peer: str, claim: DiskClaim) -> None:
        """Its disk is not what it was: it was restored from a copy, or did not keep what it synced."""
        logger.error(
            "disk_lost_entries peer=%s disk=%s: empty the directory of that node, so that it joins again",
            *(peer, claim.disk.hex()),
        )
        self._untrusted.add(claim.disk)
        self.__raftMatchIndex[self._nodes[peer]] = 0
        self._followers.begin(peer, matched=0)

    def _on_chunk_reply(self, peer: str, reply: InstallSnapshotReply) -> None:
        if self._is_answer(reply.term):
            self._on_acknowledged(peer, reply.claim, self._followers.on_chunk_reply(peer, reply))

    def _is_answer(self, term: int) -> bool:
        """Whether a reply answers this leader, in this term; one of a later term deposes it."""
        if term > self.__raftCurrentTerm:
            self.adopt_term(term)
        return self.__raftState == RaftState.LEADER and term == self.__raftCurrentTerm

    def _on_acknowledged(self, peer: str, claim: DiskClaim, matched: int) -> None:
        """The peer's log agrees up to `matched`: that is replication, and counts if its disk does."""
        if self._admissions.counts(peer, claim) and claim.disk not in self._untrusted:
            node = self._nodes[peer]
            if matched > self.__raftMatchIndex[node]:
                self.__raftMatchIndex[node] = matched
                self._may_commit |= matched > self.__raftCommitIndex
            self.__lastResponseTime[node] = now()
        self._lacking.add(peer)


class _Poller:
    """Where PySyncObj waits."""

    def __init__(self, raft: SyncObj) -> None:
        self._raft = raft

    def poll(self, _timeout_s: float) -> None:
        self._raft._network.poll(self._raft.wait_s())
