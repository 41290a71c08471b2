"""The wires between real processes: the data on each of them can be held, delayed, lost or cut.

A `Wires` is a thread with a relay for each pair of members. The member that dials gets the relay's address.
Invariant: a wire never changes, drops or reorders a byte of a connection. It delivers late, or ends the
connection. TCP has the same effect when packets are lost: it sends them again after a time, and all later
data waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Self, TypeVar

_PIECE_BYTES = 64 * 1024
RETRANSMIT_S = 0.2
"""The shortest time after which Linux sends unacknowledged data again. It doubles with each retry."""

Result = TypeVar("Result")


class Wire:
    """All connections that one member makes to another. Every method may be called from any thread."""

    def __init__(self, name: str, port: int, loop: asyncio.AbstractEventLoop) -> None:
        self.name = name
        self.port = 0
        """The port to which the dialling member connects."""
        self._target = port
        self._loop = loop
        self._is_cut = False
        self._held: frozenset[int] = frozenset()
        self._delay_s = 0.0
        self._lost_share = 0.0
        self._draw = random.Random(name)
        self._changed = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def cut(self) -> None:
        """End all connections, and refuse new ones until `heal`."""
        self._set(is_cut=True)

    def reset(self) -> None:
        """End all connections; new ones may be made."""
        self._loop.call_soon_threadsafe(self._abort)

    def hold(self, *, there: bool = True, back: bool = True) -> None:
        """Block the data to the dialled member (`there`), from it (`back`), or both. The connections stay
        open.
        """
        self._set(held=frozenset([0] * there + [1] * back))

    def delay(self, seconds: float) -> None:
        """Deliver each piece this much later."""
        self._set(delay_s=seconds)

    def lose(self, share: float) -> None:
        """Lose this share of the pieces, each of which is sent again until it arrives."""
        self._set(lost_share=share)

    def heal(self) -> None:
        """Let all data through again, held data first."""
        self._set()

    def _set(
        self,
        *,
        is_cut: bool = False,
        held: frozenset[int] = frozenset(),
        delay_s: float = 0.0,
        lost_share: float = 0.0,
    ) -> None:
        def change() -> None:
            self._is_cut, self._held = is_cut, held
            self._delay_s, self._lost_share = delay_s, lost_share
            self._changed.set()
            self._changed = asyncio.Event()
            if is_cut:
                self._abort()

        self._loop.call_soon_threadsafe(change)

    def _abort(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def open(self) -> None:
        """Listen. Call this in the relay's thread."""
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """End everything. Call this in the relay's thread."""
        self._server.close()
        self._abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._writers.add(writer)
        try:
            if self._is_cut:
                return
            with contextlib.suppress(OSError):
                far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
                self._writers.add(far_writer)
                try:
                    await self._pump_both(reader, writer, far_reader, far_writer)
                finally:
                    self._writers.discard(far_writer)
                    far_writer.transport.abort()
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _pump_both(
        self,
        near: asyncio.StreamReader,
        near_writer: asyncio.StreamWriter,
        far: asyncio.StreamReader,
        far_writer: asyncio.StreamWriter,
    ) -> None:
        pumps = [
            asyncio.ensure_future(self._pump(near, far_writer, 0)),
            asyncio.ensure_future(self._pump(far, near_writer, 1)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: int) -> None:
        while piece := await reader.read(_PIECE_BYTES):
            if self._delay_s:
                await asyncio.sleep(self._delay_s)
            again_s = RETRANSMIT_S
            while self._draw.random() < self._lost_share:
                await asyncio.sleep(again_s)
                again_s *= 2
            while way in self._held:
                await self._changed.wait()
            writer.write(piece)
            await writer.drain()


class Wires:
    """The wires between members that listen on `ports`. In each pair, the member with the greater name
    dials.
    """

    def __init__(self, ports: Mapping[str, int]) -> None:
        self._ports = dict(ports)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="wires", daemon=True)
        self._wires: dict[tuple[str, str], Wire] = {}

    def __enter__(self) -> Self:
        self._thread.start()
        names = sorted(self._ports)
        for dialler in names:
            for dialled in names:
                if dialled < dialler:
                    wire = Wire(f"{dialler}-{dialled}", self._ports[dialled], self._loop)
                    self._wires[dialler, dialled] = wire
                    self._run(wire.open())
        return self

    def __exit__(self, *error: object) -> None:
        for wire in self._wires.values():
            self._run(wire.close())
        self._run(self._loop.shutdown_asyncgens())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def all(self) -> Sequence[Wire]:
        """Every wire, in the order of the names."""
        return list(self._wires.values())

    def of(self, member: str) -> Sequence[Wire]:
        """Return all wires to and from one member."""
        return [wire for ends, wire in self._wires.items() if member in ends]

    def members_as_seen_by(self, member: str) -> dict[str, str]:
        """Return the addresses of all members for the configuration of `member`."""
        return {
            name: f"127.0.0.1:{self._wires[member, name].port if name < member else port}"
            for name, port in self._ports.items()
        }

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
