"""Keeps the memory of a server's process below a limit, whatever its peers send.

The guard measures the memory of the process, and does not rely on an account of it. Most memory that peers
can occupy is in buffers of gRPC, which cannot be counted otherwise.

Invariants:
- Above `RELEASE_BYTES`, freed memory that the C library would keep is returned to the kernel.
- Above `SHORT_BYTES`, memory is short. Then new bytes wait at the peers, unfinished batches make room, and
  calls end (`rt.net.open_calls`).

For one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import logging
import os
from collections.abc import Callable
from typing import Final

from rt.net.grpc_options import MESSAGE_BYTES_MAX
from rt.net.open_calls import CALLS_KEPT, OpenCalls

MEMORY_BYTES_MAX: Final = 512 * 2**20
"""The maximum memory of a data process."""
SHORT_BYTES: Final = 400 * 2**20
"""Above this, memory is short. Bytes that may arrive before calls have ended fit between this and
`MEMORY_BYTES_MAX`.
"""
VERY_SHORT_BYTES: Final = SHORT_BYTES + 80 * 2**20
"""Above this, calls of identities that have few calls end too."""
RELEASE_BYTES: Final = 320 * 2**20
RELEASE_S: Final = 1.0
RELEASE_WHILE_SHORT_S: Final = 0.1
"""Seconds between two releases while memory is short: each release takes milliseconds of a processor."""
LOOK_S: Final = 0.02

_FREED_BYTES_MAX = 64 * 2**20
_MAPPED_BYTES_MIN = 32 * 2**20
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8  # malloc.h
_ARENAS_MAX = 2
"""A thread cannot use memory that is free in another arena than its own. With eight arenas for each core,
most of the memory in them would be free.
"""
_LOG_PAUSE_S: Final = 5.0
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")

logger = logging.getLogger("rt.net")


def resident_bytes() -> int:
    """The resident memory of this process."""
    return int(os.pread(_statm(os.getpid()), 128, 0).split()[1]) * _PAGE_BYTES


@functools.cache
def _statm(_process: int) -> int:
    """The descriptor of the kernel's memory count for this process. It stays open, because later no
    descriptor may be free.
    """
    return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)


def keep_freed_memory() -> None:
    """Make the C library keep up to 64 MiB of freed memory instead of returning it to the kernel.

    For processes that move chunks of 1 MiB. gRPC constantly allocates and frees such buffers, and each
    returned page costs a page fault. Measured, both ends together: 3.0 instead of 4.2 CPU-seconds a GB
    pushed, 2.8 instead of 3.0 pulled. Does nothing if the C library has no mallopt.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES_MIN)
        mallopt(_M_TRIM_THRESHOLD, _FREED_BYTES_MAX)
        mallopt(_M_TOP_PAD, _FREED_BYTES_MAX // 16)
        mallopt(_M_ARENA_MAX, _ARENAS_MAX)


def release_freed_memory() -> None:
    """Return freed memory to the kernel. Takes milliseconds. Does nothing if the C library cannot do this."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class MemoryGuard:
    """Watches the memory of the process that runs `calls`.

    `make_room` gets the number of bytes to free, and returns the number that it will free soon.
    """

    def __init__(
        self,
        calls: OpenCalls,
        make_room: Callable[[int], int] = lambda _: 0,
    ) -> None:
        self._calls, self._make_room = calls, make_room
        resident_bytes()  # Opens the descriptor, which stays open.
        self._released_s = -RELEASE_S
        self._logged_s = -_LOG_PAUSE_S

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await self.check()
            await asyncio.sleep(LOOK_S)

    async def check(self) -> None:
        """Measure once, and make room if memory is short."""
        used = resident_bytes()
        is_short = used > SHORT_BYTES
        self._calls.record_memory(is_short=is_short)
        now_s = asyncio.get_running_loop().time()
        pause_s = RELEASE_WHILE_SHORT_S if is_short else RELEASE_S
        if used <= RELEASE_BYTES or now_s < self._released_s + pause_s:
            return
        self._released_s = now_s
        await asyncio.to_thread(release_freed_memory)  # A pool that peers use may be full.
        used = resident_bytes()
        over = used - SHORT_BYTES
        self._calls.record_memory(is_short=over > 0)
        if over > 0:
            over -= self._make_room(over)
            kept = CALLS_KEPT if used <= VERY_SHORT_BYTES else 0
            self._calls.end_some(-(-over // MESSAGE_BYTES_MAX), kept=kept)
            self._log(used)

    def _log(self, used: int) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._logged_s + _LOG_PAUSE_S:
            self._logged_s = now_s
            refused = self._calls.refused.total()
            logger.warning("memory_short bytes=%d calls=%d refused=%d", used, len(self._calls), refused)
