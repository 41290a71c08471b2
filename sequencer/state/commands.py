"""The commands of the Raft log, as values. A malformed command cannot be constructed.

Pure. `apply` decides whether a command fits the state; `command_codec` encodes and decodes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, TypeAlias

from rt.log.format.constants import NUMBER_MAX
from rt.log.format.segment import SEGMENT_HEADER_BYTES
from rt.log.format.segment_table import TrimReason
from rt.names import check_dedup_id, check_name, check_session_name
from sequencer.state.lease_commands import AcquireLeases, ExpireLeases, ReleaseLeases, RenewLeases
from sequencer.state.state import CONFIGURABLE, REQUEST_BYTES, End

RANGES_MAX: Final = 1024
SEALED_RUNS_MAX: Final = 256
"""Maximum number of sealed runs that one command opens."""
LATER_MAX: Final = 256
"""Maximum number of runs, after the first one, that one command fences or closes."""
FORGET_MAX: Final = 1024
"""Sessions in one command."""
COUNT_MAX: Final = 2**32 - 1
"""Messages of one range. All may have to be skipped, and a block header counts these in 32 bits."""
INCARNATION_BYTES: Final = 16
RUN_ID_BYTES: Final = 8
DISK_BYTES: Final = 16
_UINT32_END: Final = 1 << 32


@dataclass(frozen=True, slots=True)
class MergeRange:
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


@dataclass(frozen=True, slots=True)
class MergeInstruction:
    """A merge instruction: which ranges come next, ordered by session id; those of a session in its order."""

    number: int
    sequenced_ns: int
    ranges: tuple[MergeRange, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.ranges) <= RANGES_MAX or not 1 <= self.number < NUMBER_MAX:
            raise ValueError(f"no instruction: number {self.number}, {len(self.ranges)} ranges")
        places = [(one.session_id, one.run, one.roll, one.start) for one in self.ranges]
        if any(earlier >= later for earlier, later in pairwise(places)):
            raise ValueError(f"ranges are not ordered by session: {[place[0] for place in places]}")
        if not 0 <= self.sequenced_ns < 2**63:
            raise ValueError(f"sequenced at {self.sequenced_ns} ns")


@dataclass(frozen=True, slots=True)
class OpenRun:
    """Open run number `run` of a session's incarnation, identified by the random `run_id`."""

    session: str
    incarnation: bytes
    dedup_id: str | None
    run: int
    run_id: bytes
    newest: int = 0
    """The id of the newest incarnation that the proposer knew of the session; 0: none."""

    def __post_init__(self) -> None:
        _check_incarnation(self.session, self.incarnation, self.dedup_id, self.newest)
        _check_run(self.run, self.run_id)


@dataclass(frozen=True, slots=True)
class SealedRun:
    """A run that ended, at `end`, on the publisher's disk before any byte of it was sent."""

    run: int
    run_id: bytes
    end: End

    def __post_init__(self) -> None:
        _check_run(self.run, self.run_id)
        _check_end(self.end.offset, self.end.number)


@dataclass(frozen=True, slots=True)
class OpenSealedRuns:
    """Open runs, in order, whose ends are known: see `sequencer.state.run_lifecycle`."""

    session: str
    incarnation: bytes
    dedup_id: str | None
    runs: tuple[SealedRun, ...]
    newest: int = 0
    """As in `OpenRun`."""

    def __post_init__(self) -> None:
        _check_incarnation(self.session, self.incarnation, self.dedup_id, self.newest)
        if not 1 <= len(self.runs) <= SEALED_RUNS_MAX:
            raise ValueError(f"{len(self.runs)} sealed runs: 1 to {SEALED_RUNS_MAX}")
        if any(earlier.run >= later.run for earlier, later in pairwise(self.runs)):
            raise ValueError(f"sealed runs are not in order: {[run.run for run in self.runs]}")

    @property
    def opens(self) -> Iterator[OpenRun]:
        """The commands that open the same runs without their ends."""
        for run in self.runs:
            yield OpenRun(self.session, self.incarnation, self.dedup_id, run.run, run.run_id, self.newest)


@dataclass(frozen=True, slots=True)
class FenceRun:
    """Fence runs: no node accepts another byte of them after this is applied."""

    session_id: int
    run: int
    later: tuple[int, ...] = ()
    """More runs of the session to fence."""

    def __post_init__(self) -> None:
        _check_later(self.run, self.later)


@dataclass(frozen=True, slots=True)
class CloseRun:
    """End a session's run at `offset` of segment `roll`, before message `number`."""

    session_id: int
    run: int
    roll: int
    offset: int
    number: int
    later: tuple[int, ...] = ()
    """Later runs of the session that end before their first byte."""
    announced: End | None = None
    """How far the publisher said that it has the run, if the proposer knows."""

    def __post_init__(self) -> None:
        _check_end(self.offset, self.number)
        if self.announced is not None:
            _check_end(self.announced.offset, self.announced.number)
        _check_later(self.run, self.later)


@dataclass(frozen=True, slots=True)
class Roll:
    """An instruction that merges nothing: it seals the merged segment log.X.Y and starts the next one."""

    number: int
    run: int
    roll: int
    sequenced_ns: int

    def __post_init__(self) -> None:
        if not 1 <= self.number < NUMBER_MAX or not 0 <= self.sequenced_ns < 2**63:
            raise ValueError(f"no instruction: number {self.number}, at {self.sequenced_ns} ns")


@dataclass(frozen=True, slots=True)
class Configure:
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
        values = ((name, getattr(self, name)) for name in CONFIGURABLE)
        return {name: value for name, value in values if value is not None}


