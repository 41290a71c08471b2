"""What keeps the files of this node good: which are read again, and where good bytes come from.

For one event loop. Laws. Of the merged log nothing is ever given up. A session's copy that nobody can mend is
set aside, and the node then counts as one that has lost its disk of copies: it said to hold what it has not.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import Final

from replicator.protocol.messages import LogOffset, Run
from rt.cluster_epoch import line_of
from rt.errors import Corrupt, CorruptRange, Diverged, RtError
from rt.log.disk import REAL, storage_errors
from rt.log.format.segment import LogKind, SegmentId, parse_segment_name
from rt.log.format.segment_table import LogIdentity
from rt.log.scan.directory import list_segments, read_durable_end
from rt.net.grpc_errors import Unreachable
from rt.net.tls import TLS
from sequencer.config.config import NodeConfig
from sequencer.ipc.state_follower import StateFollower
from sequencer.merged.repair_queue import Repairer, VerifiedDisk
from sequencer.merged.scrubber import Scrubber, ScrubTarget
from sequencer.rest.base.node_snapshot import DamagedSegment
from sequencer.sessions.disk_id import forget_disk_id
from sequencer.sessions.merge_progress import consumed_place
from sequencer.sessions.peer_pull import fetch_copy, fetch_segment
from sequencer.sessions.replicas import SessionReplicas
from sequencer.state.state import SequencerState

GIVE_UP_TRIES: Final = 6
"""To mend a session's copy, over some 20 s: a peer that was started at the same time is there by then."""


