"""Keeps the files of this node valid: what is scrubbed, where good bytes come from, when to give up.

For one event loop. Invariants:
- No part of the merged log is given up.
- A session replica that no peer can repair, or that cannot be opened although its segments verify, is moved
  aside. The node then counts as a node that lost its disk of session replicas, because it reported bytes that
  it does not have.
- A replica that verifies is moved aside only if the disks of a majority are whole without this disk.
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
from sequencer.ipc.peer_addresses import PeerAddresses
from sequencer.ipc.state_follower import StateFollower
from sequencer.merged.repair_queue import Repairer, VerifiedDisk
from sequencer.merged.scrubber import Scrubber, ScrubTarget
from sequencer.rest.base.node_snapshot import DamageCounter, DamagedSegment
from sequencer.sessions.disk_id import forget_disk_id
from sequencer.sessions.merge_progress import consumed_place
from sequencer.sessions.peer_pull import fetch_replica, fetch_segment
from sequencer.sessions.replicas import SessionReplicas
from sequencer.state.state import SequencerState

GIVE_UP_TRIES: Final = 6
"""Number of attempts to repair a session replica. They take about 20 s: peers that started at the same time
are up then. The same number of attempts to open a replica takes about 12 s: a node that set a replica aside
has started again by then.
"""


class RepairService:
    """Run `repairer` and `scrubber`; servers read through `disk`, which refuses corrupt bytes."""

    def __init__(
        self,
        config: NodeConfig,
        tls: TLS,
        peers: PeerAddresses,
        pool: Executor,
        follower: StateFollower,
        replicas: SessionReplicas,
        on_failed: Callable[[RtError], None],
    ) -> None:
        self._config, self._tls, self._follower, self._replicas = config, tls, follower, replicas
        self._on_failed = on_failed
        self._peers = peers
        self._merged = os.path.abspath(config.merged_directory)
        self._sessions = os.path.abspath(config.sessions_directory)
        beside = os.path.dirname(self._merged)
        self._kept = os.path.join(beside, "damaged")
        self.repairer = Repairer(
            os.path.join(beside, "repair"),
            pool,
            self._fetch,
            on_failed=on_failed,
            give_up=self._give_up,
            on_repaired=self._on_repaired,
        )
        self.scrubber = Scrubber(self._targets, self.repairer.on_corrupt, pool)
        self.disk = VerifiedDisk(self.repairer.corrupt_files)
        self._last_set_aside = _last_set_aside(self._kept)

    @property
    def damage(self) -> DamageCounter:
        repairer = self.repairer
        last, last_ns = max(repairer.last, self._last_set_aside, key=lambda one: one[1])
        return DamageCounter(repairer.found, repairer.repaired, last, last_ns)

    def client_error(self, error: Corrupt) -> RtError:
        """The error for clients: for a corrupt merged segment, it names the positions that are missing."""
        directory, name = os.path.split(os.path.abspath(error.path))
        segment, state = parse_segment_name(name), self._follower.state
        found = None if segment is None or state is None else _positions_of(state, segment)
        if directory != self._merged or found is None:
            return error
        return CorruptRange(
            f"{name} is corrupt on this node from offset {error.offset} on",
            where=self._config.name,
            start=found[0],
            end=found[1],
            hint="The node asks its peers for good bytes. If none has any, see the alarm segment-corrupt.",
        )

    def damaged_segments(self) -> tuple[DamagedSegment, ...]:
        """The segments of the merged log that are corrupt and not trimmed."""
        state, found = self._follower.state, []
        for one in self.repairer.corrupt_segments:
            positions = None if state is None else _positions_of(state, one.segment)
            if os.path.dirname(one.path) == self._merged and positions is not None and state is not None:
                is_growing = one.segment == state.merged.segment
                name = one.segment.file_name
                found.append(DamagedSegment(name, one.offset, *positions, one.tries, is_growing))
        return tuple(found)

    def _targets(self) -> Iterator[ScrubTarget]:
        """The segments to scrub: the merged log, and the input that is not merged durably yet."""
        if self._follower.state is None:
            return  # Without the state a segment's identity is unknown, and a repair is impossible.
        if os.path.isdir(self._merged):
            yield from (ScrubTarget(self._merged, segment) for segment in list_segments(REAL, self._merged))
        for replica in self._replicas.all():
            yield from (ScrubTarget(replica.receiver.path, segment) for segment in replica.unmerged)

    async def _fetch(self, directory: str, segment: SegmentId, aside: str, end: int) -> None:
        """Copy a good replica of a segment from a peer; the `Fetch` of the repairer."""
        state = self._follower.state
        if state is None or not self._peers.all():
            raise Unreachable("there is no peer to fetch good bytes from", where=directory)
        if directory == self._merged:
            await self._fetch_merged(state, segment, aside, end)
        else:
            await self._fetch_replica(state, directory, segment, aside, end)

    async def _fetch_merged(self, state: SequencerState, segment: SegmentId, aside: str, end: int) -> None:
        positions = _positions_of(state, segment)
        if positions is None:
            raise Unreachable(
                "the merged log of the cluster has no such segment", where=self._config.name, got=segment
            )
        identity = LogIdentity(LogKind.MERGED, state.cluster, self._config.stream)
        try:
            line = line_of(self._follower.epoch)
            await fetch_segment(
                aside, identity, segment, positions[0], end, self._peers.all(), self._tls, line
            )
        except Diverged as error:  # The peers differ from each other.
            raise Unreachable("peers do not agree on that segment", where=segment, got=error) from error

    async def _fetch_replica(
        self, state: SequencerState, directory: str, segment: SegmentId, aside: str, end: int
    ) -> None:
        session = state.sessions.get(int(os.path.basename(directory)))
        known = None if session is None else session.run_of(segment.run)
        if session is None or known is None:
            raise Unreachable("its run is merged, and no node keeps it", where=directory, got=segment)
        opened, peers = Run(known.run, known.run_id), (self._config.stream, self._peers.all(), self._tls)
        line = line_of(self._follower.epoch)
        await fetch_replica(self._replicas, aside, session, opened, segment, end, *peers, line)

    async def _on_repaired(self, directory: str, segment: SegmentId) -> None:
        """Report the content that was not known when a replica was opened, because the segment did not verify
        then.
        """
        if os.path.dirname(directory) == self._sessions:
            await self._replicas.read_again(int(os.path.basename(directory)), segment)

    def on_unopened(self, error: Corrupt, failures: int) -> int:
        """Handle a session replica that cannot be opened: set it aside if `_may_set_aside` allows it, or else
        repair the segment.

        Returns the number of attempts that failed with this error while the segment was not being repaired.
        `failures`: this number before the call.
        """
        path = os.path.abspath(error.path)
        if path in self.repairer.corrupt_files:
            return failures
        if self._may_set_aside(failures):
            self._set_aside(os.path.dirname(path))
        else:
            self.repairer.on_corrupt(error)
        return failures + 1

    def _may_set_aside(self, failures: int) -> bool:
        """Whether the other nodes have everything that was acknowledged, even if this disk counts as lost.

        Nodes take turns in the order of their names: the next node sees that this disk is not whole any more.
        """
        state, node = self._follower.state, self._config.name
        if state is None or not self._follower.is_caught_up:
            return False
        voters = [one.name for one in self._follower.standing.nodes if not one.is_learner]
        whole = [one for one in voters if one != node and one in state.disks and state.disks[one].is_whole]
        turn = 1 + sum(one < node for one in voters)
        return failures >= turn * GIVE_UP_TRIES and len(whole) > len(voters) // 2

    def _give_up(self, directory: str, tries: int) -> bool:
        """Set aside a session replica that no peer can repair. Returns whether it was set aside."""
        if os.path.dirname(directory) != self._sessions:
            return False
        session_id = int(os.path.basename(directory))
        if tries < GIVE_UP_TRIES and not self._is_merged_whole(directory, session_id):
            return False
        self._set_aside(directory)
        return True

    def _set_aside(self, directory: str) -> None:
        """Move a session replica aside: the publisher and the peers send the bytes that are not merged.

        Then the node has lost bytes that it reported, as if its disk of session replicas were replaced. It
        starts again as a node with such a disk. The disk id is deleted first, so that a crash in between is
        safe.
        """
        session_id = int(os.path.basename(directory))
        target = os.path.join(self._kept, f"{session_id}.{time.time_ns()}")
        error = RtError("a corrupt session replica was set aside: the node starts again", where=target)
        self._replicas.abandon(session_id, error)
        forget_disk_id(self._sessions)
        with storage_errors(directory, "setting a corrupt session replica aside"):
            REAL.make_directory(self._kept)
            REAL.rename(directory, target)
            REAL.sync_directory(self._sessions)
        self._on_failed(error)

    def _is_merged_whole(self, directory: str, session_id: int) -> bool:
        """Whether all synced bytes of a replica are in enough merged logs, so that peers release them."""
        session, durable = self._follower.session(session_id), read_durable_end(REAL, directory)
        consumed = None if session is None else consumed_place(session)
        is_merged = (
            durable is not None
            and consumed is not None
            and LogOffset(*durable.id, durable.offset) <= consumed
        )
        return is_merged and self._replicas.is_released(session_id)


def _last_set_aside(kept: str) -> tuple[str, int]:
    """The session replica that was set aside last, and when; ("", 0) if there is none. See `_set_aside` for
    its name.
    """
    names = os.listdir(kept) if os.path.isdir(kept) else []
    times = {name: int(name.rpartition(".")[2]) for name in names if name.rpartition(".")[2].isdecimal()}
    if not times:
        return "", 0
    last = max(times, key=times.__getitem__)
    return os.path.join(kept, last), times[last]


def _positions_of(state: SequencerState, segment: SegmentId) -> tuple[int, int] | None:
    """The first position of a merged segment and the one past its last; None if it is trimmed."""
    if segment == state.merged.segment:
        return state.merged.first, state.position
    kept = (one for one in state.segments if one.id == segment and not one.is_trimmed)
    return next(((one.first, one.end) for one in kept), None)
