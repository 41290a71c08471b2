"""Commands in flight: from `propose`, in packs, to the leader, until they are applied.

A pack is proposed again when the route to the leader changed, when a later pack overtook it, or when no pack
completed for a while. `ClusterState` applies each pack once. Invariants: packs are applied in the order of
their sequences, so commands are applied in the order of their proposals. The number of commands in flight is
bounded.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from concurrent.futures import Future, InvalidStateError
from typing import Final, NamedTuple

from msgspec import Struct

from rt.errors import Closed, Diverged, MessageTooLarge, Overloaded
from sequencer.raft.model.cluster_state import ClusterState, PackApplied
from sequencer.raft.model.config import RaftConfig
from sequencer.raft.model.entry_codec import PACK_BYTES, PACK_COMMANDS_MAX, PACKS_MAX, encode_commands
from sequencer.raft.model.messages import COMMAND_BYTES_MAX
from sequencer.raft.storage.identity import DiskIdentity

RETRY_S_MAX: Final = 60.0
SMALL_PACKS_MAX: Final = 2
"""If this many packs are in flight, the next pack waits until it is full. While one pack is synced on this
node and another pack on another node, a third pack would cost syncs and messages for few commands.
"""


class _Pack(Struct):
    content: bytes
    size: int
    futures: list[Future[int]]


logger = logging.getLogger("sequencer.raft")


class Route(NamedTuple):
    """The way to the leader."""

    leader: str
    term: int
    connection: int
    """How often the leader was connected; 0 if this node is the leader."""


class Proposals:
    """The commands proposed by this run of the node. Any thread may call `add` and `close`.

    `lot`: random bytes that distinguish this run from a run on a copy of the disk.
    """

    def __init__(self, config: RaftConfig, identity: DiskIdentity, lot: bytes) -> None:
        self._disk = identity.disk
        # Two nodes on copies of one disk, or a disk that was rolled back, have the same run number.
        self._run = identity.run << 32 | int.from_bytes(lot[:4])
        self._commands_max, self._bytes_max = config.commands_max, config.command_bytes_max
        self._retry_s = config.retry_ms / 1000
        self._lock = threading.Lock()
        self._waiting: deque[tuple[bytes, Future[int]]] = deque()
        self._packs: dict[int, _Pack] = {}
        self._in_flight = 0
        self._bytes = 0
        self._waiting_bytes = 0
        self._next = 1
        self._closed: BaseException | None = None
        self._route: Route | None = None
        self._wait_s = self._retry_at = 0.0

    @property
    def in_flight(self) -> int:
        """Commands that are not applied yet."""
        return self._in_flight

    def add(self, command: bytes) -> Future[int]:
        if not isinstance(command, bytes):
            raise TypeError(f"a command must be bytes: got {type(command).__name__}")
        size = len(command)
        if size > COMMAND_BYTES_MAX:
            raise MessageTooLarge(
                "the command is too large", got=f"{size:,} bytes", expected=f"at most {COMMAND_BYTES_MAX:,}"
            )
        future: Future[int] = Future()
        with self._lock:
            if self._closed is not None:
                raise Closed("consensus has stopped", hint="Restart the node.") from self._closed
            if self._in_flight >= self._commands_max or self._bytes + size > self._bytes_max:
                raise Overloaded(
                    "too many commands in flight",
                    got=f"{self._in_flight:,} commands, {self._bytes + size:,} bytes",
                    expected=f"at most {self._commands_max:,} commands, {self._bytes_max:,} bytes",
                    hint="Wait for earlier commands to complete.",
                )
            self._in_flight += 1
            self._bytes += size
            self._waiting_bytes += size
            self._waiting.append((command, future))
        return future

    def due(self) -> float:
        """Time when `next_entries` has something to submit: 0 for at once, the time when packs must be
        proposed again, or infinity for never.
        """
        if self._can_pack():
            return 0.0
        return self._retry_at if self._packs else float("inf")

    def next_entries(self, route: Route, now: float) -> list[bytes]:
        """Contents of the entries to submit now, by this route.

        On a new route, all packs in flight are proposed again. On the same route, no pack should be lost. In
        case a pack was lost, the oldest pack is proposed again from time to time. If later packs had
        overtaken it, they are proposed again after it.
        """
        contents: list[bytes] = []
        if route != self._route:
            contents += [pack.content for pack in self._packs.values()]
            self._reset_retry(now)
        elif self._packs and now >= self._retry_at:
            contents.append(next(iter(self._packs.values())).content)
            self._wait_s = min(2 * self._wait_s, RETRY_S_MAX)
            self._retry_at = now + self._wait_s
        self._route = route
        while self._can_pack():
            if not self._packs:
                self._reset_retry(now)
            contents.append(self._pack())
        return contents

    def on_applied(self, applied: PackApplied, state: ClusterState, now: float) -> None:
        """A pack was committed. If this run proposed it, the pack is done, or it has overtaken another pack.

        Raises `rt.Diverged` if the pack can never be applied, because the cluster has applied later packs of
        this disk.
        """
        pack, first = applied
        if pack.disk != self._disk or pack.run != self._run:
            return
        if first is not None:
            self._resolve(pack.sequence, first)
            self._reset_retry(now)
        elif pack.sequence in self._packs:
            self._check_not_superseded(pack.sequence, state)
            self._route = None

    def on_restored(self, state: ClusterState, now: float) -> None:
        """A snapshot was restored. Packs of this run may have been applied in the meantime."""
        for sequence in list(self._packs):
            first = state.first_index(self._disk, self._run, sequence)
            if first is not None:
                self._resolve(sequence, first)
        self._reset_retry(now)

    def close(self, error: BaseException) -> None:
        """Reject new commands, and fail those in flight, whose outcome is unknown."""
        with self._lock:
            if self._closed is not None:
                return
            self._closed = error
        futures = [future for pack in self._packs.values() for future in pack.futures]
        futures += [future for _, future in self._waiting]
        self._in_flight = 0
        for future in futures:
            closed = Closed("consensus stopped; the command may or may not be committed", got=error)
            closed.__cause__ = error
            _complete(future, error=closed)

    def _check_not_superseded(self, sequence: int, state: ClusterState) -> None:
        proposer = state.proposers.get(self._disk)
        if proposer is not None and (proposer.run, proposer.next) > (self._run, sequence):
            raise Diverged(
                "another node uses a copy of this disk, or the disk was rolled back",
                where=f"disk {self._disk.hex()}",
                got=f"run {self._run}, pack {sequence}",
                expected=f"at least run {proposer.run}, pack {proposer.next} (known to the cluster)",
                hint="Stop other nodes on copies of this disk, then empty the directory: the node rejoins.",
            )

    def _can_pack(self) -> bool:
        if not self._waiting or len(self._packs) >= PACKS_MAX:
            return False
        is_full = self._waiting_bytes >= PACK_BYTES or len(self._waiting) >= PACK_COMMANDS_MAX
        return is_full or len(self._packs) < SMALL_PACKS_MAX

    def _reset_retry(self, now: float) -> None:
        self._wait_s = self._retry_s
        self._retry_at = now + self._wait_s

    def _pack(self) -> bytes:
        commands: list[bytes] = []
        futures: list[Future[int]] = []
        size = 0
        while self._waiting and len(commands) < PACK_COMMANDS_MAX:
            command, future = self._waiting[0]
            if commands and size + len(command) > PACK_BYTES:
                break
            self._waiting.popleft()
            commands.append(command)
            futures.append(future)
            size += len(command)
        with self._lock:
            self._waiting_bytes -= size
        sequence, self._next = self._next, self._next + 1
        floor = next(iter(self._packs), sequence)
        content = encode_commands(self._disk, self._run, sequence, floor, commands)
        self._packs[sequence] = _Pack(content, size, futures)
        return content

    def _resolve(self, sequence: int, first: int) -> None:
        pack = self._packs.pop(sequence, None)
        if pack is None:
            return
        with self._lock:
            self._in_flight -= len(pack.futures)
            self._bytes -= pack.size
        for index, future in enumerate(pack.futures, first):
            _complete(future, index)


def _complete(future: Future[int], index: int = 0, error: Exception | None = None) -> None:
    try:
        if error is None:
            future.set_result(index)
        else:
            future.set_exception(error)
    except InvalidStateError:
        pass  # The owner cancelled the future; the command continues.
    except BaseException:  # A callback's SystemExit must not end the loop.
        logger.exception("callback_failed")
