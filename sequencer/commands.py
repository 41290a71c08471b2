"""The commands of the Raft log, as values and as bytes.

Pure. The law: what decodes is well-formed, whoever sent it; whether it fits the state, `apply` says.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, TypeAlias, assert_never

from google.protobuf.message import DecodeError

from rt.errors import FormatError, InvalidName, UnknownVersion
from rt.log.layout import NEWER_HINT, NUMBER_MAX
from rt.log.segment import SEGMENT_HEADER_BYTES
from rt.log.table import TrimReason
from rt.names import check_dedup_id, check_name, check_session_name
from rt.v1 import sequencer_pb2 as pb
from sequencer.lease_commands import (
    AcquireLeases,
    ExpireLeases,
    HeldLease,
    IdleLease,
    ReleaseLeases,
    RenewLeases,
)
from sequencer.state import CONFIGURABLE, REQUEST_BYTES

VERSION: Final = 1
RANGES_MAX: Final = 1024
COUNT_MAX: Final = 2**32 - 1
"""Messages of one range: all of them may have to be skipped, and a block header counts those in 32 bits."""
INCARNATION_BYTES: Final = 16
LIFE_BYTES: Final = 8
DISK_BYTES: Final = 16
_UINT32_END: Final = 1 << 32


@dataclass(frozen=True, slots=True)
class Range:
    """Whole batches of one segment of a session: `start` to `end`, messages `first` to `first + count`.

    `chain_start` and `chain_end` are the segment's chain at the two offsets.
    """

    session_id: int
    x: int
    y: int
    start: int
    end: int
    first: int
    count: int
    chain_start: int
    chain_end: int

    def __post_init__(self) -> None:
        if not SEGMENT_HEADER_BYTES <= self.start < self.end < NUMBER_MAX or self.start % 8 or self.end % 8:
            raise ValueError(f"no range of a segment: offsets {self.start} to {self.end}")
        if not 1 <= self.count <= COUNT_MAX or not 0 <= self.first < self.first + self.count < NUMBER_MAX:
            raise ValueError(f"no range of numbers: {self.count} from {self.first}")

    @property
    def end_number(self) -> int:
        """One past its last message."""
        return self.first + self.count


@dataclass(frozen=True, slots=True)
class Merge:
    """A merge instruction: which ranges come next, ordered by session id, at most one of a session."""

    number: int
    sequenced_ns: int
    ranges: tuple[Range, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.ranges) <= RANGES_MAX or not 1 <= self.number < NUMBER_MAX:
            raise ValueError(f"no instruction: number {self.number}, {len(self.ranges)} ranges")
        ids = [one.session_id for one in self.ranges]
        if any(earlier >= later for earlier, later in pairwise(ids)):
            raise ValueError(f"ranges are not ordered by session: {ids}")
        if not 0 <= self.sequenced_ns < 2**63:
            raise ValueError(f"sequenced at {self.sequenced_ns} ns")


@dataclass(frozen=True, slots=True)
class Open:
    """A publisher begins session number `x` of a session's incarnation, in the life with that random id."""

    session: str
    incarnation: bytes
    dedup_id: str | None
    x: int
    life: bytes
    newest: int = 0
    """The id of the newest incarnation that the proposer knew of the session; 0: none."""

    def __post_init__(self) -> None:
        check_session_name(self.session)
        if self.dedup_id is not None:
            check_dedup_id(self.dedup_id)
        if len(self.incarnation) != INCARNATION_BYTES or len(self.life) != LIFE_BYTES:
            raise ValueError(f"incarnation of {len(self.incarnation)} bytes, life of {len(self.life)}")
        if not 0 <= self.x < _UINT32_END or not 0 <= self.newest < _UINT32_END:
            raise ValueError(f"session number {self.x}")


@dataclass(frozen=True, slots=True)
class Fence:
    """From where this is applied on no node takes a further byte of the session's X."""

    session_id: int
    x: int


@dataclass(frozen=True, slots=True)
class Close:
    """The session's X ends at `offset` of segment `y`, in front of message `number`."""

    session_id: int
    x: int
    y: int
    offset: int
    number: int

    def __post_init__(self) -> None:
        is_boundary = SEGMENT_HEADER_BYTES <= self.offset < NUMBER_MAX and self.offset % 8 == 0
        if not is_boundary or not 0 <= self.number < NUMBER_MAX:
            raise ValueError(f"no end of a session: offset {self.offset}, number {self.number}")


