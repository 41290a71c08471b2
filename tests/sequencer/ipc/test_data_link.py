"""The data process's end of the link to control: it reconnects indefinitely and raises handler errors."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import AsyncMock

import pytest
import uvloop
from nodes_bench import wait_until
from watch_loop import WatchLoop

from rt.errors import Corrupt
from rt.v1 import sequencer_pb2 as pb
from sequencer.ipc import client
from sequencer.ipc.client import ControlLink
from sequencer.ipc.frames import HEADER
from sequencer.ipc.server import ControlServer
from sequencer.ipc.silence import HUNG_S


class Control:
    """The control process's end of the link."""

    def __init__(self, path: str) -> None:
        self.heard: list[pb.ToControl] = []
        self.link = ControlServer(path, lambda data: self.heard.append(pb.ToControl.FromString(data)))
        self._loop = WatchLoop()
        self._loop.call(lambda: self.link.start(self._loop.watch))

    def stop(self) -> None:
        try:
            self._loop.call(self.link.close)
        finally:
            self._loop.stop()

    def say(self, index: int) -> None:
        message = pb.ToData(applied=pb.Applied(index=index)).SerializeToString()
        self._loop.call(lambda: self.link.send(message))


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "control")


@pytest.fixture
def control(path: str) -> Iterator[Control]:
    control = Control(path)
    yield control
    control.stop()


async def until(is_so) -> None:
    await asyncio.to_thread(wait_until, is_so)


def test_link_reconnects_and_starts_each_connection_with_hello(path):
    heard: list[pb.ToData] = []
    lost: list[bool] = []

    async def hear(message: pb.ToData) -> None:
        heard.append(message)

    async def live(start: int, link: ControlLink) -> None:
        """One run of the control process."""
        control = Control(path)
        try:
            await until(lambda: control.heard)
            assert control.heard[0].hello.instruction == start
            assert link.is_up
            control.say(start)
            await until(lambda: len(heard) > start)
        finally:
            await asyncio.to_thread(control.stop)
        await until(lambda: len(lost) > start)

    async def play() -> None:
        hellos = iter(range(100))
        link = ControlLink(
            path,
            lambda: pb.DataHello(instruction=next(hellos)),
            hear,
            lambda: lost.append(link.is_up),
        )
        running = asyncio.ensure_future(link.run())
        link.send(pb.ToControl())  # No control process is connected yet.
        for start in range(2):
            await live(start, link)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(play())
    assert [one.applied.index for one in heard] == [0, 1]
    assert lost == [False, False]


def test_link_raises_error_of_message_handler(path, control):
    async def damaged(_: pb.ToData) -> None:
        raise Corrupt("values fail their checksum", path="log.0.0", offset=64)

    async def play() -> None:
        link = ControlLink(path, pb.DataHello, damaged, lambda: None)
        running = asyncio.ensure_future(link.run())
        await until(lambda: control.heard)
        control.say(1)
        with pytest.raises(Corrupt):
            await asyncio.wait_for(running, 60)

    asyncio.run(play())


def test_link_queues_messages_while_one_is_handled_without_counting_silence(path, control):
    heard: list[int] = []

    async def play() -> None:
        may_end = asyncio.Event()

        async def handle(message: pb.ToData) -> None:
            heard.append(message.applied.index)
            await may_end.wait()

        link = ControlLink(path, pb.DataHello, handle, lambda: None)
        running = asyncio.ensure_future(link.run())
        await until(lambda: control.heard)
        for index in range(3):
            control.say(index)
        await until(lambda: heard)
        assert [link.silence.update(float(second)) for second in range(20)][-1] == 0
        assert heard == [0]
        may_end.set()
        await until(lambda: len(heard) == 3)
        await until(lambda: not link.silence.is_paused)
        assert link.silence.update(20) > 0
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(play())
    assert heard == [0, 1, 2]


@pytest.mark.parametrize(
    "garbage", [HEADER.pack(0xFFFF_FFFF), HEADER.pack(3) + b"\xff\xff\xff"], ids=["size", "message"]
)
def test_link_reconnects_after_invalid_frame_or_message(path, control, garbage):
    async def play() -> None:
        link = ControlLink(path, pb.DataHello, AsyncMock(), lambda: None)
        running = asyncio.ensure_future(link.run())
        await until(lambda: control.heard)
        peer = control.link._peer
        assert peer is not None
        peer.send(garbage)
        await until(lambda: len(control.heard) > 1)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(play())


def test_message_sent_to_broken_connection_is_dropped(path, control):
    async def play() -> None:
        link = ControlLink(path, pb.DataHello, AsyncMock(), lambda: None)
        running = asyncio.ensure_future(link.run())
        await until(lambda: control.heard)
        assert link._writer is not None
        link._writer.transport.abort()
        for _ in range(3):  # Before and after the loop closes it, and before the link knows.
            link.send(pb.ToControl())
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    uvloop.run(play())


def test_link_drops_hung_control_process_before_unsent_reports_fill_memory(path, monkeypatch, caplog):
    monkeypatch.setattr(client, "UNSENT_BYTES_MAX", 1 << 20)
    report, unsent, lost = pb.ToControl(propose=bytes(1 << 16)), list[int](), list[bool]()

    async def play() -> None:
        link = ControlLink(path, pb.DataHello, AsyncMock(), lambda: lost.append(link.is_up))
        running = asyncio.ensure_future(link.run())
        await until(lambda: link.is_up)
        link.silence.silent_s = HUNG_S
        for _ in range(1 << 10):  # 64 MiB
            link.send(report)
            await asyncio.sleep(0)
            if link._writer is not None:
                unsent.append(link._writer.transport.get_write_buffer_size())
        if link._writer is not None:
            link._writer.transport.abort()  # Otherwise closing waits for a reader.
        await until(lambda: lost)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stopped:
        stopped.bind(path)
        stopped.listen(4)  # The kernel connects, and nothing accepts.
        uvloop.run(play())
    assert max(unsent) <= (1 << 20) + 2 * report.ByteSize()
    assert not any(lost)
    assert "control_process_not_reading" in caplog.text
