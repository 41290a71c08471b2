"""The data process's reports to the control process: durable ends, merge progress, disk use.

For one event loop. Durable ends are reported in the order in which they became durable. Reports that are lost
while the link is down are not repeated: a control process that reconnects asks for everything.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Final, NamedTuple

from rt.v1 import sequencer_pb2 as pb
from sequencer.config.startup_phase import Phase
from sequencer.ipc.client import ControlLink
from sequencer.leader.replication_tracker import MARK

JOIN_S: Final = 0.002
"""Minimum time between reports of durable ends. Each report costs the control processes of all nodes."""
PART_BOUNDARIES_MAX: Final = 1 << 13
"""A report with more boundaries is split: the control process handles each part in less than a heartbeat."""
DISK_S: Final = 2.0
CLIENTS_S: Final = 2.0
CONNECTED_S: Final = 5.0
"""Much less than the minute after which an idle session may be closed."""


class MergeProgress(NamedTuple):
    """The end of the merged log that is written, or durable."""

    instruction: int
    chain: int
    """The running checksum of this node's own block headers; 0: unknown."""
    total_bytes: int
    position: int


class DataReports:
    """Sends reports over `link`."""

    def __init__(self, link: ControlLink) -> None:
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._pending: list[pb.SegmentReport] = []
        self._reported_s = float("-inf")

    def segment(self, report: pb.SegmentReport) -> None:
        """Report a new durable end: at once, or together with others `JOIN_S` after the last report."""
        if not self._pending:
            due_s = self._reported_s + JOIN_S
            if due_s > self._loop.time():
                self._loop.call_at(due_s, self._send_segments)
            else:
                # A timer would run after the callbacks that are ready now.
                self._loop.call_soon(self._send_segments)
        self._pending.append(report)

    def joins(self, joins: int) -> None:
        """Report that everything that is durable here was reported after this number of disks had joined."""
        self._send_segments()
        self._send(pb.DataReport(joins=joins))

    def members(self, version: int) -> None:
        """Report that no stream counts with an earlier list of members than this one, and that everything
        durable was reported.
        """
        self._send_segments()
        self._send(pb.DataReport(members_version=version))

    def merged(self, durable: MergeProgress, stopped: str = "") -> None:
        """Report how far the merged log is durable. `stopped` is the error that stopped the merger."""
        merged = pb.MergedReport(
            instruction=durable.instruction,
            chain=durable.chain,
            bytes=durable.total_bytes,
            position=durable.position,
            stopped=stopped,
        )
        self._send(pb.DataReport(merged=merged))

    def step(self, step: Phase) -> None:
        self._send(pb.DataReport(step=pb.DataStep(step=step.name, done=step.done, total=step.total)))

    async def keep_reporting_disk(self, directory: str) -> None:
        """Report the disk use of `directory` every `DISK_S`, until cancelled."""
        while True:
            found = os.statvfs(directory)
            # As `df` does: blocks reserved for root are neither used nor free.
            free_bytes = found.f_bavail * found.f_frsize
            size_bytes = (found.f_blocks - found.f_bfree) * found.f_frsize + free_bytes
            self._send(pb.DataReport(disk_bytes=size_bytes, disk_free_bytes=free_bytes))
            await asyncio.sleep(DISK_S)

    async def keep_reporting_connected(self, connected: Callable[[], list[int]]) -> None:
        """Report the sessions whose publishers are connected every `CONNECTED_S`, until cancelled."""
        while True:
            await asyncio.sleep(CONNECTED_S)
            if session_ids := connected():
                self._send(pb.DataReport(connected=session_ids))

    async def keep_reporting_clients(self, clients: Callable[[], pb.ConnectedClients]) -> None:
        """Report who is connected every `CLIENTS_S`, until cancelled."""
        while True:
            self._send(pb.DataReport(clients=clients()))
            await asyncio.sleep(CLIENTS_S)

    def _send_segments(self) -> None:
        segments, self._pending = self._pending, []
        if segments:
            self._reported_s = self._loop.time()
            for part in _parts(segments):
                self._send(pb.DataReport(segments=part))

    def _send(self, report: pb.DataReport) -> None:
        self._link.send(pb.ToControl(report=report))


def _parts(reports: Iterable[pb.SegmentReport]) -> Iterator[list[pb.SegmentReport]]:
    """The same reports in the same order, in parts with less than twice `PART_BOUNDARIES_MAX` boundaries."""
    part: list[pb.SegmentReport] = []
    count = 0
    for one in chain.from_iterable(map(_pieces, reports)):
        part.append(one)
        count += 1 + len(one.boundaries) // MARK.size
        if count >= PART_BOUNDARIES_MAX:
            yield part
            part, count = [], 0
    if part:
        yield part


def _pieces(one: pb.SegmentReport) -> Iterator[pb.SegmentReport]:
    """The report of a segment in pieces of up to `PART_BOUNDARIES_MAX` boundaries. The last has the ends."""
    size = PART_BOUNDARIES_MAX * MARK.size
    rest = one.boundaries
    while len(rest) > size:
        yield pb.SegmentReport(session_id=one.session_id, run=one.run, roll=one.roll, boundaries=rest[:size])
        rest = rest[size:]
    if len(rest) < len(one.boundaries):
        one.boundaries = rest
    yield one
