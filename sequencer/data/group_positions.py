"""The positions of groups: holds that several members move and read back.

For one event loop. Invariants:
- `acknowledge` returns when the state of this node has every requested position, or a later one.
- A position that is acknowledged again, or late, moves no hold back.
- At most one read is proposed at a time. All calls that arrive meanwhile share the next read. So consensus
  has one command per round trip for them, for any number of clients.
- After `catch_up` this node's state has everything that was committed before the call. If a member read the
  positions of a node that lags, it would handle messages again, or create an existing group at a later
  position.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Mapping
from typing import Final

from rt.errors import Overloaded, ProtocolViolation, RtError, Timeout
from sequencer.state.apply_result import CommandRejected, HoldMoved, Outcome
from sequencer.state.commands import Command, HoldPosition
from sequencer.state.leases.leases import TOKEN_END, HeldLease, ReleaseLeases
from sequencer.state.operations.resets import run_starts
from sequencer.state.state import REQUEST_BYTES, SequencerState

PROPOSE_AGAIN_S: Final = 1.0
"""A position that is not applied after this time is proposed again: it may have been lost."""
TIMEOUT_S: Final = 10.0
_NOBODYS: Final = (HeldLease("group/read", TOKEN_END - 1),)
"""A lease that is never granted. Its release changes nothing, but is committed after all earlier commands."""
_HINT: Final = (
    "Try again. If there are too many holds, release those of retired subscribers: POST /release-hold."
)


class _Read:
    """A read. It is applied after everything that was committed before it was proposed."""

    def __init__(self) -> None:
        self.command = ReleaseLeases(os.urandom(REQUEST_BYTES), "group", _NOBODYS)
        self.applied = asyncio.Event()


class GroupPositions:
    """`propose` may lose a command. `state` returns the applied state, or raises without a leader."""

    def __init__(self, state: Callable[[], SequencerState], propose: Callable[[Command], None]) -> None:
        self._state, self._propose = state, propose
        self._refused: dict[tuple[str, int], str] = {}
        """By name and position: why a hold was refused, for the calls that wait for it."""
        self._read: _Read | None = None
        """The read that is proposed."""
        self._next_read: _Read | None = None
        """The next read. It is proposed when `_read` is applied."""
        self._read_proposed_s = 0.0
        self._waiting = 0
        self._changed = asyncio.Event()

    def on_applied(self, command: Command, outcome: Outcome) -> None:
        match command, outcome:
            case _, HoldMoved():
                self._notify()
            case HoldPosition(name, position), CommandRejected(why) if self._waiting:
                self._refused[name, position] = why
                self._notify()
            case ReleaseLeases(), _ if self._read is not None and command == self._read.command:
                self._on_read_applied(self._read)

    def positions(self, prefix: str) -> dict[str, int]:
        """The positions whose name starts with `prefix`."""
        holds = self._state().holds
        return {name: hold.position for name, hold in holds.items() if name.startswith(prefix)}

    @property
    def log_range(self) -> tuple[int, int]:
        """The start and end of the merged log."""
        state = self._state()
        return state.log_start, state.position

    @property
    def resets(self) -> tuple[int, bytes, dict[int, int]]:
        """The number of the epoch, the id of the last forced reset (empty: none), and `run_starts`."""
        state = self._state()
        epoch = 0 if state.last_reset is None else state.last_reset.epoch
        return epoch, b"" if state.force is None else state.force.request, run_starts(state)

    async def catch_up(self) -> None:
        """Return when this node has applied everything that was committed before the call. `rt.Timeout` if no
        majority was seen.
        """
        self._state()
        read = self._join_read()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while not read.applied.is_set():
                    if time.monotonic() - self._read_proposed_s >= PROPOSE_AGAIN_S:
                        self._propose_read()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(PROPOSE_AGAIN_S):
                            await read.applied.wait()
        except TimeoutError:
            raise Timeout(
                "the positions of a group were not read: a majority of the nodes did not confirm them",
                expected=f"within {TIMEOUT_S:g} s",
                hint="Repeat the request, on any node.",
            ) from None

    def _join_read(self) -> _Read:
        """Return a read that was not proposed before this call, because the read in progress may not cover
        the call.
        """
        if self._read is None:
            read = self._read = _Read()
            self._propose_read()
            return read
        if self._next_read is None:
            self._next_read = _Read()
        return self._next_read

    def _propose_read(self) -> None:
        if self._read is not None:
            self._read_proposed_s = time.monotonic()
            self._propose(self._read.command)

    def _on_read_applied(self, read: _Read) -> None:
        read.applied.set()
        self._read, self._next_read = self._next_read, None
        self._propose_read()

    async def acknowledge(self, positions: Mapping[str, int]) -> None:
        """Move these positions forward.

        `rt.Overloaded` if the cluster has as many holds as it allows. `rt.ProtocolViolation` if its log ends
        before a position. `rt.Timeout` if no decision was seen; the positions may have moved.
        """
        self._waiting += 1
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while left := self._left(positions):
                    for name, position in left.items():
                        self._refused.pop((name, position), None)
                        self._propose(HoldPosition(name, position, time.time_ns()))
                    await self._wait(positions)
        except TimeoutError:
            raise Timeout(
                "the positions of a group were not applied",
                got=", ".join(f"{name} at {at}" for name, at in self._left(positions).items())[:200],
                expected=f"within {TIMEOUT_S:g} s",
                hint="Repeat the request, on any node.",
            ) from None
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._refused.clear()

    async def _wait(self, positions: Mapping[str, int]) -> None:
        """Wait until all are applied, one is refused, or the time to propose them again has come."""
        end_s = time.monotonic() + PROPOSE_AGAIN_S
        while (left := self._left(positions)) and (left_s := end_s - time.monotonic()) > 0:
            for name, position in left.items():
                if (why := self._refused.get((name, position))) is not None:
                    raise self._rejection(name, position, why)
            try:
                async with asyncio.timeout(left_s):
                    await self._changed.wait()
            except TimeoutError:
                return

    def _rejection(self, name: str, position: int, why: str) -> RtError:
        end = self._state().position
        if position > end:
            return ProtocolViolation(
                "the position of a group is beyond the end of the merged log",
                where=name,
                got=position,
                expected=f"at most {end}",
                hint="Was the cluster reset? Stop the members of the group, and release its positions: "
                "`rt groups delete`.",
            )
        return Overloaded(why, hint=_HINT)

    def _left(self, positions: Mapping[str, int]) -> dict[str, int]:
        """The positions that the state does not have yet."""
        holds = self._state().holds
        return {
            name: position
            for name, position in positions.items()
            if name not in holds or holds[name].position < position
        }

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
