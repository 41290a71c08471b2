"""The session replicas of this node: opened when something must be stored, reported once durable.

For one event loop, except for the methods that the merger's thread calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import Final

from replicator.protocol.messages import Chunk, LogOffset, SegmentSealed
from replicator.receive.batch_boundaries import SegmentBoundaries
from replicator.receive.group_commit import GroupCommit
from replicator.receive.session_receiver import SessionReceiver
from replicator.receive.session_replica import SessionReplicaWriter, UnfinishedBytes
from rt.errors import ClusterMismatch, Corrupt, DiskFull, InvalidName, LogNotFound, RtError
from rt.log.disk import REAL, Disk, File
from rt.log.format.segment import LogKind, SegmentId
from rt.log.format.segment_table import TABLE_FILE, LogIdentity, TrimReason
from rt.log.scan.catalog import segment_path
from rt.v1 import sequencer_pb2 as pb
from sequencer.sessions.batch_index import RangeInfo
from sequencer.sessions.merge_progress import consumed_number, consumed_place
from sequencer.sessions.replica import SessionReplica
from sequencer.state.state import End, Session
from sequencer.state.write_plan import BlockWrite

OPENINGS_MAX: Final = 4
"""Maximum number of replicas opened at the same time. Each opening waits for the disk about ten times, and
occupies a thread of the pool, which pushes need too.
"""


def check_no_link(path: str) -> None:
    """Check that a replica's directory is no symbolic link, because its name is easy to guess.
    `rt.LogNotFound` if it is a link.
    """
    if os.path.islink(path):
        raise LogNotFound(
            "the directory of a session replica is a symbolic link",
            where=path,
            got=f"a link to {os.readlink(path)}",
            expected="a directory",
            hint="Find out who created the link, and remove it.",
        )


@contextlib.contextmanager
def _corrupt_if_foreign(path: str) -> Iterator[None]:
    """Raise `rt.Corrupt` if a replica's directory holds another log: its files are wrong, and no client is at
    fault.
    """
    try:
        yield
    except (ClusterMismatch, InvalidName) as error:
        raise Corrupt(
            "the directory of a session replica holds another log",
            path=os.path.join(path, TABLE_FILE),
            offset=0,
            got=error.got,
            expected=error.expected,
            hint="Its files were exchanged: put the right ones back.",
        ) from error


class SessionReplicas:
    """All replicas of this process; the merger's `ReplicaSource`."""

    def __init__(
        self,
        directory: str,
        sync: GroupCommit,
        pool: Executor,
        *,
        on_report: Callable[[pb.SegmentReport], None],
        on_durable: Callable[[], None],
        on_failed: Callable[[RtError], None],
        is_released: Callable[[int], bool],
        on_corrupt: Callable[[Corrupt], None],
        disk: Disk = REAL,
    ) -> None:
        """`is_released(session_id)`: whether all merged bytes of a session are durable in enough merged logs.

        The merger's thread calls `on_corrupt` if a replica does not hold the bytes that must be merged.
        """
        self.is_released, self._on_corrupt = is_released, on_corrupt
        self._directory, self._sync, self._pool, self._disk = directory, sync, pool, disk
        self._on_report, self._on_durable, self._on_failed = on_report, on_durable, on_failed
        self._replicas: dict[int, SessionReplica] = {}
        self._opening = asyncio.Semaphore(OPENINGS_MAX)
        self._openings: dict[int, asyncio.Future[SessionReplica]] = {}
        """By session id: replicas that are being opened."""
        self._closings: dict[int, asyncio.Future[None]] = {}
        """By session id: replicas that are being closed."""
        self._closed_ends: dict[int, LogOffset] = {}
        """By session id: the end of a replica that was closed as unused."""
        self._abandoned: dict[int, RtError] = {}
        """By session id: why its replica was moved aside."""
        self.unfinished = UnfinishedBytes()

    def get(self, session_id: int) -> SessionReplica | None:
        """The replica, if it is open."""
        return self._replicas.get(session_id)

    def all(self) -> list[SessionReplica]:
        return list(self._replicas.values())

    def connected(self) -> list[int]:
        """The ids of the sessions that a publisher's stream feeds."""
        return [replica.session_id for replica in self._replicas.values() if replica.has_stream]

    def path(self, session_id: int) -> str:
        return os.path.join(self._directory, str(session_id))

    def is_closed_and_merged(self, session: Session) -> bool:
        """Whether the replica was closed, and the cluster has merged everything in it."""
        end, consumed = self._closed_ends.get(session.id), consumed_place(session)
        return end is not None and consumed is not None and end <= consumed

    def is_busy(self, session_id: int) -> bool:
        """Whether the replica is being opened or closed."""
        return session_id in self._openings or session_id in self._closings

    def start_removal(self, session_id: int) -> bool:
        """Keep the replica closed until `end_removal`; False if it is open or being opened."""
        if session_id in self._replicas or self.is_busy(session_id):
            return False
        self._closings[session_id] = asyncio.get_running_loop().create_future()
        return True

    def end_removal(self, session_id: int) -> None:
        """End `start_removal` and forget the replica."""
        self._closed_ends.pop(session_id, None)
        self._closings.pop(session_id).set_result(None)

    def abandon(self, session_id: int, why: RtError) -> None:
        """Store nothing more of a session whose replica is moved aside.

        Opening it again raises `why`. Otherwise this process would confirm joins without the bytes that it
        reported before.
        """
        self._abandoned[session_id] = why
        if (replica := self._replicas.get(session_id)) is not None:
            replica.store.refuse(why)

    async def close_replica(self, replica: SessionReplica) -> None:
        """Close a replica that is unused. The next `open_replica` opens it again."""
        assert replica.is_unused, replica.session_id
        del self._replicas[replica.session_id]
        if replica.receiver.next_offset is not None:
            self._closed_ends[replica.session_id] = replica.receiver.next_offset
        closing = self._closings[replica.session_id] = asyncio.ensure_future(replica.store.close())
        closing.add_done_callback(lambda _: self._closings.pop(replica.session_id))
        await asyncio.shield(closing)

    async def open_replica(self, session: Session) -> SessionReplica:
        """Open the replica, or create it.

        If the caller is cancelled, opening continues, because a thread already holds the lock of the replica.
        Storage errors, `rt.Corrupt`, or the error that `abandon` got.
        """
        known = self._replicas.get(session.id)
        if known is not None:
            return known
        opening = self._openings.get(session.id)
        if opening is None:
            opening = self._openings[session.id] = asyncio.ensure_future(self._open_replica(session))
            opening.add_done_callback(lambda opening: self._on_opened(session.id, opening))
        return await asyncio.shield(opening)

    def _on_opened(self, session_id: int, opening: asyncio.Future[SessionReplica]) -> None:
        del self._openings[session_id]
        if not opening.cancelled():
            opening.exception()  # Read it so that asyncio does not log it: the waiting callers get it.

    async def _open_replica(self, session: Session) -> SessionReplica:
        async with self._opening:
            loop = asyncio.get_running_loop()
            if (closing := self._closings.get(session.id)) is not None:
                await asyncio.wait([closing])
            self._closed_ends.pop(session.id, None)
            consumed = consumed_place(session)
            released = consumed if self.is_released(session.id) else None

            def open_receiver() -> SessionReceiver:
                path = self.path(session.id)
                check_no_link(path)
                with _corrupt_if_foreign(path):
                    receiver = SessionReceiver.open(
                        path,
                        _identity_of(session),
                        disk=self._disk,
                        at=released,
                        number=consumed_number(session),
                    )
                try:
                    if released is not None:
                        with contextlib.suppress(DiskFull):  # It is trimmed later.
                            receiver.trim(released.segment, TrimReason.MERGED)
                except BaseException:
                    receiver.close()
                    raise
                return receiver

            receiver = await loop.run_in_executor(self._pool, open_receiver)
            replica = self._made(session, receiver, lambda marks: self._on_marks(session.id, marks))
            try:
                await loop.run_in_executor(self._pool, replica.recover, released)
                if (why := self._abandoned.get(session.id)) is not None:
                    raise why
            except BaseException:
                await replica.store.close()  # The next try needs the lock.
                raise
            self._replicas[session.id] = replica
            for report in replica.reports(consumed):
                self._on_report(report)
            self._on_durable()
            return replica

    async def open_aside(self, session: Session, path: str, segment: SegmentId) -> SessionReplica:
        """Create an empty replica in another directory, starting with `segment`. It is not reported.

        The caller must close its store.
        """

        def open_receiver() -> SessionReceiver:
            check_no_link(path)
            place = LogOffset(*segment, 0)
            return SessionReceiver.open(path, _identity_of(session), disk=self._disk, at=place)

        receiver = await asyncio.get_running_loop().run_in_executor(self._pool, open_receiver)
        return self._made(session, receiver, lambda _: None)

    def _made(
        self, session: Session, receiver: SessionReceiver, on_marks: Callable[[list[SegmentBoundaries]], None]
    ) -> SessionReplica:
        writer = SessionReplicaWriter(
            receiver,
            self._sync,
            self._pool,
            on_marks=on_marks,
            on_failed=self._on_failed,
            unfinished=self.unfinished,
        )
        return SessionReplica(session.id, writer, self._disk)

    async def close(self) -> None:
        """Close all replicas. Bytes that are not synced were not reported."""
        await asyncio.gather(*self._openings.values(), *self._closings.values(), return_exceptions=True)
        for replica in self.all():
            await replica.store.close()
        self._replicas.clear()

    async def append(self, replica: SessionReplica, item: Chunk | SegmentSealed) -> None:
        """Store what a stream or a peer sends."""
        await replica.store.append(item)
        if isinstance(item, SegmentSealed) and item.is_last_of_run:
            place = item.end_offset
            self._announce(replica, place.run, End(place.roll, place.offset, item.end))

    def announce(self, replica: SessionReplica, run: int, end: End) -> None:
        """Report that the publisher has no bytes of a run after `end`, unless an end of the run was already
        announced.
        """
        if run not in replica.announced:
            self._announce(replica, run, end)

    def _announce(self, replica: SessionReplica, run: int, end: End) -> None:
        replica.announced[run] = pb.SessionEnd(
            session_id=replica.session_id, run=run, roll=end.roll, offset=end.offset, number=end.number
        )
        self._on_report(replica.report(SegmentId(run, end.roll), []))

    async def skip_merged(self, replica: SessionReplica, session: Session) -> None:
        """Skip bytes that the cluster has merged and that are missing in this replica: peers have them
        merged.
        """
        consumed = consumed_place(session)
        if consumed is not None:
            await self.skip_to(replica, session, consumed, consumed_number(session))

    async def skip_to(
        self, replica: SessionReplica, session: Session, place: LogOffset, number: int | None
    ) -> None:
        """Continue at `place`. The cluster has merged everything before it.

        Bytes before `place` are trimmed only when they are durable in the merged logs of this node and of a
        majority: other nodes may have lost their copies, or never had them.
        """
        keep = not self.is_released(session.id)
        await replica.store.call_alone(replica.receiver.skip_to, place, number, keep=keep)
        replica.prune_trimmed()

    async def report_final_end(self, replica: SessionReplica, run: int) -> None:
        """Report the end of a fenced run once all its bytes here are durable."""
        with replica.in_use():
            await replica.store.call_alone(lambda: None)
            end = replica.end_of(run)
            place = LogOffset(run, end.roll, end.offset)
            if end.number:
                await replica.store.wait_durable(place)
            replica.finals[run] = end
            self._on_report(replica.report(SegmentId(run, end.roll), []))

    async def trim(self, replica: SessionReplica, place: LogOffset) -> None:
        """Release everything before `place`, because it is merged durably: whole segments, and memory."""
        replica.prune_before(place)
        table = replica.receiver.writer.table
        with replica.in_use():
            if any(one.id < place.segment and not one.is_trimmed for one in table.segments):
                await replica.store.call_alone(replica.receiver.trim, place.segment, TrimReason.MERGED)
            if replica.receiver.uncacheable_bytes(place):
                await asyncio.get_running_loop().run_in_executor(self._pool, replica.receiver.uncache, place)

    async def read_again(self, session_id: int, segment: SegmentId) -> None:
        """Report the boundaries of a repaired segment that were not known. A closed replica reads the segment
        when it opens.
        """
        if (opening := self._openings.get(session_id)) is not None:
            await asyncio.wait([opening])  # It may have read the segment before the repair.
        if (replica := self._replicas.get(session_id)) is None:
            return
        with replica.in_use():
            new = await asyncio.get_running_loop().run_in_executor(self._pool, replica.read_again, segment)
        if new:
            self._on_report(replica.report(segment, new))
            self._on_durable()

    def _on_marks(self, session_id: int, marked: list[SegmentBoundaries]) -> None:
        replica = self._replicas.get(session_id)
        if replica is None:
            return
        for segment, marks in marked:
            self._on_report(replica.report(segment, replica.add(segment, marks)))
        self._on_durable()

    # For the merger's thread

    def range_info(self, session_id: int, segment: SegmentId, start: int, end: int) -> RangeInfo | None:
        """See `merger.ReplicaSource`. The merger's thread calls this and the two methods below."""
        replica = self._replicas.get(session_id)
        return None if replica is None else replica.range_info(segment, start, end)

    def open(self, session_id: int, segment: SegmentId) -> File:
        return self._disk.open(segment_path(self.path(session_id), segment))

    def on_bad_replica(self, block: BlockWrite, got: str) -> None:
        self._on_corrupt(
            Corrupt(
                "a session replica holds other bytes than the merge instruction names",
                path=segment_path(self.path(block.session_id), SegmentId(block.run, block.roll)),
                offset=block.start,
                got=got,
                expected=f"the bytes {block.start} to {block.end} of the merge instruction",
                hint="The node fetches good bytes from a peer.",
            )
        )


def _identity_of(session: Session) -> LogIdentity:
    return LogIdentity(LogKind.SESSION, session.incarnation, session.name, session.dedup_id)
