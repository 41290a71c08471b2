"""Tracks the clients that push to this node and pull from it, also those disconnected within a day.

For one event loop. The last ended connection of each client is kept for 24 hours; at most 4,096 are kept.
`TrackedStores` wraps the node's stores and sees every push. Pulls are polled, so the last bytes of a pull, or
a short pull, may not be counted.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from replicator.protocol.handshake import (
    PullMerged,
    PushHello,
    PushProgress,
    PushStart,
    PushStatus,
    SilenceLimit,
)
from replicator.protocol.messages import Chunk, Run, SegmentSealed, WholeRun
from replicator.pull.server import Pull
from replicator.push.server import SessionIntake, SessionReplicaStore
from rt.net.identity import Identity
from rt.units import NS_PER_MINUTE, NS_PER_S
from rt.v1 import sequencer_pb2 as pb
from sequencer.ipc.silence import SilenceDetector
from sequencer.rest.base.node_snapshot import ClientConnection

KEPT_NS: Final = 24 * 60 * NS_PER_MINUTE
ENDED_MAX: Final = 4096
REPORTED_MAX: Final = 200
"""Maximum number of clients that are reported to the other nodes: about 20 KiB, twice a second."""

CommitLimit: TypeAlias = Callable[[PushHello, SilenceLimit], SilenceLimit | None]
_Key: TypeAlias = tuple[str, str]
"""Identifies a client: the certificate's identity, and what is pushed or pulled."""


class PushActivity:
    """One stream of a publisher, while it runs and after."""

    def __init__(self, identity: Identity, hello: PushHello, now_ns: int) -> None:
        self.identity, self.hello, self.connected_ns = identity, hello, now_ns
        self.total_bytes = 0
        self.last_ns = 0
        self.progress = PushProgress()
        self.status: PushStatus | None = None
        """The last status that the push reported; None: the push is of an older version, which reports
        none.
        """
        self.silence = SilenceDetector()
        self.storage = SilenceDetector()
        """For how long the same message has been in the process of being stored."""
        self._arrival = SilenceDetector()
        """For how long no bytes of batches have come."""
        self._is_storing = False
        self._merge_stall = SilenceDetector()
        """For how long nothing was merged although something waits."""
        self._merged = 0, 0
        self._end = 0
        """The end of the merged log when the time of `_merge_stall` started."""
        self._others_merged = False

    @contextlib.contextmanager
    def storing(self) -> Iterator[None]:
        """Mark that a message is being stored. Meanwhile the node reads no message, so this time does not
        count as silence of the push.
        """
        self._is_storing = True
        try:
            yield
        finally:
            self._is_storing = False
            self.silence.record_message()
            self.storage.record_message()

    def record_status(self, status: PushStatus) -> None:
        self.status = status
        self.silence.record_message()

    def record_bytes(self, count: int) -> None:
        self.total_bytes += count
        self.last_ns = time.time_ns()
        self._arrival.record_message()

    @property
    def stalled_s(self) -> float:
        """For how long nothing was synced and nothing arrived. Arrival counts because a large message is
        synced only when it is complete.
        """
        said_s = 0.0 if self.status is None else self.status.stalled_ms / 1000
        return max(min(said_s, self._arrival.silent_s), self.storage.silent_s)

    @property
    def unmerged_s(self) -> float:
        return self._merge_stall.silent_s if self._others_merged else 0.0

    def update(self, now_ns: int, end: int, *, is_queued: bool = False) -> None:
        """`end` is the end of the merged log. `is_queued`: this node may not have read the messages that the
        push sent.
        """
        for waiting in (self.silence, self.storage, self._arrival, self._merge_stall):
            waiting.update(now_ns / NS_PER_S)
        if self._is_storing or is_queued:
            self.silence.record_message()
        if not self._is_storing:
            self.storage.record_message()
        said = self.progress
        merged = said.merged_run, said.merged_number
        if merged != self._merged or said.merged_number >= said.durable_number:
            self._merged, self._end = merged, end
            self._merge_stall.record_message()
        self._others_merged = end > self._end


