"""The messages of Raft nodes and the entries of their log. Pure.

`transport.codec` encodes them, `core` handles them. Invariant: every message that makes another node
count something (a vote, an acknowledgement) names the disk that it comes from.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

ID_BYTES: Final = 16
"""Bytes of a cluster id and of a disk id."""
NO_ID: Final = bytes(ID_BYTES)
"""The cluster id of a blank disk."""
DIGEST_BYTES: Final = 32
"""SHA-256 of a snapshot."""
NO_DIGEST: Final = bytes(DIGEST_BYTES)
COMMAND_BYTES_MAX: Final = 1 << 20
"""Limit for a proposed command."""
ENTRY_BYTES_MAX: Final = COMMAND_BYTES_MAX + 4096
"""Limit for an entry: a command of the maximum size and its header."""
APPEND_BYTES_MAX: Final = 2 << 20
"""Limit for the entries in one `AppendEntries`."""
CHUNK_BYTES_MAX: Final = 1 << 20
"""Limit for the data in one `InstallSnapshot`."""
MEMBER_LIST_BYTES_MAX: Final = 16 << 10
"""Limit for a list of members."""
SNAPSHOT_BYTES_MAX: Final = 8 << 30
"""Largest snapshot that a node accepts from another one."""


class LogIndex(NamedTuple):
    """A position in the Raft log. Index 0 is before every entry."""

    index: int  # type: ignore[assignment]  # hides the tuple's method
    term: int


NOWHERE: Final = LogIndex(0, 0)


class RaftEntry(NamedTuple):
    """An entry of the log. `model.entry_codec` decodes `content`. PySyncObj requires this order of fields."""

    content: bytes
    index: int  # type: ignore[assignment]  # hides the tuple's method
    term: int

    @property
    def place(self) -> LogIndex:
        return LogIndex(self.index, self.term)


class DiskClaim(NamedTuple):
    """The disk that a message comes from, and the position of its join, once the disk has applied it.

    The claim counts only for nodes that find the same join in their own log.
    """

    disk: bytes
    joined: LogIndex = NOWHERE


class Hello(NamedTuple):
    """The first frame on a connection, in both directions. The certificate has proved the member's name."""

    cluster: bytes
    """`NO_ID` for a blank disk."""
    epoch: int
    claim: DiskClaim
    wants_bootstrap: bool = False
    """Set by a blank node that may make a new cluster if all others are blank, too."""


class RequestVote(NamedTuple):
    """If `pre` is set (pre-vote), the answer is not binding, and `term` is the next term."""

    term: int
    last: LogIndex
    claim: DiskClaim
    pre: bool
    called: bool = False
    """The leader asked this candidate to take over, so a voter that hears the leader must not refuse for that
    reason.
    """


class TimeoutNow(NamedTuple):
    """Start an election at once: the leader of `term` transfers leadership to you."""

    term: int


class RequestVoteReply(NamedTuple):
    """`term`: the requested one if granted, else the voter's own."""

    term: int
    granted: bool
    claim: DiskClaim
    pre: bool


class AppendEntries(NamedTuple):
    """Entries after `prev`. Without entries it is a heartbeat."""

    term: int
    prev: LogIndex
    commit: int
    applied: int
    """Index that the leader has applied."""
    chain: int
    """Running checksum of the entries that the leader applied. A follower at the same index compares it."""
    entries: tuple[RaftEntry, ...]
    wants_reply: bool = True
    """False: it only carries the commit index, and is answered only if `prev` does not match."""


class AppendEntriesReply(NamedTuple):
    """Whether the log contains `prev`. The log is synced up to here before the reply is sent."""

    term: int
    matched: bool
    prev: int
    """Index of the message's `prev`."""
    index: int  # type: ignore[assignment]  # hides the tuple's method
    """If matched: every entry up to this index is equal to the leader's entry, and synced. If not: retry
    after this index.
    """
    claim: DiskClaim


class InstallSnapshot(NamedTuple):
    """A chunk of the leader's snapshot, which covers the log up to `snapshot`. Without data, it asks how much
    has arrived.
    """

    term: int
    snapshot: LogIndex
    length: int
    digest: bytes
    offset: int
    data: bytes


class InstallSnapshotReply(NamedTuple):
    """The answer to a chunk that ended at `reached`.

    `offset`: how many bytes of that snapshot have arrived in order. `installed`: it is durable and in effect.
    """

    term: int
    snapshot: LogIndex
    reached: int
    offset: int
    installed: bool
    claim: DiskClaim


class Forward(NamedTuple):
    """Content of an entry for the leader to append. If it is lost, the proposer sends it again."""

    content: bytes


class Admit(NamedTuple):
    """A small snapshot for a blank node whose disk it admits. Without it that node may not vote."""

    content: bytes


class AppMessage(NamedTuple):
    """A message between the users of consensus on two members."""

    content: bytes


class FetchState(NamedTuple):
    """Request for the state of the receiver's epoch, from `offset` on. The sender is in an earlier epoch, or
    blank.
    """

    digest: bytes = NO_DIGEST
    """Digest of the state to which the bytes before `offset` belong."""
    offset: int = 0


class FetchStateChunk(NamedTuple):
    """A chunk of the newest snapshot, in answer to `FetchState`."""

    snapshot: LogIndex
    length: int
    digest: bytes
    offset: int
    data: bytes


class MemberList(NamedTuple):
    """The newest list of members that the sender has. It is also the last frame to a peer that is not in it.

    Nodes send it from the first change of the members on, so that older programs never get it.
    """

    index: int  # type: ignore[assignment]  # hides the tuple's method
    """Raft index of the list's entry."""
    is_committed: bool
    content: bytes
    """The entry. `model.entry_codec` decodes it."""


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
    | MemberList
)
