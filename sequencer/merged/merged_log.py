"""The merged log of this node: starts the merger, keeps its log durable, and releases merged input.

For one event loop; the merger has its own thread. Invariant: bytes of a session are released only when they
are durable in the merged logs of this node and of a majority.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from itertools import takewhile
from typing import Final

from replicator.protocol.messages import LogOffset
from replicator.protocol.run_in_thread import run_to_end
from rt.errors import Corrupt, DiskFull, RtError
from rt.log.format.segment import LogKind
from rt.log.format.segment_table import LogIdentity
from rt.v1 import sequencer_pb2 as pb
from sequencer.config.config import NodeConfig
from sequencer.ipc.data_reports import DataReports, MergeProgress
from sequencer.merged.fetched_ranges import FetchedRanges
from sequencer.merged.merger import Merger
from sequencer.merged.repair_queue import Repairer
from sequencer.merged.session_retention import SessionRetention
from sequencer.sessions.merge_progress import ConsumedRanges
from sequencer.sessions.replicas import SessionReplicas
from sequencer.state.apply_result import SegmentsTrimmed
from sequencer.state.state import SequencerState
from sequencer.state.write_plan import WritePlan

SYNC_S: Final = 0.2
"""How often merged bytes are synced. No client waits for this sync; it bounds the tail of pending plans."""

logger = logging.getLogger("sequencer")


class MergedLog:
    """Owns the merger, starting with the first state that belongs to a cluster."""

    def __init__(
        self,
        config: NodeConfig,
        pool: Executor,
        replicas: SessionReplicas,
        reports: DataReports,
        repairer: Repairer,
        on_failed: Callable[[RtError], None],
    ) -> None:
        """`on_failed` gets the error that must end the process."""
        self._directory, self._stream = config.merged_directory, config.stream
        self._pool, self._replicas, self._reports, self._repairer = pool, replicas, reports, repairer
        self._on_failed = on_failed
        self._loop = asyncio.get_running_loop()
        self._consumed = ConsumedRanges()
        self._retention = SessionRetention(config.name, config.members)
        self._released = 0
        """Input up to this instruction was released."""
        self.fetched = FetchedRanges()
        """Input that came from peers."""
        self._reported = MergeProgress(0, 0, 0, 0)
        self.merger: Merger | None = None

    def start(self, state: SequencerState, plans: Sequence[WritePlan]) -> None:
        """Continue with a snapshot's state and its latest plans, after `open`."""
        merger = self.merger
        assert merger is not None, "not open"
        self._consumed.start(state, plans)
        self._released = 0
        merged = state.merged
        end = LogOffset(*merged.segment, merged.offset) if merged.segment is not None else None
        reached = MergeProgress(state.instruction, merged.chain, merged.total_bytes, state.position)
        merger.start(plans, end, reached, state.cleared)
        self._trim(state)

    def report(self) -> None:
        """Report the durable end to a control process that was restarted."""
        assert self.merger is not None, "no cluster yet"
        self._reports.merged(self.merger.durable)

    def add(self, plan: WritePlan) -> None:
        """Execute the plan of the cluster's next merge instruction."""
        assert self.merger is not None, "no cluster yet"
        self._consumed.add(plan)
        self.merger.add(plan)

    def on_trimmed(self, state: SequencerState, trimmed: SegmentsTrimmed) -> None:
        """Trim the segments that the cluster trimmed, each as soon as it is sealed on this node."""
        if trimmed.overridden:
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
        """Let the merger continue: input became durable."""
        if self.merger is not None:
            self.merger.wake()

    @property
    def instruction(self) -> int:
        """The last instruction that is durable here."""
        return self.merger.durable.instruction if self.merger is not None else 0

    def is_released(self, session_id: int) -> bool:
        """Whether all merged bytes of a session are durable in enough merged logs, so that its input can be
        deleted.
        """
        released = self.released
        return released is not None and self._consumed.is_durable(session_id, released)

    @property
    def released(self) -> int | None:
        """The last instruction whose input is not needed; None while merging cannot continue from here."""
        merger = self.merger
        if merger is None or merger.gap is not None or merger.damage is not None:
            return None
        return self._retention.released(merger.durable.instruction)

    def on_view(self, view: pb.Standing) -> None:
        """Record which nodes vote, and the last instruction that each reported as merged durably."""
        self._retention.on_voters(one.name for one in view.nodes if not one.is_learner)
        self._retention.on_merged({one.name: one.summary.merged.instruction for one in view.nodes})

    def on_replica_removed(self, session_id: int) -> None:
        if self.merger is not None:
            self.merger.close_files(session_id)

    def forget_sessions(self, session_ids: Iterable[int]) -> None:
        self._consumed.forget(session_ids)

    # Opening and closing

    async def open(self, cluster: bytes) -> None:
        """Open the log of this cluster in a thread: its newest segment is scanned and synced.

        Raises storage errors, and `rt.Corrupt` if the log cannot be repaired. If the caller is cancelled,
        this waits for the thread, and `close` closes everything that the thread has opened.
        """
        identity = LogIdentity(LogKind.MERGED, cluster, self._stream)
        opened: list[Merger] = []

        def open_merger() -> None:
            opened.append(
                Merger(
                    self._directory,
                    identity,
                    self._replicas,
                    on_failed=self._wake_on_failed,
                    fetched=self.fetched,
                )
            )

        try:
            await run_to_end(self._pool, open_merger)
        finally:
            self.merger = opened[0] if opened else None
        if opened[0].damage is not None:
            self.request_repair(opened[0].damage)

    def request_repair(self, damage: Corrupt) -> None:
        """Request the repair of the merged log, which cannot be opened. `rt.Corrupt` if the corrupt file is
        no segment.

        If there are no peers, an operator must act: put good bytes in place, or reset the stream. The alarm
        stays.
        """
        if not self._repairer.on_corrupt(damage):
            raise damage

    async def close(self, *, sync: bool) -> None:
        merger, self.merger = self.merger, None
        if merger is None:
            return
        if sync:
            await self._loop.run_in_executor(self._pool, merger.sync)
        await self._loop.run_in_executor(self._pool, merger.close)

    def _wake_on_failed(self) -> None:
        """Called by the merger's thread."""
        with contextlib.suppress(RuntimeError):  # The loop is closed.
            self._loop.call_soon_threadsafe(self._on_merger_failed)

    def _on_merger_failed(self) -> None:
        if self.merger is not None and self.merger.failure is not None:
            self._reports.merged(self.merger.durable, stopped=str(self.merger.failure))
            self._on_failed(self.merger.failure)

    # Keeping it durable

    async def keep_durable(self) -> None:
        """Sync merged bytes, report them and release their input. Storage errors are final."""
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
                await self.release_input(released)

    async def release_input(self, instruction: int) -> None:
        """Trim whole segments of replicas that are merged durably up to `instruction`."""
        for end in self._consumed.drain(instruction):
            replica = self._replicas.get(end.session_id)
            if replica is None:
                continue
            try:
                await self._replicas.trim(replica, LogOffset(end.run, end.roll, end.offset))
            except DiskFull as error:
                logger.warning("trim_deferred session_id=%d error=%r", end.session_id, str(error))
                self._consumed.put_back(instruction, end)