class _ClientStream:
    def __init__(self, stream: PushActivity | Pull, address: str) -> None:
        self.stream = stream
        self.address = address
        self.ended_ns = 0
        self.rate = 0.0
        self.updated_ns = 0
        self.updated_bytes = 0
        self._mark = 0
        self._marked_ns = 0

    @property
    def total_bytes(self) -> int:
        stream = self.stream
        return stream.total_bytes if isinstance(stream, PushActivity) else stream.sent_bytes

    @property
    def key(self) -> _Key:
        stream = self.stream
        if isinstance(stream, PushActivity):
            return stream.identity.uri, f"push {stream.hello.session}"
        wanted = stream.wanted
        return stream.identity.uri, "merged" if isinstance(wanted, PullMerged) else f"{wanted.session_id}"

    def update(self, now_ns: int, end: int, is_queued: Callable[[str], bool]) -> None:
        """Update the rate and the lag. `end` is the end of the merged log."""
        size = self.total_bytes
        since_ns = self.updated_ns or self.stream.connected_ns
        if now_ns > since_ns:
            self.rate = max(size - self.updated_bytes, 0) * NS_PER_S / (now_ns - since_ns)
        self.updated_ns, self.updated_bytes = now_ns, size
        if isinstance(self.stream, PushActivity):
            self.stream.update(now_ns, end, is_queued=is_queued(self.stream.identity.uri))
        goal, reached = self._way(end)
        if reached >= self._mark:
            self._mark, self._marked_ns = goal, now_ns

    def lag_ns(self, now_ns: int) -> int:
        """The minimum age of the data that the client has not reached yet; 0 if it does not lag."""
        _, reached = self._way(0)
        return max(now_ns - self._marked_ns, 0) if reached < self._mark else 0

    def _way(self, end: int) -> tuple[int, int]:
        """The number or position that the client must reach, and the one it has reached."""
        stream = self.stream
        if isinstance(stream, PushActivity):
            return stream.progress.durable_number, stream.progress.merged_number
        position, wanted = stream.progress.position, stream.wanted
        # A reader of a range does not report its progress, and does not lag.
        is_copy = isinstance(wanted, PullMerged) and wanted.range is None
        return (end if is_copy else position), position

    def client(self, now_ns: int) -> ClientConnection:
        stream = self.stream
        rate = 0.0 if self.ended_ns else self.rate
        lag_ns = 0 if self.ended_ns else self.lag_ns(now_ns)
        if isinstance(stream, PushActivity):
            status = stream.status
            return ClientConnection(
                stream.identity,
                self.address,
                stream.hello.session,
                stream.connected_ns,
                self.ended_ns,
                stream.last_ns,
                stream.total_bytes,
                rate,
                stream.progress.durable_number,
                stream.progress.merged_number,
                lag_ns=lag_ns,
                incarnation=stream.hello.incarnation,
                silent_s=0.0 if status is None else stream.silence.silent_s,
                waiting_bytes=0 if status is None else status.waiting_bytes,
                stalled_s=0.0 if status is None else stream.stalled_s,
                unmerged_s=0.0 if self.ended_ns else stream.unmerged_s,
            )
        wanted = stream.wanted
        return ClientConnection(
            stream.identity,
            self.address,
            None,
            stream.connected_ns,
            self.ended_ns,
            stream.sent_ns,
            stream.sent_bytes,
            rate,
            stream.progress.position,
            is_of_merged=isinstance(wanted, PullMerged),
            lag_ns=lag_ns,
            session_id=None if isinstance(wanted, PullMerged) else wanted.session_id,
        )


