"""Write plans: a merge instruction as every node executes it, byte for byte.

Pure. `apply` makes them, the merger executes them, a snapshot contains those not yet merged durably.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rt.log.format.segment import SegmentId
from rt.v1 import sequencer_pb2 as pb


class SessionEnd(NamedTuple):
    """A place in a session: offset of `log.X.Y`, before message `number`."""

    session_id: int
    run: int
    roll: int
    offset: int
    number: int


@dataclass(frozen=True, slots=True)
class BlockWrite:
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


@dataclass(frozen=True, slots=True)
class WritePlan:
    """What an instruction writes: at `offset` of the merged segment, 0 if it starts the segment.

    If `offset` is `end_offset`, it writes nothing. Both are 0, with no segment, before the first segment.
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
    """How far sessions are consumed after it, also by ranges without a block."""


def encode_write_plan(plan: WritePlan) -> bytes:
    message = pb.WritePlan(
        instruction=plan.instruction,
        sequenced_ns=plan.sequenced_ns,
        run=plan.segment.run,
        roll=plan.segment.roll,
        offset=plan.offset,
        first_position=plan.first_position,
        end_position=plan.end_position,
        chain=plan.chain,
        bytes=plan.total_bytes,
        end=plan.end_offset,
    )
    for block in plan.blocks:
        message.blocks.add(
            head=block.head,
            is_declaration=block.is_declaration,
            session_id=block.session_id,
            run=block.run,
            roll=block.roll,
            start=block.start,
            end=block.end,
            chain_end=block.chain_end,
            count=block.message_count,
        )
    for end in plan.consumed:
        message.consumed.add(
            session_id=end.session_id, run=end.run, roll=end.roll, offset=end.offset, number=end.number
        )
    return message.SerializeToString(deterministic=True)


def decode_write_plan(data: bytes) -> WritePlan:
    """Decode the bytes of `encode_write_plan`, which come from this node's own processes."""
    message = pb.WritePlan.FromString(data)
    return WritePlan(
        message.instruction,
        message.sequenced_ns,
        SegmentId(message.run, message.roll),
        message.offset,
        message.first_position,
        message.end_position,
        tuple(
            BlockWrite(
                b.head, b.is_declaration, b.session_id, b.run, b.roll, b.start, b.end, b.chain_end, b.count
            )
            for b in message.blocks
        ),
        message.chain,
        message.bytes,
        message.end,
        tuple(SessionEnd(e.session_id, e.run, e.roll, e.offset, e.number) for e in message.consumed),
    )
