"""Write plans: a merge instruction as every node executes it, byte for byte.

Pure. `apply` makes them, the merger executes them, and a snapshot contains the plans that are not merged
durably yet.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from msgspec import Struct

from rt.log.format.segment import SegmentId
from rt.message_codec import MessageCodec, inlined
from rt.v1 import sequencer_pb2 as pb

PLANS_MAX: Final = 1 << 16
"""Maximum number of plans that wait for input or disk space: about 100 MB, if each has a few ranges."""
PLANS_BYTES_MAX: Final = 2 << 30
"""Maximum number of merged bytes that kept plans write. It bounds the number of their ranges: a plan may have
1,024, each of 400 bytes in memory. A node that needs older plans copies the bytes from other nodes. The limit
is twice the leader's limit. This ensures that a majority has the bytes durably.
"""


class SessionEnd(NamedTuple):
    """An end in a session: offset of segment `log.X.Y`, before message `number`."""

    session_id: int
    run: int
    roll: int
    offset: int
    number: int


class BlockWrite(Struct, frozen=True):
    """A declaration (`head` is all of it), or the header of a block and the source range after it."""

    head: bytes
    is_declaration: bool = False
    session_id: int = 0
    run: int = 0
    roll: int = 0
    start: int = 0
    end: int = 0
    chain_end: int = 0
    message_count: int = 0
    """Messages merged, without the skipped ones."""

    @property
    def size(self) -> int:
        """Size of the source range."""
        return self.end - self.start

    @property
    def size_bytes(self) -> int:
        """Size of the block in the merged log."""
        return len(self.head) + self.size


class WritePlan(Struct, frozen=True):
    """The bytes that an instruction writes at `offset` of the merged segment. `offset` is 0 if it starts the
    segment.

    If `offset` equals `end_offset`, the instruction writes nothing. Both are 0, with no segment, before the
    first segment.
    """

    instruction: int
    sequenced_ns: int
    segment: SegmentId
    offset: int
    first_position: int
    end_position: int
    blocks: tuple[BlockWrite, ...]
    chain: int
    """The merged running checksum after it."""
    total_bytes: int
    """Size of all merged segments after it."""
    end_offset: int
    consumed: tuple[SessionEnd, ...]
    """The ends up to which sessions are consumed after the instruction, also by ranges without a block."""


def encode_write_plan(plan: WritePlan) -> bytes:
    return pb.WritePlan(**_PLAN.encode(plan)).SerializeToString(deterministic=True)


def decode_write_plan(data: bytes) -> WritePlan:
    """Decode the bytes of `encode_write_plan`, which come from this node's own processes."""
    return _PLAN.decode(pb.WritePlan.FromString(data))


_PLAN: Final = MessageCodec(WritePlan, pb.WritePlan, segment=inlined(MessageCodec(SegmentId, pb.WritePlan)))


def take_surplus(plans: deque[WritePlan]) -> list[WritePlan]:
    """Remove and return the oldest waiting plans above the limits."""
    surplus: list[WritePlan] = []
    while plans and (
        len(plans) > PLANS_MAX or plans[0].total_bytes < plans[-1].total_bytes - PLANS_BYTES_MAX
    ):
        surplus.append(plans.popleft())
    return surplus
