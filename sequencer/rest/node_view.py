"""A node at one moment, as the answers are made of it: values that nobody changes.

Pure. What is the cluster's stands in `state`, the same on every node at the same instruction; the rest is of
this node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from rt.net.identity import Identity
from rt.v1 import sequencer_pb2 as pb
from sequencer.rest.kept import Kept
from sequencer.rest.lease_counts import NO_LEASES, LeaseCounts
from sequencer.rest.operations import NO_RESET, ResetStatus
from sequencer.rest.trims import NO_TRIMS, Trims
from sequencer.state import State

LAG_BYTES_MAX: Final = 64 * 2**20
"""A node whose merged log is farther behind what is committed is not ready: others have more to give."""


@dataclass(frozen=True, slots=True)
class Client:
    """One connection of a publisher or a puller to this node. Times are ns, 0: never."""

    identity: Identity
    address: str
    """host:port, if it is known."""
    session: str | None
    """What is pushed; None for pulls."""
    connected_ns: int
    ended_ns: int = 0
    last_ns: int = 0
    """When bytes last came or went."""
    total_bytes: int = 0
    rate: float = 0.0
    """Bytes per second, of late."""
    position: int = 0
    """Pushes: one past the last number durable here. Pulls: one past the last position the puller has."""
    merged: int = 0
    """Pushes: one past the last number merged."""
    is_of_merged: bool = True
    """Pulls: of the merged log, not of a session's copy."""
    lag_ns: int = 0
    """So long at least something has waited to be merged, or pulled; 0: nothing waits."""
    incarnation: bytes = b""
    """Of the session that is pushed."""
    session_id: int | None = None
    """Of the copy that is pulled."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Observations by size; `counts[i]` are those up to `bounds[i]`, and one more counts the rest."""

    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = (0,)
    total: float = 0.0


@dataclass(frozen=True, slots=True)
class Counts:
    """What was counted since this process began."""

    push_bytes: int = 0
    pull_bytes: int = 0
    push_streams: int = 0
    pull_streams: int = 0
    refused: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """By where (push, pull, grpc, rest, health) and by the error's class."""
    requests: Mapping[tuple[str, int], int] = field(default_factory=dict)
    """Answers by port (rest, health) and HTTP status."""
    syncs: Histogram = Histogram()
    """Seconds of the syncs of session copies."""
    cpu_s: float = 0.0
    memory_bytes: int = 0
    certificate_end_s: float = 0.0
    """When the node's certificate expires, seconds since the epoch; 0: it has none."""
    trims: Trims = NO_TRIMS
    refused_holds: Mapping[str, str] = field(default_factory=dict)
    """Of subscribers of this node, by name: why nothing is held back for them."""
    leases: LeaseCounts = NO_LEASES
    overtaken: int = 0
    """Subscribers that had to skip forward, because what they wanted next was trimmed."""


@dataclass(frozen=True, slots=True)
class Merging:
    """How the merger is doing."""

    instruction: int
    position: int
    durable_position: int
    is_behind_gap: bool = False
    """Bytes before the next order come from another node."""
    damage: str = ""
    """Why the merged log cannot be opened before it is mended."""
    waits_for: str = ""
    """The input that it waits for."""
    failure: str = ""


@dataclass(frozen=True, slots=True)
class NodeView:
    """Everything that an answer may tell."""

    stream: str
    node: str
    now_ns: int
    started_ns: int
    standing: pb.Standing
    """As control last said; never changed in place."""
    is_control_up: bool = True
    applied_index: int = 0
    state: State | None = None
    """A copy; None before the first snapshot."""
    merging: Merging | None = None
    failure: str = ""
    """Why the data process ends."""
    reset: ResetStatus = NO_RESET
    configured: frozenset[str] = frozenset()
    """What the node's own settings say of the replicated configuration, by its names: only they change it."""
    clients: tuple[Client, ...] = ()
    counts: Counts = Counts()

    @property
    def lag(self) -> tuple[int, int]:
        """How many messages, and about how many bytes, this node's merged log is behind what is committed."""
        if self.state is None:
            return 0, 0
        position = 0 if self.merging is None else self.merging.position
        return max(self.state.position - position, 0), Kept(self.state).bytes_from(position)


def obstacles(node: NodeView) -> list[str]:
    """Why this node should get no traffic now; empty: it is ready. Constant words, for they are public."""
    standing = node.standing
    reasons: list[tuple[bool, str]] = [
        (bool(node.failure), "the data process has failed"),
        (not node.is_control_up, "the control process is not connected"),
        (not standing.leader, "no leader is known"),
        (standing.role not in {"leader", "follower"}, "this node neither leads nor follows"),
        (not standing.is_caught_up, "nothing of the present term was applied yet"),
        (node.state is None or node.merging is None, "the state of the cluster is not here yet"),
        (node.merging is not None and bool(node.merging.failure), "the merger has failed"),
        (node.merging is not None and bool(node.merging.damage), "the merged log is damaged"),
        (node.merging is not None and node.merging.is_behind_gap, "the merged log is being copied"),
        (node.lag[1] > LAG_BYTES_MAX, "the merged log is far behind"),
    ]
    return [reason for is_so, reason in reasons if is_so]
