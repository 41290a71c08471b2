"""Pulling a merged log from the nodes of a cluster into a directory, for as long as the process lives.

Laws. The copy goes on exactly where it ends, with whichever node: all have the same bytes. A node that fails,
is silent, or has less than the copy is left for the next one. One whose log differs from the copy ends it all
loudly (`rt.Diverged`), for one of the two is wrong; so does a local disk that failed. What is written is
synced in rounds of `SYNC_SECONDS`. What the subscriber acknowledges is told within `ACKNOWLEDGED_SECONDS`,
also when nothing comes.
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

from replicator.protocol.codec import PULL_METHOD, PullAsked, decode_pull_reply, encode_pull_request
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
)
from rt.net.grpc_channel import Channel, open_channel
from rt.net.grpc_errors import Unreachable, asking
from rt.net.tls import TLS

# isort: split
import grpc.aio

logger = logging.getLogger("replicator")

BACKOFF_SECONDS_MIN: Final = 0.05
BACKOFF_SECONDS_MAX: Final = 1.0
START_SECONDS: Final = 10.0
"""How long a node may take to answer the hello: it may have to read a segment to check what we have."""
SILENCE_SECONDS: Final = 30.0
"""After so long without an item the next node is asked: this one may be cut off from the others."""
SYNC_SECONDS: Final = 0.1
ACKNOWLEDGED_SECONDS: Final = 1.0
"""How often it is looked whether the subscriber has acknowledged more."""

_FAILURES_FULL: Final = 10
"""A full disk is waited for as long as many failures: nothing but room helps."""

_OURS = (StorageFailed, DirectoryLocked, InvalidName)
"""What ends the client if it is said of the copy: no node can mend it."""
_FINAL = (Diverged, *_OURS)
_REFUSALS = (CertificateError, ClusterMismatch)
"""What ends it when every node says so."""

_Result = TypeVar("_Result")


class PullClient:
    """Keeps `copy` up to date with the cluster whose nodes are `endpoints` ("host:port" each).

    Without `tls` (with `insecure`) the endpoints must be of loopback. Make and use it in one event loop.
    `raises_damage`: `run` raises `rt.Corrupt` when the copy turns out to be damaged; else it tries again.
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
        draw: Callable[[float, float], float] = random.uniform,
    ) -> None:
        if not endpoints:
            raise ValueError("no endpoints: name at least one node, host:port")
        self.copy = copy
        self._stream = stream
        self._channels: list[Channel] = [open_channel(each, tls, insecure=insecure) for each in endpoints]
        self._raises_damage = raises_damage
        self._silence_seconds = silence_seconds
        self._start_seconds = start_seconds
        self._draw = draw
        self._pool: Executor = ThreadPoolExecutor(2, thread_name_prefix="rt-pull")
        """One thread for the copy, which is for one at a time, and one that syncs beside it."""
        self._heard_at = 0.0
        self._unsynced = asyncio.Event()
        self._saying = asyncio.Lock()
        """Held while something is written: gRPC takes one message at a time."""
        self._alone = asyncio.Lock()
        """Held while the copy is used in another thread, or must not change."""
        self.node: str | None = None
        """The node that the copy follows now."""
        self.switches = 0
        """How often a node was left."""
        self._corrupt: tuple[int, int | None] | None = None
        """The range of which it was last told that no node has good bytes of it."""
        self.left: dict[str, RtError] = {}
        """Why each node was left last, by its endpoint, since something last came from any of them."""

    async def run(self) -> None:
        """Follow the log until cancelled. Raises only what no node can mend."""
        try:
            await self._in_thread(self.copy.open)
            await self._follow_for_ever()
        finally:
            await self._release()

    async def _follow_for_ever(self) -> None:
        at, failures, refusals = self._first_endpoint(), 0, 0
        while True:
            self._heard_at = 0.0
            error = await self._follow(self._channels[at])
            self.node = None
            if isinstance(error, _FINAL) or (self._raises_damage and self._is_of_copy(error)):
                raise error
            refusals = refusals + 1 if isinstance(error, _REFUSALS) else 0
            if refusals >= len(self._channels):
                raise error
            failures = 1 if self._heard_at else failures + 1
            self.switches += 1
            self.left[self._channels[at].target] = error
            self._emit_corrupt()
            logger.warning("node_left endpoint=%s error=%r", self._channels[at].target, str(error))
            at = (at + 1) % len(self._channels)
            if isinstance(error, DiskFull):
                failures = _FAILURES_FULL
            pause = min(BACKOFF_SECONDS_MAX, BACKOFF_SECONDS_MIN * 2 ** min(failures - 1, 10))
            await asyncio.sleep(self._draw(pause / 2, pause))

    @property
    def has_left_all(self) -> bool:
        """Whether each node was left since something last came."""
        return len(self.left) >= len(self._channels)

    def _emit_corrupt(self) -> None:
        """Tell it, once for each place, when every node was left because its bytes are not good."""
        errors = [self.left.get(channel.target) for channel in self._channels]
        if not all(isinstance(error, FormatError) for error in errors):
            return
        start = self.copy.position
        ranges = [error for error in errors if isinstance(error, CorruptRange) and error.end > start]
        if self.copy.place is None:
            start = max([start, *(one.start for one in ranges)])
        end = min((one.end for one in ranges), default=None)
        if (start, end) != self._corrupt:
            self._corrupt = start, end
            why = "; ".join(f"{target}: {error}" for target, error in sorted(self.left.items()))
            self.copy.on_corrupt(start, end, why)

    def _is_of_copy(self, error: RtError) -> bool:
        """Whether it says that a file of the copy is damaged, and not what a node has sent."""
        return isinstance(error, Corrupt) and os.path.dirname(error.path) == self.copy.path

    def _first_endpoint(self) -> int:
        """Clients spread over the nodes."""
        return int(self._draw(0, len(self._channels))) % len(self._channels)

    async def _follow(self, channel: Channel) -> RtError:
        """Follow one node until it is left; why."""
        try:
            with asking(channel.target):
                await self._stream_from(channel)
        except RtError as error:
            if isinstance(error, _OURS) and isinstance(error.__cause__, grpc.aio.AioRpcError):
                return Unreachable(str(error), where=channel.target)  # The node's trouble, not ours.
            return error
        return Unreachable("the node ended the stream", where=channel.target)

    async def _stream_from(self, channel: Channel) -> None:
        call: Any = channel.get().stream_stream(PULL_METHOD)()
        try:
            wanted = await self._in_thread(self.copy.wanted)
            await self._say(call, PullHello(self._stream, wanted))
            start = await self._read_start(call, channel.target)
            await self._in_thread(lambda: self.copy.begin(start))
            self.node = start.node
            logger.info("node_followed endpoint=%s node=%s place=%s", channel.target, start.node, start.place)
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
            data = await asyncio.wait_for(call.read(), self._start_seconds)
        except TimeoutError:
            raise Timeout(
                "the node does not answer", where=target, expected=f"{self._start_seconds:g} s"
            ) from None
        if not isinstance(data, bytes):
            raise Unreachable("the node ended the stream", where=target)
        start = decode_pull_reply(data)
        if not isinstance(start, PullStart):
            raise ProtocolViolation("a stream begins with a start", where=target, got=type(start).__name__)
        return start

    async def _receive(self, call: Any) -> None:
        loop, copy = asyncio.get_running_loop(), self.copy
        while isinstance(data := await call.read(), bytes):
            item = decode_pull_reply(data)
            if isinstance(item, PullStart | LogOutline):
                raise ProtocolViolation("an answer that was not asked for", got=type(item).__name__)
            self._heard_at = loop.time()
            if isinstance(item, HoldRejected):
                copy.on_hold_refused(item)
                continue
            place = copy.position, copy.place
            async with self._alone:
                if copy.is_quick(item):
                    copy.take(item)
                else:
                    await run_to_end(self._pool, lambda taken=item: copy.take(taken))  # type: ignore[misc]
            if (copy.position, copy.place) != place:
                self.left.clear()
                self._corrupt = None
            self._unsynced.set()

    async def _sync(self, call: Any) -> None:
        """Sync what has come, now and then, and say so."""
        while True:
            await self._unsynced.wait()
            await asyncio.sleep(SYNC_SECONDS)
            self._unsynced.clear()
            async with self._alone:
                point = self.copy.sync_point()
            # Beside what goes on coming: on a busy disk a sync may take as long as a second.
            position = await run_to_end(self._pool, partial(self.copy.sync_to, point))
            await self._in_thread(self.copy.tidy)
            await self._say(call, PullProgress(position, is_synced=True))

    async def _acknowledge(self, call: Any, told: Acknowledged | None) -> None:
        """Tell what the subscriber acknowledges, from when it differs from what was told."""
        while True:
            await asyncio.sleep(ACKNOWLEDGED_SECONDS)
            said = await run_to_end(self._pool, self.copy.acknowledged)
            if said is not None and said != told:
                told = said
                await self._say(call, said)

    async def _notice_silence(self, target: str) -> None:
        loop = asyncio.get_running_loop()
        since = loop.time()
        while True:
            left = max(since, self._heard_at) + self._silence_seconds - loop.time()
            if left <= 0 and len(self._channels) > 1:
                raise Timeout(
                    "the node is silent", where=target, expected=f"something in {self._silence_seconds:g} s"
                )
            await asyncio.sleep(max(left, self._silence_seconds / 4))

    async def _in_thread(self, act: Callable[[], _Result]) -> _Result:
        async with self._alone:
            return await run_to_end(self._pool, act)

    async def _release(self) -> None:
        async with self._alone:
            await run_to_end(self._pool, self.copy.close)
        self._pool.shutdown(wait=False)
        await asyncio.gather(*(channel.close() for channel in self._channels), return_exceptions=True)

    async def _say(self, call: Any, said: PullAsked) -> None:
        """Write it; a call that has ended is left to the reading side, which alone is told why."""
        async with self._saying:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await call.write(encode_pull_request(said))
