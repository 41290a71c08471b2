"""The calls that a gRPC server runs: which may read their next message, and which end when memory is short.

gRPC keeps what has come of a message until all of it is here, and does not report how much that is. So a call
that waits for a message may hold `MESSAGE_BYTES_MAX`, whoever its peer is. A call that does not wait for one
holds a window, `SERVER_WINDOW_BYTES`.

Invariants:
- While handlers have messages of `READ_BYTES_MAX` together, no call waits for another message, unless no
  handler has a message of its identity. So handlers that do not return stop only their own identity.
- The next call that may wait for a message is of the identity that has least. Calls of nodes never have to:
  handlers may need what they bring.
- While memory is short, a call begins to wait for its next message `PAUSE_S` later.
- Calls that have waited for a message for `STALLED_S` end before those that go on.
- The identity with the most calls loses the next one. It keeps `CALLS_KEPT`, unless memory is very short.
- Calls of nodes do not end: what they bring is needed to merge.
- A call ends with `rt.Overloaded`, so that its peer makes it again.

For one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Final

from rt.errors import Overloaded
from rt.net.grpc_options import MESSAGE_BYTES_MAX
from rt.net.identity import Identity

# isort: split
import grpc.aio

STALLED_S: Final = 1.0
"""A message of the largest size comes within this at 1 MiB/s. Whoever is slower is ended only while memory is
short."""
READ_BYTES_MAX: Final = 24 * 2**20
"""Messages that were read and are not handled yet, of all calls."""
PAUSE_S: Final = 0.25
"""Before the next message of each call, while memory is short: what it would bring waits at the peer."""
CALLS_WHILE_SHORT_MAX: Final = 4
"""Calls of one identity while memory is short: new ones above this are rejected."""
CALLS_KEPT: Final = 2
"""Calls of one identity that do not end, unless memory is very short."""


class ReadBudget:
    """What handlers have of messages, and which calls wait until that is less. For one event loop."""

    def __init__(self) -> None:
        self.total = 0
        self.has_memory = asyncio.Event()
        """Cleared while memory is short."""
        self.has_memory.set()
        self._held: Counter[str] = Counter()
        """By the identity's URI."""
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """By the identity's URI; none of them is empty."""

    def add(self, uri: str, size: int) -> None:
        """Handlers of an identity have so many bytes more."""
        self.total += size
        self._held[uri] += size
        if not self._held[uri]:
            del self._held[uri]
            self._let(uri)
        self._let_next()

    async def has_room(self, uri: str) -> None:
        """Return when a call of the identity may wait for a message."""
        if not self.has_memory.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PAUSE_S):
                    await self.has_memory.wait()
        if self.total < READ_BYTES_MAX or uri not in self._held:
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(uri, deque()).append(turn)
        try:
            await turn
        finally:
            if not turn.done() or turn.cancelled():
                self._forget(uri, turn)

    def is_queued(self, uri: str) -> bool:
        """Whether a call of the identity waits until handlers have less."""
        return uri in self._waiting

    def _let_next(self) -> None:
        """Let as many go on as there is room for, each with a message of the largest size."""
        room = READ_BYTES_MAX - self.total
        while self._waiting and room > 0:
            if self._let(min(self._waiting, key=self._held.__getitem__)):
                room -= MESSAGE_BYTES_MAX

    def _let(self, uri: str) -> bool:
        """Let one call of the identity go on. False if none waits."""
        while (line := self._waiting.get(uri)) is not None:
            turn = line[0]
            self._forget(uri, turn)
            if not turn.done():
                turn.set_result(None)
                return True
        return False

    def _forget(self, uri: str, turn: asyncio.Future[None]) -> None:
        line = self._waiting.get(uri)
        if line is not None and turn in line:
            line.remove(turn)
            if not line:
                del self._waiting[uri]


