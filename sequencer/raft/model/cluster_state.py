"""The cluster's own replicated state: members, which disks count, and which commands were applied. Pure.

Invariants:
- `apply` is total. Nodes that applied the same entries have the same state.
- A command is applied once and in its proposer's order, however often its entry was committed.

In a snapshot it precedes the state machine's bytes, little-endian:

    offset  bytes  field
         0      8  magic "RTRAFTST"
         8      2  version: 1 before the first change of the members, then 2
        10      2  count of members
        12      4  count of proposers
        16     16  cluster id
        32      8  epoch
        40      8  commands so far
        48     16  last entry applied: index, term
        64      4  chain: running checksum of the entries applied
        68      4  0
        72         members, by name: u8 length, name, disk (16), index and term of its join (8 + 8)
                   proposers, by disk: disk (16), run (8), next sequence (8), count (8),
                       then, count times: sequence (8), index of its first command (8)
                   only in version 2: index of the entry with the members (8), its length (4), its content
                   the state machine's bytes
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from crc32c import crc32c
from msgspec import Struct, field

from rt.errors import FormatError, UnknownVersion
from rt.log.format.constants import NEWER_HINT
from sequencer.raft.model.entry_codec import (
    Commands,
    JoinEntry,
    MembersEntry,
    NoOp,
    ResetEntry,
    decode_content,
    decode_members,
    encode_members,
)
from sequencer.raft.model.members import Members
from sequencer.raft.model.messages import NO_ID, NOWHERE, DiskClaim, LogIndex, RaftEntry

INITIAL: Final = LogIndex(1, 1)
"""Position at which the log of a new cluster starts. The first snapshot represents this entry, and admits all
disks.
"""

_MAGIC = b"RTRAFTST"
_VERSION, _VERSION_WITH_MEMBERS = 1, 2
_HEADER = struct.Struct("<8sHHI16sQQQQII")
_MEMBER = struct.Struct("<16sQQ")
_PROPOSER = struct.Struct("<16sQQQ")
_PAIR = struct.Struct("<QQ")
_LIST = struct.Struct("<QI")

NO_DISK: Final = DiskClaim(NO_ID, NOWHERE)
"""The claim of a member without a disk that has joined."""


class ProposerState(Struct):
    """Which commands of one disk are applied, in the newest run that proposed something."""

    run: int
    next: int = 1
    """Sequence of the next pack. A pack that was overtaken is proposed again."""
    firsts: dict[int, int] = field(default_factory=dict)
    """Index of the first command of each applied pack that the proposer may still ask for."""


class PackApplied(NamedTuple):
    """`first` is the index of the pack's first command.

    It is None if this entry did not apply the pack: the pack was applied before, an earlier pack is missing,
    or its disk is not the disk of a member.
    """

    pack: Commands
    first: int | None


class EpochEnded(NamedTuple):
    index: int  # type: ignore[assignment]  # hides the tuple's method
    command: bytes


class ClusterState(Struct):
    cluster: bytes
    epoch: int
    disks: dict[str, DiskClaim]
    """For each member the disk that counts, and its join."""
    index: int = 0
    """Number of the last command applied."""
    applied: LogIndex = INITIAL
    chain: int = 0
    proposers: dict[bytes, ProposerState] = field(default_factory=dict)
    members: Members | None = None
    """The list of the last change. None before the first one: then the members are those with `disks`."""
    members_index: int = 0
    """Raft index of the entry with `members`."""

    def apply(self, entry: RaftEntry) -> PackApplied | EpochEnded | None:
        """Apply the next entry. Returns None if it contains no commands.

        Nothing is applied after `EpochEnded`: the next epoch starts with this state.
        """
        assert entry.index == self.applied.index + 1, (entry.place, self.applied)
        self.applied = entry.place
        self.chain = crc32c(entry.content, crc32c(_PAIR.pack(*entry.place), self.chain))
        try:
            content = decode_content(entry.content)
        except UnknownVersion as error:
            error.where = f"entry {entry.index} of the Raft log"
            raise
        match content:
            case Commands():
                return PackApplied(content, self._apply_commands(content))
            case JoinEntry():
                self._apply_join(content, entry.place)
            case MembersEntry():
                self._apply_members(content.members, entry.index)
            case ResetEntry() if content.epoch == self.epoch:
                self.index += 1
                return EpochEnded(self.index, content.command)
            case ResetEntry():
                pass
            case NoOp():
                pass
        return None

    def first_index(self, disk: bytes, run: int, sequence: int) -> int | None:
        """Index of the first command of an applied pack. None if it was not applied, or is not remembered."""
        proposer = self.proposers.get(disk)
        return proposer.firsts.get(sequence) if proposer is not None and proposer.run == run else None

    def _apply_commands(self, pack: Commands) -> int | None:
        if all(claim.disk != pack.disk for claim in self.disks.values()):
            return None  # Not the disk of a member.
        proposer = self.proposers.get(pack.disk)
        if proposer is None or proposer.run < pack.run:
            proposer = self.proposers[pack.disk] = ProposerState(pack.run)
        if proposer.run != pack.run:
            return None
        while proposer.firsts and (oldest := next(iter(proposer.firsts))) < pack.floor:
            del proposer.firsts[oldest]
        if proposer.next != pack.sequence:
            return None
        proposer.next += 1
        first = proposer.firsts[pack.sequence] = self.index + 1
        self.index += len(pack.commands)
        return first

    def _apply_join(self, join: JoinEntry, place: LogIndex) -> None:
        known = self.disks.get(join.name)
        if known is None or known.disk == join.disk:
            return  # Not a member; or a second join of the same disk: the first one counts.
        self.disks[join.name] = DiskClaim(join.disk, place)

    def _apply_members(self, members: Members, index: int) -> None:
        """A removed member's disk and its commands are forgotten: if it is added again, it joins again."""
        removed = {claim.disk for name, claim in self.disks.items() if name not in members}
        self.disks = {name: self.disks.get(name, NO_DISK) for name in members}
        self.proposers = {disk: kept for disk, kept in self.proposers.items() if disk not in removed}
        self.members, self.members_index = members, index


