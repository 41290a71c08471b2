"""Reports the phase of the data process to the control process. For one event loop."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from sequencer.config.startup_phase import DataPhases, MergedLogView, Phase
from sequencer.ipc.data_reports import DISK_S, DataReports
from sequencer.ipc.state_follower import StateFollower
from sequencer.merged.catch_up import CatchUp
from sequencer.merged.merged_log import MergedLog

POLL_S: Final = 0.5


class PhaseReporter:
    def __init__(
        self, follower: StateFollower, merged_log: MergedLog, catch_up: CatchUp, reports: DataReports
    ) -> None:
        self._follower, self._merged_log, self._catch_up = follower, merged_log, catch_up
        self._reports = reports
        self._phases = DataPhases()

    async def run(self) -> None:
        """Report the phase after each change, and also every `DISK_S`, because a restarted control process
        knows nothing.
        """
        reported: Phase | None = None
        reported_s = 0.0
        while True:
            phase, now_s = self.poll(time.monotonic_ns()), time.monotonic()
            if phase != reported or now_s - reported_s >= DISK_S:
                reported, reported_s = phase, now_s
                self._reports.step(phase)
            await asyncio.sleep(POLL_S)

    def poll(self, now_ns: int) -> Phase:
        """The current phase of this process."""
        state, merger = self._follower.state, self._merged_log.merger
        if state is None or merger is None:
            return self._phases.update(None, now_ns)
        is_cut_off = merger.gap is not None or merger.damage is not None
        merged = MergedLogView(merger.written.position, state.position, self._catch_up.copied, is_cut_off)
        return self._phases.update(merged, now_ns)
