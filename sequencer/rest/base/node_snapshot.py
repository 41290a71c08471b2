"""An immutable snapshot of a node, from which all views are made. Pure.

`state` is the cluster's: the same on every node at the same instruction. The rest is this node's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from statistics import median_low
from typing import Final, NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from rt.exposition import Histogram
from rt.log.format.segment_table import TrimReason
from rt.net.identity import Identity
from rt.v1 import sequencer_pb2 as pb
from sequencer.ipc.silence import HUNG_S, next_step
from sequencer.rest.base.admin_ports import NO_RESET, ResetStatus
from sequencer.state.apply_result import LeasesExpired, LeasesGranted, Outcome, SegmentsTrimmed
from sequencer.state.feature_level import MemberLevel, member_level
from sequencer.state.state import SequencerState

LAG_BYTES_MAX: Final = 64 * 2**20
"""A node whose merged log lags more than this is not ready."""


class ClientConnection(Struct, frozen=True):
    """One connection of a publisher or a puller to this node. Times are ns, 0: never."""

    identity: Identity
    address: str
    """host:port; empty: not known."""
    session: str | None
    """The session that is pushed; None for pulls."""
    connected_ns: int
    ended_ns: int = 0
    last_ns: int = 0
    """When bytes were last received or sent."""
    total_bytes: int = 0
    rate: float = 0.0
    """Recent bytes per second."""
    position: int = 0
    """Pushes: one past the last number durable here. Pulls: one past the last position pulled."""
    merged: int = 0
    """Pushes: one past the last number merged."""
    is_of_merged: bool = True
    """Pulls: whether the merged log is pulled, not a session's copy."""
    lag_ns: int = 0
    """Data has waited at least this long to be merged or pulled. 0: nothing waits."""
    incarnation: bytes = b""
    """Pushes: incarnation of the session."""
    session_id: int | None = None
    """Pulls of a session's copy: its id."""
    silent_s: float = 0.0
    """Pushes: for how long nothing arrived while this node waited for a message. If the connection has ended:
    at its end.
    """
    waiting_bytes: int = 0
    """Pushes: bytes that are on the publisher's disk and not synced here, as the push last reported."""
    stalled_s: float = 0.0
    """Pushes: for how long none of the `waiting_bytes` had been synced at that time."""
    unmerged_s: float = 0.0
    """Pushes: for how long no message of the session that was durable here was merged, while messages of
    other sessions were merged.
    """


class TrimCounter(Struct, frozen=True):
    """Trims that this process applied since it started; those applied again after a restart count again."""

    segments: Mapping[TrimReason, int] = field(default_factory=dict)
    size_bytes: Mapping[TrimReason, int] = field(default_factory=dict)
    overridden: int = 0
    """Holds overridden by trims; each hold counts once per trim."""

    def after(self, outcome: Outcome) -> TrimCounter:
        """The counts after a command with this outcome."""
        if not isinstance(outcome, SegmentsTrimmed):
            return self
        reason = outcome.reason
        segments = self.segments.get(reason, 0) + outcome.segments
        size_bytes = self.size_bytes.get(reason, 0) + outcome.size_bytes
        return TrimCounter(
            {**self.segments, reason: segments},
            {**self.size_bytes, reason: size_bytes},
            self.overridden + len(outcome.overridden),
        )


class DamageCounter(Struct, frozen=True):
    """Corrupt segments of this node's disk, since this process started."""

    found: int = 0
    repaired: int = 0
    last: str = ""
    """Path and offset of the last corrupt bytes, or the directory that was set aside because of corrupt
    bytes.
    """
    last_ns: int = 0
    """When the last corrupt bytes were found; 0: none are known. An earlier process may have found them, if
    it set a directory aside.
    """


class LeaseCounter(Struct, frozen=True):
    """Lease changes, counted like trims."""

    granted: int = 0
    renewed: int = 0
    released: int = 0
    expired: int = 0

    def after(self, outcome: Outcome) -> LeaseCounter:
        """The counts after a command with this outcome."""
        match outcome:
            case LeasesGranted(granted=granted, renewed=renewed, released=released):
                return LeaseCounter(
                    self.granted + granted, self.renewed + renewed, self.released + released, self.expired
                )
            case LeasesExpired(names):
                return replace(self, expired=self.expired + len(names))
            case _:
                return self


class Counts(Struct, frozen=True):
    """Counts since this process started."""

    push_bytes: int = 0
    pull_bytes: int = 0
    push_streams: int = 0
    pull_streams: int = 0
    refused: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """By interface (push, pull, grpc, rest, health) and by the error's class."""
    requests: Mapping[tuple[str, int], int] = field(default_factory=dict)
    """Answers by port (rest, health) and HTTP status."""
    syncs: Histogram = field(default_factory=Histogram)
    """Seconds of each fsync of session copies."""
    cpu_s: float = 0.0
    memory_bytes: int = 0
    certificate_end_s: float = 0.0
    """When the node's certificate expires, seconds since 1970; 0: it has none."""
    trims: TrimCounter = field(default_factory=TrimCounter)
    refused_holds: Mapping[str, str] = field(default_factory=dict)
    """Why holds were refused, by name of the subscriber; only subscribers of this node."""
    leases: LeaseCounter = field(default_factory=LeaseCounter)
    damage: DamageCounter = DamageCounter()
    overtaken: int = 0
    """Subscribers that had to skip forward because the data they needed next was trimmed."""


class MergeStatus(Struct, frozen=True):
    instruction: int
    position: int
    durable_position: int
    is_behind_gap: bool = False
    """Whether the merger copies the bytes before its next instruction from another node."""
    damage: str = ""
    """Why the merged log cannot be opened before it is repaired."""
    waits_for: str = ""
    """The input that the merger waits for; empty: none."""
    failure: str = ""


