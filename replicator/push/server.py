"""The push side of a node: it receives the sessions of publishers.

Invariants:
- A peer is identified by its certificate: a publisher pushes only sessions of its own name, and a dedup
  session only if the certificate has that dedup id.
- A stream begins with a hello, and a run is open before a byte of it is accepted.
- A session has one stream: a newer one replaces the older.
- A stream ends when the members that its client received have changed. The client connects again, and
  receives the new members.
- One message of a stream is in memory at a time; the others wait in gRPC's windows.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from msgspec.structs import replace

from replicator.protocol.codec import PushReply, decode_push_request, encode_push_reply
from replicator.protocol.grpc_service import Call, first_of, frames_cleared, read_first
from replicator.protocol.handshake import (
    OpenReply,
    PushHello,
    PushProgress,
    PushStart,
    PushStatus,
    SilenceLimit,
)
from replicator.protocol.known_nodes import NO_NODES, KnownNodes
from replicator.protocol.messages import Chunk, Run, SegmentSealed, WholeRun, WholeRuns
from rt.errors import CertificateError, Closed, ClusterMismatch, Overloaded, ProtocolViolation, RtError
from rt.names import dedup_owner, session_owner
from rt.net.grpc_auth import caller
from rt.net.grpc_errors import MembersChanged
from rt.net.identity import STREAM_HINT, Identity

logger = logging.getLogger("replicator")

SESSIONS_MAX = 64
"""Streams of one certificate at once: a publisher has one, or a few with suffixes. Each takes up to 1.6 MiB
of memory: gRPC's window, and the message that is read.
"""


class SessionIntake(Protocol):
    """Where the bytes of one stream go. Used by one stream, from its loop."""

    @property
    def start(self) -> PushStart:
        """The answer to the hello: from where on the session is needed."""

    async def open_run(self, run: Run) -> None:
        """Return when the cluster accepts the bytes of the run. `rt.Fenced` if it never will."""

    async def append(self, item: Chunk | SegmentSealed) -> None:
        """Verify and store. Returns when the next item may come, not when this one is durable."""

    async def append_runs(self, runs: Sequence[WholeRun]) -> None:
        """`open_run` and `append` for runs that follow each other, together; durable on return."""

    def record_status(self, status: PushStatus) -> SilenceLimit | None:
        """Record the status of the push. Return its limit of silence if nothing of the limit is left to
        commit.
        """

    async def next_progress(self, told: PushProgress | None) -> PushProgress:
        """How much of the session is safe, as soon as that differs from `told`. Raises the error that ends
        the stream.
        """

    async def close(self) -> None:
        """Call it when the stream has ended. The bytes that it stored stay."""


class SessionReplicaStore(Protocol):
    """The sessions of a node, as the push server needs them."""

    @property
    def cluster(self) -> bytes: ...

    async def accept(self, hello: PushHello, identity: Identity) -> SessionIntake:
        """Prepare the session for a stream. The certificate was checked; the caller closes the intake."""


def check_publisher(identity: Identity, hello: PushHello, stream: str) -> None:
    """`rt.CertificateError` or `rt.ClusterMismatch` unless the certificate may push that session."""
    if identity.role != "publisher":
        raise CertificateError("only a publisher can push", got=identity.uri, expected="role publisher")
    if hello.stream != stream or identity.stream != stream:
        got = f"{hello.stream} by a certificate of {identity.stream}"
        raise ClusterMismatch("another stream is served here", got=got, expected=stream, hint=STREAM_HINT)
    if session_owner(hello.session) != identity.name:
        raise CertificateError(
            "the session does not belong to the certificate's name",
            got=hello.session,
            expected=f"{identity.name} or {identity.name}~<suffix>",
            hint="`rt certs issue` makes a certificate for that name.",
        )
    if hello.dedup_id is not None and dedup_owner(hello.dedup_id) not in identity.dedup_ids:
        raise CertificateError(
            "the certificate does not name that dedup id",
            got=hello.dedup_id,
            expected=" or ".join(f"{one}, {one}~<suffix>" for one in sorted(identity.dedup_ids)) or "none",
            hint="`rt certs issue` makes one that does.",
        )


class PushServicer:
    """Answers `Replication.Push`. `refused` counts rejections by the error's class.

    For a server of `rt.net.grpc_channel.serve`, whose gate turns errors into statuses. `identify` returns the
    identity of the caller, `nodes` the members now: call `on_nodes_changed` when they have changed. Before
    their first change the number of members is the one in the store's `PushStart`.
    """

    def __init__(
        self,
        stores: SessionReplicaStore,
        stream: str,
        *,
        identify: Callable[[], Identity] = caller,
        nodes: Callable[[], KnownNodes] = lambda: NO_NODES,
    ) -> None:
        self._stores = stores
        self._stream = stream
        self._identify = identify
        self._nodes = nodes
        self._streams: dict[str, _Stream] = {}
        self._owned: Counter[str] = Counter()  # The number of streams of each certificate's name.
        self.refused: Counter[str] = Counter()

    @property
    def sessions(self) -> list[str]:
        return sorted(self._streams)

    def on_nodes_changed(self) -> None:
        """End the streams whose clients received other members. Call it in the event loop."""
        version = self._nodes().version
        for stream in self._streams.values():
            if stream.told_version not in {None, version}:
                stream.end(MembersChanged())

    async def push(self, _requests: Any, context: Call) -> None:
        try:
            with frames_cleared():
                await self._serve(context)
        except MembersChanged as error:
            logger.info("push_ended peer=%s error=%r", context.peer(), str(error))
            raise
        except RtError as error:
            self.refused[type(error).__name__] += 1
            logger.warning("push_ended peer=%s error=%r", context.peer(), str(error))
            raise

    async def _serve(self, context: Call) -> None:
        identity = self._identify()
        hello = decode_push_request(await read_first(context))
        if not isinstance(hello, PushHello):
            raise ProtocolViolation("a stream must begin with a hello")
        check_publisher(identity, hello, self._stream)
        if hello.cluster not in {b"", self._stores.cluster}:
            raise ClusterMismatch(
                "the session was pushed to another cluster before",
                got=self._stores.cluster.hex(),
                expected=hello.cluster.hex(),
                hint="Check `endpoints`. If the earlier cluster no longer exists: stop the publisher, remove "
                "`.cluster` in its session directory, then start it.",
            )
        stream = _Stream(context)
        self._register(hello.session, identity, stream)
        try:
            await self._replace(stream)
            intake = await self._stores.accept(hello, identity)
            try:
                await stream.run(intake, self._nodes(), hello.version)
            finally:
                await intake.close()
        finally:
            if self._streams.get(hello.session) is stream:
                self._unregister(hello.session, stream)
            stream.has_ended.set()

    def _register(self, session: str, identity: Identity, stream: _Stream) -> None:
        """Make `stream` the current stream of its session."""
        older = self._streams.get(session)
        owned = self._owned[identity.name]
        if older is None and owned >= SESSIONS_MAX:
            raise Overloaded("too many sessions of one certificate", got=owned + 1, expected=SESSIONS_MAX)
        self._streams[session] = stream
        stream.older = older
        self._owned[identity.name] += older is None

    def _unregister(self, session: str, stream: _Stream) -> None:
        older = _still_running(stream.older)
        if older is not None:  # The stream was cancelled while it waited: the next one must wait, too.
            self._streams[session] = older
            return
        owner = session_owner(session)
        del self._streams[session]
        self._owned[owner] -= 1
        if not self._owned[owner]:
            del self._owned[owner]

    async def _replace(self, stream: _Stream) -> None:
        """Return when the older streams have ended. Raises if a newer one came meanwhile."""
        while (older := _still_running(stream.older)) is not None:
            older.end(Closed("a newer stream of this session took over", hint=_ONE_CLIENT_HINT))
            await older.has_ended.wait()
        stream.older = None
        stream.raise_if_ending()


def _still_running(stream: _Stream | None) -> _Stream | None:
    """The newest stream, of `stream` and the older ones, that has not ended; None if all have ended."""
    while stream is not None and stream.has_ended.is_set():
        stream = stream.older
    return stream


_ONE_CLIENT_HINT: Final = "One push client a session directory."


class _Stream:
    """One stream of a session, while it is served."""

    def __init__(self, context: Call) -> None:
        self._ending = asyncio.Event()
        self._reason: RtError | None = None
        self.has_ended = asyncio.Event()
        self.older: _Stream | None = None
        """The stream of the session before this one, until that has ended."""
        self.told_version: int | None = None
        """The version of the members that the client received; None if it has received none yet."""
        self._context = context
        self._writing = asyncio.Lock()

    def end(self, error: RtError) -> None:
        """End the stream with this error, unless it ends already."""
        self._reason = self._reason or error
        self._ending.set()

    def raise_if_ending(self) -> None:
        if self._reason is not None:
            raise self._reason

    async def run(self, intake: SessionIntake, nodes: KnownNodes, version: int) -> None:
        """Store what comes and report progress, until the stream ends, fails or is replaced."""
        start, self.told_version = replace(intake.start, version=version), nodes.version
        if nodes.version:
            start = replace(start, members=len(nodes.nodes), nodes=nodes)
        await self._write(start)
        await first_of(self._receive(intake), self._send_progress(intake), self._wait_ending())

    async def _receive(self, intake: SessionIntake) -> None:
        while await self._receive_one(intake):
            pass

    async def _receive_one(self, intake: SessionIntake) -> bool:
        """Receive one message; False at the end of the stream. The message is not kept while the next one is
        awaited.
        """
        data = await self._context.read()
        if not isinstance(data, bytes):
            return False
        said = decode_push_request(data)
        del data
        match said:
            case Chunk() | SegmentSealed():
                await intake.append(said)
            case WholeRuns(runs):
                await intake.append_runs(runs)
            case Run():
                await intake.open_run(said)
                await self._write(OpenReply(said.number))
            case PushStatus():
                if (settled := intake.record_status(said)) is not None:
                    await self._write(settled)
            case PushHello():
                raise ProtocolViolation("a second hello")
        return True

    async def _send_progress(self, intake: SessionIntake) -> None:
        told: PushProgress | None = None
        while True:
            told = await intake.next_progress(told)
            await self._write(told)

    async def _wait_ending(self) -> None:
        await self._ending.wait()
        self.raise_if_ending()

    async def _write(self, answer: PushReply) -> None:
        async with self._writing:
            self.raise_if_ending()  # The answer may be counted with the earlier members.
            await self._context.write(encode_push_reply(answer))
