"""When the streams of a session look for more to send: in rounds, which pace themselves.

Invariants:
- The first change starts a round at once.
- Until a round is merged, small changes wait for the next one: the busier the nodes, the larger each message,
  and the less each byte costs. Overlapping rounds would share the processors, and each be later.
- Nothing waits longer than `WAIT_SECONDS_MAX`, and what fills a message does not wait.
- One more round follows the last one: it finds nothing, or what is wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from replicator.protocol.handshake import NOWHERE
from replicator.protocol.messages import CHUNK_BYTES_MAX, LogOffset

WAIT_SECONDS_MAX: Final = 0.1
"""For when nodes are unreachable or disks slow: enough to batch, too short to be noticed then."""
QUIET_SECONDS: Final = 0.25  # After this time without a round one more follows.
FULL_BYTES: Final = CHUNK_BYTES_MAX  # Bytes that fill a message.


class SendPacer:
    """Calls `look` when the streams must look. For one event loop.

    `waiting_bytes` says how much there is after an offset, None if that is unknown.
    """

    def __init__(
        self,
        look: Callable[[], None],
        waiting_bytes: Callable[[LogOffset], int | None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._on_round, self._waiting_bytes, self._loop = look, waiting_bytes, loop
        self._sent = self._merged = NOWHERE
        self._is_wanted = False
        self._latest: asyncio.TimerHandle | None = None
        self._quiet: asyncio.TimerHandle | None = None
        self._started_s = 0.0

    def request(self, *, is_urgent: bool = False) -> None:
        self._is_wanted = True
        if is_urgent or self._is_free() or self._is_full():
            self._start_round()
        elif self._latest is None:
            self._latest = self._loop.call_later(WAIT_SECONDS_MAX, self._start_round)

    def record_sent(self, end: LogOffset) -> None:
        self._sent = max(self._sent, end)

    def record_merged(self, merged: LogOffset) -> None:
        self._merged = merged
        if self._is_wanted and self._is_free():
            self._start_round()

    def close(self) -> None:
        self._clear()
        if self._quiet is not None:
            self._quiet.cancel()
            self._quiet = None

    def _is_free(self) -> bool:
        return self._merged >= self._sent

    def _is_full(self) -> bool:
        size = self._waiting_bytes(self._sent)
        return size is None or size >= FULL_BYTES

    def _start_round(self) -> None:
        self._clear()
        self._started_s = self._loop.time()
        if self._quiet is None:
            self._quiet = self._loop.call_later(QUIET_SECONDS, self._when_quiet)
        self._on_round()

    def _clear(self) -> None:
        self._is_wanted = False
        if self._latest is not None:
            self._latest.cancel()
            self._latest = None

    def _when_quiet(self) -> None:
        quiet_s = self._started_s + QUIET_SECONDS
        if self._loop.time() < quiet_s:
            self._quiet = self._loop.call_at(quiet_s, self._when_quiet)
        else:
            self._quiet = None
            self._on_round()
