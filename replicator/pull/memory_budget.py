"""The memory that all pulls of a node may hold, shared fairly.

Invariants:
- A pull takes bytes before it reads, and releases them as they are sent. All pulls together never hold more
  than the budget.
- A pull takes at most its share: the budget divided by the number of pulls that hold or want bytes now.
- When pulls wait, the next pull is one of the waiting identity that holds the fewest bytes.
- While a pull waits, a pull that took its bytes more than `STALLED_S` ago is ended. Pulls above their share
  are ended first.
- An identity has a bounded number of pulls.
- If gRPC could not send a message, it keeps the message until the call is over, whatever the server does. So
  those bytes stay counted, and so does the pull, until the call is over. They are at most a 16th of the
  share. So pulls that never read take less than the whole budget: the share falls as their number rises.

For one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable
from typing import Final, NamedTuple

from replicator.protocol.messages import CHUNK_BYTES_MAX
from rt.errors import Overloaded

PULL_BYTES_MAX: Final = 64 * 2**20
PULLS_PER_IDENTITY_MAX: Final = 16
READ_BYTES_MAX: Final = 4 * 2**20  # Read at once by a pull that is behind, if its share allows it.
CHUNK_BYTES_MIN: Final = 8 * 1024
STALLED_S: Final = 2.0
"""A subscriber that receives its bytes in this time is not ended: for 4 MiB, that needs a link of 17 Mbit/s.
A slower subscriber is ended only while others wait. It then continues at its position with a smaller share.
"""

_COPIES: Final = 2  # Copies of a chunk while it is sent: the framed one, and gRPC's.


class BudgetGrant(NamedTuple):
    """How much a pull may read now, and in chunks of what size."""

    read_bytes: int
    chunk_bytes: int

    @property
    def copies_bytes(self) -> int:
        return _COPIES * self.chunk_bytes

    @property
    def bytes(self) -> int:
        """The total: the bytes that are read, up to one chunk more, and the copies."""
        return self.read_bytes + self.chunk_bytes + self.copies_bytes


def grant_of(share: int, wanted: int, chunk_bytes_max: int = CHUNK_BYTES_MAX) -> BudgetGrant:
    """The grant of a share for a pull that wants to read `wanted` bytes. It takes no more than the share.

    The least share is eight of the smallest chunks.
    """
    share = max(share, 8 * CHUNK_BYTES_MIN)
    chunk_bytes = min(max(share // 16, CHUNK_BYTES_MIN), chunk_bytes_max)
    room = share - (1 + _COPIES) * chunk_bytes
    return BudgetGrant(min(wanted, room, READ_BYTES_MAX), chunk_bytes)


class PullBudget:
    """The bytes of all pulls of one server, and their places: the slots of each identity. `now` is a clock in
    seconds that never goes back.
    """

    def __init__(
        self,
        bytes_max: int = PULL_BYTES_MAX,
        *,
        per_identity_max: int = PULLS_PER_IDENTITY_MAX,
        now: Callable[[], float] | None = None,
    ) -> None:
        self.bytes_max = bytes_max
        self.per_identity_max = per_identity_max
        self.used_bytes = 0
        self.used_bytes_peak = 0
        self.ended = 0  # Pulls that were ended so that others get their share.
        self.counts: Counter[str] = Counter()  # Pulls by the identity's URI.
        self._now = now
        self._active: dict[BudgetHold, None] = {}
        """The pulls that hold or want bytes, in the order in which they took bytes."""
        self._held: Counter[str] = Counter()  # Bytes by the identity's URI.
        self._waiting: dict[str, deque[BudgetHold]] = {}  # By the identity's URI; none of them is empty.

    def enter(
        self, identity: str, places: int | None = None, *, chunk_bytes_max: int = CHUNK_BYTES_MAX
    ) -> BudgetHold:
        """Register a new pull. Its chunks have at most `chunk_bytes_max` bytes.

        `rt.Overloaded` if the identity already has all its `places` (None: the default number).
        """
        places = self.per_identity_max if places is None else places
        if self.counts[identity] >= places:
            raise Overloaded(
                "too many pulls of one certificate at once",
                where=identity,
                expected=f"at most {places}",
                hint="End some of them: one pull serves all readers of a copy.",
            )
        self.counts[identity] += 1
        return BudgetHold(self, identity, chunk_bytes_max)

    @property
    def share_bytes(self) -> int:
        """What each active pull may hold."""
        return self.bytes_max // max(len(self._active), 1)

    def now(self) -> float:
        return asyncio.get_running_loop().time() if self._now is None else self._now()

    def try_acquire(self, hold: BudgetHold, wanted: int) -> BudgetGrant | None:
        """Take the grant of a share now; None if others wait, or there is no room."""
        self._active[hold] = self._active.pop(hold, None)
        if self._waiting and self._next() is not hold:
            return None
        grant = grant_of(self.share_bytes, wanted, hold.chunk_bytes_max)
        if self.used_bytes + grant.bytes > self.bytes_max:
            return None
        self._set(hold, hold.bytes + grant.bytes)
        hold.taken_s = self.now()
        return grant

    async def acquire(self, hold: BudgetHold, wanted: int) -> BudgetGrant:
        """Take the grant of a share, as soon as there is room."""
        grant = self.try_acquire(hold, wanted)
        if grant is not None:
            return grant
        line = self._waiting.setdefault(hold.identity, deque())
        line.append(hold)
        try:
            while (grant := self.try_acquire(hold, wanted)) is None:
                hold.turn.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._end_stalled()):
                        await hold.turn.wait()
            return grant
        finally:
            line.remove(hold)
            if not line:
                del self._waiting[hold.identity]
            self._wake()

    def _next(self) -> BudgetHold:
        return self._waiting[min(self._waiting, key=self._held.__getitem__)][0]

    def release(self, hold: BudgetHold, size: int) -> None:
        self._set(hold, hold.bytes - size)
        if not hold.bytes:
            self._active.pop(hold, None)
        self._wake()

    def leave(self, hold: BudgetHold) -> None:
        self.release(hold, hold.bytes)
        self.counts[hold.identity] -= 1
        if not self.counts[hold.identity]:
            del self.counts[hold.identity]

    def _set(self, hold: BudgetHold, size: int) -> None:
        assert size >= 0, (size, hold.bytes)
        self.used_bytes += size - hold.bytes
        self._held[hold.identity] += size - hold.bytes
        if not self._held[hold.identity]:
            del self._held[hold.identity]
        self.used_bytes_peak = max(self.used_bytes_peak, self.used_bytes)
        assert self.used_bytes <= self.bytes_max, (self.used_bytes, self.bytes_max)
        hold.bytes = size

    def _wake(self) -> None:
        if self._waiting:
            self._next().turn.set()

    def _end_stalled(self) -> float:
        """End the pull that is due. Return the seconds until another pull may be due."""
        now, share = self.now(), self.share_bytes
        holders = [
            hold for hold in self._active if hold.bytes > hold.sending_bytes and not hold.ended.is_set()
        ]
        if not holders:
            return STALLED_S
        due = [hold for hold in holders if hold.taken_s + STALLED_S <= now]
        if not due:
            return max(min(hold.taken_s for hold in holders) + STALLED_S - now, 0.001)
        due.sort(key=lambda hold: (hold.bytes <= share, hold.taken_s))
        due[0].ended.set()
        self.ended += 1
        return STALLED_S


class BudgetHold:
    """The part of the budget that one pull holds. Made by `PullBudget.enter`; call `leave` at the end."""

    def __init__(self, budget: PullBudget, identity: str, chunk_bytes_max: int) -> None:
        self.identity = identity
        self.chunk_bytes_max = chunk_bytes_max
        self.bytes = 0
        self.sending_bytes = 0
        """The part of `bytes` for the message that is being sent. It cannot be released before the message
        was sent.
        """
        self.taken_s = 0.0
        self.turn = asyncio.Event()  # Set when there may be room for it.
        self._budget = budget
        self.ended = asyncio.Event()  # Set when the pull must end: others need their share.
        self._is_over = False

    async def acquire(self, wanted: int) -> BudgetGrant:
        """A grant to read at most `wanted` bytes. The pull must not hold any bytes yet."""
        assert not self.bytes
        return await self._budget.acquire(self, wanted)

    def keep(self, size: int) -> None:
        """Keep only `size` of the bytes that were taken; release the others."""
        if size < self.bytes:
            self._budget.release(self, self.bytes - size)

    def begin_sending(self, size: int) -> None:
        """A message of `size` is passed to gRPC."""
        self.sending_bytes = min(_COPIES * size, self.bytes)

    def end_sending(self, size: int) -> None:
        """Release the bytes of the message, which was sent."""
        self.sending_bytes = 0
        self._budget.release(self, min(size, self.bytes))

    async def wait_ended(self) -> None:
        """Never return. `rt.Overloaded` when others need the bytes that the pull holds."""
        await self.ended.wait()
        raise Overloaded(
            "the pull reads more slowly than others, and memory is needed for them",
            where=self.identity,
            hint="Pull again: it goes on where it is.",
        )

    def stop(self) -> None:
        """Call it when the pull has ended. Bytes that gRPC still keeps stay counted until `leave`."""
        if not self._is_over:
            self.keep(self.sending_bytes)

    def leave(self, _call: object = None) -> None:
        """Release everything when the call is over, for any reason. It may be called twice."""
        if not self._is_over:
            self._is_over = True
            self._budget.leave(self)
