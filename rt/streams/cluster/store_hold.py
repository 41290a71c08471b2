"""The hold of a subscription store on its cluster's log: nodes trim nothing from its position on.

The name of the hold is the cluster's `name`, "~store-" and the id of the store. So each store has its own
hold, even if other positions are acknowledged under that name.

Invariants:
- The hold is at or before the first position that the store still needs. A node that does not answer delays
  only the hold.
- As long as this runs, a hold that an operator releases exists again within `AGAIN_S`.

If subscriptions are kept in memory, the id and the position of their hold are stored next to the copy of the
log:

    hold-id.NAME        the id: 16 hexadecimal digits
    hold-position.NAME  what was acknowledged, as in `rt.client.cursor`

So a host that starts again without its subscriptions continues at the acknowledged position, under the same
hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Sequence
from typing import Final

from rt.client.cursor import read_position, write_position
from rt.errors import Corrupt, RtError
from rt.log.disk import REAL, storage_errors
from rt.log.scan.directory import read_file
from rt.log.whole_files import write_whole
from rt.net.lease_client import LeaseCalls
from rt.net.tls import TLS

logger = logging.getLogger("rt.streams")

AGAIN_S: Final = 30.0
"""How often a hold that does not move is sent again, in seconds."""
_RETRY_S: Final = 5.0
_LAST_S: Final = 2.0
"""How long sending the last position may take, in seconds. If it is not sent, the nodes retain a little
more.
"""
_MAGIC: Final = b"RTHOLDAT"
_ID_BYTES: Final = 8


def hold_name(name: str, store_id: str) -> str:
    return f"{name}~store-{store_id}"


class StoreHold:
    """The hold called `name`. For one event loop."""

    def __init__(self, name: str, endpoints: Sequence[str], tls: TLS) -> None:
        self._name = name
        self._calls = LeaseCalls(endpoints, tls)
        self._position = 0
        self._sent = -1
        self._moved = asyncio.Event()
        self._sending: asyncio.Task[None] | None = None
        self._is_refused = False

    def begin(self, position: int) -> None:
        """Hold from `position` on."""
        self._position = position
        self._sending = asyncio.create_task(self._send_all())

    def move(self, position: int) -> None:
        """Nothing before `position` is needed any more."""
        if position > self._position:
            self._position = position
            self._moved.set()

    async def close(self) -> None:
        """Send the last position, for a limited time. The hold stays."""
        sending, self._sending = self._sending, None
        if sending is None:
            return
        sending.cancel()
        await asyncio.wait([sending])
        try:
            if self._position > self._sent:
                with contextlib.suppress(RtError):
                    await self._send(_LAST_S)
        finally:
            await self._calls.close()

    async def _send_all(self) -> None:
        while True:
            self._moved.clear()
            wait_s = AGAIN_S
            try:
                await self._send(None)
                self._is_refused = False
            except RtError as error:
                wait_s = _RETRY_S if error.retriable else AGAIN_S
                if not self._is_refused:
                    self._is_refused = True
                    logger.warning("hold_refused name=%s why=%r", self._name, str(error))
            if wait_s != AGAIN_S or self._is_refused:
                await asyncio.sleep(wait_s)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._moved.wait()

    async def _send(self, timeout_s: float | None) -> None:
        """Send the position. `rt.RtError` if no node confirmed it."""
        limits = {} if timeout_s is None else {"timeout_s": timeout_s}
        if self._sent < 0:  # Messages that are trimmed already need no hold.
            known = await self._calls.acknowledge({}, **limits)
            self._position = max(self._position, min(known.log_start, known.log_end))
        position = self._position
        await self._calls.acknowledge({self._name: position}, **limits)
        self._sent = position


class HoldFiles:
    """The id and the position of the hold of `name`, in `directory`. Creates the directory. Raises storage
    errors, `rt.Corrupt`.
    """

    def __init__(self, directory: str, name: str) -> None:
        self._path = os.path.join(directory, f"hold-position.{name}")
        with storage_errors(directory, "making a directory for a copy"):
            REAL.make_directory(directory)
        self.id: Final = _id(os.path.join(directory, f"hold-id.{name}"))
        stored = read_position(REAL, self._path, _MAGIC)
        self.position = None if stored is None else stored.position
        """None: nothing was acknowledged."""

    def acknowledge(self, position: int) -> None:
        """Durable on return."""
        if self.position is None or position > self.position:
            write_position(REAL, self._path, _MAGIC, position)
            self.position = position


def _id(path: str) -> str:
    data = read_file(REAL, path, 64, doing="reading the id of a hold")
    if data is None:
        data = os.urandom(_ID_BYTES).hex().encode()
        with storage_errors(path, "storing the id of a hold"):
            write_whole(REAL, path, data)
    try:
        return bytes.fromhex(data.decode()).hex()
    except ValueError as error:
        raise Corrupt(
            "the id of a hold is not valid",
            path=path,
            offset=0,
            hint="Remove the file: the subscriptions in memory get another hold.",
        ) from error
