"""The merged log of this node: begun with the state, synced, told of; and what may be let go of for it.

For one event loop, beside the merger's own thread. The law: bytes of a session are let go of only once they
are durable in the merged logs of this node and of a majority.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from itertools import takewhile
from typing import Final

from replicator.protocol.messages import LogOffset
from rt.errors import Corrupt, DiskFull, RtError
from rt.log.format.segment import LogKind
from rt.log.format.segment_table import LogIdentity, TrimReason
from sequencer.config.config import NodeConfig
from sequencer.ipc.data_reports import DataReports, MergeProgress
from sequencer.merged.merger import Merger
from sequencer.merged.repair_queue import Repairer
from sequencer.sessions.fetched_ranges import FetchedRanges
from sequencer.sessions.merge_progress import ConsumedRanges
from sequencer.sessions.replicas import SessionReplicas
from sequencer.sessions.session_retention import SessionRetention
from sequencer.state.apply_result import SegmentsTrimmed
from sequencer.state.state import SequencerState
from sequencer.state.write_plan import WritePlan

SYNC_S: Final = 0.2
"""How often merged bytes are synced; nobody waits for it, but for the tail of orders to become short."""

logger = logging.getLogger("sequencer")


class MergedLog:
    """Has the merger, from the first state on that belongs to a cluster."""

    def __init__(
        self,
        config: NodeConfig,
        pool: Executor,
        copies: SessionReplicas,
        reports: DataReports,
        mender: Repairer,
        on_failed: Callable[[RtError], None],
    ) -> None:
        """`on_failed` gets what must end the process."""
        self._directory, self._stream = config.merged_directory, config.stream
        self._pool, self._copies, self._reports, self._mender = pool, copies, reports, mender
        self._on_failed = on_failed
        self._loop = asyncio.get_running_loop()
        self._consumed = ConsumedRanges()
        self._retention = SessionRetention(config.name, len(config.members))
        self._released = 0
        """The instruction up to which input was let go of."""
        self.fetched = FetchedRanges()
        """Input that came from peers."""
        self._reported = MergeProgress(0, 0, 0, 0)
        self.trims: Counter[TrimReason] = Counter()
        """Segments that the cluster trimmed since this process began, by reason."""
        self.overridden: Counter[str] = Counter()
        """How often it trimmed what was held back for a subscriber, by name."""
        self.merger: Merger | None = None

    # What the process hears

    def begin(self, state: SequencerState, orders: Sequence[WritePlan]) -> None:
        """Go on with a snapshot's state and the orders that led to it. `rt.Corrupt` if nobody can mend it."""
        merger = self.merger or self._open(state)
        self._consumed.begin(state, orders)
        self._released = 0
        merged = state.merged
        end = LogOffset(*merged.segment, merged.offset) if merged.segment is not None else None
        reached = MergeProgress(state.instruction, merged.chain, merged.total_bytes, state.position)
        merger.start(orders, end, reached, state.cleared)
        self._trim(state)

    def report(self) -> None:
        """Control begins anew, and knows nothing."""
        assert self.merger is not None, "no cluster yet"
        self._reports.merged(self.merger.durable)

    def add(self, order: WritePlan) -> None:
        """An instruction was merged by the cluster."""
        assert self.merger is not None, "no cluster yet"
        self._consumed.add(order)
        self.merger.add(order)

    def on_trimmed(self, state: SequencerState, trimmed: SegmentsTrimmed) -> None:
        """The cluster trimmed segments: so does this node, as soon as they are sealed here."""
        self.trims[trimmed.reason] += trimmed.segments
        if trimmed.overridden:
            self.overridden.update(trimmed.overridden)
            logger.warning(
                "holds_overridden names=%s reason=%s log_start=%d",
                ",".join(trimmed.overridden),
                trimmed.reason.name,
                trimmed.log_start,
            )
        self._trim(state)

    def _trim(self, state: SequencerState) -> None:
        assert self.merger is not None, "no cluster yet"
        self.merger.trim(tuple(takewhile(lambda one: one.is_trimmed, state.segments)))

    def wake(self) -> None:
        """Input became durable: the merger may go on."""
        if self.merger is not None:
            self.merger.wake()

    @property
    def instruction(self) -> int:
        """The last one that is durable here."""
        return self.merger.durable.instruction if self.merger is not None else 0

    def is_released(self, session_id: int) -> bool:
        """Whether all that the cluster merged of a session is durable in merged logs, here and elsewhere.

        Then its input need not be kept.
        """
        released = self.released
        return released is not None and self._consumed.is_durable(session_id, released)

    @property
    def released(self) -> int | None:
        """The last instruction whose input need not be kept; None if merging cannot go on from here now."""
        merger = self.merger
        if merger is None or merger.gap is not None or merger.damage is not None:
            return None
        return self._retention.released(merger.durable.instruction)

    def on_merged(self, merged: Mapping[str, int]) -> None:
        """Nodes reported the last instruction that they have merged durably."""
        self._retention.on_merged(merged)

    def on_copy_removed(self, session_id: int) -> None:
        """Its files are gone."""
        if self.merger is not None:
            self.merger.close_files(session_id)

    def forget_sessions(self, session_ids: Iterable[int]) -> None:
        """Their records are gone."""
        self._consumed.forget(session_ids)

    # Opening and closing

    def _open(self, state: SequencerState) -> Merger:
        identity = LogIdentity(LogKind.MERGED, state.cluster, self._stream)
        merger = self.merger = Merger(
            self._directory, identity, self._copies, on_failed=self._wake_on_failed, fetched=self.fetched
        )
        if merger.damage is not None:
            self.have_mended(merger.damage)
        return merger

    def have_mended(self, damage: Corrupt) -> None:
        """The merged log cannot be opened: have it mended. `rt.Corrupt` if it is no segment that is damaged.

        Without peers it is up to an operator, to whom the node goes on telling so: who puts good bytes in
        place, or resets the stream.
        """
        if not self._mender.on_damaged(damage):
            raise damage

    async def close(self, *, sync: bool) -> None:
        """End the merger."""
        merger, self.merger = self.merger, None
        if merger is None:
            return
        if sync:
            await self._loop.run_in_executor(self._pool, merger.sync)
        await self._loop.run_in_executor(self._pool, merger.close)

    def _wake_on_failed(self) -> None:
        """From the merger's thread."""
        with contextlib.suppress(RuntimeError):  # The loop is closed.
            self._loop.call_soon_threadsafe(self._on_merger_failed)

    def _on_merger_failed(self) -> None:
        if self.merger is not None and self.merger.failure is not None:
            self._reports.merged(self.merger.durable, stopped=str(self.merger.failure))
            self._on_failed(self.merger.failure)

    # Keeping it durable

    async def keep_durable(self) -> None:
        """Sync what is merged, say so, and let go of what it was made of. Storage errors are final."""
        while True:
            await asyncio.sleep(SYNC_S)
            if self.merger is None or self.merger.failure is not None:
                continue
            durable = await self._loop.run_in_executor(self._pool, self.merger.sync)
            if durable != self._reported:
                self._reported = durable
                self._reports.merged(durable)
            released = self._retention.released(durable.instruction)
            if released > self._released:
                self._released = released
                await self.let_go(released)

    async def let_go(self, instruction: int) -> None:
        """Whole segments of copies that are merged durably up to there are not needed any more."""
        for end in self._consumed.take(instruction):
            copy = self._copies.get(end.session_id)
            if copy is None:
                continue
            try:
                await self._copies.trim(copy, LogOffset(end.run, end.roll, end.offset))
            except DiskFull as error:
                logger.warning("trim_deferred session_id=%d error=%r", end.session_id, str(error))
                self._consumed.put_back(instruction, end)
