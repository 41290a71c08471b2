"""When the streams of a session look for more to send: in rounds, which pace themselves.

Laws. The first change is looked at once. While a round is on its way, until it is merged, what is little
waits, and goes with all that comes meanwhile: the busier the nodes, the larger each message, and the less
each byte costs. Rounds that overlapped would share the processors, and each come later. Nothing waits longer
than `WAIT_SECONDS_MAX`, and what fills a message does not wait. Behind the last round there is one more look,
which finds nothing, or what is wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from replicator.protocol.handshake import NOWHERE
from replicator.protocol.messages import CHUNK_BYTES_MAX, LogOffset

WAIT_SECONDS_MAX: Final = 0.1
"""Where nodes are away, or their disks slow: enough to gather something, too little to be noticed then."""
QUIET_SECONDS: Final = 0.25
"""Without a round for so long, there is the one more look."""
FULL_BYTES: Final = CHUNK_BYTES_MAX
"""So much is worth a message of its own."""


class SendPacer:
    """Calls `look` when the streams are to look. For one event loop.

    `waiting_bytes` says how much there is behind a place, None if that cannot be said.
    """

    def __init__(
        self,
        look: Callable[[], None],
        waiting_bytes: Callable[[LogOffset], int | None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._look, self._waiting_bytes, self._loop = look, waiting_bytes, loop
        self._sent = self._merged = NOWHERE
        self._is_wanted = False
        self._latest: asyncio.TimerHandle | None = None
        self._quiet: asyncio.TimerHandle | None = None
        self._begun_s = 0.0

    def want(self, *, is_urgent: bool = False) -> None:
        """There may be more to send."""
        self._is_wanted = True
        if is_urgent or self._is_free() or self._is_full():
            self._begin()
        elif self._latest is None:
            self._latest = self._loop.call_later(WAIT_SECONDS_MAX, self._begin)

    def note_sent(self, end: LogOffset) -> None:
        """All before `end` is on its way."""
        self._sent = max(self._sent, end)

    def on_progress(self, merged: LogOffset) -> None:
        """All before `merged` is merged."""
        self._merged = merged
        if self._is_wanted and self._is_free():
            self._begin()

    def close(self) -> None:
        """Begin no more."""
        self._forget()
        if self._quiet is not None:
            self._quiet.cancel()
            self._quiet = None

    def _is_free(self) -> bool:
        return self._merged >= self._sent

    def _is_full(self) -> bool:
        size = self._waiting_bytes(self._sent)
        return size is None or size >= FULL_BYTES

    def _begin(self) -> None:
        self._forget()
        self._begun_s = self._loop.time()
        if self._quiet is None:
            self._quiet = self._loop.call_later(QUIET_SECONDS, self._when_quiet)
        self._look()

    def _forget(self) -> None:
        self._is_wanted = False
        if self._latest is not None:
            self._latest.cancel()
            self._latest = None

    def _when_quiet(self) -> None:
        quiet_s = self._begun_s + QUIET_SECONDS
        if self._loop.time() < quiet_s:
            self._quiet = self._loop.call_at(quiet_s, self._when_quiet)
        else:
            self._quiet = None
            self._look()
