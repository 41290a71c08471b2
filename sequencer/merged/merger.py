"""Executes merge instructions: writes the headers of blocks and copies ranges of session replicas.

Invariants:
- Plans are executed in order. A plan names the place of each byte, so executing it again changes nothing.
- A block is written only if its input is on this node, durable, and has the checksum that the plan names.
- Input is verified while it is copied. Bytes that changed since they were received are not merged.
- The running checksum of the result must be the plan's. A difference stops the merger for good.
- A segment that the cluster trimmed is trimmed here as soon as it is sealed here. Nothing else is trimmed.

- One thread at a time executes a plan.

The merger has its own thread. The event loop calls `start`, `add`, `trim` and `wake`; a thread of a pool
calls `sync`. `add` executes a small plan itself if the thread is idle: two changes of threads cost more.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final

from replicator.protocol.messages import LogOffset
from rt.errors import Closed, Corrupt, DiskFull, RtError
from rt.log.disk import REAL, Disk
from rt.log.format.segment import LogKind
from rt.log.format.segment_table import LogIdentity
from rt.log.write.writer import LogWriter
from sequencer.ipc.data_reports import MergeProgress
from sequencer.merged.blocked_log import BlockedLog
from sequencer.merged.fetched_ranges import FetchedRanges
from sequencer.merged.merge_input import BlockInput, MergeInput, MissingInput, ReplicaSource, find_block
from sequencer.merged.merged_files import MergedFiles
from sequencer.merged.plan_executor import Executed, PlanExecutor, begin_of, is_quick
from sequencer.state.state import ClearedRange, MergedSegment
from sequencer.state.write_plan import BlockWrite, WritePlan, take_surplus

RETRY_S: Final = 0.2
"""How long to wait for space on a full disk before the next attempt."""
UPCOMING_MAX: Final = 1 << 10
"""Maximum number of plans whose input is requested from peers at the same time."""

logger = logging.getLogger("sequencer")


class Merger:
    """The one writer of a node's merged log."""

    def __init__(
        self,
        path: str,
        identity: LogIdentity,
        sources: ReplicaSource,
        *,
        disk: Disk = REAL,
        on_failed: Callable[[], None] = lambda: None,
        on_written: Callable[[], None] = lambda: None,
        fetched: FetchedRanges | None = None,
    ) -> None:
        """`on_failed` is called after `failure` is set, and `on_written` after each plan. The thread that
        executed the plan calls them.

        Ranges in `fetched`, which come from peers, are used before the ranges of `sources`.
        """
        assert identity.kind is LogKind.MERGED, identity
        self._fetched = FetchedRanges() if fetched is None else fetched
        self._on_failed, self._on_written = on_failed, on_written
        self._output = MergedFiles(path, identity, disk)
        self._input = MergeInput(sources, self._fetched)
        self._executor = PlanExecutor(self._output, self._input, self._wait_for)
        self._quick_executor = PlanExecutor(self._output, self._input, self._input.find_sound)
        self._quick_after_s = 0.0
        """When `add` may execute a plan again. So at most half of the event loop's time is spent on it."""
        self._changed = threading.Condition()
        """Guards the fields below, and those of `_output`."""
        self._plans: deque[WritePlan] = deque()
        self._removed: set[int] = set()
        """Sessions whose replicas were removed. Their files must be closed."""
        self._is_closed = self._is_paused = False
        self._blocked = BlockedLog()
        self._is_idle = False
        """No thread executes a plan. The one that clears it may, until it sets it. The merger's begins."""
        self._awaits_input = False
        self._inputs = 0  # How often input arrived. Only the event loop changes it, without the lock.
        self.missing: MissingInput | None = None
        self.gap: LogOffset | None = None
        """The first plan starts here, after the end of this log. Bytes up to it must come from a peer."""
        self.failure: RtError | None = None
        self.damage: Corrupt | None = None
        """The merged log cannot be opened until this is repaired. Until then the merger is paused."""
        self._chain: int | None = None
        """The running checksum of the merged log; None if it is not known."""
        self._end: tuple[LogOffset | None, MergeProgress] = (None, MergeProgress(0, 0, 0, 0))
        """The end of the state's merged log at the last `start`."""
        self.written = MergeProgress(0, 0, 0, 0)
        self.durable = MergeProgress(0, 0, 0, 0)
        try:
            self._continue_with(*self._output.open())
        except Corrupt as error:
            self.damage, self._is_paused = error, True
        self._thread = threading.Thread(target=self._run, name="rt-merger", daemon=True)
        self._thread.start()

    # From the event loop

    @property
    def place(self) -> LogOffset | None:
        """The end of the last whole block; None if there is no segment."""
        with self._changed:
            return self._output.place

    @property
    def position(self) -> int:
        """One past the last position of this log."""
        with self._changed:
            return self._output.position

    def start(
        self,
        plans: Sequence[WritePlan],
        end: LogOffset | None,
        reached: MergeProgress,
        cleared: ClearedRange | None = None,
    ) -> None:
        """Replace the waiting plans by `plans`. After them the state's merged log ends at `end`."""
        with self._changed:
            self._end, self._output.cleared = (end, reached), cleared
            self._plans.clear()
            self._fetched.clear()
            self._plans.extend(one for one in plans if one.instruction > self.written.instruction)
            take_surplus(self._plans)
            self._find_gap()
            self._changed.notify_all()

    def add(self, plan: WritePlan) -> None:
        """Append a plan. If too much waits, the oldest is dropped: its bytes must come from another node."""
        with self._changed:
            self._plans.append(plan)
            if surplus := take_surplus(self._plans):
                for dropped in surplus:
                    self._fetched.forget(dropped)
                self._find_gap()
            if not self._is_idle:
                return
            if not self._may_execute_now(plan):
                self._changed.notify_all()
                return
            self._is_idle, chain = False, self._chain
        self._execute_now(plan, chain)

    def _may_execute_now(self, plan: WritePlan) -> bool:
        """Whether the event loop may execute a plan: it is the only work there is, and quick."""
        return (
            not self._must_stop()
            and self.failure is None
            and self._may_merge()
            and self._plans[0] is plan
            and is_quick(plan, self._output.place)
            and not (self._removed or self._output.to_trim())
            and time.monotonic() >= self._quick_after_s
        )

    def _execute_now(self, plan: WritePlan, chain: int | None) -> None:
        """Execute a plan in the event loop. If that fails, the thread executes it again, and acts on it."""
        begun_s = time.monotonic()
        done: Executed | None = None
        try:
            with contextlib.suppress(RtError):
                done = self._quick_executor.execute(plan, chain)
            if done is not None:
                self.missing = None
                self._on_executed(plan, done)
        except Exception as error:  # noqa: BLE001 - it stops the merger
            self._fail_unexpectedly(error)
        finally:
            self._quick_after_s = 2 * time.monotonic() - begun_s
            with self._changed:
                self._is_idle = True
                if self._is_paused or self._may_work():
                    self._changed.notify_all()

    def upcoming(self) -> list[WritePlan]:
        """The next plans, `UPCOMING_MAX` at most."""
        with self._changed:
            return list(islice(self._plans, UPCOMING_MAX))

    def trim(self, trimmed: Sequence[MergedSegment]) -> None:
        """Trim what the cluster trimmed: all segments that its state lists as trimmed, oldest first."""
        with self._changed:
            self._output.trimmed = trimmed
            self._changed.notify_all()

    def is_trimmed(self, damage: Corrupt) -> bool:
        """Whether the cluster trimmed the corrupt segment, so that it cannot and need not be repaired."""
        return self._output.is_trimmed(damage)

    def wake(self) -> None:
        """Report that more input is durable."""
        # The thread sets the flag before it compares the count, so either it sees the count or we the flag.
        self._inputs += 1
        if self._awaits_input:
            with self._changed:
                self._changed.notify_all()

    def close_files(self, session_id: int) -> None:
        """Close the files of a session whose replica was removed, to free their disk space."""
        with self._changed:
            self._removed.add(session_id)
            self._changed.notify_all()

    def pause(self) -> None:
        """Release the merged log for another writer. Returns when the merger writes nothing more."""
        with self._changed:
            self._is_paused = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_idle or self.failure is not None)
        self._release()

    def resume(self) -> None:
        """Open the merged log again, as it is now. If it is corrupt, the merger stays paused."""
        opened: tuple[LogWriter, int] | None = None
        while opened is None:
            try:
                opened = self._output.open()  # Reads a whole segment, so not on the event loop.
            except Corrupt as error:
                self.damage = error
                return
            except DiskFull as error:
                self._blocked.record(error)
                with self._changed:
                    if self._changed.wait_for(lambda: self._is_closed, RETRY_S):
                        return
        with self._changed:
            self._continue_with(*opened)
            self.damage = self.missing = None  # Another writer may have written the missing bytes.
            self._is_paused = False
            self._find_gap()
            self._changed.notify_all()

    def sync(self) -> MergeProgress:
        """Sync the written bytes and return the durable progress. `rt.StorageFailed` is final."""
        with self._output.lock:
            with self._changed:
                written, writer = self.written, self._output.writer
                if writer is None or written == self.durable:
                    return self.durable
                # Sealed segments are durable already.
                point = writer.sync_point() if writer.active is not None else None
            if point is not None:
                writer.sync_to(point)
        with self._changed:
            if written.instruction > self.durable.instruction:
                self.durable = written
            return self.durable

    def close(self) -> None:
        """End the thread and close the files. Does not sync."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()
        self._release()

    def _continue_with(self, writer: LogWriter, instruction: int) -> None:
        self._output.writer = writer
        if instruction >= self.durable.instruction:
            self.written = self.durable = MergeProgress(instruction, 0, self.durable.total_bytes, writer.end)
        else:
            self.written = self.durable
        self._chain = None

    def _release(self) -> None:
        with self._output.lock, self._changed:
            self._output.close()
        self._input.files.close()

    def _find_gap(self) -> None:
        """Set `gap` unless the first plan, or the state's end, follows the end of this log."""
        end, reached = self._end
        # Plans before the first segment write nothing and have no offset.
        plan = next((one for one in self._plans if one.end_offset), None)
        begin = end if plan is None else begin_of(plan)
        first = reached.position if plan is None else plan.first_position
        self.gap = begin if begin is not None and not self._output.reaches(begin, first) else None
        is_cleared = end is None and self._output.cleared is not None
        is_there = self._output.place == end or is_cleared
        if not self._plans and is_there and self.written.instruction < reached.instruction:
            self.written, self._chain = reached._replace(chain=0), reached.chain
            if is_cleared:
                self.durable = self.written  # A hard reset keeps nothing.

    # The thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_idle = True
                self._changed.notify_all()
                self._changed.wait_for(self._may_work)
                if self._is_closed or self.failure is not None:
                    return
                self._is_idle = False
                plan, chain = (self._plans[0], self._chain) if self._may_merge() else (None, None)
                removed, self._removed = self._removed, set()
            try:
                self._input.files.close_sessions(removed)
                self._trim()
                done = None if plan is None else self._executor.execute(plan, chain)
            except (DiskFull, Corrupt) as error:
                self._blocked.record(error)
                self._input.files.close()
                with self._changed:
                    if isinstance(error, Corrupt) and plan is not None:
                        # The replica was trimmed because the cluster is far ahead, or it is corrupt.
                        self.missing = MissingInput.of(find_block(plan, error.path))
                    self._changed.wait(RETRY_S)
                continue
            except RtError as error:
                self._fail(error)
                return
            except Exception as error:  # noqa: BLE001 - it stops the merger
                self._fail_unexpectedly(error)
                return
            if plan is not None and done is not None:
                self._on_executed(plan, done)

    def _on_executed(self, plan: WritePlan, done: Executed) -> None:
        with self._changed:
            self._chain = done.chain
            self.written = MergeProgress(
                plan.instruction, done.chain or 0, plan.total_bytes, plan.end_position
            )
            self._fetched.forget(plan)
            while self._plans and self._plans[0].instruction <= plan.instruction:
                self._plans.popleft()  # Since it began, `start` may have listed it again.
        self._on_written()

    def _may_work(self) -> bool:
        """Whether the thread may continue: it has something to do, or must end."""
        if not self._is_idle:
            return False  # The event loop executes a plan.
        if self._is_closed or self.failure is not None:
            return True
        return not self._must_stop() and (
            self._may_merge() or bool(self._removed) or bool(self._output.to_trim())
        )

    def _may_merge(self) -> bool:
        return bool(self._plans) and self.gap is None

    def _must_stop(self) -> bool:
        return self._is_closed or self._is_paused

    def _fail(self, error: RtError) -> None:
        logger.critical("merge_stopped error=%r", str(error))
        with self._changed:
            self.failure = error
            self._is_idle = True
            self._changed.notify_all()
        self._on_failed()

    def _fail_unexpectedly(self, error: Exception) -> None:
        logger.critical("merge_failed", exc_info=error)
        self._fail(Closed(f"the merger was interrupted: {error!r}", where=self._output.path))

    def _trim(self) -> None:
        """Trim sealed segments; `rt.DiskFull` if the table cannot be written."""
        with self._changed:
            writer, gone = self._output.writer, self._output.to_trim()
        if writer is not None and gone:
            with self._output.lock:  # A sync may be running.
                writer.trim_each(gone)
            logger.info("merged_log_trimmed segments=%d last=%s", len(gone), max(gone).file_name)

    def _wait_for(self, block: BlockWrite) -> BlockInput | None:
        """Wait for the input of a block; None if the merger must stop before it arrived."""
        is_reported = False
        while True:
            inputs = self._inputs
            found = self._input.find(block)
            if found is not None and found.range_info.chain_end == block.chain_end:
                self.missing = None
                return found
            if found is not None and not is_reported:
                is_reported = True
                self._input.on_bad_replica(block, f"chain {found.range_info.chain_end:#010x}")
            self._trim()  # Input may take long to arrive.
            with self._changed:
                self.missing = MissingInput.of(block)
                self._awaits_input = True
                if self._inputs == inputs and not self._must_stop():
                    self._changed.wait(RETRY_S)
                self._awaits_input = False
                if self._must_stop():
                    return None
