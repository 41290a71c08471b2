"""The state machine that Raft drives: the replicated state, and the merge orders not durable here yet.

    snapshot: length of the state u32, the state, then each order: length u32, order

The law: whoever has the state has every order behind what this node has merged durably, so merged bytes can
always be made again; but for those so far behind that a majority has merged them durably. The consensus
thread uses it; only the encoding of a snapshot runs elsewhere.
"""

from __future__ import annotations

import hashlib
import logging
import struct
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from rt.errors import FormatError
from sequencer.state.apply import apply
from sequencer.state.apply_result import ClusterReset, CommandRejected, Outcome, RangesMerged
from sequencer.state.command_codec import decode_command
from sequencer.state.commands import Command
from sequencer.state.state import SequencerState
from sequencer.state.state_codec import decode_state, encode_state
from sequencer.state.write_plan import WritePlan, decode_order, encode_order

_LENGTH: Final = struct.Struct("<I")
TAIL_BYTES_MAX: Final = 2 << 30
"""Orders of merged bytes further behind are forgotten: a node that did not carry them out gets the bytes from
others. Twice the leader's limit, which says that a majority has them durably."""

logger = logging.getLogger("sequencer")


class TailEntry:
    """A merge order in the tail. Its bytes are made when a snapshot first asks for them: most never do."""

    __slots__ = ("_content", "_order", "instruction", "total_bytes")

    def __init__(self, order: WritePlan, content: bytes | None = None) -> None:
        self.instruction, self.total_bytes = order.instruction, order.total_bytes
        self._order, self._content = order, content

    @property
    def content(self) -> bytes:
        """Its bytes; from any thread."""
        if self._content is None:
            self._content = encode_order(self._order)
        return self._content


class SequencerStateMachine:
    """The sequencer's state on this node. `on_applied` and `on_restored` hear of every change."""

    def __init__(
        self,
        on_applied: Callable[[int, bytes, Command, Outcome], None],
        on_restored: Callable[[], None],
    ) -> None:
        self.index = 0
        self.state = SequencerState(b"")
        self.tail: deque[TailEntry] = deque()
        """Orders behind what this node has merged durably, oldest first."""
        self._on_applied, self._on_restored = on_applied, on_restored

    def apply(self, index: int, command: bytes) -> None:
        """See `StateMachine.apply`."""
        decoded = decode_command(command)
        outcome = apply(self.state, decoded)
        self.index = index
        if isinstance(outcome, RangesMerged):
            order = outcome.order
            self.tail.append(TailEntry(order))
            while self.tail[0].total_bytes < order.total_bytes - TAIL_BYTES_MAX:
                self.tail.popleft()
        elif isinstance(outcome, ClusterReset) and outcome.is_hard:
            self.tail.clear()
        elif isinstance(outcome, CommandRejected):
            logger.info(
                "command_rejected index=%d kind=%s why=%r", index, type(decoded).__name__, outcome.why
            )
        self._on_applied(index, command, decoded, outcome)

    def forget_orders(self, instruction: int) -> None:
        """This node has merged durably up to `instruction`."""
        while self.tail and self.tail[0].instruction <= instruction:
            self.tail.popleft()

    def snapshot(self) -> Callable[[], bytes]:
        """See `StateMachine.snapshot`."""
        state, tail = encode_state(self.state), list(self.tail)
        return lambda: b"".join(_pieces(state, tail))

    def digest(self) -> bytes:
        """See `StateMachine.digest`: of the state without the tail, which is this node's."""
        return hashlib.sha256(encode_state(self.state)).digest()

    def restore(self, index: int, state: bytes, cluster: bytes) -> None:
        """See `StateMachine.restore`."""
        self.index = index
        self.tail.clear()
        if state:
            self.state = self._decode(state)
        else:
            self.state = SequencerState(cluster)
        self._on_restored()

    def _decode(self, data: bytes) -> SequencerState:
        pieces = _split(data)
        state = decode_state(next(pieces))
        for content in pieces:
            self.tail.append(TailEntry(decode_order(content), content))
        return state


def _pieces(state: bytes, tail: list[TailEntry]) -> Iterator[bytes]:
    for piece in (state, *(order.content for order in tail)):
        yield _LENGTH.pack(len(piece))
        yield piece


def _split(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        if at + _LENGTH.size > len(data):
            raise FormatError("a snapshot of the sequencer is cut short", got=f"{len(data)} bytes")
        (size,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if at + size > len(data):
            raise FormatError("a snapshot of the sequencer is cut short", got=f"{len(data)} bytes")
        yield data[at : at + size]
        at += size
