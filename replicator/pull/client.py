"""Pulls a merged log from the nodes of a cluster into a directory, for as long as the process runs.

Invariants:
- The copy continues exactly where it ends, from any node: all nodes have the same bytes.
- If a node fails, is silent, or has less than the copy, the client leaves it for the next node. Once the
  members have changed, the nodes in their list are used too.
- If the log of a node differs from the copy, the pull ends with `rt.Diverged`, because one of the two is
  wrong. The pull also ends if the local disk failed.
- Written data are synced in rounds of `SYNC_SECONDS`. The acknowledgement of the subscriber is sent within
  `ACKNOWLEDGED_SECONDS`, even if no bytes arrive.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

from replicator.protocol.codec import (
    PULL_METHOD,
    PullReply,
    PullRequest,
    decode_pull_reply,
    encode_pull_request,
)
from replicator.protocol.grpc_service import first_of
from replicator.protocol.handshake import (
    Acknowledged,
    HoldRejected,
    LogOutline,
    PullHello,
    PullProgress,
    PullStart,
)
from replicator.protocol.run_in_thread import run_to_end
from replicator.pull.local_copy import LocalCopy
from replicator.pull.node_call import pull_channel
from replicator.pull.node_channels import NodeChannels
from rt.endpoints import check_endpoints
from rt.errors import (
    CertificateError,
    ClusterMismatch,
    Corrupt,
    CorruptRange,
    DirectoryLocked,
    DiskFull,
    Diverged,
    FormatError,
    InvalidName,
    ProtocolViolation,
    RtError,
    StorageFailed,
    Timeout,
    UnknownVersion,
)
from rt.log_limit import LogLimit
from rt.net.connect_probe import probe_endpoint
from rt.net.grpc_channel import Channel
from rt.net.grpc_errors import MembersChanged, NothingMergedYet, Unreachable, asking
from rt.net.tls import TLS

# isort: split
import grpc.aio

logger = logging.getLogger("replicator")

BACKOFF_SECONDS_MIN: Final = 0.05
BACKOFF_SECONDS_MAX: Final = 1.0
START_SECONDS: Final = 10.0
"""How long a node may take to answer the hello: it may have to read a segment to check our bytes."""
SILENCE_SECONDS: Final = 30.0
"""After this time without an item the next node is asked: this one may be cut off from the others."""
SYNC_SECONDS: Final = 0.1
ACKNOWLEDGED_SECONDS: Final = 1.0  # How often the subscriber's acknowledgement is read.

_FAILURES_FULL: Final = 10  # A full disk counts as this number of failures: only free space helps.

_OURS = (StorageFailed, DirectoryLocked, InvalidName)
"""These errors of the copy end the client: no node can repair it."""
LOG_AGAIN_SECONDS: Final = 60.0

_FINAL = (Diverged, *_OURS)
_REFUSALS = (CertificateError, ClusterMismatch, UnknownVersion)
"""These end the client when every node returns them."""

_Result = TypeVar("_Result")


class _Quiet(Timeout):
    """Nothing came from a node. It hangs, or there is nothing new: the next node is asked."""


def _is_of_node(error: RtError) -> bool:
    """Whether it is a fault of the node's disk, not of the copy's."""
    return isinstance(error.__cause__, grpc.aio.AioRpcError)


class PullClient:
    """Keeps `copy` up to date with the cluster whose nodes are `endpoints` ("host:port" each).

    Without `tls` (with `insecure`) the endpoints must be on loopback. Create and use it in one event loop.
    `raises_damage`: `run` raises `rt.Corrupt` when the copy is found to be corrupt; otherwise it tries again.
    If no node is reached in `connect_timeout_s`, it logs why each node failed, and goes on.
    """

    def __init__(
        self,
        copy: LocalCopy,
        stream: str,
        endpoints: Sequence[str],
        tls: TLS | None,
        *,
        insecure: bool = False,
        raises_damage: bool = False,
        silence_seconds: float = SILENCE_SECONDS,
        start_seconds: float = START_SECONDS,
        connect_timeout_s: float | None = None,
        draw: Callable[[float, float], float] = random.uniform,
    ) -> None:
        endpoints = check_endpoints(endpoints, is_required=True)
        self.copy = copy
        self._stream = stream
        at = int(draw(0, len(endpoints))) % len(endpoints)  # Clients spread over the nodes.
        self._nodes = NodeChannels(endpoints, partial(pull_channel, tls=tls, insecure=insecure), at)
        self._tls = tls
        self._was_reached = False  # Whether a node has ever accepted a stream.
        self._raises_damage = raises_damage
        self._silence_seconds = silence_seconds
        self._start_seconds = start_seconds
        self._connect_timeout_s = connect_timeout_s
        self._draw = draw
        self._pool: Executor = ThreadPoolExecutor(2, thread_name_prefix="rt-pull")
        """One thread uses the copy, which allows one user at a time. The other thread syncs meanwhile."""
        self._heard_at = 0.0
        self._unsynced = asyncio.Event()
        self._send_lock = asyncio.Lock()  # Held while a message is written: gRPC accepts one at a time.
        self._copy_lock = asyncio.Lock()  # Held while the copy is used in another thread, or must not change.
        self.node: str | None = None  # The node that the copy follows now.
        self.switches = 0  # How often a node was left.
        self._corrupt: tuple[int, int | None] | None = None
        """The range that was last reported as corrupt on every node."""
        self.left: dict[str, RtError] = {}
        """By endpoint, why its node was left since the last item came from any node."""
        self._limits: dict[tuple[str, type[RtError]], LogLimit] = {}
        """Limits of the log records about left nodes since that item, by endpoint and error."""

    async def run(self) -> None:
        """Follow the log until cancelled. Raises only what no node can repair."""
        try:
            await self._in_thread(self.copy.open)
            late = asyncio.create_task(self._notice_unreached())
            try:
                await self._follow_until_stopped()
            finally:
                late.cancel()
        finally:
            await self._release()

    async def _follow_until_stopped(self) -> None:
        failures, refusals, nodes = 0, 0, self._nodes
        while True:
            self._heard_at = 0.0
            error = await self._follow()
            self.node = None
            if isinstance(error, MembersChanged) and nodes.is_renewal():
                continue
            if isinstance(error, _FINAL) or (self._raises_damage and self._is_of_copy(error)):
                raise error
            refusals = refusals + 1 if isinstance(error, _REFUSALS) else 0
            if refusals >= len(nodes.targets):
                raise error
            is_quiet = isinstance(error, _Quiet)
            failures = 1 if self._heard_at or is_quiet else failures + 1
            self.switches += 1
            if not self._was_reached:
                error = await self._reason_of(error, nodes.target)
            self.left[nodes.target] = error
            self._report_corrupt()
            self._report_unreached()
            self._log_left(nodes.target, error)
            nodes.record_failure()
            nodes.advance()
            await nodes.close_unused()
            if isinstance(error, DiskFull):
                failures = _FAILURES_FULL
            pause = min(BACKOFF_SECONDS_MAX, BACKOFF_SECONDS_MIN * 2 ** min(failures - 1, 10))
            await asyncio.sleep(self._draw(pause / 2, pause))

    def _log_left(self, target: str, error: RtError) -> None:
        """Log the error at once, and then once a minute while it happens again. A full local disk is not
        logged as a fault of a node.
        """
        is_full = isinstance(error, DiskFull) and not _is_of_node(error)
        limit = self._limits.setdefault(("" if is_full else target, type(error)), LogLimit(LOG_AGAIN_SECONDS))
        if (left_out := limit.admit(asyncio.get_running_loop().time())) is None:
            return
        if is_full:
            logger.warning("pull_waits path=%s reason=%r", self.copy.path, str(error))
            return
        level = logging.INFO if isinstance(error, _Quiet) else logging.WARNING
        logger.log(level, "node_left endpoint=%s error=%r not_logged=%d", target, str(error), left_out)

    @property
    def has_left_all(self) -> bool:
        """Whether every node was left since an item last came."""
        return all(target in self.left for target in self._nodes.counted)

    def _report_corrupt(self) -> None:
        """Report a corrupt range, once, when every node was left because its bytes are corrupt."""
        errors = [self.left.get(target) for target in self._nodes.counted]
        if any(not isinstance(one, FormatError) or isinstance(one, UnknownVersion) for one in errors):
            return
        start = self.copy.position
        ranges = [error for error in errors if isinstance(error, CorruptRange) and error.end > start]
        if self.copy.next_offset is None:
            start = max([start, *(one.start for one in ranges)])
        end = min((one.end for one in ranges), default=None)
        if (start, end) != self._corrupt:
            self._corrupt = start, end
            why = "; ".join(f"{target}: {error}" for target, error in sorted(self.left.items()))
            self.copy.on_corrupt(start, end, why)

    async def _reason_of(self, error: RtError, target: str) -> RtError:
        """A more precise reason, if the node could not be reached."""
        if type(error) is not Unreachable or self._tls is None:
            return error
        return await probe_endpoint(target, self._tls) or error

    async def _notice_unreached(self) -> None:
        """Report the reasons if no node is reached in time. A node that was not asked yet, or is silent,
        counts as left.
        """
        if (seconds := self._connect_timeout_s) is None:
            return
        await asyncio.sleep(seconds)
        if self._was_reached:
            return
        for target in self._nodes.targets:
            silent = Timeout("no answer yet", where=target, expected=f"within {seconds:g} s")
            self.left.setdefault(target, silent)
        logger.error("no_node_reached seconds=%g reasons=%r", seconds, self._reasons)
        self._report_unreached()

    @property
    def _reasons(self) -> str:
        return "; ".join(f"{target}: {error.reason}" for target, error in sorted(self.left.items()))

    def _report_unreached(self) -> None:
        """Report why no node was reached yet. A node that has no log yet counts as reached."""
        if self._was_reached or not self.has_left_all:
            return
        if not any(isinstance(error, NothingMergedYet) for error in self.left.values()):
            self.copy.on_unreached(self._reasons)

    def _is_of_copy(self, error: RtError) -> bool:
        """Whether the error is about a corrupt file of the copy, and not about bytes that a node sent."""
        return isinstance(error, Corrupt) and os.path.dirname(error.path) == self.copy.path

    async def _follow(self) -> RtError:
        """Follow one node until it is left. Returns why."""
        target = self._nodes.target
        try:
            with asking(target):
                await self._stream_from(self._nodes.channel())
        except RtError as error:
            if isinstance(error, _OURS) and _is_of_node(error):
                return Unreachable(str(error), where=target)
            return error
        return Unreachable("the node ended the stream", where=target)

    async def _stream_from(self, channel: Channel) -> None:
        call: Any = channel.get().stream_stream(PULL_METHOD)()
        try:
            wanted = await self._in_thread(self.copy.request)
            await self._send(call, PullHello(self._stream, wanted))
            start = await self._read_start(call, channel.target)
            await self._in_thread(lambda: self.copy.start(start))
            self._nodes.record_answer(start, self.left)
            self.node = start.node
            self._was_reached = True
            logger.info(
                "node_followed endpoint=%s node=%s place=%s", channel.target, start.node, start.offset
            )
            await first_of(
                self._receive(call),
                self._sync(call),
                self._acknowledge(call, wanted.acknowledged),
                self._notice_silence(channel.target),
            )
        finally:
            call.cancel()

    async def _read_start(self, call: Any, target: str) -> PullStart:
        try:
            async with asyncio.timeout(self._start_seconds):
                data = await call.read()
        except TimeoutError:
            raise Timeout(
                "the node did not answer in time", where=target, expected=f"{self._start_seconds:g} s"
            ) from None
        if not isinstance(data, bytes):
            raise Unreachable("the node ended the stream", where=target)
        start = decode_pull_reply(data)
        if not isinstance(start, PullStart):
            raise ProtocolViolation(
                "a stream must begin with a start", where=target, got=type(start).__name__
            )
        return start

    async def _receive(self, call: Any) -> None:
        """Store the items that arrive. The next message is requested while one is stored."""
        reading = asyncio.ensure_future(call.read())
        try:
            while isinstance(data := await reading, bytes):
                reading = asyncio.ensure_future(call.read())
                await self._handle(decode_pull_reply(data))
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _handle(self, item: PullReply) -> None:
        if isinstance(item, PullStart | LogOutline):
            raise ProtocolViolation("the node sent a message that was not requested", got=type(item).__name__)
        copy = self.copy
        self._heard_at = asyncio.get_running_loop().time()
        if isinstance(item, HoldRejected):
            copy.on_hold_refused(item)
            return
        place = copy.position, copy.next_offset
        async with self._copy_lock:
            if copy.is_quick(item):
                copy.append(item)
            else:
                await run_to_end(self._pool, partial(copy.append, item))
        if (copy.position, copy.next_offset) != place:
            self.left.clear()
            self._limits.clear()
            self._corrupt = None
        self._unsynced.set()

    async def _sync(self, call: Any) -> None:
        """Sync the stored items in rounds, and report the synced position."""
        while True:
            await self._unsynced.wait()
            await asyncio.sleep(SYNC_SECONDS)
            self._unsynced.clear()
            async with self._copy_lock:
                point = self.copy.sync_point()
            # Items go on coming meanwhile: on a busy disk a sync may take a second.
            position = await run_to_end(self._pool, partial(self.copy.sync_to, point))
            await self._in_thread(self.copy.tidy)
            await self._send(call, PullProgress(position, is_synced=True))

    async def _acknowledge(self, call: Any, told: Acknowledged | None) -> None:
        """Send the subscriber's acknowledgement when it differs from `told`, the last one sent."""
        while True:
            await asyncio.sleep(ACKNOWLEDGED_SECONDS)
            said = await run_to_end(self._pool, self.copy.acknowledged)
            if said is not None and said != told:
                told = said
                await self._send(call, said)

    async def _notice_silence(self, target: str) -> None:
        loop = asyncio.get_running_loop()
        since = loop.time()
        while True:
            left = max(since, self._heard_at) + self._silence_seconds - loop.time()
            if left <= 0 and len(self._nodes.targets) > 1:
                raise _Quiet(
                    "the node is silent", where=target, expected=f"something in {self._silence_seconds:g} s"
                )
            await asyncio.sleep(max(left, self._silence_seconds / 4))

    async def _in_thread(self, act: Callable[[], _Result]) -> _Result:
        async with self._copy_lock:
            return await run_to_end(self._pool, act)

    async def _release(self) -> None:
        async with self._copy_lock:
            await run_to_end(self._pool, self.copy.close)
        self._pool.shutdown(wait=False)
        await self._nodes.close()

    async def _send(self, call: Any, said: PullRequest) -> None:
        """Write a message. If the call has ended, the reading side raises why."""
        async with self._send_lock:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await call.write(encode_pull_request(said))
