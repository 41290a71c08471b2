"""Helps a merger that cannot continue: fetches missing input from peers, or has its log repaired first.

For one event loop. Invariants:
- Missing input is fetched as session ranges while the merger runs. Merged bytes are copied only if no peer
  has a range, and only from peers whose merged log is longer.
- While merged bytes are copied the merger is paused and has no file open. Copying ends as soon as no peer is
  ahead, or the missing input has arrived.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from typing import Final

from msgspec import Struct

from replicator.protocol.messages import LogOffset
from rt.cluster_epoch import line_of
from rt.errors import Corrupt, Diverged, RtError, StorageFailed, Timeout
from rt.log.format.segment import SegmentId
from rt.net.grpc_channel import Channel, open_channel
from rt.net.tls import TLS
from sequencer.config.config import NodeConfig
from sequencer.config.startup_phase import COPYING, Phase
from sequencer.ipc.peer_addresses import PeerAddresses
from sequencer.ipc.state_follower import StateFollower
from sequencer.merged.merge_input import MissingInput
from sequencer.merged.merged_log import MergedLog
from sequencer.merged.merger import Merger
from sequencer.merged.repair_queue import CorruptFiles
from sequencer.sessions.input_planner import RANGES_BYTES_MAX, SessionRange, is_due, peers_ahead, plan_ranges
from sequencer.sessions.peer_pull import catch_up, fetch_range, merged_end
from sequencer.sessions.replicas import SessionReplicas
from sequencer.state.write_plan import BlockWrite

POLL_S: Final = 0.1
"""How often the merger's state is polled."""
RETRY_S: Final = 0.5
"""Pause before peers are asked again if none could help."""
SILENCE_MIN_S: Final = 2.0
"""If a peer sends nothing for this time, another peer is asked. The time doubles, up to `SILENCE_MAX_S`, each
time that no peer could help and a peer was silent, because that peer may be busy. When nothing is missing,
the time is short again.
"""
SILENCE_MAX_S: Final = 10.0
FETCHES_MAX: Final = 8
"""Maximum number of ranges fetched at the same time."""

logger = logging.getLogger("sequencer")


class _Wait(Struct):
    missing: MissingInput
    since_s: float
    place: LogOffset | None
    """The offset that the stream with the missing input has reached; None if there is no such stream."""
    moved_s: float
    """When that stream last advanced."""


