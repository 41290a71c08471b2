"""What the control process hears of this one: what became durable, how far it is merged, the disk.

For one event loop. The law: what is durable is told in the order in which it became so. What nobody heard,
because the link was down, is not told again here: a control process that begins anew is told all there is.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Final, NamedTuple

from rt.v1 import sequencer_pb2 as pb
from sequencer.config.startup_phase import Phase
from sequencer.ipc.client import ControlLink

JOIN_S: Final = 0.002
"""Control is told of what became durable at most so often: each time costs all nodes' control a little."""
DISK_S: Final = 2.0
CONNECTED_S: Final = 5.0
"""Much less than the minute after which a session may be closed."""


class MergeProgress(NamedTuple):
    """How far the merged log is written, or durable."""

    instruction: int
    chain: int
    """As this node's own headers of blocks make it; 0: not known."""
    total_bytes: int
    position: int


class DataReports:
    """Tells the control process at the other end of `link`."""

    def __init__(self, link: ControlLink) -> None:
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._untold: list[pb.SegmentReport] = []
        self._told_s = float("-inf")

    def segment(self, report: pb.SegmentReport) -> None:
        """Of a session's copy something is new: alone at once; what comes soon behind it goes together."""
        if not self._untold:
            self._loop.call_at(self._told_s + JOIN_S, self._tell_segments)
        self._untold.append(report)

    def joins(self, joins: int) -> None:
        """All was told that is durable here now that so many disks have joined."""
        self._tell_segments()
        self._tell(pb.DataReport(joins=joins))

    def merged(self, durable: MergeProgress, stopped: str = "") -> None:
        """How far the merged log is durable; `stopped` says why it will not go on."""
        merged = pb.MergedReport(
            instruction=durable.instruction,
            chain=durable.chain,
            bytes=durable.total_bytes,
            position=durable.position,
            stopped=stopped,
        )
        self._tell(pb.DataReport(merged=merged))

    def step(self, step: Phase) -> None:
        """Where this process is on its way to keeping up with the cluster."""
        self._tell(pb.DataReport(step=pb.DataStep(step=step.name, done=step.done, total=step.total)))

    async def keep_telling_disk(self, directory: str) -> None:
        """Now and then, how full the disk of `directory` is."""
        while True:
            found = os.statvfs(directory)
            # As `df` does: what is set aside for root is neither used nor free.
            free_bytes = found.f_bavail * found.f_frsize
            size_bytes = (found.f_blocks - found.f_bfree) * found.f_frsize + free_bytes
            self._tell(pb.DataReport(disk_bytes=size_bytes, disk_free_bytes=free_bytes))
            await asyncio.sleep(DISK_S)

    async def keep_telling_connected(self, connected: Callable[[], list[int]]) -> None:
        """Now and then, which sessions have a stream of their publisher."""
        while True:
            await asyncio.sleep(CONNECTED_S)
            if session_ids := connected():
                self._tell(pb.DataReport(connected=session_ids))

    def _tell_segments(self) -> None:
        segments, self._untold = self._untold, []
        if segments:
            self._told_s = self._loop.time()
            self._tell(pb.DataReport(segments=segments))

    def _tell(self, report: pb.DataReport) -> None:
        self._link.send(pb.ToControl(report=report))