class ClientTracker:
    """The streams of a node. `clock` is in ns since the epoch.

    `is_queued`: whether a call of the identity with this URI may not read now, because this node has too
    much.
    """

    def __init__(
        self,
        clock: Callable[[], int] = time.time_ns,
        *,
        is_queued: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._clock, self._is_queued = clock, is_queued
        self._pushes: dict[PushActivity, _ClientStream] = {}
        self._pulls: dict[int, _ClientStream] = {}
        self._ended: dict[_Key, _ClientStream] = {}
        """Ordered by the time of their end."""
        self._ended_push_bytes = 0
        self._ended_pull_bytes = 0

    @property
    def push_bytes(self) -> int:
        """Bytes received from publishers since the start."""
        return self._ended_push_bytes + sum(known.total_bytes for known in self._pushes.values())

    @property
    def pull_bytes(self) -> int:
        """Bytes sent to pulling clients since the start, as far as they were polled."""
        return self._ended_pull_bytes + sum(known.total_bytes for known in self._pulls.values())

    def start_push(self, identity: Identity, hello: PushHello) -> PushActivity:
        push = PushActivity(identity, hello, self._clock())
        self._pushes[push] = _ClientStream(push, "")
        return push

    def end_push(self, push: PushActivity) -> None:
        known = self._pushes.pop(push)
        self._ended_push_bytes += known.total_bytes
        self._keep(known)

    def update(self, pulls: Mapping[int, Pull], end: int = 0) -> None:
        """Update all streams, about once a second. `end` is the end of the merged log."""
        now_ns = self._clock()
        self.record_pulls(pulls)
        for known in (*self._pushes.values(), *self._pulls.values()):
            known.update(now_ns, end, self._is_queued)
        for key in [key for key, known in self._ended.items() if now_ns - known.ended_ns > KEPT_NS]:
            del self._ended[key]

    def record_pulls(self, pulls: Mapping[int, Pull]) -> None:
        for key in [key for key in self._pulls if key not in pulls]:
            known = self._pulls.pop(key)
            self._ended_pull_bytes += known.total_bytes
            self._keep(known)
        for key, pull in pulls.items():
            if key not in self._pulls:
                # gRPC's address begins with the kind: "ipv4:127.0.0.1:1".
                self._pulls[key] = _ClientStream(pull, pull.peer.partition(":")[2])

    def clients(self) -> tuple[ClientConnection, ...]:
        """All connected clients, and the last connection of each other client."""
        now_ns = self._clock()
        live = [*self._pushes.values(), *self._pulls.values()]
        connected = {known.key for known in live}
        ended = [known for key, known in self._ended.items() if key not in connected]
        return tuple(known.client(now_ns) for known in (*live, *ended))

    def received_ns(self) -> dict[str, int]:
        """When the last bytes of a session arrived, for each session that is pushed to this node."""
        return dict(sorted((push.hello.session, push.last_ns) for push in self._pushes))

    def connected(self) -> pb.ConnectedClients:
        """The connected publishers and subscribers for the other nodes, those that lag most first."""
        found = [one for one in self.clients() if not one.ended_ns and one.identity.role != "node"]
        found.sort(key=lambda one: (-one.lag_ns, one.identity.uri, one.session or ""))
        return pb.ConnectedClients(
            clients=[
                pb.ConnectedClient(
                    role=one.identity.role,
                    name=one.identity.name,
                    session=one.session,
                    lag_s=one.lag_ns / NS_PER_S,
                )
                for one in found[:REPORTED_MAX]
            ],
            left_out=max(len(found) - REPORTED_MAX, 0),
        )

    def _keep(self, known: _ClientStream) -> None:
        known.ended_ns = self._clock()
        self._ended.pop(known.key, None)
        self._ended[known.key] = known
        if len(self._ended) > ENDED_MAX:
            del self._ended[next(iter(self._ended))]


class TrackedStores:
    """A `replicator.push.server.SessionReplicaStore` that records its users in `clients`.

    `commit` commits a publisher's limit of silence: see `sequencer.data.publisher_silence`.
    """

    def __init__(
        self,
        stores: SessionReplicaStore,
        clients: ClientTracker,
        commit: CommitLimit = lambda _, limit: limit,
    ) -> None:
        self._stores, self._clients, self._commit = stores, clients, commit

    @property
    def cluster(self) -> bytes:
        return self._stores.cluster

    async def accept(self, hello: PushHello, identity: Identity) -> SessionIntake:
        intake = await self._stores.accept(hello, identity)
        push = self._clients.start_push(identity, hello)
        return _TrackedIntake(intake, self._clients, push, self._commit)


class _TrackedIntake:
    def __init__(
        self, intake: SessionIntake, clients: ClientTracker, push: PushActivity, commit: CommitLimit
    ) -> None:
        self._intake, self._clients, self._push, self._commit = intake, clients, push, commit

    @property
    def start(self) -> PushStart:
        return self._intake.start

    async def open_run(self, opened: Run) -> None:
        with self._push.storing():
            await self._intake.open_run(opened)

    async def append(self, item: Chunk | SegmentSealed) -> None:
        with self._push.storing():
            await self._intake.append(item)
        if isinstance(item, Chunk):
            self._push.record_bytes(len(item.data))

    async def append_runs(self, runs: Sequence[WholeRun]) -> None:
        with self._push.storing():
            await self._intake.append_runs(runs)
        self._push.record_bytes(sum(len(one.data) for one in runs))

    def record_status(self, status: PushStatus) -> SilenceLimit | None:
        self._push.record_status(status)
        limit = status.silence_limit
        return None if limit is None else self._commit(self._push.hello, limit)

    async def next_progress(self, told: PushProgress | None) -> PushProgress:
        self._push.progress = progress = await self._intake.next_progress(told)
        return progress

    async def close(self) -> None:
        try:
            await self._intake.close()
        finally:
            self._clients.end_push(self._push)
