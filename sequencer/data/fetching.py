"""What this node's copies lack, fetched from the copies of others.

For one event loop. Laws. Of a life that is closed everything is fetched: a majority must hold it to have it
merged. Of one that is open something is fetched only while no publisher's stream feeds the copy here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from replicator.items import Life, Place
from rt.epochs import line_of
from rt.errors import RtError, StorageFailed
from rt.log.segment import SEGMENT_HEADER_BYTES
from rt.net.rpc_errors import Unreachable
from rt.net.tls import TLS
from rt.v1 import sequencer_pb2 as pb
from sequencer.config import NodeConfig
from sequencer.data.copies import Copies, Copy
from sequencer.data.peers import fetch_session
from sequencer.data.replica import Replica
from sequencer.state import Life as OpenLife

AGAIN_S: Final = 0.2
"""Between two peers that are asked for the rest of a life."""

logger = logging.getLogger("sequencer")


class Fetcher:
    """Fetches from peers into copies, which `opened` opens."""

    def __init__(
        self,
        config: NodeConfig,
        tls: TLS,
        replica: Replica,
        copies: Copies,
        opened: Callable[[int], Awaitable[Copy | None]],
    ) -> None:
        self._stream, self._members, self._tls = config.stream, config.members, tls
        self._endpoints = [config.members[peer].data for peer in config.peers]
        self._replica, self._copies, self._opened = replica, copies, opened
        self._fetching: set[int] = set()
        """Sessions of which a peer's copy is fetched although they are open."""

    # Lives that are closed

    async def complete(self, session_id: int, end: Place) -> None:
        """Have what this node lacks of an X that ends at `end`, however long that takes."""
        at = 0
        while self._endpoints and (life := self._life_of(session_id, end.x)) is not None:
            copy = await self._opened(session_id)
            if copy is None or (end.segment == (end.x, 0) and end.offset <= SEGMENT_HEADER_BYTES):
                return
            endpoint = self._endpoints[at % len(self._endpoints)]
            at += 1
            try:
                if await self._complete_from(endpoint, copy, Life(life.x, life.life), end):
                    return
            except RtError as error:
                logger.warning(
                    "fetch_failed session_id=%d peer=%s error=%r", session_id, endpoint, str(error)
                )
                await asyncio.sleep(AGAIN_S)

    async def _complete_from(self, endpoint: str, copy: Copy, life: Life, end: Place) -> bool:
        """Fetch what is there; whether nothing was lacking any more."""
        session = self._replica.session(copy.session_id)
        assert session is not None, copy.session_id
        await self._copies.skip_merged(copy, session)  # Peers may have let go of what is merged.
        place = copy.receiver.place
        if place is not None and place >= end:
            return True
        line = line_of(self._replica.epoch)
        await fetch_session(self._copies, copy, life, end, self._stream, endpoint, self._tls, line=line)
        return False

    def _life_of(self, session_id: int, x: int) -> OpenLife | None:
        session = self._replica.session(session_id)
        return None if session is None else session.life_of(x)

    # Lives that are open

    async def fetch(self, wanted: pb.Fetch) -> None:
        """Get what a peer has of a life that is open and that nobody sends, for as long as nobody does."""
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

        await self._copies.skip_merged(copy, session)
        place, end = copy.receiver.place, Place(wanted.x, wanted.y, wanted.offset)
        if place is not None and place.x < life.x and not copy.receiver.has_ended:
            await self._copies.skip_to(copy, session, Place(life.x, 0, 0), None)
        if place is None or place < end:
            logger.info("fetches session=%s peer=%s up_to=%s", session.name, wanted.holder, end)
            source = self._stream, member.data, self._tls
            line = line_of(self._replica.epoch)
            await fetch_session(self._copies, copy, Life(life.x, life.life), end, *source, check, line=line)

    def _open_life(self, wanted: pb.Fetch) -> OpenLife | None:
        """The life as it was opened; None if it takes no more bytes."""
        session = self._replica.session(wanted.session_id)
        life = None if session is None else session.life
        is_open = life is not None and life.x == wanted.x and not life.is_fenced and life.end is None
        return life if is_open else None