@dataclass(frozen=True, slots=True)
class JoinDisk:
    """A node keeps its session replicas on that disk from now on."""

    node: str
    disk: bytes

    def __post_init__(self) -> None:
        check_name(self.node, kind="node")
        if len(self.disk) != DISK_BYTES:
            raise ValueError(f"disk id of {len(self.disk)} bytes")


@dataclass(frozen=True, slots=True)
class RestoreDisk:
    """The node's disk has what was lost with the disk before: see `sequencer.leader.session_close`."""

    node: str
    disk: bytes

    def __post_init__(self) -> None:
        JoinDisk(self.node, self.disk)  # Checks them.


@dataclass(frozen=True, slots=True)
class TrimSegments:
    """Trim every sealed merged segment that ends at or before `up_to`, as far as the reason allows."""

    up_to: int
    reason: TrimReason
    trimmed_ns: int
    """For age: the time that a majority's clocks have reached. Otherwise only a label."""

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
class HoldPosition:
    """A named subscriber has everything below `position`. Keep what follows for it."""

    name: str
    position: int
    at_ns: int

    def __post_init__(self) -> None:
        check_name(self.name, kind="subscriber")
        if not 0 <= self.position < NUMBER_MAX or not 0 <= self.at_ns < 2**63:
            raise ValueError(f"a hold at position {self.position}, {self.at_ns} ns")


@dataclass(frozen=True, slots=True)
class ReleaseHold:
    """Remove the hold of the subscriber with that name."""

    name: str

    def __post_init__(self) -> None:
        check_name(self.name, kind="subscriber")


@dataclass(frozen=True, slots=True)
class CloseSession:
    """Close the newest session of that name: abandon the rest of its open run."""

    session: str

    def __post_init__(self) -> None:
        check_session_name(self.session)


@dataclass(frozen=True, slots=True)
class Forget:
    """Delete the records of these closed sessions, which a majority has merged durably."""

    session_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.session_ids) <= FORGET_MAX:
            raise ValueError(f"{len(self.session_ids)} sessions to forget: 1 to {FORGET_MAX}")

    @property
    def brief(self) -> str:
        """Text for a log line."""
        return f"Forget({len(self.session_ids)} sessions, the first {self.session_ids[0]})"


Operation: TypeAlias = Configure | TrimSegments | ReleaseHold | CloseSession
"""What operators may request."""


@dataclass(frozen=True, slots=True)
class SubmitRequest:
    """A request of an operator: see `sequencer.state.operator_requests`."""

    id: bytes
    until_ns: int
    """By the nodes' clocks. It is not executed after this time."""
    operation: Operation

    def __post_init__(self) -> None:
        _check_request(self.id, self.until_ns)


@dataclass(frozen=True, slots=True)
class DecideRequest:
    """Execute a request, unless it is too late by the nodes' clocks."""

    id: bytes
    at_ns: int

    def __post_init__(self) -> None:
        _check_request(self.id, self.at_ns)


@dataclass(frozen=True, slots=True)
class ResetCluster:
    """Continue in another epoch. A hard reset drops everything merged and everything that was waiting."""

    is_hard: bool
    epoch: int
    """The next epoch."""
    at_ns: int
    """When it was requested, by the clock of the node that received the request."""
    request: bytes
    """Identifies the request."""
    forced_by: str = ""
    """The node that decided it alone, without a majority; empty if a majority did."""

    def __post_init__(self) -> None:
        if not 1 <= self.epoch < _UINT32_END or not 0 <= self.at_ns < 2**63:
            raise ValueError(f"a reset to epoch {self.epoch} at {self.at_ns} ns")
        if len(self.request) != REQUEST_BYTES:
            raise ValueError(f"request id of {len(self.request)} bytes")
        if self.forced_by:
            check_name(self.forced_by, kind="node")


def _check_incarnation(session: str, incarnation: bytes, dedup_id: str | None, newest: int) -> None:
    check_session_name(session)
    if dedup_id is not None:
        check_dedup_id(dedup_id)
    if len(incarnation) != INCARNATION_BYTES or not 0 <= newest < _UINT32_END:
        raise ValueError(f"incarnation of {len(incarnation)} bytes, newest session id {newest}")


def _check_run(run: int, run_id: bytes) -> None:
    if len(run_id) != RUN_ID_BYTES or not 0 <= run < _UINT32_END:
        raise ValueError(f"run {run} with an id of {len(run_id)} bytes")


def may_be_end(offset: int, number: int) -> bool:
    """Whether a segment can end there."""
    is_boundary = SEGMENT_HEADER_BYTES <= offset < NUMBER_MAX and offset % 8 == 0
    return is_boundary and 0 <= number < NUMBER_MAX


def _check_end(offset: int, number: int) -> None:
    if not may_be_end(offset, number):
        raise ValueError(f"no end of a session: offset {offset}, number {number}")


def _check_later(run: int, later: tuple[int, ...]) -> None:
    if len(later) > LATER_MAX:
        raise ValueError(f"{len(later)} later runs: at most {LATER_MAX}")
    if any(before >= after for before, after in pairwise((run, *later))):
        raise ValueError(f"runs are not in order: {run}, {later}")


def _check_request(request: bytes, at_ns: int) -> None:
    if len(request) != REQUEST_BYTES or not 1 <= at_ns < 2**63:
        raise ValueError(f"request id of {len(request)} bytes, at {at_ns} ns")


Command: TypeAlias = (
    MergeInstruction
    | OpenRun
    | OpenSealedRuns
    | FenceRun
    | CloseRun
    | Roll
    | Configure
    | JoinDisk
    | RestoreDisk
    | TrimSegments
    | HoldPosition
    | ReleaseHold
    | CloseSession
    | Forget
    | SubmitRequest
    | DecideRequest
    | ResetCluster
    | AcquireLeases
    | RenewLeases
    | ReleaseLeases
    | ExpireLeases
)