@dataclass(frozen=True, slots=True)
class Roll:
    """An instruction that merges nothing: it seals the merged segment (x, y), and begins the next one."""

    number: int
    x: int
    y: int
    sequenced_ns: int

    def __post_init__(self) -> None:
        if not 1 <= self.number < NUMBER_MAX or not 0 <= self.sequenced_ns < 2**63:
            raise ValueError(f"no instruction: number {self.number}, at {self.sequenced_ns} ns")


@dataclass(frozen=True, slots=True)
class Configure:
    """Change the replicated configuration, by its names; None leaves a value as it is."""

    roll_bytes: int | None = None
    roll_minutes: int | None = None
    """0: never by age."""
    session_bytes_max: int | None = None
    time_minutes: int | None = None
    """0: nothing is trimmed by age."""
    limit_bytes: int | None = None
    """0: nothing is trimmed by size."""
    disk_percent: int | None = None
    """0: nothing is trimmed for want of space."""
    hold_limit_bytes: int | None = None
    """0: holds hold nothing back."""

    def __post_init__(self) -> None:
        for name, value in self.changes.items():
            least, end = CONFIGURABLE[name]
            if not least <= value < end:
                raise ValueError(f"a configuration with {name} {value}, not {least} to {end - 1}")

    @property
    def changes(self) -> dict[str, int]:
        """What it changes, by name."""
        values = ((name, getattr(self, name)) for name in CONFIGURABLE)
        return {name: value for name, value in values if value is not None}


@dataclass(frozen=True, slots=True)
class Join:
    """A node keeps its session copies on that disk from now on."""

    node: str
    disk: bytes

    def __post_init__(self) -> None:
        _check_disk(self.node, self.disk)


@dataclass(frozen=True, slots=True)
class Restore:
    """The node's disk holds again what was lost with the one before: see `sequencer.ends`."""

    node: str
    disk: bytes

    def __post_init__(self) -> None:
        _check_disk(self.node, self.disk)


@dataclass(frozen=True, slots=True)
class Trim:
    """Every sealed merged segment that ends at `up_to` or before is trimmed, as far as the reason holds."""

    up_to: int
    reason: TrimReason
    trimmed_ns: int
    """For age: the time that a majority's clocks have reached. Else only a label."""

    def __post_init__(self) -> None:
        if not 0 <= self.up_to < NUMBER_MAX:
            raise ValueError(f"no position: {self.up_to}")
        if self.reason not in TRIM_REASONS:
            raise ValueError(f"a trim of the merged log for reason {self.reason.name}")
        if not 1 <= self.trimmed_ns < 2**63:
            raise ValueError(f"trimmed at {self.trimmed_ns} ns")


TRIM_REASONS: Final = frozenset(
    {TrimReason.TIME, TrimReason.SIZE, TrimReason.DISK, TrimReason.REQUEST, TrimReason.RESET}
)
"""Why a cluster trims its merged log."""


@dataclass(frozen=True, slots=True)
class Hold:
    """A named subscriber has everything below `position`; what follows is held back for it."""

    name: str
    position: int
    at_ns: int

    def __post_init__(self) -> None:
        check_name(self.name, kind="subscriber")
        if not 0 <= self.position < NUMBER_MAX or not 0 <= self.at_ns < 2**63:
            raise ValueError(f"a hold at position {self.position}, {self.at_ns} ns")


@dataclass(frozen=True, slots=True)
class Release:
    """Nothing is held back any more for the subscriber of that name."""

    name: str

    def __post_init__(self) -> None:
        check_name(self.name, kind="subscriber")


Operation: TypeAlias = Configure | Trim | Release
"""What operators ask for."""


@dataclass(frozen=True, slots=True)
class Ask:
    """An operator asks for a command: see `sequencer.requests`."""

    id: bytes
    until_ns: int
    """By the nodes' clocks; later it is not carried out."""
    operation: Operation

    def __post_init__(self) -> None:
        _check_request(self.id, self.until_ns)


@dataclass(frozen=True, slots=True)
class Decide:
    """The leader has what was asked for carried out, if it is not too late by the nodes' clocks."""

    id: bytes
    at_ns: int

    def __post_init__(self) -> None:
        _check_request(self.id, self.at_ns)


