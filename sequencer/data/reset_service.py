"""Resets on request of an operator, on any node, and their status. For one event loop.

Whether a reset is done is read from the replicated state, so all nodes report the same, also after restarts.
Only the node that was asked knows of a reset that is not committed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

from msgspec import Struct

from rt.cluster_epoch import forced_number
from rt.errors import RtError
from rt.net.grpc_errors import Unreachable
from sequencer.data.hard_reset import HardResetter
from sequencer.ipc.state_follower import StateFollower
from sequencer.rest.base.admin_ports import DroppedMessages, ResetKind, ResetStatus
from sequencer.rest.base.errors import ResetRefused
from sequencer.state.command_codec import encode_command
from sequencer.state.commands import ResetCluster
from sequencer.state.state import REQUEST_BYTES, LastReset

PROPOSE_AGAIN_S: Final = 0.5
GIVE_UP_S: Final = 30.0
"""A reset that is not applied after this time is not proposed again. It may still be applied."""
UNDER_WAY_S: Final = 2.0
"""How long to wait whether a forced reset is refused."""
LOST: Final = "The cluster continued with the data of one node. Data that only other nodes had is lost."


class _PendingReset(Struct):
    command: ResetCluster
    error: str = ""
    is_under_way: bool = False
    """The control process has ended and restarts in the next epoch."""


class ResetService:
    """The `ResetPort` of a node."""

    def __init__(
        self,
        node: str,
        follower: StateFollower,
        clearing: HardResetter,
        propose: Callable[[bytes], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._node, self._follower, self._clearing = node, follower, clearing
        self._propose, self._spawn = propose, spawn
        self._pending: _PendingReset | None = None
        self._ended_ns: dict[int, int] = {}
        """By epoch: when this process first saw that the reset to this epoch was done on this node."""

    def status(self) -> ResetStatus:
        pending, last = self._pending, self._last
        if pending is None:
            return ResetStatus() if last is None else self._status_of(last)
        command = pending.command
        if last is not None and (last.request == command.request or last.epoch > command.epoch):
            return self._status_of(last)
        return ResetStatus(
            "failed" if pending.error else "running",
            "hard" if command.is_hard else "soft",
            command.epoch,
            started_ns=command.at_ns,
            error=pending.error,
            may_lose=self._may_lose() if command.forced_by else "",
        )

    async def begin(self, kind: ResetKind, *, force: bool) -> ResetStatus:
        status, standing = self.status(), self._follower.standing
        if status.state == "running":
            raise ResetRefused(
                "a reset is running", got=f"to epoch {status.epoch}", hint="GET /reset-status."
            )
        state = self._follower.state
        if state is None or not any(state.cluster):
            raise Unreachable("this node has not joined its cluster yet", hint="Try again, or another node.")
        is_forced = not standing.leader
        if is_forced and not force:
            raise ResetRefused(
                "there is no leader, so no majority can agree on a reset",
                expected="a majority of the nodes, or force",
                hint=f"With force the cluster continues with the data of {self._node}. {self._may_lose()}",
            )
        epoch = forced_number(standing.epoch) if is_forced else standing.epoch + 1
        forced_by = self._node if is_forced else ""
        command = ResetCluster(kind == "hard", epoch, time.time_ns(), os.urandom(REQUEST_BYTES), forced_by)
        pending = self._pending = _PendingReset(command)
        self._spawn(self._propose_until_applied(pending))
        if is_forced:
            await self._wait_for_refusal(pending)
        return self.status()

    def on_refused(self, request: bytes, why: str) -> None:
        """The control process refused a forced reset."""
        if self._pending is not None and self._pending.command.request == request:
            self._pending.error = why

    def on_lost(self) -> None:
        """The control process has ended or restarted."""
        if self._pending is not None:
            self._pending.is_under_way = True

    def on_changed(self) -> None:
        """Handle a possible change of the state or of this node's standing."""
        last = self._last
        if last is not None and self._has_begun(last) and self.status().state == "done":
            self._ended_ns.setdefault(last.epoch, time.time_ns())

    async def _propose_until_applied(self, pending: _PendingReset) -> None:
        """Propose the reset until it is applied or can no longer be applied."""
        content, begun = encode_command(pending.command), time.monotonic()
        while not pending.error:
            last = self._last
            if last is not None and last.epoch >= pending.command.epoch:
                if last.request != pending.command.request:
                    pending.error = "Another reset was first."
                return
            if time.monotonic() - begun > GIVE_UP_S:
                pending.error = "No majority has applied it. It may still be applied."
                return
            self._propose(content)
            await asyncio.sleep(PROPOSE_AGAIN_S)

    async def _wait_for_refusal(self, pending: _PendingReset) -> None:
        for _ in range(int(UNDER_WAY_S / 0.05)):
            last = self._last
            is_applied = last is not None and last.request == pending.command.request
            if pending.error or pending.is_under_way or is_applied:
                break
            await asyncio.sleep(0.05)
        if pending.error:
            self._pending = None
            raise ResetRefused("the reset was not started", got=pending.error, hint=self._may_lose())

    @property
    def _last(self) -> LastReset | None:
        state = self._follower.state
        return None if state is None else state.last_reset

    def _has_begun(self, last: LastReset) -> bool:
        return self._follower.standing.epoch >= last.epoch

    def _status_of(self, last: LastReset) -> ResetStatus:
        state = self._follower.state
        assert state is not None
        is_cleared = not last.is_hard or not self._clearing.is_due(state)
        is_done = self._has_begun(last) and is_cleared
        done = self._clearing.done
        dropped = done.dropped if last.is_hard and is_done and done.epoch == last.epoch else ()
        return ResetStatus(
            "done" if is_done else "running",
            "hard" if last.is_hard else "soft",
            last.epoch,
            started_ns=last.at_ns,
            ended_ns=self._ended_ns.get(last.epoch, 0) if is_done else 0,
            dropped=tuple(DroppedMessages(*one) for one in dropped),
            may_lose=LOST if last.forced_by else "",
        )

    def _may_lose(self) -> str:
        """A description of the data that a forced reset may lose. Until there is a leader, a restarted node
        has merged more than it knows to be committed.
        """
        state = self._follower.state
        position = 0 if state is None else state.position
        with contextlib.suppress(RtError, OSError):
            position = max(position, self._clearing.merged_end())
        return (
            f"Commits that this node did not receive are lost: positions from {position} on may be given to "
            "other messages. Replicated messages that are not on this node come again only from publishers "
            "that still have them."
        )
