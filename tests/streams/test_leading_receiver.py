"""A queue is read from the nodes until the local copy of the log has caught up with them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rt.errors import StorageFailed
from rt.log.scan.message_batch import MessageBatch
from rt.streams.cluster.cluster_events import TopicSelection
from rt.streams.cluster.leading_receiver import LOOK_S, OPEN_S, LeadingReceiver
from rt.streams.cluster.log_gaps import LogGaps
from rt.streams.core.event_batch import EventBatch
from rt.streams.core.stream_id import SequenceToken, StreamId
from rt.streams.queue.adapter import QueueGap, QueueRead
from rt.streams.simulate import virtual_time

A = StreamId("n", "a")


def messages(start: int, end: int) -> MessageBatch:
    numbers = np.arange(start, end, dtype=np.int64)
    offsets = np.arange(len(numbers) + 1, dtype=np.int32)
    names = {"session_names": ("s",), "session_runs": (0,), "session_index": None, "topic_names": ("n/a",)}
    return MessageBatch(
        positions=numbers,
        timestamps_ns=numbers,
        numbers=numbers,
        topic_index=None,
        value_offsets=offsets,
        value_bytes=memoryview(bytes(len(numbers))),
        **names,  # type: ignore[arg-type]
    )


def events(start: int, end: int) -> QueueRead:
    numbers = range(start, end)
    return QueueRead([EventBatch(A, numbers, [bytes(1)] * len(numbers), None, 0)], SequenceToken(end))


class Nodes:
    def __init__(self) -> None:
        self.found = asyncio.Queue[MessageBatch]()
        self.is_closed = False

    async def read(self, _: int) -> MessageBatch:
        return await self.found.get()

    def close(self) -> None:
        self.is_closed = True


class Copy:
    """A copy whose reads and errors come from a queue."""

    def __init__(self) -> None:
        self.found = asyncio.Queue[Any]()
        self.opened_at: float | None = None
        self.closed = 0
        self.acknowledged: list[int] = []
        self.position: int | None = None
        """The position up to which the copy follows the nodes. None: it does not follow them yet."""
        self.error: Exception | None = None
        self.start, self.known_end = SequenceToken(0), None

    async def open(self) -> None:
        if self.error is not None:
            raise self.error
        self.opened_at = asyncio.get_running_loop().time()

    def follows(self, position: int) -> bool:
        return self.position is not None and self.position >= position

    async def receive(self, _: int, timeout: float) -> QueueRead | None:
        try:
            async with asyncio.timeout(timeout):
                return await self.found.get()  # type: ignore[no-any-return]
        except TimeoutError:
            return None

    async def acknowledge(self, low: SequenceToken) -> None:
        assert self.opened_at is not None
        self.acknowledged.append(low.sequence_number)

    async def close(self) -> None:
        self.closed += 1


class World:
    """A receiver that starts at position `start`, with its nodes and its copy."""

    def __init__(self, start: int = 0) -> None:
        self.copy, self.nodes, self.gaps = Copy(), Nodes(), LogGaps("s")
        token = SequenceToken(start)
        self.receiver = LeadingReceiver(self.copy, self.nodes, self.gaps, token, None, TopicSelection(None))
        self.got: list[int] = []
        self.gaps_got: list[QueueGap] = []

    async def read_until(self, end: int) -> None:
        async with asyncio.timeout(100):
            at = SequenceToken(0)
            while at < SequenceToken(end):
                read = await self.receiver.receive(100, 1.0)
                if read is not None:
                    at = read.end
                    self.take(read)

    def take(self, read: QueueRead) -> None:
        self.gaps_got += read.gaps
        for batch in read.batches:
            self.got += batch.sequence_numbers


def run(main: Any) -> None:
    virtual_time.run(main())


def test_receiver_reads_nodes_before_copy_is_opened_and_then_only_copy() -> None:
    async def main() -> None:
        world = World(5)
        world.nodes.found.put_nowait(messages(5, 8))
        await world.read_until(8)
        assert world.copy.opened_at is None or world.copy.opened_at < OPEN_S
        world.copy.found.put_nowait(events(5, 7))
        world.copy.found.put_nowait(events(7, 10))
        await world.read_until(10)
        assert world.nodes.is_closed
        world.nodes.found.put_nowait(messages(8, 20))
        world.copy.found.put_nowait(events(10, 12))
        await world.read_until(12)
        assert world.got == list(range(5, 12))
        await world.receiver.close()
        assert world.copy.closed == 1

    run(main)


def test_receiver_closes_nodes_once_idle_copy_reaches_their_position() -> None:
    async def main() -> None:
        world = World(5)
        for _ in range(5):
            assert await world.receiver.receive(100, LOOK_S) is None
        assert not world.nodes.is_closed
        world.copy.position = 4
        for _ in range(5):
            assert await world.receiver.receive(100, LOOK_S) is None
        assert not world.nodes.is_closed
        world.copy.position = 5
        for _ in range(5):
            assert await world.receiver.receive(100, LOOK_S) is None
        assert world.nodes.is_closed
        await world.receiver.close()

    run(main)


def test_hanging_nodes_delay_opening_of_copy_by_limited_time() -> None:
    async def main() -> None:
        world = World()
        world.copy.found.put_nowait(events(0, 3))
        await world.read_until(3)
        assert world.copy.opened_at == OPEN_S
        assert world.got == [0, 1, 2]
        await world.receiver.close()

    run(main)


def test_trimmed_range_is_reported_once() -> None:
    async def main() -> None:
        world = World()
        world.gaps.add(0, 5, "trimmed on the nodes")
        world.nodes.found.put_nowait(messages(5, 8))
        await world.read_until(8)
        gap = QueueGap(SequenceToken(0), SequenceToken(5), "trimmed")
        reset = QueueGap(SequenceToken(6), SequenceToken(6), "reset", is_reset=True)
        world.copy.found.put_nowait(QueueRead(events(5, 7).batches, SequenceToken(7), [gap, reset]))
        later = QueueGap(SequenceToken(9), SequenceToken(11), "trimmed")
        world.copy.found.put_nowait(QueueRead(events(11, 12).batches, SequenceToken(12), [later]))
        await world.read_until(12)
        assert world.got == [5, 6, 7, 11]
        assert [(gap.wanted.sequence_number, gap.resumed.sequence_number) for gap in world.gaps_got] == [
            (0, 5),
            (6, 6),
            (9, 11),
        ]
        await world.receiver.close()

    run(main)


@pytest.mark.parametrize("call", ["receive", "acknowledge"])
def test_receiver_raises_storage_failed_if_copy_cannot_be_opened(call: str) -> None:
    async def main() -> None:
        world = World()
        world.copy.error = StorageFailed("no disk")
        with pytest.raises(StorageFailed):
            if call == "acknowledge":
                await world.receiver.acknowledge(SequenceToken(1))
            while True:
                await world.receiver.receive(100, 1.0)
        await world.receiver.close()
        assert world.copy.closed == 0

    run(main)


def test_acknowledgement_waits_for_copy() -> None:
    async def main() -> None:
        world = World()
        await world.receiver.acknowledge(SequenceToken(7))
        assert world.copy.acknowledged == [7]
        await world.receiver.close()
        await world.receiver.close()

    run(main)


@given(
    nodes=st.lists(st.integers(1, 4), max_size=12),
    copy=st.lists(st.integers(1, 4), max_size=12),
    waits=st.lists(st.sampled_from(["nodes", "copy", "cancel"]), max_size=40),
)
def test_events_arrive_once_and_in_order_from_nodes_and_copy(
    nodes: Sequence[int], copy: Sequence[int], waits: Sequence[str]
) -> None:
    """The nodes and the copy deliver the same events, in reads of any size and in any order of arrival."""

    async def main() -> None:
        world = World()
        at = {"nodes": 0, "copy": 0}
        left = {"nodes": [*nodes], "copy": [*copy]}

        def arrive(which: str) -> None:
            if not left[which]:
                return
            start = at[which]
            at[which] = end = start + left[which].pop()
            if which == "nodes":
                world.nodes.found.put_nowait(messages(start, end))
            else:
                world.copy.found.put_nowait(events(start, end))

        for what in waits:
            if what != "cancel":
                arrive(what)
            reading = asyncio.ensure_future(world.receiver.receive(100, 0.5))
            if what == "cancel":
                await asyncio.sleep(0)
                if not reading.done():
                    reading.cancel()
            await asyncio.wait([reading])
            if not reading.cancelled() and (read := reading.result()) is not None:
                world.take(read)
        end = max(at.values())
        if at["copy"] < end:  # In the end the copy has everything.
            world.copy.found.put_nowait(events(at["copy"], end))
        for _ in range(100):
            if (read := await world.receiver.receive(100, 0.5)) is not None:
                world.take(read)
        assert world.got == list(range(end))
        await world.receiver.close()

    run(main)