class CatchUp:
    """`run` keeps merging going, as far as peers can help."""

    def __init__(
        self,
        config: NodeConfig,
        tls: TLS,
        peers: PeerAddresses,
        pool: Executor,
        follower: StateFollower,
        replicas: SessionReplicas,
        merged_log: MergedLog,
        corrupt_files: CorruptFiles,
        on_failed: Callable[[RtError], None],
    ) -> None:
        """`corrupt_files`: the files under repair. `on_failed` gets the error that must end the process."""
        self._directory, self._stream, self._tls = config.merged_directory, config.stream, tls
        self._peers = peers
        self._pool, self._follower, self._replicas = pool, follower, replicas
        self._merged_log, self._corrupt_files = merged_log, corrupt_files
        self._on_failed = on_failed
        self._loop = asyncio.get_running_loop()
        self._channels: dict[str, Channel] = {}
        self._holders: dict[int, str] = {}
        """By session id: the peer that last had its bytes."""
        self._fetches = asyncio.Semaphore(FETCHES_MAX)
        self._wait: _Wait | None = None
        self._silence_s = SILENCE_MIN_S
        self._silent = set[str]()
        """Peers that were silent, and have not answered a request for a range since. The other peers are
        asked first.
        """
        self._reported = ""
        self.copied: Phase | None = None
        """How far merged bytes were copied from peers; None while none are copied."""

    async def run(self) -> None:
        """Help the merger until cancelled. An error that is raised must end the process."""
        try:
            while True:
                await asyncio.sleep(POLL_S)
                merger = self._merged_log.merger
                if merger is None or merger.failure is not None:
                    continue
                if merger.damage is not None:
                    await self._open_repaired(merger, merger.damage)
                elif self._peers.all() and (merger.gap is not None or self._is_due(merger.missing)):
                    await self._help(merger)
        finally:
            for channel in self._channels.values():
                await channel.close()

    def forget_sessions(self, session_ids: Iterable[int]) -> None:
        for session_id in session_ids:
            self._holders.pop(session_id, None)

    def _is_due(self, missing: MissingInput | None) -> bool:
        """Whether the merger's missing input must be fetched now."""
        if missing is None:
            self._wait, self._silence_s = None, SILENCE_MIN_S
            return False
        now_s, place = self._loop.time(), self._feeding_stream(missing)
        wait = self._wait
        if wait is None or wait.missing != missing:
            self._wait = _Wait(missing, now_s, place, now_s)
            return False  # Wait until the next poll: most input is only slightly late.
        if wait.place != place:
            wait.place, wait.moved_s = place, now_s
        return is_due(
            waited_s=now_s - wait.since_s, still_s=now_s - wait.moved_s, is_coming=place is not None
        )

    def _feeding_stream(self, missing: MissingInput) -> LogOffset | None:
        """How far the stream that brings the missing input has come; None if there is no such stream."""
        replica = self._replicas.get(missing.session_id)
        is_fed = replica is not None and (replica.has_stream or replica.is_followed)
        place = replica.receiver.next_offset if replica is not None and is_fed else None
        return place if place is not None and place < LogOffset(*missing.segment, missing.end) else None

    async def _open_repaired(self, merger: Merger, damage: Corrupt) -> None:
        """Open the merged log after its corrupt segment was repaired or trimmed. More may be corrupt."""
        if damage.path in self._corrupt_files and not merger.is_trimmed(damage):
            return
        await self._loop.run_in_executor(self._pool, merger.resume)
        if merger.damage is not None:
            if merger.damage.path == damage.path:
                raise merger.damage  # All synced bytes are valid, so the error has another cause.
            self._merged_log.request_repair(merger.damage)

    async def _help(self, merger: Merger) -> None:
        """Get what the merger needs next: ranges of sessions, or else merged bytes."""
        if merger.gap is None and await self._fetch_ranges(merger):
            merger.wake()
            return
        ends = await self._merged_ends()
        if merger.gap is None and merger.missing is None:
            return  # The missing bytes arrived meanwhile.
        ahead = peers_ahead(ends, merger.position, is_cut_off=merger.gap is not None)
        if ahead:
            await self.catch_up(merger, ahead, max(ends.values()))
            self._wait = None
            return
        what = f"position={merger.position} gap={merger.gap} missing={merger.missing}"
        if what != self._reported:
            self._reported = what
            logger.warning("missing_bytes_not_found %s", what)
        if self._silent:
            self._silence_s = min(2 * self._silence_s, SILENCE_MAX_S)
        await asyncio.sleep(RETRY_S)

    async def _fetch_ranges(self, merger: Merger) -> bool:
        """Fetch the input of the next plans. Returns whether the first plan has its input now.

        Input of later plans does not count as progress: while messages are published, peers have more of it
        in each round.
        """
        plans, is_here = merger.upcoming(), self._is_here
        if merger.missing is not None and not plan_ranges(plans[:1], is_here):
            # A replica has the range, but the bytes cannot be read: they were trimmed or are corrupt.
            plans, is_here = plans[:1], self._is_fetched
        # Ranges that were fetched ahead, and wait for the first plan, count as well.
        room = max(RANGES_BYTES_MAX - self._merged_log.fetched.total_bytes, 0)
        got = await asyncio.gather(*map(self._fetch_range, plan_ranges(plans, is_here, bytes_max=room)))
        if any(got):
            logger.info("fetched_ranges count=%d wanted=%d bytes=%d", sum(map(bool, got)), len(got), sum(got))
        is_past = merger.upcoming()[:1] != plans[:1]
        return any(got) and (is_past or not plan_ranges(plans[:1], is_here))

    def _is_fetched(self, block: BlockWrite) -> bool:
        return self._merged_log.fetched.find(block) is not None

    def _is_here(self, block: BlockWrite) -> bool:
        if self._is_fetched(block):
            return True
        replica, segment = self._replicas.get(block.session_id), SegmentId(block.run, block.roll)
        return replica is not None and replica.has(segment, block.start, block.end, block.chain_end)

    async def _fetch_range(self, wanted: SessionRange) -> int:
        """Fetch a range from a peer that has it. Returns the number of bytes."""
        session = self._follower.session(wanted.session_id)
        if session is None:
            return 0
        last, line = self._holders.get(session.id), line_of(self._follower.epoch)
        async with self._fetches:
            for endpoint in sorted(self._peers.all(), key=lambda one: (one in self._silent, one != last)):
                try:
                    channel = self._channel(endpoint)
                    fetched = await fetch_range(
                        channel, self._stream, wanted, session.incarnation, line, self._silence_s
                    )
                except RtError as error:
                    self._record(endpoint, error)
                    logger.info("range_not_fetched peer=%s %s error=%r", endpoint, wanted, str(error))
                    continue
                self._record(endpoint, None)
                self._holders[session.id] = endpoint
                self._merged_log.fetched.add(fetched)
                return wanted.end - wanted.start
        return 0

    async def _merged_ends(self) -> dict[str, int]:
        """The merged ends of the peers that answer."""
        return dict(one for one in await asyncio.gather(*map(self._merged_end, self._peers.all())) if one)

    async def _merged_end(self, endpoint: str) -> tuple[str, int] | None:
        try:
            line = line_of(self._follower.epoch)
            channel = self._channel(endpoint)
            return endpoint, await merged_end(channel, self._stream, line, self._silence_s)
        except RtError as error:
            self._record(endpoint, error)
            logger.info("merged_end_not_known peer=%s error=%r", endpoint, str(error))
            return None

    def _record(self, endpoint: str, error: RtError | None) -> None:
        """Record the result of a request to a peer. `error`: why the peer did not help; None if it helped."""
        if isinstance(error, Timeout):
            self._silent.add(endpoint)
        else:
            self._silent.discard(endpoint)

    def _channel(self, endpoint: str) -> Channel:
        if endpoint not in self._channels:
            self._channels[endpoint] = open_channel(endpoint, self._tls)
        return self._channels[endpoint]

    async def catch_up(self, merger: Merger, endpoints: list[str], target: int) -> None:
        """Copy everything that these peers have merged by now, up to position `target`.

        If only the bytes that are missing now were copied, the node would never catch up while messages are
        published.
        """
        wanted, missing = merger.gap, merger.missing
        if missing is not None and self._has_arrived(missing):
            missing = None  # The input is here, but cannot be read.
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
                lambda place, reached: self._is_done(place, reached, wanted, missing, target),
                line=line_of(self._follower.epoch),
                may_arrive=self._may_arrive,
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
            self._merged_log.request_repair(merger.damage)
        logger.info("caught_up to_position=%d", merger.position)

    async def _may_arrive(self, position: int) -> bool:
        """Whether a peer has merged more than `position`. One such peer is enough: the others may be
        silent.
        """
        asked = [asyncio.ensure_future(self._merged_end(endpoint)) for endpoint in self._peers.all()]
        try:
            for answer in asyncio.as_completed(asked):
                found = await answer
                if found is not None and found[1] > position:
                    return True
            return False
        finally:
            for each in asked:
                each.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    def _is_done(
        self,
        place: LogOffset,
        reached: int,
        wanted: LogOffset | None,
        missing: MissingInput | None,
        target: int,
    ) -> bool:
        self.copied = Phase(COPYING, reached, target)
        if wanted is None and missing is not None and self._has_arrived(missing):
            return True
        return (wanted is None or place >= wanted) and reached >= target

    def _has_arrived(self, missing: MissingInput) -> bool:
        """Whether the session replica has the missing range by now."""
        replica = self._replicas.get(missing.session_id)
        return replica is not None and replica.covers(missing.segment, missing.start, missing.end)
