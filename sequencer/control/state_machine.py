"""The state machine that Raft drives: the replicated state, and the write plans that are not durable here.

    snapshot: length of the state u32, the state, then for each plan: length u32, plan

Invariant: a node that has the state also has every plan after its durable merged end, so it can always make
the merged bytes again. Exception: plans so old that a majority has merged them durably (`PLANS_BYTES_MAX`).

Used by the consensus thread. Only the encoding of a snapshot runs on another thread.
"""

from __future__ import annotations

import hashlib
import logging
import struct
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from rt.errors import FormatError, UnknownVersion
from sequencer.state.apply import apply
from sequencer.state.apply_result import ClusterReset, CommandRejected, Outcome, RangesMerged
from sequencer.state.command_codec import decode_command
from sequencer.state.commands import Command
from sequencer.state.state import SequencerState
from sequencer.state.state_codec import check_version, decode_state, encode_state, frozen_state
from sequencer.state.write_plan import PLANS_BYTES_MAX, WritePlan, decode_write_plan, encode_write_plan

_LENGTH: Final = struct.Struct("<I")
logger = logging.getLogger("sequencer")


class TailEntry:
    """A write plan in the tail. It is encoded when a snapshot first needs it, because most plans are never
    encoded.
    """

    __slots__ = ("_content", "_plan", "instruction", "total_bytes")

    def __init__(self, plan: WritePlan, content: bytes | None = None) -> None:
        self.instruction, self.total_bytes = plan.instruction, plan.total_bytes
        self._plan, self._content = plan, content

    @property
    def content(self) -> bytes:
        """May be called from any thread."""
        if self._content is None:
            self._content = encode_write_plan(self._plan)
        return self._content


class SequencerStateMachine:
    """`on_applied` and `on_restored` are called after every change. `directory`: of its log and snapshots."""

    def __init__(
        self,
        on_applied: Callable[[int, bytes, Command, Outcome], None],
        on_restored: Callable[[], None],
        directory: str = "",
    ) -> None:
        self.index = 0
        self.state = SequencerState(b"")
        self.tail: deque[TailEntry] = deque()
        """Plans after this node's durable merged end, oldest first."""
        self._on_applied, self._on_restored, self._directory = on_applied, on_restored, directory

    def apply(self, index: int, command: bytes) -> None:
        try:
            decoded = decode_command(command)
            outcome = apply(self.state, decoded)
        except UnknownVersion as error:
            error.where = f"command {index} of the Raft log in {self._directory}"
            raise
        self.index = index
        if isinstance(outcome, RangesMerged):
            plan = outcome.plan
            self.tail.append(TailEntry(plan))
            while self.tail[0].total_bytes < plan.total_bytes - PLANS_BYTES_MAX:
                self.tail.popleft()
        elif isinstance(outcome, ClusterReset) and outcome.is_hard:
            self.tail.clear()
        elif isinstance(outcome, CommandRejected):
            logger.info(
                "command_rejected index=%d kind=%s why=%r", index, type(decoded).__name__, outcome.why
            )
        self._on_applied(index, command, decoded, outcome)

    def prune_plans(self, instruction: int) -> None:
        """Drop the plans up to `instruction`: they are durable here."""
        while self.tail and self.tail[0].instruction <= instruction:
            self.tail.popleft()

    def snapshot(self) -> Callable[[], bytes]:
        encode, tail = frozen_state(self.state), list(self.tail)
        return lambda: b"".join(_pieces(encode(), tail))

    def digest(self) -> bytes:
        """See `StateMachine.digest`. It excludes the tail, which differs between nodes."""
        return hashlib.sha256(encode_state(self.state)).digest()

    def check(self, state: bytes) -> None:
        if state:
            check_version(state[_LENGTH.size : _LENGTH.size + 2])

    def restore(self, index: int, state: bytes, cluster: bytes) -> None:
        self.index = index
        self.tail.clear()
        if state:
            try:
                self.state = self._decode(state)
            except UnknownVersion as error:
                error.where = f"the newest snapshot in {self._directory}"
                raise
        else:
            self.state = SequencerState(cluster)
        self._on_restored()

    def _decode(self, data: bytes) -> SequencerState:
        pieces = _split(data)
        state = decode_state(next(pieces), keeps_pages=True)
        for content in pieces:
            self.tail.append(TailEntry(decode_write_plan(content), content))
        return state


def _pieces(state: bytes, tail: list[TailEntry]) -> Iterator[bytes]:
    for piece in (state, *(plan.content for plan in tail)):
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
