"""The commands of the Raft log, as values. A malformed command cannot be constructed.

Pure. `apply` decides whether a command fits the state; `command_codec` encodes and decodes it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final, TypeAlias

from msgspec import Struct

from rt.log.format.constants import NUMBER_MAX
from rt.log.format.segment import SEGMENT_HEADER_BYTES
from rt.log.format.segment_table import TrimReason
from rt.names import check_hold_name, check_name
from sequencer.state.configuration import CONFIGURABLE
from sequencer.state.leases.leases import AcquireLeases, ExpireLeases, ReleaseLeases, RenewLeases
from sequencer.state.leases.requests import PostRequest
from sequencer.state.leases.tables import DeleteTable, WriteTable
from sequencer.state.operations.membership import (
    ADDRESS_CHARACTERS_MAX,
    CancelMembers,
    RequestMembers,
    SettleMembers,
)
from sequencer.state.session_commands import (
    CloseRun,
    CloseSession,
    FenceRun,
    Forget,
    LimitSilence,
    OpenRun,
    OpenSealedRuns,
)
from sequencer.state.state import REQUEST_BYTES

RANGES_MAX: Final = 1024
COUNT_MAX: Final = 2**32 - 1
"""Maximum number of messages of one range. All of them may have to be skipped, and a block header counts
skipped messages in 32 bits.
"""
DISK_BYTES: Final = 16
REFUSED_MAX: Final = 1000
"""Maximum number of characters of the reason with which a leader refuses a request."""
TRIM_REASONS: Final = frozenset(
    {TrimReason.TIME, TrimReason.SIZE, TrimReason.DISK, TrimReason.REQUEST, TrimReason.RESET}
)
"""The reasons for which a cluster trims its merged log."""


class MergeRange(Struct, frozen=True):
    """Whole batches of one segment of a session: `start` to `end`, messages `first` to `first + count`.

    `chain_start` and `chain_end` are the segment's running checksum at the two offsets.
    """

    session_id: int
    run: int
    roll: int
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


class MergeInstruction(Struct, frozen=True):
    """A merge instruction: the ranges that come next, ordered by session id. Ranges of a session are in its
    order.
    """

    number: int
    sequenced_ns: int
    ranges: tuple[MergeRange, ...]

    def __post_init__(self) -> None:
        _check_instruction(self.number, self.sequenced_ns)
        if not 1 <= len(self.ranges) <= RANGES_MAX:
            raise ValueError(f"{len(self.ranges)} ranges: 1 to {RANGES_MAX}")
        places = [(one.session_id, one.run, one.roll, one.start) for one in self.ranges]
        if any(earlier >= later for earlier, later in pairwise(places)):
            raise ValueError(f"ranges are not ordered by session: {[place[0] for place in places]}")


class Roll(Struct, frozen=True):
    """An instruction that merges nothing: it seals the merged segment log.X.Y and starts the next one."""

    number: int
    run: int
    roll: int
    sequenced_ns: int

    def __post_init__(self) -> None:
        _check_instruction(self.number, self.sequenced_ns)


class Configure(Struct, frozen=True):
    """Change replicated settings; None leaves a setting as it is. See `Configuration`."""

    roll_bytes: int | None = None
    roll_minutes: int | None = None
    session_bytes_max: int | None = None
    retention_minutes: int | None = None
    retention_bytes: int | None = None
    retention_disk_percent: int | None = None
    hold_bytes_max: int | None = None
    sessions_max: int | None = None
    sessions_per_name_max: int | None = None
    session_idle_minutes: int | None = None

    def __post_init__(self) -> None:
        for name, value in self.changes.items():
            least, end = CONFIGURABLE[name]
            if not least <= value < end:
                raise ValueError(f"a configuration with {name} {value}, not {least} to {end - 1}")

    @property
    def changes(self) -> dict[str, int]:
        """The changed settings, by name."""
        return {name: value for name in CONFIGURABLE if (value := getattr(self, name)) is not None}


class JoinDisk(Struct, frozen=True):
    """A node keeps its session replicas on that disk from now on.

    `address`: host:port of its gRPC server, from feature level 2 on; empty if it is not reported.
    """

    node: str
    disk: bytes
    address: str = ""

    def __post_init__(self) -> None:
        check_name(self.node, kind="node")
        if len(self.disk) != DISK_BYTES:
            raise ValueError(f"disk id of {len(self.disk)} bytes")
        if len(self.address) > ADDRESS_CHARACTERS_MAX:
            raise ValueError(f"an address of {len(self.address)} characters")


class RestoreDisk(Struct, frozen=True):
    """The node's disk has the bytes that were lost with the previous disk: see
    `sequencer.leader.session_close`.
    """

    node: str
    disk: bytes

    def __post_init__(self) -> None:
        JoinDisk(self.node, self.disk)  # This checks the node and the disk.


class TrimSegments(Struct, frozen=True):
    """Trim every sealed merged segment that ends at or before `up_to`, as far as the reason allows."""

    up_to: int
    reason: TrimReason
    trimmed_ns: int
    """For a trim by age: the time that the clocks of a majority have reached. For other reasons, it is only a
    label.
    """

    def __post_init__(self) -> None:
        if not 0 <= self.up_to < NUMBER_MAX:
            raise ValueError(f"no position: {self.up_to}")
        if self.reason not in TRIM_REASONS:
            raise ValueError(f"a trim of the merged log for reason {self.reason.name}")
        if not 1 <= self.trimmed_ns < 2**63:
            raise ValueError(f"trimmed at {self.trimmed_ns} ns")


class HoldPosition(Struct, frozen=True):
    """A named subscriber has all messages below `position`. The messages from `position` on are kept for
    it.
    """

    name: str
    position: int
    at_ns: int

    def __post_init__(self) -> None:
        check_hold_name(self.name)
        if not 0 <= self.position < NUMBER_MAX or not 0 <= self.at_ns < 2**63:
            raise ValueError(f"a hold at position {self.position}, {self.at_ns} ns")


class ReleaseHold(Struct, frozen=True):
    """Remove a subscriber's hold."""

    name: str

    def __post_init__(self) -> None:
        check_hold_name(self.name)


