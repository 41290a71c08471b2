"""Where the merger cannot go on by itself: merged bytes come from a peer, or the log is opened once mended.

For one event loop. The law: while another one writes the merged log the merger holds nothing of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Final

from replicator.items import Place
from rt.epochs import line_of
from rt.errors import Damaged, Diverged, RtError, StorageFailed
from rt.net.tls import TLS
from sequencer.config import NodeConfig
from sequencer.data.copies import Copies
from sequencer.data.mending import Damages
from sequencer.data.merger import Merger, Missing
from sequencer.data.merging import Merging
from sequencer.data.peers import catch_up
from sequencer.data.replica import Replica
from sequencer.steps import COPYING, Step

LOOK_S: Final = 0.1
"""How often the merger is looked at."""
STUCK_S: Final = 1.0
"""So long the merger waits for input that does not come nearer before merged bytes are fetched."""

logger = logging.getLogger("sequencer")


class CatchingUp:
    """`run` sees to it that merging goes on, as far as peers can help."""

    def __init__(
        self,
        config: NodeConfig,
        tls: TLS,
        pool: Executor,
        replica: Replica,
        copies: Copies,
        merging: Merging,
        damages: Damages,
        on_failed: Callable[[RtError], None],
    ) -> None:
        """`damages` are the files that are being mended. `on_failed` gets what must end the process."""
        self._directory, self._stream, self._tls = config.merged_directory, config.stream, tls
        self._endpoints = [config.members[peer].data for peer in config.peers]
        self._pool, self._replica, self._copies = pool, replica, copies
        self._merging, self._damages = merging, damages
        self._on_failed = on_failed
        self._loop = asyncio.get_running_loop()
        self.copied: Step | None = None
        """How far merged bytes have come from peers; None while none are fetched."""

    async def run(self) -> None:
        """Look after the merger until cancelled. What it raises must end the process."""
        waiting: tuple[Missing, Place | None] | None = None
        since = 0.0
        while True:
            await asyncio.sleep(LOOK_S)
            merger = self._merging.merger
            if merger is None or merger.failure is not None:
                continue
            if merger.damage is not None:
                await self._open_mended(merger, merger.damage)
                continue
            if not self._endpoints:
                continue
            missing = merger.missing
            present = None if missing is None else (missing, self._on_its_way(missing))
            if present != waiting:
                waiting, since = present, self._loop.time()
            is_stuck = missing is not None and self._loop.time() - since >= STUCK_S
            if merger.gap is not None or is_stuck:
                await self.catch_up(merger)
                waiting = None

    def _on_its_way(self, missing: Missing) -> Place | None:
        """How far a publisher's stream has come that is bringing what is missing; None if none does."""
        copy = self._copies.get(missing.session_id)
        place = copy.receiver.place if copy is not None and copy.has_stream else None
        return place if place is not None and place < Place(*missing.segment, missing.end) else None

    async def _open_mended(self, merger: Merger, damage: Damaged) -> None:
        """Open the merged log once what was damaged is mended, or is to go; there may be more of it."""
        if damage.path in self._damages and not merger.is_gone(damage):
            return
        await self._loop.run_in_executor(self._pool, merger.resume)
        if merger.damage is not None:
            if merger.damage.path == damage.path:
                raise merger.damage  # All that was synced verifies: it is something else.
            self._merging.have_mended(merger.damage)

    async def catch_up(self, merger: Merger) -> None:
        """Get all that is merged by now: step by step it would never come near a stream that flows."""
        wanted, state = merger.gap, self._replica.state
        assert state is not None
        target = state.position
        logger.info("catches_up from_position=%d to_position=%d place=%s", merger.position, target, wanted)
        self.copied = Step(COPYING, merger.position, target)
        await self._loop.run_in_executor(self._pool, merger.hold)
        try:
            await catch_up(
                self._directory,
                self._stream,
                self._endpoints,
                self._tls,
                lambda place, reached: self._is_there(place, reached, wanted, target),
                line=line_of(self._replica.epoch),
            )
        except RtError as error:
            if isinstance(error, Diverged | StorageFailed):
                self._on_failed(error)
                raise
            logger.warning("catching_up_failed error=%r", str(error))
        finally:
            await self._loop.run_in_executor(self._pool, merger.resume)
            self.copied = None
        if merger.damage is not None:
            self._merging.have_mended(merger.damage)
        logger.info("caught_up to_position=%d", merger.position)

    def _is_there(self, place: Place, reached: int, wanted: Place | None, target: int) -> bool:
        self.copied = Step(COPYING, reached, target)
        return (wanted is None or place >= wanted) and reached >= target
