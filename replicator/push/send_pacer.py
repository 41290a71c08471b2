"""Decides when the streams of a session look for more bytes to send: in rounds, which pace themselves.

Invariants:
- The first change starts a round at once.
- Until a round is merged, small changes wait for the next round. So the busier the nodes are, the larger each
  message is, and the less each byte costs. Overlapping rounds would share the processors, and each would be
  later.
- Nothing waits longer than `WAIT_SECONDS_MAX`. Bytes that fill a message do not wait, or wait at most
  `CHECK_SECONDS` if the rounds before were small.
- While a round of a slow publisher is in progress, the pacer does not listen to writes: each write would be a
  wake-up that changes nothing. When it listens again, it checks for bytes that were written meanwhile.
- One more round follows the last one. It finds nothing, or it finds an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from replicator.protocol.handshake import NOWHERE
from replicator.protocol.messages import CHUNK_BYTES_MAX, LogOffset

WAIT_SECONDS_MAX: Final = 0.1
"""The limit when nodes are unreachable or disks are slow. It is long enough to batch, and too short to be
noticed then.
"""
QUIET_SECONDS: Final = 0.25  # After this time without a round one more follows.
FULL_BYTES: Final = CHUNK_BYTES_MAX  # Bytes that fill a message.
SMALL_BYTES: Final = FULL_BYTES // 8
"""A round that sends less is small: at its rate it takes many rounds to fill a message."""
SMALL_ROUNDS_MIN: Final = 2
"""This number of small rounds in a row shows a slow publisher. A single small round may be the start of a
burst, or its rest.
"""
CHECK_SECONDS: Final = 0.01
"""How often to check whether enough waits to fill a message, while writes are not listened to."""


class SendPacer:
    """Calls `look` when the streams must look for more bytes. For one event loop.

    `waiting_bytes` returns the number of bytes after an offset; None if that is unknown. `listen` is called
    with True if `request` must be called for each write, otherwise with False.
    """

    def __init__(
        self,
        look: Callable[[], None],
        waiting_bytes: Callable[[LogOffset], int | None],
        loop: asyncio.AbstractEventLoop,
        *,
        listen: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self._on_round, self._waiting_bytes, self._loop = look, waiting_bytes, loop
        self._listen = listen
        self._sent = self._merged = NOWHERE
        self._is_wanted = False
        self._latest: asyncio.TimerHandle | None = None
        self._quiet: asyncio.TimerHandle | None = None
        self._check: asyncio.TimerHandle | None = None
        self._started_s = 0.0
        self._started_at = NOWHERE  # Everything before this offset was sent before the round.
        self._small_rounds = 0  # In series, before this round. One that found nothing does not count.
        self._is_listening = True

    def request(self, *, is_urgent: bool = False) -> None:
        self._is_wanted = True
        if is_urgent or self._is_free() or self._is_full():
            self._start_round()
        elif self._latest is None:
            self._latest = self._loop.call_later(WAIT_SECONDS_MAX, self._start_round)

    def record_sent(self, end: LogOffset) -> None:
        self._sent = max(self._sent, end)
        if self._is_listening and not self._is_free() and self._is_slow():
            self._is_listening = False
            self._listen(False)
            if self._check is None:
                self._check = self._loop.call_at(self._started_s + CHECK_SECONDS, self._when_unheard)

    def record_merged(self, merged: LogOffset) -> None:
        self._merged = merged
        if not self._is_free():
            return
        if self._is_wanted or (not self._is_listening and self._waiting_bytes(self._sent) != 0):
            self._start_round()
        else:
            self._listen_again()

    def close(self) -> None:
        self._clear()
        for timer in (self._quiet, self._check):
            if timer is not None:
                timer.cancel()
        self._quiet = self._check = None

    def _is_free(self) -> bool:
        return self._merged >= self._sent

    def _is_full(self) -> bool:
        size = self._waiting_bytes(self._sent)
        return size is None or size >= FULL_BYTES

    def _is_slow(self) -> bool:
        """Whether this round and those before it are small."""
        return self._is_small() and self._small_rounds >= SMALL_ROUNDS_MIN

    def _is_small(self) -> bool:
        begun, sent = self._started_at, self._sent
        return begun.segment == sent.segment and sent.offset - begun.offset < SMALL_BYTES

    def _start_round(self) -> None:
        self._clear()
        if self._sent > self._started_at:
            self._small_rounds = self._small_rounds + 1 if self._is_small() else 0
        self._started_s, self._started_at = self._loop.time(), self._sent
        if self._quiet is None:
            self._quiet = self._loop.call_later(QUIET_SECONDS, self._when_quiet)
        self._on_round()

    def _clear(self) -> None:
        self._is_wanted = False
        if self._latest is not None:
            self._latest.cancel()
            self._latest = None

    def _listen_again(self) -> None:
        if not self._is_listening:
            self._is_listening = True
            self._listen(True)
            # Earlier writes were not noticed while nothing listened to writes.
            if self._waiting_bytes(self._sent) != 0:
                self._start_round()

    def _when_unheard(self) -> None:
        """Called while writes are not listened to, or after listening has started again."""
        self._check = None
        if self._is_listening:
            return
        now, check_s = self._loop.time(), self._started_s + CHECK_SECONDS
        if now < check_s:
            self._check = self._loop.call_at(check_s, self._when_unheard)
        elif self._is_free() or now >= self._started_s + WAIT_SECONDS_MAX or self._is_full():
            self._listen_again()
        else:
            self._check = self._loop.call_later(CHECK_SECONDS, self._when_unheard)

    def _when_quiet(self) -> None:
        quiet_s = self._started_s + QUIET_SECONDS
        if self._loop.time() < quiet_s:
            self._quiet = self._loop.call_at(quiet_s, self._when_quiet)
        else:
            self._quiet = None
            self._on_round()
