"""Which calls of a server wait, and which are ended, when memory is short."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

import rt.net.memory_guard as guarding
from rt.errors import Overloaded
from rt.net.grpc_options import MESSAGE_BYTES_MAX
from rt.net.identity import Identity
from rt.net.memory_guard import SHORT_BYTES, VERY_SHORT_BYTES, MemoryGuard
from rt.net.open_calls import (
    CALLS_KEPT,
    CALLS_WHILE_SHORT_MAX,
    READ_BYTES_MAX,
    STALLED_S,
    OpenCall,
    OpenCalls,
    ReadBudget,
    calls_to_end,
)

NOW_S = 100.0
STALLED = NOW_S - STALLED_S


def call_of(name: str, since_s: float | None = None, role: Any = "publisher") -> OpenCall:
    call = OpenCall(Identity("s", role, name), ReadBudget(), lambda: NOW_S)
    call.waits_since_s = since_s
    return call


def ended(calls: list[OpenCall], count: int, kept: int = 0) -> list[int]:
    return [calls.index(call) for call in calls_to_end(calls, count, NOW_S, kept=kept)]


def test_identity_with_most_calls_loses_longest_stalled_calls_first() -> None:
    calls = [
        call_of("a", STALLED),
        call_of("b", STALLED - 1),
        call_of("b", STALLED - 3),
        call_of("b", STALLED - 2),
        call_of("b"),
        call_of("a", NOW_S),
    ]
    assert ended(calls, 2) == [2, 3]
    assert ended(calls, 4) == [2, 3, 0, 1]
    assert ended(calls, 100, kept=2) == [2, 3]
    assert sorted(ended(calls, 100)) == [0, 1, 2, 3, 4, 5]


def test_active_calls_are_ended_after_all_stalled_calls() -> None:
    calls = [*(call_of("busy") for _ in range(5)), call_of("idle", STALLED), call_of("idle", STALLED)]
    assert ended(calls, 2) == [5, 6]
    assert ended(calls, 3) == [5, 6, 0]


def test_node_calls_and_ending_calls_are_not_ended() -> None:
    ending = call_of("a", STALLED)
    ending.is_ending = True
    assert ended([ending, call_of("n1", STALLED, "node")], 5) == []


class Peer:
    """A context that reads messages from the test."""

    def __init__(self) -> None:
        self.messages = asyncio.Queue[bytes]()
        self.reading = 0

    async def read(self) -> bytes:
        self.reading += 1
        try:
            return await self.messages.get()
        finally:
            self.reading -= 1


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_reads_wait_while_handlers_of_same_identity_hold_messages_at_byte_limit() -> None:
    async def main() -> None:
        calls = OpenCalls()
        async with contextlib.AsyncExitStack() as stack:

            async def entered(name: str) -> tuple[OpenCall, Any]:
                call = await stack.enter_async_context(calls.entered(Identity("s", "publisher", name)))
                return call, Peer()

            large = READ_BYTES_MAX // MESSAGE_BYTES_MAX + 1
            hostile = [await entered("hostile") for _ in range(large)]
            for call, peer in hostile:
                peer.messages.put_nowait(bytes(MESSAGE_BYTES_MAX))
                await call.read(peer)
            assert calls.reading.total >= READ_BYTES_MAX
            good, late = await entered("good"), [await entered(name) for name in ("hostile", "good")]
            good[1].messages.put_nowait(b"x")
            await good[0].read(good[1])  # Handlers that do not return must not stop other identities.
            reads = [asyncio.create_task(call.read(peer)) for call, peer in late]
            await settle()
            assert [peer.reading for _, peer in late] == [0, 0]
            queued = [hostile[0][0].identity.uri, good[0].identity.uri]
            assert [calls.reading.is_queued(uri) for uri in queued] == [True, True]
            again = [asyncio.create_task(good[0].read(good[1]))]
            await settle()
            assert [peer.reading for _, peer in (*late, good)] == [0, 1, 1]
            assert [calls.reading.is_queued(uri) for uri in queued] == [True, False]
            again.append(asyncio.create_task(hostile[0][0].read(hostile[0][1])))
            again.append(asyncio.create_task(hostile[1][0].read(hostile[1][1])))
            await settle()
            assert late[0][1].reading == 1
            for task in (*reads, *again):
                task.cancel()
            await asyncio.gather(*reads, *again, return_exceptions=True)
        assert calls.reading.total == 0
        assert not calls.reading._held
        assert not calls.reading._waiting
        assert len(calls) == 0

    asyncio.run(main())


def test_node_call_reads_without_waiting_at_byte_limit() -> None:
    async def main() -> None:
        calls, peer, node = OpenCalls(), Peer(), Identity("s", "node", "n1")
        calls.reading.add("hostile", READ_BYTES_MAX)
        calls.reading.add(node.uri, 1)
        async with calls.entered(node) as call:
            peer.messages.put_nowait(b"x")
            assert await call.read(peer) == b"x"

    asyncio.run(main())


def test_ended_call_raises_overloaded_and_new_calls_are_refused_while_memory_is_short() -> None:
    async def main() -> None:
        calls = OpenCalls()
        identity = Identity("s", "subscriber", "a")

        async def handle(peer: Any) -> None:
            async with calls.entered(identity) as call:
                await call.read(peer)

        tasks = [asyncio.create_task(handle(Peer())) for _ in range(CALLS_WHILE_SHORT_MAX)]
        await settle()
        calls.record_memory(is_short=True)
        with pytest.raises(Overloaded, match="short of memory") as refused:
            await handle(Peer())
        assert refused.value.retriable
        calls.end_some(1)
        calls.end_some(1)  # One call is already ending.
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        (done,) = [task for task in tasks if task.done()]
        with pytest.raises(Overloaded):
            done.result()
        calls.record_memory(is_short=False)
        tasks.append(asyncio.create_task(handle(Peer())))
        await settle()
        assert len(calls) == CALLS_WHILE_SHORT_MAX
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (len(calls), calls.refused) == (0, {"Overloaded": 1})

    asyncio.run(main())


@pytest.mark.parametrize(
    ("used", "room", "counts"),
    [
        (SHORT_BYTES, 0, []),
        (SHORT_BYTES + 3 * MESSAGE_BYTES_MAX, 0, [(3, CALLS_KEPT)]),
        (SHORT_BYTES + 3 * MESSAGE_BYTES_MAX, 2 * MESSAGE_BYTES_MAX, [(1, CALLS_KEPT)]),
        (VERY_SHORT_BYTES + 1, VERY_SHORT_BYTES - SHORT_BYTES, [(1, 0)]),
    ],
)
def test_memory_guard_ends_calls_according_to_excess_memory(
    used: int, room: int, counts: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    calls = OpenCalls()
    monkeypatch.setattr(calls, "end_some", lambda count, *, kept: asked.append((count, kept)))
    monkeypatch.setattr(guarding, "resident_bytes", lambda: used)
    asyncio.run(MemoryGuard(calls, lambda _: room).check())
    assert asked == counts
    assert calls.is_short is bool(counts)
