"""What this node's copies lack, fetched from the copies of others.

For one event loop. Laws. Of a life that is closed everything is fetched: a majority must hold it to have it
merged. Of one that is open something is fetched only while no publisher's stream feeds the copy here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from replicator.protocol.messages import LogOffset, Run
from rt.cluster_epoch import line_of
from rt.errors import RtError, StorageFailed
from rt.log.format.segment import SEGMENT_HEADER_BYTES
from rt.net.grpc_channel import Channel, open_channel
from rt.net.grpc_errors import Unreachable
from rt.net.tls import TLS
from rt.v1 import sequencer_pb2 as pb
from sequencer.config.config import NodeConfig
from sequencer.ipc.state_follower import StateFollower
from sequencer.sessions.peer_pull import fetch_session
from sequencer.sessions.replicas import SessionReplica, SessionReplicas
from sequencer.state.state import ActiveRun as OpenLife

AGAIN_S: Final = 0.2
"""Between two peers that are asked for the rest of a life."""
FETCHES_MAX: Final = 128
"""Sessions that are fetched from peers at the same time, while they are open."""
WINDOW_BYTES: Final = 2**18
"""Ahead of the reader, for each of them: 32 MiB of all."""
FOLLOWS_MAX: Final = 64
"""So many of them are followed for as long as something comes. Of more, what is there is fetched."""

logger = logging.getLogger("sequencer")


class PeerFetcher:
    """Fetches from peers into copies, which `opened` opens."""

    def __init__(
        self,
        config: NodeConfig,
        tls: TLS,
        replica: StateFollower,
        copies: SessionReplicas,
        opened: Callable[[int], Awaitable[SessionReplica | None]],
    ) -> None:
        self._stream, self._members, self._tls = config.stream, config.members, tls
        self._endpoints = [config.members[peer].data for peer in config.peers]
        self._replica, self._copies, self._opened = replica, copies, opened
        self._fetching: set[int] = set()
        """Sessions of which a peer's copy is fetched although they are open."""
        self._fetches = asyncio.Semaphore(FETCHES_MAX)
        self._follows = 0
        self._channels: dict[str, Channel] = {}

    async def close(self) -> None:
        """Close the connections; nothing is fetched any more."""
        for channel in self._channels.values():
            await channel.close()

    def _channel(self, endpoint: str) -> Channel:
        if endpoint not in self._channels:
            self._channels[endpoint] = open_channel(endpoint, self._tls, window_bytes=WINDOW_BYTES)
        return self._channels[endpoint]

    # Lives that are closed

    async def complete(self, session_id: int, end: LogOffset) -> None:
        """Have what this node lacks of an X that ends at `end`, however long that takes."""
        at = 0
        while self._endpoints and (life := self._life_of(session_id, end.run)) is not None:
            copy = await self._opened(session_id)
            if copy is None or (end.segment == (end.run, 0) and end.offset <= SEGMENT_HEADER_BYTES):
                return
            endpoint = self._endpoints[at % len(self._endpoints)]
            at += 1
            try:
                with copy.in_use():
                    is_whole = await self._complete_from(endpoint, copy, Run(life.run, life.run_id), end)
                if is_whole:
                    return
            except RtError as error:
                logger.warning(
                    "fetch_failed session_id=%d peer=%s error=%r", session_id, endpoint, str(error)
                )
                await asyncio.sleep(AGAIN_S)

    async def _complete_from(self, endpoint: str, copy: SessionReplica, life: Run, end: LogOffset) -> bool:
        """Fetch what is there; whether nothing was lacking any more."""
        session = self._replica.session(copy.session_id)
        if session is None:
            return True  # Its record is gone: it is merged.
        await self._copies.skip_merged(copy, session)  # Peers may have let go of what is merged.
        place = copy.receiver.next_offset
        if place is not None and place >= end:
            return True
        line = line_of(self._replica.epoch)
        channel = self._channel(endpoint)
        await fetch_session(self._copies, copy, life, end, self._stream, channel, line=line)
        return False

    def _life_of(self, session_id: int, run: int) -> OpenLife | None:
        session = self._replica.session(session_id)
        return None if session is None else session.life_of(run)

    # Lives that are open

    async def fetch(self, wanted: pb.Fetch) -> None:
        """Get what a peer has of a life that is open and that nobody sends, for as long as nobody does.

        It goes on with what comes to the peer meanwhile: its publisher may not reach this node at all.
        """
        if wanted.session_id in self._fetching:
            return
        self._fetching.add(wanted.session_id)
        try:
            await self._fetch_open(wanted)
        except StorageFailed:
            raise
        except RtError as error:  # The leader says it again.
            logger.warning(
                "fetch_failed session_id=%d peer=%s error=%r", wanted.session_id, wanted.holder, str(error)
            )
        finally:
            self._fetching.discard(wanted.session_id)

    async def _fetch_open(self, wanted: pb.Fetch) -> None:
        life, member = self._open_life(wanted), self._members.get(wanted.holder)
        copy = None if life is None or member is None else await self._opened(wanted.session_id)
        session = self._replica.session(wanted.session_id)
        if copy is None or session is None or life is None or member is None or copy.has_stream:
            return

        def check() -> None:
            if copy.has_stream or self._open_life(wanted) != life:
                raise Unreachable("its publisher is back, or it is being closed", where=session.name)

        with copy.in_use():
            await self._copies.skip_merged(copy, session)
            place, end = copy.receiver.next_offset, LogOffset(wanted.run, wanted.roll, wanted.offset)
            if place is not None and place.run < life.run and not copy.receiver.has_ended:
                await self._copies.skip_to(copy, session, LogOffset(life.run, 0, 0), None)
            if place is None or place < end:
                logger.info("fetch_started session=%s peer=%s up_to=%s", session.name, wanted.holder, end)
                source = self._stream, self._channel(member.data)
                async with self._fetches:
                    await self._fetch_and_follow(copy, Run(life.run, life.run_id), end, *source, check)

    async def _fetch_and_follow(
        self,
        copy: SessionReplica,
        life: Run,
        end: LogOffset,
        stream: str,
        channel: Channel,
        check: Callable[[], None],
    ) -> None:
        line, follows = line_of(self._replica.epoch), self._follows < FOLLOWS_MAX
        copy.is_followed = True
        self._follows += follows
        try:
            await fetch_session(
                self._copies, copy, life, end, stream, channel, check, line=line, follows=follows
            )
        finally:
            copy.is_followed = False
            self._follows -= follows

    def _open_life(self, wanted: pb.Fetch) -> OpenLife | None:
        """The life as it was opened; None if it takes no more bytes."""
        session = self._replica.session(wanted.session_id)
        life = None if session is None else session.life
        is_open = life is not None and life.run == wanted.run and not life.is_fenced
        return life if is_open else None