class RepairService:
    """`mender` and `scrubber` are to be run; through `disk` nobody reads what is damaged."""

    def __init__(
        self,
        config: NodeConfig,
        tls: TLS,
        pool: Executor,
        replica: StateFollower,
        copies: SessionReplicas,
        on_failed: Callable[[RtError], None],
    ) -> None:
        self._config, self._tls, self._replica, self._copies = config, tls, replica, copies
        self._on_failed = on_failed
        self._endpoints = [config.members[peer].data for peer in config.peers]
        self._merged = os.path.abspath(config.merged_directory)
        self._sessions = os.path.abspath(config.sessions_directory)
        beside = os.path.dirname(self._merged)
        self._kept = os.path.join(beside, "damaged")
        self.mender = Repairer(
            os.path.join(beside, "mending"), pool, self._fetch, on_failed=on_failed, give_up=self._give_up
        )
        self.scrubber = Scrubber(self._targets, self.mender.on_damaged, pool)
        self.disk = VerifiedDisk(self.mender.damages)

    def told(self, error: Corrupt) -> RtError:
        """What others are told of damage: of the merged log, which positions are not to be had here."""
        directory, name = os.path.split(os.path.abspath(error.path))
        segment, state = parse_segment_name(name), self._replica.state
        found = None if segment is None or state is None else _positions_of(state, segment)
        if directory != self._merged or found is None:
            return error
        return CorruptRange(
            f"{name} is damaged here from offset {error.offset} on",
            where=self._config.name,
            start=found[0],
            end=found[1],
            hint="Other nodes are asked for good bytes. If none has any, the alarm segment-corrupt says what "
            "helps.",
        )

    def damaged_segments(self) -> tuple[DamagedSegment, ...]:
        """The segments of the merged log that are damaged, and not trimmed."""
        state, found = self._replica.state, []
        for one in self.mender.patients:
            positions = None if state is None else _positions_of(state, one.segment)
            if os.path.dirname(one.path) == self._merged and positions is not None and state is not None:
                is_growing = one.segment == state.merged.segment
                name = one.segment.file_name
                found.append(DamagedSegment(name, one.offset, *positions, one.tries, is_growing))
        return tuple(found)

    def _targets(self) -> Iterator[ScrubTarget]:
        """What is read again and again: the merged log, and what is not merged durably yet."""
        if self._replica.state is None:
            return  # What a segment must be, and that it can be mended, is not known yet.
        if os.path.isdir(self._merged):
            yield from (ScrubTarget(self._merged, segment) for segment in list_segments(REAL, self._merged))
        for copy in self._copies.all():
            yield from (ScrubTarget(copy.receiver.path, segment) for segment in copy.unmerged)

    async def _fetch(self, directory: str, segment: SegmentId, aside: str, end: int) -> None:
        """Get a good copy of a segment from a peer; see `mending.Fetch`."""
        state = self._replica.state
        if state is None or not self._endpoints:
            raise Unreachable("there is no peer to fetch good bytes from", where=directory)
        if directory == self._merged:
            await self._fetch_merged(state, segment, aside, end)
        else:
            await self._fetch_copy(state, directory, segment, aside, end)

    async def _fetch_merged(self, state: SequencerState, segment: SegmentId, aside: str, end: int) -> None:
        first = _first_of(state, segment)
        if first is None:
            raise Unreachable("the cluster does not keep that segment", where=self._config.name, got=segment)
        identity = LogIdentity(LogKind.MERGED, state.cluster, self._config.stream)
        try:
            line = line_of(self._replica.epoch)
            await fetch_segment(aside, identity, segment, first, end, self._endpoints, self._tls, line)
        except Diverged as error:  # Of peers, among each other.
            raise Unreachable("peers do not agree on that segment", where=segment, got=error) from error

    async def _fetch_copy(
        self, state: SequencerState, directory: str, segment: SegmentId, aside: str, end: int
    ) -> None:
        session = state.sessions.get(int(os.path.basename(directory)))
        known = None if session is None else session.life_of(segment.run)
        if session is None or known is None:
            raise Unreachable("that is merged, and nobody keeps it", where=directory, got=segment)
        life, peers = Run(known.run, known.run_id), (self._config.stream, self._endpoints, self._tls)
        line = line_of(self._replica.epoch)
        await fetch_copy(self._copies, aside, session, life, segment, end, *peers, line)

    def _give_up(self, directory: str, tries: int) -> bool:
        """A copy that no peer can mend is set aside: publisher and peers bring what is not merged.

        This node then has lost what it said to hold, as if its disk of copies were another one, and begins
        anew as such. That is noted first, so that a crash cannot come between.
        """
        if os.path.dirname(directory) != self._sessions:
            return False
        session_id = int(os.path.basename(directory))
        if tries < GIVE_UP_TRIES and not self._is_merged_whole(directory, session_id):
            return False
        target = os.path.join(self._kept, f"{session_id}.{time.time_ns()}")
        error = RtError("a damaged session copy was set aside: the node begins anew", where=target)
        copy = self._copies.get(session_id)
        if copy is not None:
            copy.store.refuse(error)
        forget_disk_id(self._sessions)
        with storage_errors(directory, "setting a damaged copy aside"):
            REAL.make_directory(self._kept)
            REAL.rename(directory, target)
            REAL.sync_directory(self._sessions)
        self._on_failed(error)
        return True

    def _is_merged_whole(self, directory: str, session_id: int) -> bool:
        """Whether all that is synced of a copy is in enough merged logs: peers have let go of it, or will."""
        session, durable = self._replica.session(session_id), read_durable_end(REAL, directory)
        consumed = None if session is None else consumed_place(session)
        is_merged = (
            durable is not None
            and consumed is not None
            and LogOffset(*durable.id, durable.offset) <= consumed
        )
        return is_merged and self._copies.is_released(session_id)


def _positions_of(state: SequencerState, segment: SegmentId) -> tuple[int, int] | None:
    """The positions of a merged segment that the cluster keeps: the first, and one past the last."""
    if segment == state.merged.segment:
        return state.merged.first, state.position
    kept = (one for one in state.segments if one.id == segment and not one.is_trimmed)
    return next(((one.first, one.end) for one in kept), None)


def _first_of(state: SequencerState, segment: SegmentId) -> int | None:
    """The first position of a merged segment that the cluster keeps; None if it does not."""
    positions = _positions_of(state, segment)
    return None if positions is None else positions[0]