class OpenCall:
    """A call that runs. `end` it when its memory is needed."""

    def __init__(self, identity: Identity, budget: ReadBudget, now: Callable[[], float]) -> None:
        self.identity: Final = identity
        self.waits_since_s: float | None = None
        """Since when its handler waits for a message; None while it does not."""
        self.is_ending = False
        self._budget, self._now = budget, now
        self._read_bytes = 0
        """Of the message that its handler has."""
        self._deadline = asyncio.Timeout(None)

    def end(self) -> None:
        """Have its handler cancelled, and the call end with `rt.Overloaded`."""
        self.is_ending = True
        self._deadline.reschedule(self._now())

    async def read(self, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        """The next message of `context`; the one before is handled."""
        self._set(0)
        if self.identity.role != "node":
            await self._budget.has_room(self.identity.uri)
        self.waits_since_s = self._now()
        try:
            message = await context.read()
        finally:
            self.waits_since_s = None
        if isinstance(message, bytes):
            self._set(len(message))
        return message

    def leave(self) -> None:
        self._set(0)

    def _set(self, size: int) -> None:
        self._budget.add(self.identity.uri, size - self._read_bytes)
        self._read_bytes = size

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Around its handler."""
        try:
            async with self._deadline:
                yield
        except TimeoutError:
            if not self._deadline.expired():
                raise
            raise _overloaded(self.identity.uri) from None


class WatchedContext:
    """The context of a call, which notes since when a message is awaited. All else is gRPC's."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any], call: OpenCall) -> None:
        self._context, self._call = context, call
        self.write = context.write

    async def read(self) -> Any:
        """See `grpc.aio.ServicerContext.read`."""
        return await self._call.read(self._context)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


class OpenCalls:
    """All calls of one server."""

    def __init__(self, *, refused: Counter[str] | None = None) -> None:
        self.refused: Final = Counter[str]() if refused is None else refused
        """By the class of the error. Calls that were ended are counted here."""
        self.reading: Final = ReadBudget()
        self._calls: dict[OpenCall, None] = {}
        """Oldest first."""
        self._counts: Counter[str] = Counter()
        """By the identity's URI."""

    @property
    def is_short(self) -> bool:
        """Whether memory is short. Then identities with `CALLS_WHILE_SHORT_MAX` calls may begin no others."""
        return not self.reading.has_memory.is_set()

    def note_memory(self, *, is_short: bool) -> None:
        if is_short:
            self.reading.has_memory.clear()
        else:
            self.reading.has_memory.set()

    def __len__(self) -> int:
        return len(self._calls)

    @contextlib.asynccontextmanager
    async def entered(self, identity: Identity) -> AsyncIterator[OpenCall]:
        """Around a call. `rt.Overloaded` if it may not begin now, and when it is ended."""
        uri = identity.uri
        if self.is_short and self._counts[uri] >= CALLS_WHILE_SHORT_MAX and identity.role != "node":
            raise _overloaded(uri)
        call = OpenCall(identity, self.reading, asyncio.get_running_loop().time)
        self._calls[call] = None
        self._counts[uri] += 1
        try:
            async with call.running():
                yield call
        finally:
            del self._calls[call]
            call.leave()
            self._counts[uri] -= 1
            if not self._counts[uri]:
                del self._counts[uri]

    def end_some(self, count: int, *, kept: int = CALLS_KEPT) -> None:
        """End calls until `count` are ending. Each identity keeps the last `kept`."""
        count -= sum(call.is_ending for call in self._calls)
        chosen = calls_to_end(self._calls, count, asyncio.get_running_loop().time(), kept=kept)
        for call in chosen:
            call.end()
        self.refused[Overloaded.__name__] += len(chosen)


def calls_to_end(calls: Iterable[OpenCall], count: int, now_s: float, *, kept: int = 0) -> list[OpenCall]:
    """Up to `count` of the calls, whose end costs honest peers least. Each identity keeps `kept`."""
    groups: dict[str, list[OpenCall]] = defaultdict(list)
    for call in calls:
        if not call.is_ending and call.identity.role != "node":
            groups[call.identity.uri].append(call)
    for group in groups.values():
        group.sort(key=lambda call: -_stalled_s(call, now_s))  # Those that wait longest go first.
    chosen: list[OpenCall] = []
    while len(chosen) < count:
        uri = max(groups, key=lambda uri: _rank(groups[uri], kept, now_s), default=None)
        if uri is None or len(groups[uri]) <= kept:
            break
        chosen.append(groups[uri].pop(0))
    return chosen


def _stalled_s(call: OpenCall, now_s: float) -> float:
    """How long it has waited for a message; 0 while that is less than `STALLED_S`."""
    waited_s = 0.0 if call.waits_since_s is None else now_s - call.waits_since_s
    return waited_s if waited_s >= STALLED_S else 0.0


def _rank(group: list[OpenCall], kept: int, now_s: float) -> tuple[bool, int]:
    """Highest for the identity that loses the next call."""
    has_stalled = len(group) > kept and _stalled_s(group[0], now_s) > 0
    return has_stalled, len(group)


def _overloaded(where: str) -> Overloaded:
    return Overloaded(
        "this node is short of memory",
        where=where,
        hint="Call again: what was stored stays. Identities with the most calls are rejected first.",
    )
