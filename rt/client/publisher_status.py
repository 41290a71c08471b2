"""How the replication of a publisher stands, as one value. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from rt.errors import RtError
from rt.log.format.segment import SegmentId
from rt.sidecar.progress_file import Level, PublisherProgress
from rt.sidecar.push_protocol import EndpointStatus

ReplicationState: TypeAlias = Literal["local", "connecting", "replicating", "waiting", "blocked", "closed"]


@dataclass(frozen=True, slots=True)
class PublisherStatus:
    """How the replication of a publisher stands: the result of `Publisher.status`.

    `state` is one of these:

    - "local": the publisher has no endpoints.
    - "connecting": no attempt to connect has ended yet.
    - "replicating": a majority of the endpoints is connected.
    - "waiting": fewer are connected, which may pass by itself. `endpoints` says why.
    - "blocked": nothing is replicated until somebody mends the cause of `error`.
    - "closed": the publisher was closed.

    It began at `since_ns` (ns since the Unix epoch). `endpoints` has an `EndpointStatus` for each node.
    `unsent_messages` were published and are not replicated yet, also those of earlier runs in the directory.
    `unsent_bytes` are their bytes, estimated within a segment of which a part is replicated. `progress` is
    that of `Publisher.progress`.
    """

    state: ReplicationState
    since_ns: int
    error: RtError | None
    endpoints: tuple[EndpointStatus, ...]
    unsent_messages: int
    unsent_bytes: int
    progress: PublisherProgress


class SegmentExtent(NamedTuple):
    """Numbers `first` to `end` (exclusive) in `size_bytes` bytes of a segment."""

    id: SegmentId
    first: int
    end: int
    size_bytes: int


def unsent(segments: Iterable[SegmentExtent], replicated: Level) -> tuple[int, int]:
    """Messages and bytes of the segments above `replicated`.

    An earlier run is replicated completely before a later one begins.
    """
    messages = size_bytes = 0
    for segment in segments:
        count = segment.end - segment.first
        if replicated.run > segment.id.run or not count:
            continue
        left = count
        if replicated.run == segment.id.run:
            left = segment.end - min(max(replicated.number, segment.first), segment.end)
        messages += left
        size_bytes += segment.size_bytes * left // count
    return messages, size_bytes


def state_of(error: RtError | None, endpoints: tuple[EndpointStatus, ...]) -> ReplicationState:
    """The state of an open publisher with endpoints."""
    if error is not None:
        return "blocked"
    if 2 * sum(one.is_connected for one in endpoints) > len(endpoints):
        return "replicating"
    return "waiting" if any(one.error is not None for one in endpoints) else "connecting"


def reasons(endpoints: Iterable[EndpointStatus]) -> str:
    """Why each endpoint that is not connected failed; empty if none did."""
    return "; ".join(filter(None, (one.reason for one in endpoints)))
