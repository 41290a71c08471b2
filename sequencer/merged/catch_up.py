"""Where the merger cannot go on by itself: what it is missing comes from peers, or its log is mended first.

For one event loop. Invariants:
- Missing input is fetched as session ranges, beside the merger. Only when no peer has a range are merged
  bytes copied, and only from peers whose merged log goes further.
- While another one writes the merged log the merger holds nothing of it. That ends as soon as no peer is
  ahead, or the missing input has come.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final

from replicator.protocol.messages import LogOffset
from rt.cluster_epoch import line_of
from rt.errors import Corrupt, Diverged, RtError, StorageFailed
from rt.log.format.segment import SegmentId
from rt.net.grpc_channel import Channel, open_channel
from rt.net.tls import TLS
from sequencer.config.config import NodeConfig
from sequencer.config.startup_phase import COPYING, Phase
from sequencer.ipc.state_follower import StateFollower
from sequencer.merged.merged_log import MergedLog
from sequencer.merged.merger import Merger, MissingInput
from sequencer.merged.repair_queue import CorruptFiles
from sequencer.sessions.input_planner import (
    RANGES_BYTES_MAX,
    SessionRange,
    is_due,
    peers_ahead,
    plan_ranges,
)
from sequencer.sessions.peer_pull import catch_up, fetch_range, merged_end
from sequencer.sessions.replicas import SessionReplicas
from sequencer.state.write_plan import BlockWrite

LOOK_S: Final = 0.1
"""How often the merger is looked at."""
AGAIN_S: Final = 0.5
"""How long until peers are asked again when none could help."""
FETCHES_MAX: Final = 8
"""Ranges that are fetched at the same time."""

logger = logging.getLogger("sequencer")


@dataclass(slots=True)
class _Wait:
    """The merger waits for input."""

    missing: MissingInput
    since_s: float
    place: LogOffset | None
    """Where the stream is that brings it; None if there is none."""
    moved_s: float
    """When that stream moved last."""


class CatchUp:
    """`run` sees to it that merging goes on, as far as peers can help."""

    def __init__(
        self,
        config: NodeConfig,
        tls: TLS,
        pool: Executor,
        replica: StateFollower,
        copies: SessionReplicas,
        merging: MergedLog,
        damages: CorruptFiles,
        on_failed: Callable[[RtError], None],
    ) -> None:
        """`damages` are the files that are being mended. `on_failed` gets what must end the process."""
        self._directory, self._stream, self._tls = config.merged_directory, config.stream, tls
        self._endpoints = [config.members[peer].data for peer in config.peers]
        self._pool, self._replica, self._copies = pool, replica, copies
        self._merging, self._damages = merging, damages
        self._on_failed = on_failed
        self._loop = asyncio.get_running_loop()
        self._channels: dict[str, Channel] = {}
        self._holders: dict[int, str] = {}
        """By session id: the peer that had its bytes last."""
        self._fetches = asyncio.Semaphore(FETCHES_MAX)
        self._wait: _Wait | None = None
        self._told = ""
        self.copied: Phase | None = None
        """How far merged bytes have come from peers; None while none are fetched."""

    async def run(self) -> None:
        """Look after the merger until cancelled. What it raises must end the process."""
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                merger = self._merging.merger
                if merger is None or merger.failure is not None:
                    continue
                if merger.damage is not None:
                    await self._open_mended(merger, merger.damage)
                elif self._endpoints and (merger.gap is not None or self._is_due(merger.missing)):
                    await self._supply(merger)
        finally:
            for channel in self._channels.values():
                await channel.close()

    def forget_sessions(self, session_ids: Iterable[int]) -> None:
        """Their records are gone."""
        for session_id in session_ids:
            self._holders.pop(session_id, None)

    def _is_due(self, missing: MissingInput | None) -> bool:
        """Whether what the merger is missing is to be fetched now."""
        if missing is None:
            self._wait = None
            return False
        now_s, place = self._loop.time(), self._on_its_way(missing)
        wait = self._wait
        if wait is None or wait.missing != missing:
            self._wait = _Wait(missing, now_s, place, now_s)
            return False  # At the next look: most input is only a little late.
        if wait.place != place:
            wait.place, wait.moved_s = place, now_s
        return is_due(
            waited_s=now_s - wait.since_s, still_s=now_s - wait.moved_s, is_coming=place is not None
        )

    def _on_its_way(self, missing: MissingInput) -> LogOffset | None:
        """How far a stream has come that is bringing what is missing; None if none does."""
        copy = self._copies.get(missing.session_id)
        is_fed = copy is not None and (copy.has_stream or copy.is_followed)
        place = copy.receiver.next_offset if copy is not None and is_fed else None
        return place if place is not None and place < LogOffset(*missing.segment, missing.end) else None

    async def _open_mended(self, merger: Merger, damage: Corrupt) -> None:
        """Open the merged log once what was damaged is mended, or is to go; there may be more of it."""
        if damage.path in self._damages and not merger.is_trimmed(damage):
            return
        await self._loop.run_in_executor(self._pool, merger.resume)
        if merger.damage is not None:
            if merger.damage.path == damage.path:
                raise merger.damage  # All that was synced verifies: it is something else.
            self._merging.have_mended(merger.damage)

    # From peers

    async def _supply(self, merger: Merger) -> None:
        """Get what the merger needs next, in whichever form a peer has it."""
        if merger.gap is None and await self._fetch_ranges(merger):
            merger.wake()
            return
        ends = await self._merged_ends()
        ahead = peers_ahead(ends, merger.position, is_cut_off=merger.gap is not None)
        if ahead and (merger.gap is not None or merger.missing is not None):
            await self.catch_up(merger, ahead, max(ends.values()))
            self._wait = None
            return
        said = f"position={merger.position} gap={merger.gap} missing={merger.missing}"
        if said != self._told:
            self._told = said
            logger.warning("no_peer_has_what_is_missing %s", said)
        await asyncio.sleep(AGAIN_S)

    async def _fetch_ranges(self, merger: Merger) -> bool:
        """Fetch what the next orders need; whether the first of them has its input now.

        Input of later orders is no progress: while a stream flows, peers have more of it at each round.
        """
        orders, is_here = merger.upcoming(), self._is_here
        if merger.missing is not None and not plan_ranges(orders[:1], is_here):
            # A copy is here, but its bytes cannot be read: it was trimmed or is damaged.
            orders, is_here = orders[:1], self._is_fetched
        # What was fetched ahead, and waits for the first order, counts as well.
        room = max(RANGES_BYTES_MAX - self._merging.fetched.total_bytes, 0)
        got = await asyncio.gather(*map(self._fetch_range, plan_ranges(orders, is_here, bytes_max=room)))
        if any(got):
            logger.info("fetched_ranges count=%d wanted=%d bytes=%d", sum(map(bool, got)), len(got), sum(got))
        is_past = merger.upcoming()[:1] != orders[:1]
        return any(got) and (is_past or not plan_ranges(orders[:1], is_here))

    def _is_fetched(self, block: BlockWrite) -> bool:
        return self._merging.fetched.find(block) is not None

    def _is_here(self, block: BlockWrite) -> bool:
        if self._is_fetched(block):
            return True
        copy, segment = self._copies.get(block.session_id), SegmentId(block.run, block.roll)
        return copy is not None and copy.has(segment, block.start, block.end, block.chain_end)

    async def _fetch_range(self, wanted: SessionRange) -> int:
        """Fetch a range from whichever peer has it; how many bytes came."""
        session = self._replica.session(wanted.session_id)
        if session is None:
            return 0
        last, line = self._holders.get(session.id), line_of(self._replica.epoch)
        async with self._fetches:
            for endpoint in sorted(self._endpoints, key=lambda one: one != last):
                channel = self._channel(endpoint)
                try:
                    fetched = await fetch_range(channel, self._stream, wanted, session.incarnation, line)
                except RtError as error:
                    logger.info("range_not_fetched peer=%s %s error=%r", endpoint, wanted, str(error))
                    continue
                self._holders[session.id] = endpoint
                self._merging.fetched.add(fetched)
                return wanted.end - wanted.start
        return 0

    async def _merged_ends(self) -> dict[str, int]:
        """How far the merged logs of the peers go that answer."""
        return dict(one for one in await asyncio.gather(*map(self._merged_end, self._endpoints)) if one)

    async def _merged_end(self, endpoint: str) -> tuple[str, int] | None:
        try:
            line = line_of(self._replica.epoch)
            return endpoint, await merged_end(self._channel(endpoint), self._stream, line)
        except RtError as error:
            logger.info("merged_end_not_known peer=%s error=%r", endpoint, str(error))
            return None

    def _channel(self, endpoint: str) -> Channel:
        if endpoint not in self._channels:
            self._channels[endpoint] = open_channel(endpoint, self._tls)
        return self._channels[endpoint]

    async def catch_up(self, merger: Merger, endpoints: list[str], target: int) -> None:
        """Get all that these peers have merged by now, up to position `target`.

        Step by step it would never come near a stream that flows.
        """
        wanted, missing = merger.gap, merger.missing
        if missing is not None and self._has_come(missing):
            missing = None  # It is here, and cannot be read.
        logger.info(
            "catch_up_started from_position=%d to_position=%d place=%s", merger.position, target, wanted
        )
        self.copied = Phase(COPYING, merger.position, target)
        await self._loop.run_in_executor(self._pool, merger.pause)
        try:
            await catch_up(
                self._directory,
                self._stream,
                endpoints,
                self._tls,
                lambda place, reached: self._is_there(place, reached, wanted, missing, target),
                line=line_of(self._replica.epoch),
                may_come=self._may_come,
            )
        except RtError as error:
            if isinstance(error, Diverged | StorageFailed):
                self._on_failed(error)
                raise
            logger.warning("catch_up_failed error=%r", str(error))
        finally:
            await self._loop.run_in_executor(self._pool, merger.resume)
            self.copied = None
        if merger.damage is not None:
            self._merging.have_mended(merger.damage)
        logger.info("caught_up to_position=%d", merger.position)

    async def _may_come(self, position: int) -> bool:
        """Whether a peer has merged more than is here."""
        return any(end > position for end in (await self._merged_ends()).values())

    def _is_there(
        self,
        place: LogOffset,
        reached: int,
        wanted: LogOffset | None,
        missing: MissingInput | None,
        target: int,
    ) -> bool:
        self.copied = Phase(COPYING, reached, target)
        if wanted is None and missing is not None and self._has_come(missing):
            return True
        return (wanted is None or place >= wanted) and reached >= target

    def _has_come(self, missing: MissingInput) -> bool:
        """Whether the copy here has got what was missing."""
        copy = self._copies.get(missing.session_id)
        return copy is not None and copy.covers(missing.segment, missing.start, missing.end)