@dataclass(frozen=True, slots=True)
class Reset:
    """The cluster goes on in another epoch; a hard one lets go of all that is merged and was to be."""

    is_hard: bool
    epoch: int
    """The one that begins."""
    at_ns: int
    """When it was asked for, by the clock of the node that was asked."""
    request: bytes
    """Names the request."""
    forced_by: str = ""
    """The node that decided it by itself, without a majority; empty if a majority did."""

    def __post_init__(self) -> None:
        if not 1 <= self.epoch < _UINT32_END or not 0 <= self.at_ns < 2**63:
            raise ValueError(f"a reset to epoch {self.epoch} at {self.at_ns} ns")
        if len(self.request) != REQUEST_BYTES:
            raise ValueError(f"request id of {len(self.request)} bytes")
        if self.forced_by:
            check_name(self.forced_by, kind="node")


def _check_request(request: bytes, at_ns: int) -> None:
    if len(request) != REQUEST_BYTES or not 1 <= at_ns < 2**63:
        raise ValueError(f"request id of {len(request)} bytes, at {at_ns} ns")


def _check_disk(node: str, disk: bytes) -> None:
    check_name(node, kind="node")
    if len(disk) != DISK_BYTES:
        raise ValueError(f"disk id of {len(disk)} bytes")


Command: TypeAlias = (
    Merge
    | Open
    | Fence
    | Close
    | Roll
    | Configure
    | Join
    | Restore
    | Trim
    | Hold
    | Release
    | Ask
    | Decide
    | Reset
    | AcquireLeases
    | RenewLeases
    | ReleaseLeases
    | ExpireLeases
)


def encode_command(command: Command) -> bytes:
    """The bytes of a command in the Raft log."""
    message = pb.Command(version=VERSION)
    match command:
        case Merge():
            message.merge.number, message.merge.sequenced_ns = command.number, command.sequenced_ns
            message.merge.ranges.extend(_encode_range(one) for one in command.ranges)
        case Open():
            message.open.session, message.open.incarnation = command.session, command.incarnation
            message.open.dedup_id = command.dedup_id or ""
            message.open.x, message.open.life = command.x, command.life
            message.open.newest = command.newest
        case Fence():
            message.fence.session_id, message.fence.x = command.session_id, command.x
        case Close():
            message.close.CopyFrom(
                pb.Close(
                    session_id=command.session_id,
                    x=command.x,
                    y=command.y,
                    offset=command.offset,
                    number=command.number,
                )
            )
        case Roll():
            message.roll.number, message.roll.sequenced_ns = command.number, command.sequenced_ns
            message.roll.x, message.roll.y = command.x, command.y
        case Configure():
            message.configure.CopyFrom(pb.Configure(**command.changes))
        case Join():
            message.join.node, message.join.disk = command.node, command.disk
        case Restore():
            message.restore.node, message.restore.disk = command.node, command.disk
        case Trim():
            message.trim.up_to = command.up_to
            message.trim.reason, message.trim.trimmed_ns = command.reason, command.trimmed_ns
        case Hold():
            message.hold.name, message.hold.position = command.name, command.position
            message.hold.at_ns = command.at_ns
        case Release():
            message.release.name = command.name
        case Ask():
            message.ask.id, message.ask.until_ns = command.id, command.until_ns
            message.ask.command = encode_command(command.operation)
        case Decide():
            message.decide.id, message.decide.at_ns = command.id, command.at_ns
        case Reset():
            message.reset.is_hard, message.reset.epoch = command.is_hard, command.epoch
            message.reset.at_ns, message.reset.request = command.at_ns, command.request
            message.reset.forced_by = command.forced_by
        case AcquireLeases():
            message.acquire_leases.CopyFrom(
                pb.AcquireLeases(
                    request=command.request,
                    owner=command.owner,
                    duration_ms=command.duration_ms,
                    names=command.names,
                )
            )
        case RenewLeases():
            message.renew_leases.request, message.renew_leases.owner = command.request, command.owner
            message.renew_leases.leases.extend(pb.HeldLease(**one._asdict()) for one in command.leases)
        case ReleaseLeases():
            message.release_leases.request, message.release_leases.owner = command.request, command.owner
            message.release_leases.leases.extend(pb.HeldLease(**one._asdict()) for one in command.leases)
        case ExpireLeases():
            message.expire_leases.leases.extend(pb.IdleLease(**one._asdict()) for one in command.leases)
        case _:
            assert_never(command)
    return message.SerializeToString(deterministic=True)


