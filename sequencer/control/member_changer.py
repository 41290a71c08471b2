"""Carries out the steps of a change of the members, one at a time. Only the consensus thread calls it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

from rt.errors import RtError
from sequencer.leader.member_steps import MemberStep, TransferLeadership
from sequencer.raft.model.members import MemberChange
from sequencer.raft.raft import Raft
from sequencer.state.operations.membership import WHY_CHARACTERS_MAX, SettleMembers

AGAIN_NS: Final = 10**9
"""Pause after a step that was refused for now, or may have been lost."""
TRANSFER_S: Final = 1.0

logger = logging.getLogger("sequencer")


class MemberChanger:
    """`settle` proposes the end of the request that is being carried out."""

    def __init__(self, settle: Callable[[SettleMembers], None]) -> None:
        self._settle = settle
        self._in_flight: Future[None] | None = None
        self._again_ns = 0
        self.refused = ""
        """Why the last step was refused for now; empty: it was not."""

    def carry_out(self, step: MemberStep | None, number: int, raft: Raft) -> None:
        """Start `step` of request `number`, unless a step is in flight. The caller repeats the call until the
        step is applied.

        `step` is None if this node does not lead, if no step may be taken now, or if nothing is requested
        (`number` 0).
        """
        if step is None and self._in_flight is None:
            self.refused = ""  # The change waits for something else.
        if step is None or self._in_flight is not None or time.monotonic_ns() < self._again_ns:
            return
        if isinstance(step, SettleMembers):
            self._settle(step)
            return
        self._again_ns = time.monotonic_ns() + AGAIN_NS
        logger.info("member_step_started request=%d step=%s", number, step)
        if isinstance(step, TransferLeadership):
            # `transfer_leadership` waits for the consensus thread.
            threading.Thread(
                target=raft.transfer_leadership, args=(TRANSFER_S,), name="leadership transfer", daemon=True
            ).start()
            return
        self._in_flight = raft.change_members(step)
        self._in_flight.add_done_callback(lambda future: self._on_done(future, step, number))

    def _on_done(self, future: Future[None], step: MemberChange, number: int) -> None:
        self._in_flight, self.refused = None, ""
        error = future.exception()
        if error is None:
            logger.info("member_step_done request=%d step=%s", number, step)
            return
        logger.warning("member_step_refused request=%d step=%s error=%r", number, step, str(error))
        if isinstance(error, RtError) and error.retriable:
            self.refused = str(error)
        else:
            self._settle(SettleMembers(number, str(error)[:WHY_CHARACTERS_MAX]))
