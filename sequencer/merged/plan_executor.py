"""Executes one plan: writes the blocks that are missing here, and compares the merged log's checksum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from replicator.protocol.messages import LogOffset
from rt.errors import Corrupt, Diverged
from rt.log.format.checksum import crc32c
from rt.log.format.segment import SEGMENT_HEADER_BYTES
from rt.log.write.writer import BatchFrames, LogWriter
from sequencer.merged.merge_input import BlockInput, MergeInput, find_block
from sequencer.merged.merged_files import MergedFiles
from sequencer.state.write_plan import BlockWrite, WritePlan

QUICK_BYTES_MAX: Final = 64 * 1024
QUICK_BLOCKS_MAX: Final = 8
"""A plan within both limits takes less time than two thread switches."""


class Executed(NamedTuple):
    chain: int | None
    """The running checksum of the merged log after the plan; None if it is not known."""


class PlanExecutor:
    """Executes plans, one after the other. For the thread that executes the plan."""

    def __init__(
        self, output: MergedFiles, source: MergeInput, wait_for: Callable[[BlockWrite], BlockInput | None]
    ) -> None:
        """`wait_for` waits for the input of a block and returns it; None if the merger must stop before the
        input arrives.
        """
        self._output, self._input, self._wait_for = output, source, wait_for

    def execute(self, plan: WritePlan, chain: int | None) -> Executed | None:
        """Write the blocks that are missing; None if the merger must stop before their input arrived.

        `chain` is the running checksum before the plan; None if it is not known.
        """
        writer = self._output.writer
        assert writer is not None
        here = self._output.place
        if plan.offset < plan.end_offset and (here is None or here < end_of(plan)):
            try:
                if not self._write_blocks(writer, plan):
                    return None
            finally:
                self._input.files.close_passed()
            is_new = here is None or here <= begin_of(plan)
            self._check_headers(plan, None if is_new else self._output.heads(plan), chain)
        elif not plan.blocks or self._output.contains(plan):
            self._check_headers(plan, self._output.heads(plan), chain)
        else:
            return Executed(None)
        return Executed(plan.chain)

    def _write_blocks(self, writer: LogWriter, plan: WritePlan) -> bool:
        begins = plan.offset == 0
        if begins and (writer.active is None or writer.active.id != plan.segment or writer.is_sealed):
            if writer.end != plan.first_position and not self._output.is_first_after_reset(plan.segment):
                raise self._diverged(plan, f"position {writer.end}", f"position {plan.first_position}")
            with self._output.lock:
                writer.start(plan.segment, first=plan.first_position, created_ns=plan.sequenced_ns)
        at = plan.offset or SEGMENT_HEADER_BYTES
        if writer.active is None or writer.active.id != plan.segment or writer.offset < at:
            raise self._diverged(plan, f"an end at {self._output.place}", f"{plan.segment} offset {at}")
        position = plan.first_position
        runs: list[BatchFrames] = []
        for block in plan.blocks:
            if at >= writer.offset:
                if not runs and at != writer.offset:
                    raise self._diverged(plan, f"an end at offset {writer.offset}", f"a block at {at}")
                run = self._frames(block, position)
                if run is None:
                    return False
                runs.append(run)
            at += block.size_bytes
            position += block.message_count
        if at != plan.end_offset or position != plan.end_position:
            raise self._diverged(plan, f"offset {at}", f"offset {plan.end_offset}")
        if runs:
            try:
                writer.append(runs)
            except Corrupt as error:
                self._input.on_bad_replica(find_block(plan, error.path), str(error.got))
                raise
            self._input.files.close_idle()
        return True

    def _frames(self, block: BlockWrite, position: int) -> BatchFrames | None:
        """Wait for the block's input and return its bytes; None if the merger must stop before."""
        if block.is_declaration:
            return BatchFrames([block.head], position, 0, 0, is_declaration=True)
        found = self._wait_for(block)
        return None if found is None else self._input.frames(block, found, position + block.message_count)

    def _check_headers(self, plan: WritePlan, heads: list[bytes] | None, chain: int | None) -> None:
        """Compare the running checksum of the merged log with the plan's. `chain` is the checksum before the
        plan.

        `heads` are the headers in the merged log; None if they were just written. If the checksum before them
        is not known, the headers are compared instead.
        """
        expected = [block.head for block in plan.blocks]
        if chain is None:
            chain = plan.chain if heads in (None, expected) else None
        else:
            for head in expected if heads is None else heads:
                chain = crc32c(head, chain)
        if chain != plan.chain:
            got = "other headers of blocks" if chain is None else f"running checksum {chain:#010x}"
            raise self._diverged(plan, got, f"running checksum {plan.chain:#010x}")

    def _diverged(self, plan: WritePlan, got: str, expected: str) -> Diverged:
        return Diverged(
            "this node's merged log differs from what the cluster agreed on",
            where=f"{self._output.path}, instruction {plan.instruction}",
            got=got,
            expected=expected,
            hint="Keep the files for analysis. If only this node says this, empty its directory: it copies "
            "it from its peers. If more than one node says this, empty none.",
        )


def is_quick(plan: WritePlan, here: LogOffset | None) -> bool:
    """Whether a plan is one short write at the end of the merged log, `here`: no new segment, no sync."""
    is_small = len(plan.blocks) <= QUICK_BLOCKS_MAX and plan.end_offset - plan.offset <= QUICK_BYTES_MAX
    return is_small and 0 < plan.offset < plan.end_offset and here == begin_of(plan)


def begin_of(plan: WritePlan) -> LogOffset:
    return LogOffset(*plan.segment, plan.offset)


def end_of(plan: WritePlan) -> LogOffset:
    return LogOffset(*plan.segment, plan.end_offset)