class DamagedSegment(Struct, frozen=True):
    """A segment of this node's merged log that fails verification from `offset` on.

    It contains positions [first, end). `tries`: number of rounds in which no peer had good bytes.
    """

    name: str
    offset: int
    first: int
    end: int
    tries: int
    is_growing: bool


class UnopenedReplica(NamedTuple):
    """A session replica of this node that cannot be opened, and why. The node tries again."""

    session: str
    error: str


class SilentPublisher(NamedTuple):
    """A publisher that published nothing for longer than it promised."""

    session: str
    silent_s: float
    """As far as this node knows: silence is counted from the start of the node."""
    limit_s: float


class NodeSnapshot(Struct, frozen=True):
    stream: str
    node: str
    now_ns: int
    started_ns: int
    standing: pb.Standing
    """As the control process last reported; never changed in place."""
    is_control_up: bool = True
    control_silent_s: float = 0.0
    """Seconds since the last report of the control process, connected or not."""
    applied_index: int = 0
    state: SequencerState | None = None
    """A copy; None before the first snapshot."""
    merging: MergeStatus | None = None
    damaged: tuple[DamagedSegment, ...] = ()
    unopened: tuple[UnopenedReplica, ...] = ()
    failure: str = ""
    """Why the data process failed; empty: it has not."""
    reset: ResetStatus = NO_RESET
    configured: frozenset[str] = frozenset()
    """Fields of the replicated configuration that this node's settings set. REST cannot change them."""
    clients: tuple[ClientConnection, ...] = ()
    silent: tuple[SilentPublisher, ...] = ()
    counts: Counts = Counts()

    @property
    def is_control_hung(self) -> bool:
        """Whether the control process is connected, but stopped or stuck."""
        return self.is_control_up and self.control_silent_s >= HUNG_S

    @property
    def clock_skews(self) -> dict[str, float]:
        """Seconds by which the clock of each member that reports is ahead of the median."""
        offsets = {
            one.name: one.clock_offset_s
            for one in self.standing.nodes
            if one.summary.clock_ns and self.report_age_s(one) < HUNG_S
        }
        middle = median_low(offsets.values()) if offsets else 0.0
        return {name: offset - middle for name, offset in sorted(offsets.items())}

    def report_age_s(self, member: pb.NodeStanding) -> float:
        """Seconds since the last report of a member arrived here; -1: none did."""
        return member.summary_age_s + self.control_silent_s if member.HasField("summary") else -1.0

    @property
    def member_levels(self) -> list[MemberLevel]:
        """What each member reported of its program."""
        return [
            member_level(one.name, one.summary, is_current=0.0 <= self.report_age_s(one) < HUNG_S)
            for one in self.standing.nodes
        ]

    @property
    def lag(self) -> tuple[int, int]:
        """Committed messages, and approximately bytes, that this node has not merged."""
        if self.state is None:
            return 0, 0
        position = 0 if self.merging is None else self.merging.position
        return max(self.state.position - position, 0), RetainedSize(self.state).bytes_from(position)


class _Piece(NamedTuple):
    first: int
    end: int
    size: int


class RetainedSize:
    """Retained segments of a state, including the active one. Build once per state."""

    def __init__(self, state: SequencerState) -> None:
        pieces = [_Piece(one.first, one.end, one.size_bytes) for one in state.segments if not one.is_trimmed]
        merged = state.merged
        if merged.segment is not None:
            pieces.append(_Piece(merged.first, state.position, merged.offset))
        self._pieces = pieces
        self._ends = [piece.end for piece in pieces]
        self._bytes_up_to = [0, *accumulate(piece.size for piece in pieces)]

    @property
    def segments(self) -> int:
        return len(self._pieces)

    @property
    def total_bytes(self) -> int:
        return self._bytes_up_to[-1]

    def bytes_from(self, position: int) -> int:
        """Approximate bytes from `position` to the end; exact at segment boundaries."""
        at = bisect_right(self._ends, position)
        if at == len(self._pieces):
            return 0
        first, end, size = self._pieces[at]
        rest = size if position <= first else size * (end - position) // (end - first)
        return rest + self.total_bytes - self._bytes_up_to[at + 1]


def defects(node: NodeSnapshot) -> list[str]:
    """Why this node must be restarted if its condition does not change; empty: it works. The texts are
    public: no paths.
    """
    merging = node.merging
    hung = f"control-hung: the control process has not answered for {node.control_silent_s:.0f} s."
    reasons: list[tuple[bool, str]] = [
        (bool(node.failure), "the data process has failed"),
        (node.is_control_hung, f"{hung} {next_step('control', node.node)}"),
        (merging is not None and bool(merging.failure), "the merger has failed"),
    ]
    return [reason for is_so, reason in reasons if is_so]


def obstacles(node: NodeSnapshot) -> list[str]:
    """Why this node is not ready; empty: it is ready. The texts are public: no paths."""
    standing = node.standing
    reasons: list[tuple[bool, str]] = [
        (not node.is_control_up, "the control process is not connected"),
        (not standing.leader, "no leader is known"),
        (standing.role not in {"leader", "follower"}, "this node is neither leader nor follower"),
        (not standing.is_caught_up, "no entry of the current term was applied yet"),
        (node.state is None or node.merging is None, "the state of the cluster was not received yet"),
        (node.merging is not None and bool(node.merging.damage), "the merged log is corrupt"),
        (node.merging is not None and node.merging.is_behind_gap, "the merged log is being copied"),
        (node.lag[1] > LAG_BYTES_MAX, "the merged log lags too far"),
    ]
    return [*defects(node), *(reason for is_so, reason in reasons if is_so)]
