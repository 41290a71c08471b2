"""What the control process hears of this one: what became durable, how far it is merged, the disk.

For one event loop. The law: what is durable is told in the order in which it became so. What nobody heard,
because the link was down, is not told again here: a control process that begins anew is told all there is.
"""

from __future__ import annotations

import asyncio
import os
from typing import Final

from rt.v1 import sequencer_pb2 as pb
from sequencer.data.link import ControlLink
from sequencer.data.merger import Reached
from sequencer.steps import Step

JOIN_S: Final = 0.002
"""Control is told of what became durable at most so often: each time costs all nodes' control a little."""
DISK_S: Final = 2.0


class Reports:
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

    def merged(self, durable: Reached, stopped: str = "") -> None:
        """How far the merged log is durable; `stopped` says why it will not go on."""
        merged = pb.MergedReport(
            instruction=durable.instruction,
            chain=durable.chain,
            bytes=durable.total_bytes,
            position=durable.position,
            stopped=stopped,
        )
        self._tell(pb.DataReport(merged=merged))

    def step(self, step: Step) -> None:
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

    def _tell_segments(self) -> None:
        segments, self._untold = self._untold, []
        if segments:
            self._told_s = self._loop.time()
            self._tell(pb.DataReport(segments=segments))

    def _tell(self, report: pb.DataReport) -> None:
        self._link.send(pb.ToControl(report=report))
