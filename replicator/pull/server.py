"""The pull side of a node: its merged log for subscribers, its session replicas for other nodes.

Invariants:
- A peer is identified by its certificate: session replicas go to nodes only, and the name of a hold is the
  certificate's own.
- A stream continues at the receiver's offset only if the receiver's bytes there are equal to this node's
  (`replicator.pull.negotiation`).
- The memory of all streams is bounded, and shared fairly (`replicator.pull.memory_budget`).
- A stream with nothing to send waits on a watch that all streams of the directory share.
- A client's stream of the merged log ends when the members that the client received have changed. The client
  connects again, and receives the new members.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any, Final

from msgspec import Struct, field
from msgspec.structs import replace

from replicator.protocol.codec import decode_pull_request, encode_pull_reply
from replicator.protocol.grpc_service import Call, first_of, frames_cleared, read_first
from replicator.protocol.handshake import (
    Acknowledged,
    HoldRejected,
    LogOutline,
    PullHello,
    PullMerged,
    PullProgress,
    PullSession,
    PullStart,
)
from replicator.protocol.messages import CHUNK_BYTES_MAX, PULLED_CHUNK_BYTES_MAX, Chunk, Item, Run
from replicator.protocol.run_in_thread import run_to_end
from replicator.pull.memory_budget import READ_BYTES_MAX, BudgetHold, PullBudget
from replicator.pull.source import LogProvider, PullSource, SourceOpener, check_cluster
from replicator.send.directory_watch import WatchedDirectory, WatchHub
from rt.errors import CertificateError, ClusterMismatch, ProtocolViolation, RtError
from rt.log.disk import REAL, Disk
from rt.net.grpc_auth import STREAMS_PER_IDENTITY_MAX, caller
from rt.net.grpc_errors import MembersChanged, NothingMergedYet
from rt.net.identity import STREAM_HINT, Identity

logger = logging.getLogger("replicator")

BEGINNINGS_MAX: Final = 1
"""To find out where a stream begins, the node may read a message of the largest size. So only one stream at a
time does it.
"""
TAIL_BYTES: Final = 256 * 1024
"""A stream that is at the end reads these bytes at once, in the event loop. They were just written, so they
are in memory.
"""
LOOP_S_MAX: Final = 0.02
"""Limit of processor time. If a read of a stream in the event loop took longer, the stream reads in a thread
while it is behind.
"""


class Pull(Struct):
    """One stream, for the list of clients. `progress` is what the receiver last reported."""

    identity: Identity
    peer: str
    wanted: PullMerged | PullSession
    connected_ns: int
    sent_bytes: int = 0
    sent_ns: int = 0
    progress: PullProgress = field(default_factory=lambda: PullProgress(0))
    rejection: HoldRejected | None = None  # Sent before the next items.
    told_version: int | None = None  # Version of the members that a client received.
    outdated: asyncio.Event = field(default_factory=asyncio.Event)  # Set when these members have changed.


def check_puller(identity: Identity, hello: PullHello, stream: str) -> None:
    """`rt.CertificateError` or `rt.ClusterMismatch` unless the certificate may pull the requested log."""
    if hello.stream != stream or identity.stream != stream:
        got = f"{hello.stream} by a certificate of {identity.stream}"
        raise ClusterMismatch("another stream is served here", got=got, expected=stream, hint=STREAM_HINT)
    wanted = hello.log
    roles = ("node",) if isinstance(wanted, PullSession) else ("subscriber", "node", "operator")
    if identity.role not in roles:
        what = "a session replica" if isinstance(wanted, PullSession) else "the merged log"
        wants = f"role {' or '.join(roles)}"
        raise CertificateError(f"this role may not pull {what}", got=identity.uri, expected=wants)
    if isinstance(wanted, PullMerged) and wanted.name not in {None, identity.name}:
        raise CertificateError(
            "a subscriber's name must be its certificate's", got=wanted.name, expected=identity.name
        )
    if isinstance(wanted, PullMerged) and wanted.acknowledged is not None:
        check_acknowledged(identity, wanted.acknowledged)


def check_acknowledged(identity: Identity, said: Acknowledged) -> None:
    """`rt.CertificateError` unless the certificate belongs to the subscriber that acknowledges."""
    if (identity.role, identity.name) != ("subscriber", said.name):
        raise CertificateError(
            "only a subscriber itself can acknowledge",
            got=identity.uri,
            expected=f"role subscriber, name {said.name}",
        )


async def _wait_outdated(pull: Pull) -> None:
    await pull.outdated.wait()
    raise MembersChanged


async def _confirm_nothing(_name: str) -> None:
    """For a server without holds."""


class PullServicer:
    """Answers `Replication.Pull`. `refused` counts rejections by the error's class.

    For a server of `rt.net.grpc_channel.serve`, whose gate turns errors into statuses. `identify` returns the
    identity of the caller. `on_progress` gets the progress that a receiver reports. `on_acknowledged` gets
    the name of a subscriber, which was checked, and the position below which it needs nothing. `confirm_hold`
    waits until the cluster has the hold. `check_reach` raises `rt.Corrupt` if a file is known to be corrupt
    before an offset. Call `on_nodes_changed` when the members that `logs` names have changed.
    """

    def __init__(
        self,
        logs: LogProvider,
        stream: str,
        pool: Executor,
        *,
        identify: Callable[[], Identity] = caller,
        on_progress: Callable[[Pull], None] = lambda _: None,
        on_acknowledged: Callable[[str, int], None] = lambda _name, _position: None,
        confirm_hold: Callable[[str], Awaitable[None]] = _confirm_nothing,
        check_reach: Callable[[str, int], None] = lambda _path, _offset: None,
        disk: Disk = REAL,
        budget: PullBudget | None = None,
    ) -> None:
        self.budget = budget or PullBudget()
        self._opening = asyncio.Semaphore(BEGINNINGS_MAX)
        self._logs, self._stream = logs, stream
        self._opener = SourceOpener(logs, disk, check_reach)
        self._pool = pool
        self._identify = identify
        self._on_progress, self._on_acknowledged = on_progress, on_acknowledged
        self._confirm_hold = confirm_hold
        self._hub = WatchHub()
        self.pulls: dict[int, Pull] = {}  # The streams that run now.
        self._next_id = 0
        self.refused: Counter[str] = Counter()
        self.overtaken = 0  # How often a subscriber had to skip positions because they were trimmed.

    def refuse_hold(self, name: str, why: str) -> None:
        """Tell the subscriber of that name, on each of its streams, that nothing is held for it."""
        for pull in self.pulls.values():
            if (pull.identity.role, pull.identity.name) == ("subscriber", name):
                pull.rejection = HoldRejected(name, why)
        self._hub.wake(self._logs.merged)

    def on_nodes_changed(self) -> None:
        """End the streams whose clients received other members. Call it in the event loop."""
        version = self._logs.nodes.version
        for pull in self.pulls.values():
            if pull.told_version not in {None, version}:
                pull.outdated.set()

    async def pull(self, _requests: Any, context: Call) -> None:
        try:
            with frames_cleared():
                await self._serve(context)
        except MembersChanged as error:
            logger.info("pull_ended peer=%s error=%r", context.peer(), str(error))
            raise
        except RtError as error:
            self.refused[type(error).__name__] += 1
            level = logging.INFO if isinstance(error, NothingMergedYet) else logging.WARNING
            logger.log(level, "pull_ended peer=%s error=%r", context.peer(), str(error))
            raise

    async def _serve(self, context: Call) -> None:
        identity = self._identify()
        hello = decode_pull_request(await read_first(context))
        if not isinstance(hello, PullHello):
            raise ProtocolViolation("a stream must begin with a hello")
        check_puller(identity, hello, self._stream)
        is_node = identity.role == "node"
        places = STREAMS_PER_IDENTITY_MAX if is_node else None
        chunk_bytes_max = CHUNK_BYTES_MAX if is_node else PULLED_CHUNK_BYTES_MAX
        hold = self.budget.enter(identity.uri, places, chunk_bytes_max=chunk_bytes_max)
        leave: Any = hold.leave
        context.add_done_callback(leave)
        pull = Pull(identity, context.peer(), hello.log, time.time_ns())
        self._next_id = key = self._next_id + 1
        self.pulls[key] = pull
        try:
            if isinstance(hello.log, PullMerged) and hello.log.range and (said := hello.log.acknowledged):
                # A reader of ranges keeps no copy, so the nodes must hold the data.
                check_cluster(hello.log, self._logs.cluster)
                self._on_acknowledged(said.name, said.position)
                await self._confirm_hold(said.name)
            await self._send(context, pull, hold, hello.version)
        finally:
            del self.pulls[key]
            hold.stop()

    async def _send(self, context: Call, pull: Pull, hold: BudgetHold, version: int) -> None:
        async with self._opening:
            source = await run_to_end(self._pool, partial(self._opener.open, pull.wanted))
        try:
            with self._hub.watching(source.sender.path) as watched:
                self._record_overtaken(pull, source)
                self._hold_for_copy(pull.wanted)
                if source.end_offset is not None:
                    # A reader of a range reports no progress. Its position is where it began, or the end if
                    # it gets no bytes.
                    pull.progress = PullProgress(source.start.end if source.is_at_end else source.start.first)
                await context.write(encode_pull_reply(self._start(source.start, pull, version)))
                await first_of(
                    self._send_items(context, pull, source, watched, hold),
                    self._listen(context, pull),
                    hold.wait_ended(),
                    _wait_outdated(pull),
                )
        finally:
            source.sender.close()

    def _hold_for_copy(self, wanted: PullMerged | PullSession) -> None:
        """Take the position that a copy has acknowledged. Call it after the log was compared. In a copy of
        another cluster, or of a line that a forced reset ended, the position belongs to other messages, and a
        hold never moves back.
        """
        if isinstance(wanted, PullMerged) and wanted.range is None and (said := wanted.acknowledged):
            self._on_acknowledged(said.name, said.position)

    def _start(self, start: PullStart, pull: Pull, version: int) -> PullStart:
        """The start with the version of the protocol and, for a client, the members."""
        start = replace(start, version=version)
        if pull.identity.role == "node" or isinstance(pull.wanted, PullSession):
            return start
        nodes = self._logs.nodes
        pull.told_version = nodes.version
        return replace(start, nodes=nodes)

    def _record_overtaken(self, pull: Pull, source: PullSource) -> None:
        overtaking = source.overtaking
        if overtaking is not None and overtaking.is_overtaken and pull.identity.role == "subscriber":
            self.overtaken += 1
            logger.warning("subscriber_overtaken peer=%s name=%s", pull.peer, pull.identity.name)
            overtaking.is_overtaken = False

    async def _send_items(
        self, context: Call, pull: Pull, source: PullSource, watched: WatchedDirectory, hold: BudgetHold
    ) -> None:
        is_behind, is_costly = True, False
        while True:
            version = watched.version
            if pull.rejection is not None:
                refusal, pull.rejection = pull.rejection, None
                await context.write(encode_pull_reply(refusal))
            grant = await hold.acquire(READ_BYTES_MAX if is_behind else TAIL_BYTES)
            if is_behind and (is_costly or not source.is_recent(grant)):
                items = await run_to_end(self._pool, partial(source.items, grant))
            else:
                begun_s = time.thread_time()
                items = source.items(grant)
                is_costly = time.thread_time() - begun_s > LOOP_S_MAX
            self._record_overtaken(pull, source)
            size = sum(len(item.data) for item in items if isinstance(item, Chunk))
            is_behind = size >= min(TAIL_BYTES, grant.read_bytes)
            hold.keep(size and size + grant.copies_bytes)
            is_new = bool(items)
            await self._write(context, items, hold)
            hold.keep(0)
            if source.is_done:
                return
            if is_new:
                pull.sent_bytes += size
                pull.sent_ns = time.time_ns()
            elif source.is_idle:
                await watched.changed(version)

    async def _write(self, context: Call, items: list[Item | LogOutline], hold: BudgetHold) -> None:
        """Send the items; each leaves the list, and the memory, as it is sent."""
        items.reverse()
        while items:
            item = items.pop()
            size = len(item.data) if isinstance(item, Chunk) else 0
            hold.begin_sending(size)
            if not isinstance(item, Run):
                await context.write(encode_pull_reply(item))
            del item
            hold.end_sending(size)

    async def _listen(self, context: Call, pull: Pull) -> None:
        while isinstance(data := await context.read(), bytes):
            match decode_pull_request(data):
                case PullProgress() as has:
                    pull.progress = has
                    self._on_progress(pull)
                case Acknowledged() as said:
                    check_acknowledged(pull.identity, said)
                    self._on_acknowledged(said.name, said.position)
                case PullHello():
                    raise ProtocolViolation("a second hello")