def initial_state(cluster: bytes, epoch: int, disks: dict[str, bytes]) -> ClusterState:
    """The state of a new cluster. These disks are its members from the start."""
    return ClusterState(cluster, epoch, {name: DiskClaim(disk, INITIAL) for name, disk in disks.items()})


def encode_state(state: ClusterState) -> bytes:
    version = _VERSION if state.members is None else _VERSION_WITH_MEMBERS
    parts = [
        _HEADER.pack(
            *(_MAGIC, version, len(state.disks), len(state.proposers), state.cluster, state.epoch),
            *(state.index, *state.applied, state.chain, 0),
        )
    ]
    for name, claim in sorted(state.disks.items()):
        parts += [bytes([len(name)]), name.encode(), _MEMBER.pack(claim.disk, *claim.joined)]
    for disk, proposer in sorted(state.proposers.items()):
        parts.append(_PROPOSER.pack(disk, proposer.run, proposer.next, len(proposer.firsts)))
        parts += [_PAIR.pack(*pair) for pair in sorted(proposer.firsts.items())]
    if state.members is not None:
        content = encode_members(state.members)
        parts += [_LIST.pack(state.members_index, len(content)), content]
    return b"".join(parts)


def decode_state(content: bytes) -> tuple[ClusterState, bytes]:
    """The cluster's state, and the state machine's bytes. Raises `rt.FormatError`."""
    try:
        return _decode(content)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise FormatError("malformed state in a Raft snapshot", got=str(error)) from error


def _decode(content: bytes) -> tuple[ClusterState, bytes]:
    magic, version, members, proposers, cluster, epoch, index, *rest = _HEADER.unpack_from(content)
    at, (entry_index, term, chain, _) = _HEADER.size, rest
    if magic != _MAGIC:
        raise FormatError("wrong magic in the state of a Raft snapshot", got=magic, expected=_MAGIC)
    if version not in {_VERSION, _VERSION_WITH_MEMBERS}:
        raise UnknownVersion(
            "unknown version of the state in a Raft snapshot",
            got=version,
            expected=f"{_VERSION} or {_VERSION_WITH_MEMBERS}",
            hint=NEWER_HINT,
        )
    state = ClusterState(cluster, epoch, {}, index, LogIndex(entry_index, term), chain)
    for _ in range(members):
        start = at + 1
        at = start + content[at]
        disk, *place = _MEMBER.unpack_from(content, at)
        state.disks[content[start:at].decode("ascii")] = DiskClaim(disk, LogIndex(*place))
        at += _MEMBER.size
    for _ in range(proposers):
        disk, run, following, count = _PROPOSER.unpack_from(content, at)
        at += _PROPOSER.size
        pairs = _PAIR.iter_unpack(content[at : at + _PAIR.size * count])
        proposer = state.proposers[disk] = ProposerState(run, following, dict(pairs))
        at += _PAIR.size * count
        if len(proposer.firsts) != count:
            raise FormatError("truncated list of proposers in a Raft snapshot", got=len(proposer.firsts))
    if version == _VERSION_WITH_MEMBERS:
        state.members_index, length = _LIST.unpack_from(content, at)
        at += _LIST.size + length
        state.members = decode_members(content[at - length : at])
        if state.members is None or set(state.members) != set(state.disks):
            raise FormatError("invalid list of members in a Raft snapshot", got=sorted(state.disks))
    return state, content[at:]
