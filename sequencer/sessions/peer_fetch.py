"""Fetches session bytes that this node's replicas are missing from the replicas of peers.

For one event loop. Invariants:
- All bytes of a closed run are fetched: a majority must hold them before they are merged.
- Bytes of an open run are fetched only while no publisher's stream feeds the replica here.
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
from sequencer.ipc.peer_addresses import PeerAddresses
from sequencer.ipc.state_follower import StateFollower
from sequencer.sessions.peer_pull import fetch_session
from sequencer.sessions.replica import SessionReplica
from sequencer.sessions.replicas import SessionReplicas
from sequencer.state.state import ActiveRun

RETRY_S: Final = 0.2
"""Pause between two peers that are asked for the rest of a run."""
FETCHES_MAX: Final = 128
"""Maximum number of open sessions that are fetched from peers at the same time."""
WINDOW_BYTES: Final = 2**18
"""Receive window of each fetch: 32 MiB in total."""
FOLLOWS_MAX: Final = 64
"""Maximum number of open sessions that are followed at a peer while bytes arrive there. Of other sessions,
only the bytes that the peer has now are fetched.
"""

logger = logging.getLogger("sequencer")


class PeerFetcher:
    """Fetches bytes from peers into replicas, which `opened` opens."""

    def __init__(
        self,
        config: NodeConfig,
        tls: TLS,
        peers: PeerAddresses,
        follower: StateFollower,
        replicas: SessionReplicas,
        opened: Callable[[int], Awaitable[SessionReplica | None]],
    ) -> None:
        self._stream, self._tls, self._peers = config.stream, tls, peers
        self._follower, self._replicas, self._opened = follower, replicas, opened
        self._fetching: set[int] = set()
        """Open sessions that are being fetched from a peer."""
        self._fetches = asyncio.Semaphore(FETCHES_MAX)
        self._follows = 0
        self._channels: dict[str, Channel] = {}

    async def close(self) -> None:
        """Close the connections. Nothing is fetched afterwards."""
        for channel in self._channels.values():
            await channel.close()

    def _channel(self, endpoint: str) -> Channel:
        if endpoint not in self._channels:
            self._channels[endpoint] = open_channel(endpoint, self._tls, window_bytes=WINDOW_BYTES)
        return self._channels[endpoint]

    async def complete(self, session_id: int, end: LogOffset) -> None:
        """Fetch the bytes that are missing here of a run that ends at `end`, however long that takes."""
        at = 0
        while (endpoints := self._peers.all()) and (opened := self._run_of(session_id, end.run)) is not None:
            replica = await self._opened(session_id)
            if replica is None or (end.segment == (end.run, 0) and end.offset <= SEGMENT_HEADER_BYTES):
                return
            endpoint = endpoints[at % len(endpoints)]
            at += 1
            try:
                with replica.in_use():
                    is_whole = await self._complete_from(
                        endpoint, replica, Run(opened.run, opened.run_id), end
                    )
                if is_whole:
                    return
            except RtError as error:
                logger.warning(
                    "fetch_failed session_id=%d peer=%s error=%r", session_id, endpoint, str(error)
                )
                await asyncio.sleep(RETRY_S)

    async def _complete_from(
        self, endpoint: str, replica: SessionReplica, opened: Run, end: LogOffset
    ) -> bool:
        """Fetch the missing bytes that the peer has. Return whether no bytes were missing before."""
        session = self._follower.session(replica.session_id)
        if session is None:
            return True  # Its record was deleted, so it is merged.
        await self._replicas.skip_merged(replica, session)  # Peers may have trimmed merged bytes.
        place = replica.receiver.next_offset
        if place is not None and place >= end:
            return True
        line = line_of(self._follower.epoch)
        channel = self._channel(endpoint)
        await fetch_session(self._replicas, replica, opened, end, self._stream, channel, line=line)
        return False

    def _run_of(self, session_id: int, run: int) -> ActiveRun | None:
        session = self._follower.session(session_id)
        return None if session is None else session.run_of(run)

    async def fetch(self, wanted: pb.Fetch) -> None:
        """Fetch a peer's bytes of an open run, as long as no publisher sends that run to this node.

        Bytes that arrive at the peer meanwhile are fetched too: the publisher may not be able to reach this
        node.
        """
        if wanted.session_id in self._fetching:
            return
        self._fetching.add(wanted.session_id)
        try:
            await self._fetch_open(wanted)
        except StorageFailed:
            raise
        except RtError as error:  # The leader repeats the request.
            logger.warning(
                "fetch_failed session_id=%d peer=%s error=%r", wanted.session_id, wanted.holder, str(error)
            )
        finally:
            self._fetching.discard(wanted.session_id)

    async def _fetch_open(self, wanted: pb.Fetch) -> None:
        opened, endpoint = self._open_run(wanted), self._peers.get(wanted.holder)
        replica = None if opened is None or endpoint is None else await self._opened(wanted.session_id)
        session = self._follower.session(wanted.session_id)
        if replica is None or session is None or opened is None or endpoint is None or replica.has_stream:
            return

        def check() -> None:
            if replica.has_stream or self._open_run(wanted) != opened:
                raise Unreachable("its publisher is connected, or it is being closed", where=session.name)

        with replica.in_use():
            await self._replicas.skip_merged(replica, session)
            place, end = replica.receiver.next_offset, LogOffset(wanted.run, wanted.roll, wanted.offset)
            if place is not None and place.run < opened.run and not replica.receiver.has_ended:
                await self._replicas.skip_to(replica, session, LogOffset(opened.run, 0, 0), None)
            if place is None or place < end:
                logger.info("fetch_started session=%s peer=%s up_to=%s", session.name, wanted.holder, end)
                source = self._stream, self._channel(endpoint)
                async with self._fetches:
                    await self._fetch_and_follow(replica, Run(opened.run, opened.run_id), end, *source, check)

    async def _fetch_and_follow(
        self,
        replica: SessionReplica,
        opened: Run,
        end: LogOffset,
        stream: str,
        channel: Channel,
        check: Callable[[], None],
    ) -> None:
        line, follows = line_of(self._follower.epoch), self._follows < FOLLOWS_MAX
        replica.is_followed = True
        self._follows += follows
        try:
            await fetch_session(
                self._replicas, replica, opened, end, stream, channel, check, line=line, follows=follows
            )
        finally:
            replica.is_followed = False
            self._follows -= follows

    def _open_run(self, wanted: pb.Fetch) -> ActiveRun | None:
        """The run that must be fetched; None if nodes accept no more bytes of it."""
        session = self._follower.session(wanted.session_id)
        opened = None if session is None else session.active
        is_open = opened is not None and opened.run == wanted.run and not opened.is_fenced
        return opened if is_open else None
