"""The streams of one session: one for each endpoint in use, updated as the client learns of endpoints.

Invariants:
- Two streams never lead to the same node, unless two configured endpoints do.
- Acknowledgements of nodes count for the known members: `SessionSource.quorum` has the members as soon as
  they are known.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from replicator.protocol.handshake import PushStart
from replicator.protocol.known_nodes import ClientEndpoints
from replicator.push.session_source import SessionSource
from replicator.push.stream import PushStream
from rt.errors import RtError
from rt.net.grpc_channel import Channel
from rt.net.grpc_errors import Unreachable
from rt.net.tls import TLS

logger = logging.getLogger("replicator")


class PushStreams:
    """A `replicator.push.stream.StreamOwner`. `connect` opens a channel to an endpoint."""

    def __init__(
        self,
        log: SessionSource,
        seeds: Sequence[str],
        connect: Callable[[str], Channel],
        tls: TLS | None,
        on_change: Callable[[], None],
    ) -> None:
        self._log, self._connect, self._tls = log, connect, tls
        self.on_change = on_change
        self._endpoints = ClientEndpoints(seeds)
        self._streams: dict[str, PushStream] = {}
        self._channels: dict[str, Channel] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        """Tasks of streams that were closed, and what closes their channels."""
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def all(self) -> list[PushStream]:
        return list(self._streams.values())

    @property
    def members(self) -> int:
        """The number of members, if they are known by name; else 0."""
        return len(self._endpoints.known.nodes)

    @property
    def counted(self) -> list[PushStream]:
        """The streams that lead to members, or may lead to one."""
        endpoints = self._endpoints
        serving = {one.target: endpoints.node_of(one.target) for one in self.all if one.is_serving}
        return [self._streams[target] for target in endpoints.counted(self._streams, serving)]

    def open(self) -> None:
        """Stream to the configured endpoints until `close`."""
        for endpoint in self._endpoints.in_use:
            self._channels[endpoint] = self._connect(endpoint)
            self._open(endpoint)

    async def run(self) -> None:
        """Wait until cancelled. Raises what ends the streams: `LocalLogFailed`."""
        await self._failed

    async def close(self) -> None:
        tasks = [*self._tasks.values(), *self._ending]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(
            *(channel.close() for channel in self._channels.values()), return_exceptions=True
        )
        self._streams.clear()
        self._failed.cancel()

    # From the streams

    def admit(self, stream: PushStream, start: PushStart) -> None:
        expected = self._endpoints.node_of(stream.target)
        is_right = self._endpoints.record_answer(stream.target, start.node)
        self._follow()
        if not is_right:
            raise Unreachable(
                "the endpoint of a member leads to another node",
                where=stream.target,
                got=start.node,
                expected=expected,
            )

    def learn(self, start: PushStart) -> None:
        if self._endpoints.learn(start.cluster, start.epoch, start.nodes):
            known = self._log.quorum.known = self._endpoints.known
            nodes = ",".join(f"{node.name}={node.endpoint}" for node in known.nodes)
            logger.info("members_learned path=%s version=%d nodes=%s", self._log.path, known.version, nodes)
            self._follow()

    def record_failure(self, stream: PushStream) -> None:
        self._endpoints.record_failure(stream.target)
        self._follow()

    def record_lost(self, stream: PushStream) -> None:
        for other in self.all:
            if other is not stream:
                other.hurry()

    # The endpoints

    def _follow(self) -> None:
        """Close the streams to endpoints that are not used any more, and open those that are."""
        wanted = self._endpoints.in_use
        for endpoint in [one for one in self._streams if one not in wanted]:
            self._close(endpoint)
        for endpoint in wanted:
            if endpoint not in self._streams:
                self._open_learned(endpoint)

    def _open_learned(self, endpoint: str) -> None:
        try:
            self._channels[endpoint] = self._connect(endpoint)
        except RtError as error:
            logger.warning("endpoint_not_used endpoint=%s reason=%s", endpoint, error)
            self._endpoints.exclude(endpoint)
        else:
            self._open(endpoint)

    def _open(self, endpoint: str) -> None:
        stream = PushStream(self._log, endpoint, self._channels[endpoint], self, self._tls)
        self._streams[endpoint] = stream
        task = self._tasks[endpoint] = asyncio.create_task(stream.run())
        task.add_done_callback(self._on_ended)

    def _close(self, endpoint: str) -> None:
        logger.info("endpoint_left endpoint=%s path=%s", endpoint, self._log.path)
        self._streams.pop(endpoint).close()
        task, channel = self._tasks.pop(endpoint), self._channels.pop(endpoint)
        task.cancel()
        closing = asyncio.create_task(_close_after(task, channel))
        for one in (task, closing):
            self._ending.add(one)
            one.add_done_callback(self._ending.discard)

    def _on_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self._failed.done():
            self._failed.set_exception(error)


async def _close_after(task: asyncio.Task[None], channel: Channel) -> None:
    await asyncio.wait([task])
    await channel.close()
