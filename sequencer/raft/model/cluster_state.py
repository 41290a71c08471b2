"""What the committed log has decided about the cluster itself: its disks, and which commands were applied.

Pure and the same on every node at the same place. The law: `apply` is total; a command is given out once and
in its proposer's order, however often and in whatever order its entry was committed.

In a snapshot it stands before the state machine's own bytes, little-endian:

    offset  bytes  field
         0      8  magic "RTRAFTST"
         8      2  version
        10      2  count of members
        12      4  count of proposers
        16     16  cluster id
        32      8  epoch
        40      8  commands so far
        48     16  last entry applied: index, term
        64      4  chain: running checksum of the entries applied
        68      4  0
        72         members, by name: u8 length, name, disk (16), index and term of its join (8 + 8)
                   proposers, by disk: disk (16), life (8), next sequence (8), count (8),
                       then so often: sequence (8), index of its first command (8)
                   the state machine's bytes
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from crc32c import crc32c

from rt.errors import FormatError, UnknownVersion
from sequencer.raft.model.entry_codec import Commands, JoinEntry, NoOp, ResetEntry, decode_content
from sequencer.raft.model.messages import DiskClaim, LogIndex, RaftEntry

INITIAL: Final = LogIndex(1, 1)
"""Where the log of a new cluster begins: its first snapshot stands for this entry, and admits all disks."""

_MAGIC = b"RTRAFTST"
_VERSION = 1
_HEADER = struct.Struct("<8sHHI16sQQQQII")
_MEMBER = struct.Struct("<16sQQ")
_PROPOSER = struct.Struct("<16sQQQ")
_PAIR = struct.Struct("<QQ")


@dataclass(slots=True)
class ProposerState:
    """How far one disk's commands are applied, in the newest life that was heard of."""

    life: int
    next: int = 1
    """The only sequence that may come next: a pack that was overtaken is proposed again."""
    firsts: dict[int, int] = field(default_factory=dict)
    """Index of the first command of each applied pack, until the proposer is known to know it."""


class PackApplied(NamedTuple):
    """What became of a pack: `first` is the index of its first command, None if it is not to be carried out.

    Then it was carried out before, or packs that come before it are missing, or it is not a member's.
    """

    pack: Commands
    first: int | None


class EpochEnded(NamedTuple):
    """The epoch is over; its last command has this index."""

    index: int  # type: ignore[assignment]  # hides the tuple's method
    command: bytes


@dataclass(slots=True)
class ClusterState:
    """The replicated part that consensus itself needs."""

    cluster: bytes
    epoch: int
    disks: dict[str, DiskClaim]
    """For each member the disk that counts, and where it joined. The names never change in an epoch."""
    index: int = 0
    """Commands given out so far."""
    applied: LogIndex = INITIAL
    chain: int = 0
    proposers: dict[bytes, ProposerState] = field(default_factory=dict)

    def apply(self, entry: RaftEntry) -> PackApplied | EpochEnded | None:
        """Take the next entry; what became of its commands, None if it holds none.

        Behind `EpochEnded` comes nothing more: the next epoch begins with this state.
        """
        assert entry.index == self.applied.index + 1, (entry.place, self.applied)
        self.applied = entry.place
        self.chain = crc32c(entry.content, crc32c(_PAIR.pack(*entry.place), self.chain))
        content = decode_content(entry.content)
        match content:
            case Commands():
                return PackApplied(content, self._apply_commands(content))
            case JoinEntry():
                self._apply_join(content, entry.place)
            case ResetEntry() if content.epoch == self.epoch:
                self.index += 1
                return EpochEnded(self.index, content.command)
            case ResetEntry():
                pass
            case NoOp():
                pass
        return None

    def first_index(self, disk: bytes, life: int, sequence: int) -> int | None:
        """The index of the first command of an applied pack; None if it was not applied, or is forgotten."""
        proposer = self.proposers.get(disk)
        return proposer.firsts.get(sequence) if proposer is not None and proposer.life == life else None

    def _apply_commands(self, pack: Commands) -> int | None:
        if all(claim.disk != pack.disk for claim in self.disks.values()):
            return None  # Not a member's disk, or not any more.
        proposer = self.proposers.get(pack.disk)
        if proposer is None or proposer.life < pack.life:
            proposer = self.proposers[pack.disk] = ProposerState(pack.life)
        if proposer.life != pack.life:
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
            return  # No member; or asked for twice, and where it joined first is where it joined.
        self.disks[join.name] = DiskClaim(join.disk, place)


def initial_state(cluster: bytes, epoch: int, disks: dict[str, bytes]) -> ClusterState:
    """The state of a new cluster with these disks, all of them members from the start."""
    return ClusterState(cluster, epoch, {name: DiskClaim(disk, INITIAL) for name, disk in disks.items()})


def encode_state(state: ClusterState) -> bytes:
    """The bytes that stand before the machine's in a snapshot."""
    parts = [
        _HEADER.pack(
            *(_MAGIC, _VERSION, len(state.disks), len(state.proposers), state.cluster, state.epoch),
            *(state.index, *state.applied, state.chain, 0),
        )
    ]
    for name, claim in sorted(state.disks.items()):
        parts += [bytes([len(name)]), name.encode(), _MEMBER.pack(claim.disk, *claim.joined)]
    for disk, proposer in sorted(state.proposers.items()):
        parts.append(_PROPOSER.pack(disk, proposer.life, proposer.next, len(proposer.firsts)))
        parts += [_PAIR.pack(*pair) for pair in sorted(proposer.firsts.items())]
    return b"".join(parts)


def decode_state(content: bytes) -> tuple[ClusterState, bytes]:
    """The cluster's state and the machine's bytes in a snapshot; `rt.FormatError` if they are not there."""
    try:
        return _decode(content)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise FormatError("malformed state in a Raft snapshot", got=str(error)) from error


def _decode(content: bytes) -> tuple[ClusterState, bytes]:
    magic, version, members, proposers, cluster, epoch, index, *rest = _HEADER.unpack_from(content)
    at, (entry_index, term, chain, _) = _HEADER.size, rest
    if magic != _MAGIC:
        raise FormatError("wrong magic in the state of a Raft snapshot", got=magic, expected=_MAGIC)
    if version != _VERSION:
        raise UnknownVersion(
            "unknown version of the state in a Raft snapshot", got=version, expected=_VERSION
        )
    state = ClusterState(cluster, epoch, {}, index, LogIndex(entry_index, term), chain)
    for _ in range(members):
        start = at + 1
        at = start + content[at]
        disk, *place = _MEMBER.unpack_from(content, at)
        state.disks[content[start:at].decode("ascii")] = DiskClaim(disk, LogIndex(*place))
        at += _MEMBER.size
    for _ in range(proposers):
        disk, life, following, count = _PROPOSER.unpack_from(content, at)
        at += _PROPOSER.size
        pairs = _PAIR.iter_unpack(content[at : at + _PAIR.size * count])
        proposer = state.proposers[disk] = ProposerState(life, following, dict(pairs))
        at += _PAIR.size * count
        if len(proposer.firsts) != count:
            raise FormatError("truncated list of proposers in a Raft snapshot", got=len(proposer.firsts))
    return state, content[at:]
