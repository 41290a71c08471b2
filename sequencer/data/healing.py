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

from replicator.items import Life, Place
from rt.epochs import line_of
from rt.errors import Diverged, RtError
from rt.log.directory import list_segments, read_durable_end
from rt.log.disk import REAL, storage_errors
from rt.log.segment import Kind, SegmentId
from rt.log.table import Identity
from rt.net.rpc_errors import Unreachable
from rt.net.tls import TLS
from sequencer.config import NodeConfig
from sequencer.data.consumed import consumed_place
from sequencer.data.copies import Copies
from sequencer.data.disk_id import forget_disk_id
from sequencer.data.mending import Mender, SoundDisk
from sequencer.data.peers import fetch_copy, fetch_segment
from sequencer.data.replica import Replica
from sequencer.data.scrubbing import Scrubber, Target
from sequencer.state import State

GIVE_UP_TRIES: Final = 6
"""To mend a session's copy, over some 20 s: a peer that was started at the same time is there by then."""


class Healing:
    """`mender` and `scrubber` are to be run; through `disk` nobody reads what is damaged."""

    def __init__(
        self,
        config: NodeConfig,
        tls: TLS,
        pool: Executor,
        replica: Replica,
        copies: Copies,
        on_failed: Callable[[RtError], None],
    ) -> None:
        self._config, self._tls, self._replica, self._copies = config, tls, replica, copies
        self._on_failed = on_failed
        self._endpoints = [config.members[peer].data for peer in config.peers]
        self._merged = os.path.abspath(config.merged_directory)
        self._sessions = os.path.abspath(config.sessions_directory)
        beside = os.path.dirname(self._merged)
        self._kept = os.path.join(beside, "damaged")
        self.mender = Mender(
            os.path.join(beside, "mending"), pool, self._fetch, on_failed=on_failed, give_up=self._give_up
        )
        self.scrubber = Scrubber(self._targets, self.mender.on_damaged, pool)
        self.disk = SoundDisk(self.mender.damages)

    def _targets(self) -> Iterator[Target]:
        """What is read again and again: the merged log, and what is not merged durably yet."""
        if self._replica.state is None:
            return  # What a segment must be, and that it can be mended, is not known yet.
        if os.path.isdir(self._merged):
            yield from (Target(self._merged, segment) for segment in list_segments(REAL, self._merged))
        for copy in self._copies.all():
            yield from (Target(copy.receiver.path, segment) for segment in copy.unmerged)

    async def _fetch(self, directory: str, segment: SegmentId, aside: str, end: int) -> None:
        """Get a good copy of a segment from a peer; see `mending.Fetch`."""
        state = self._replica.state
        if state is None or not self._endpoints:
            raise Unreachable("there is no peer to fetch good bytes from", where=directory)
        if directory == self._merged:
            await self._fetch_merged(state, segment, aside, end)
        else:
            await self._fetch_copy(state, directory, segment, aside, end)

    async def _fetch_merged(self, state: State, segment: SegmentId, aside: str, end: int) -> None:
        first = _first_of(state, segment)
        if first is None:
            raise Unreachable("the cluster does not keep that segment", where=self._config.name, got=segment)
        identity = Identity(Kind.MERGED, state.cluster, self._config.stream)
        try:
            line = line_of(self._replica.epoch)
            await fetch_segment(aside, identity, segment, first, end, self._endpoints, self._tls, line)
        except Diverged as error:  # Of peers, among each other.
            raise Unreachable("peers do not agree on that segment", where=segment, got=error) from error

    async def _fetch_copy(
        self, state: State, directory: str, segment: SegmentId, aside: str, end: int
    ) -> None:
        session = state.sessions.get(int(os.path.basename(directory)))
        known = None if session is None else session.life_of(segment.x)
        if session is None or known is None:
            raise Unreachable("that is merged, and nobody keeps it", where=directory, got=segment)
        life, peers = Life(known.x, known.life), (self._config.stream, self._endpoints, self._tls)
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
        """Whether all that is synced of a copy is merged by the cluster: peers have let go of it, or will."""
        session, durable = self._replica.session(session_id), read_durable_end(REAL, directory)
        consumed = None if session is None else consumed_place(session)
        return durable is not None and consumed is not None and Place(*durable.id, durable.offset) <= consumed


def _first_of(state: State, segment: SegmentId) -> int | None:
    """The first position of a merged segment that the cluster keeps; None if it does not."""
    if segment == state.merged.segment:
        return state.merged.first
    return next((one.first for one in state.segments if one.id == segment and not one.is_trimmed), None)