def decode_command(data: bytes) -> Command:
    """Read a command; `rt.FormatError` if it is none, `rt.UnknownVersion` if a newer rt wrote it."""
    message = pb.Command()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise FormatError("not a command of the sequencer", got=f"{len(data)} bytes") from error
    if message.version != VERSION:
        got = message.version
        raise UnknownVersion("command of an unknown version", got=got, wanted=VERSION, hint=NEWER_HINT)
    kind = message.WhichOneof("kind")
    try:
        match kind:
            case "merge":
                merge = message.merge
                return Merge(merge.number, merge.sequenced_ns, tuple(map(_decode_range, merge.ranges)))
            case "open":
                opened = message.open
                dedup_id = opened.dedup_id or None
                life = opened.x, opened.life, opened.newest
                return Open(opened.session, opened.incarnation, dedup_id, *life)
            case "fence":
                return Fence(message.fence.session_id, message.fence.x)
            case "close":
                close = message.close
                return Close(close.session_id, close.x, close.y, close.offset, close.number)
            case "roll":
                roll = message.roll
                return Roll(roll.number, roll.x, roll.y, roll.sequenced_ns)
            case "configure":
                wanted = message.configure
                return Configure(**{field.name: value for field, value in wanted.ListFields()})
            case "join":
                return Join(message.join.node, message.join.disk)
            case "restore":
                return Restore(message.restore.node, message.restore.disk)
            case "trim":
                trim = message.trim
                return Trim(trim.up_to, TrimReason(trim.reason), trim.trimmed_ns)
            case "hold":
                hold = message.hold
                return Hold(hold.name, hold.position, hold.at_ns)
            case "release":
                return Release(message.release.name)
            case "ask":
                return Ask(message.ask.id, message.ask.until_ns, decode_operation(message.ask.command))
            case "decide":
                return Decide(message.decide.id, message.decide.at_ns)
            case "reset":
                asked = message.reset
                return Reset(asked.is_hard, asked.epoch, asked.at_ns, asked.request, asked.forced_by)
            case "acquire_leases":
                acquire = message.acquire_leases
                return AcquireLeases(
                    acquire.request, acquire.owner, acquire.duration_ms, tuple(acquire.names)
                )
            case "renew_leases":
                renew = message.renew_leases
                return RenewLeases(renew.request, renew.owner, _held_leases(renew.leases))
            case "release_leases":
                free = message.release_leases
                return ReleaseLeases(free.request, free.owner, _held_leases(free.leases))
            case "expire_leases":
                idle = message.expire_leases.leases
                return ExpireLeases(tuple(IdleLease(one.name, one.token, one.renewals) for one in idle))
    except (ValueError, InvalidName) as error:
        raise FormatError(f"a command says what it cannot: {error}", got=kind) from error
    raise UnknownVersion("command of an unknown kind", hint=NEWER_HINT)


def decode_operation(data: bytes) -> Operation:
    """Read what an operator asked for; see `decode_command`."""
    command = decode_command(data)
    if not isinstance(command, Configure | Trim | Release):
        raise FormatError("a command that is not for operators", got=type(command).__name__)
    return command


def reset_of(data: bytes) -> Reset | None:
    """The reset that these bytes are; None if they are something else."""
    try:
        command = decode_command(data) if pb.Command.FromString(data).HasField("reset") else None
    except (DecodeError, FormatError):
        return None
    return command if isinstance(command, Reset) else None


def _held_leases(leases: Iterable[pb.HeldLease]) -> tuple[HeldLease, ...]:
    return tuple(HeldLease(one.name, one.token) for one in leases)


def _encode_range(one: Range) -> pb.Range:
    return pb.Range(
        session_id=one.session_id,
        x=one.x,
        y=one.y,
        start=one.start,
        end=one.end,
        first=one.first,
        count=one.count,
        chain_start=one.chain_start,
        chain_end=one.chain_end,
    )


def _decode_range(one: pb.Range) -> Range:
    return Range(
        one.session_id,
        one.x,
        one.y,
        one.start,
        one.end,
        one.first,
        one.count,
        one.chain_start,
        one.chain_end,
    )
