"""What Raft nodes say to each other, and the entries of the log they keep.

Pure values. `codec` turns messages into bytes and back, `hardened` acts on them. The law: every message
that makes another node count something (a vote, an acknowledgement) says from which disk it comes.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

ID_BYTES: Final = 16
"""Bytes of a cluster id and of a disk id."""
NO_ID: Final = bytes(ID_BYTES)
"""A disk that belongs to no cluster yet."""
DIGEST_BYTES: Final = 32
"""SHA-256 of a snapshot."""
NO_DIGEST: Final = bytes(DIGEST_BYTES)
"""Of no snapshot yet."""
COMMAND_BYTES_MAX: Final = 1 << 20
"""The largest command that may be proposed."""
ENTRY_BYTES_MAX: Final = COMMAND_BYTES_MAX + 4096
"""The largest entry: one command of that size and what is written around it."""
APPEND_BYTES_MAX: Final = 2 << 20
"""The most bytes of entries that one `AppendEntries` carries, its last entry included."""
CHUNK_BYTES_MAX: Final = 1 << 20
"""The most bytes of a snapshot that one `InstallSnapshot` carries."""
SNAPSHOT_BYTES_MAX: Final = 8 << 30
"""The largest snapshot a node takes from another one."""


class LogIndex(NamedTuple):
    """A place in the Raft log. Index 0 stands before every entry."""

    index: int  # type: ignore[assignment]  # hides the tuple's method
    term: int


NOWHERE: Final = LogIndex(0, 0)


class RaftEntry(NamedTuple):
    """An entry of the log. `content` says what it does: see `entries`. The order of fields is PySyncObj's."""

    content: bytes
    index: int  # type: ignore[assignment]  # hides the tuple's method
    term: int

    @property
    def place(self) -> LogIndex:
        """Where it stands."""
        return LogIndex(self.index, self.term)


class DiskClaim(NamedTuple):
    """Which disk speaks, and where the join that admitted it stands, once this disk has applied it.

    What a disk says counts only for those who find that same join in their own log.
    """

    disk: bytes
    joined: LogIndex = NOWHERE


class Hello(NamedTuple):
    """The first frame on a connection, both ways; the certificate has said which member it is."""

    cluster: bytes
    """`NO_ID`: a blank disk."""
    epoch: int
    """Which one of the cluster: see `epochs`."""
    claim: DiskClaim
    wants_bootstrap: bool = False
    """A blank node that was told to make a new cluster if all others are blank too."""


class RequestVote(NamedTuple):
    """Will you vote for me? With `pre` the answer binds nobody, and `term` is the term I would begin."""

    term: int
    last: LogIndex
    claim: DiskClaim
    pre: bool
    called: bool = False
    """The leader called this candidate to stand: that it is heard is no reason to refuse."""


class TimeoutNow(NamedTuple):
    """Stand for election at once: the leader of `term` hands over to you, who have all of its log."""

    term: int


class RequestVoteReply(NamedTuple):
    """The answer: `term` is the one asked for if granted, the voter's own if not."""

    term: int
    granted: bool
    claim: DiskClaim
    pre: bool


class AppendEntries(NamedTuple):
    """Entries that follow `prev`; none is a heartbeat."""

    term: int
    prev: LogIndex
    commit: int
    applied: int
    """How far the leader has applied its log, and ..."""
    chain: int
    """... the running checksum of what it applied: a follower that applied as much compares."""
    entries: tuple[RaftEntry, ...]
    wants_reply: bool = True
    """False: it only brings the commit index, and is to be answered only if it does not match."""


class AppendEntriesReply(NamedTuple):
    """Whether the log has `prev`. All of it is synced when this leaves the node."""

    term: int
    matched: bool
    prev: int
    """Index of the message's `prev`."""
    index: int  # type: ignore[assignment]  # hides the tuple's method
    """Matched: every entry up to here is the leader's and synced. Not: try again from behind this index."""
    claim: DiskClaim


class InstallSnapshot(NamedTuple):
    """A piece of the leader's snapshot, which covers the log up to `snapshot`. An empty one only asks."""

    term: int
    snapshot: LogIndex
    length: int
    digest: bytes
    offset: int
    data: bytes


class InstallSnapshotReply(NamedTuple):
    """The answer to a chunk that ended at `reached`.

    `offset`: how many bytes of that snapshot are here, in order; `installed`: synced and taken.
    """

    term: int
    snapshot: LogIndex
    reached: int
    offset: int
    installed: bool
    claim: DiskClaim


class Forward(NamedTuple):
    """An entry's content for the leader to append. Its proposer sees it applied, or sends it again."""

    content: bytes


class Admit(NamedTuple):
    """A small snapshot, for a blank node whose disk it names a member: until it has one, it may not vote."""

    content: bytes


class AppMessage(NamedTuple):
    """Something between the users of consensus on two members; Raft itself only carries it."""

    content: bytes


class FetchState(NamedTuple):
    """Give me the state of your epoch, from `offset` on: I am in an earlier one, or blank."""

    offset: int
    digest: bytes = NO_DIGEST
    """Of the state that the bytes before are of."""


class FetchStateChunk(NamedTuple):
    """A piece of the newest snapshot of a node in the epoch of this frame, for one that asked for it."""

    snapshot: LogIndex
    length: int
    digest: bytes
    offset: int
    data: bytes


Message: TypeAlias = (
    RequestVote
    | TimeoutNow
    | RequestVoteReply
    | AppendEntries
    | AppendEntriesReply
    | InstallSnapshot
    | InstallSnapshotReply
    | Forward
    | Admit
    | AppMessage
    | FetchState
    | FetchStateChunk
)