class ResetGroup(Struct, frozen=True):
    """Move all positions of a group without members to `position`, also back, or delete them."""

    group: str
    position: int
    at_ns: int
    is_deletion: bool = False

    def __post_init__(self) -> None:
        check_name(self.group, kind="group")
        if not 0 <= self.position < NUMBER_MAX or not 0 <= self.at_ns < 2**63:
            raise ValueError(f"a group at position {self.position}, {self.at_ns} ns")


class RaiseFeatureLevel(Struct, frozen=True):
    """Permit what the levels up to `level` introduce: see `sequencer.state.feature_level`."""

    level: int

    def __post_init__(self) -> None:
        if not 2 <= self.level < 2**32:
            raise ValueError(f"no feature level to raise to: {self.level}")


Operation: TypeAlias = (
    Configure
    | TrimSegments
    | ReleaseHold
    | ResetGroup
    | DeleteTable
    | CloseSession
    | RaiseFeatureLevel
    | RequestMembers
    | CancelMembers
)


class SubmitRequest(Struct, frozen=True):
    """A request of an operator: see `sequencer.state.operations.operator_requests`."""

    id: bytes
    until_ns: int
    """The request is not executed after this time, by the nodes' clocks."""
    operation: Operation

    def __post_init__(self) -> None:
        _check_request(self.id, self.until_ns)


class DecideRequest(Struct, frozen=True):
    """Execute a request, unless it is too late by the nodes' clocks, or the leader refuses it."""

    id: bytes
    at_ns: int
    refused: str = ""
    """Why the leader refuses the request; empty if it does not refuse it."""

    def __post_init__(self) -> None:
        _check_request(self.id, self.at_ns)
        if len(self.refused) > REFUSED_MAX:
            raise ValueError(f"a reason of {len(self.refused)} characters")


class ResetCluster(Struct, frozen=True):
    """Continue in another epoch. A hard reset drops everything merged and everything that was waiting."""

    is_hard: bool
    epoch: int
    """The next epoch."""
    at_ns: int
    """When it was requested, by the clock of the node that received the request."""
    request: bytes
    forced_by: str = ""
    """The node that decided it alone, without a majority; empty if a majority did."""

    def __post_init__(self) -> None:
        if not 1 <= self.epoch < 2**32 or not 0 <= self.at_ns < 2**63:
            raise ValueError(f"a reset to epoch {self.epoch} at {self.at_ns} ns")
        _check_request(self.request)
        if self.forced_by:
            check_name(self.forced_by, kind="node")


def _check_instruction(number: int, sequenced_ns: int) -> None:
    if not 1 <= number < NUMBER_MAX or not 0 <= sequenced_ns < 2**63:
        raise ValueError(f"no instruction: number {number}, at {sequenced_ns} ns")


def _check_request(request: bytes, at_ns: int = 1) -> None:
    if len(request) != REQUEST_BYTES or not 1 <= at_ns < 2**63:
        raise ValueError(f"request id of {len(request)} bytes, at {at_ns} ns")


Command: TypeAlias = (
    MergeInstruction
    | OpenRun
    | OpenSealedRuns
    | FenceRun
    | CloseRun
    | Roll
    | JoinDisk
    | RestoreDisk
    | SettleMembers
    | HoldPosition
    | Forget
    | LimitSilence
    | Operation
    | SubmitRequest
    | DecideRequest
    | ResetCluster
    | AcquireLeases
    | RenewLeases
    | ReleaseLeases
    | ExpireLeases
    | WriteTable
    | PostRequest
)
