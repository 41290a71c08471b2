"""`LocalCluster` with wires that can be cut, silent, slow or lossy, between nodes and from clients to nodes.

There is a relay (`Wire`) for each direction: from each node to each other node, for Raft and for data, and
from the clients to each node. Named clients have their own wires. As for every wire, no byte is changed, lost
or reordered within a connection.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from chaos.wires import Wire
from sequencer.localcluster.nodes import LocalCluster

CLIENTS: Final = "clients"

Result = TypeVar("Result")


class WiredNodes(LocalCluster):
    """A `LocalCluster` whose wires exist between `__enter__` and `__exit__`."""

    def __init__(
        self,
        root: Path,
        count: int = 3,
        *,
        stream: str = "s",
        flags: Sequence[str] = (),
        with_rest: bool = False,
        clients: Sequence[str] = (),
    ) -> None:
        """`clients` are the names of clients with their own wires, in addition to `CLIENTS`."""
        super().__init__(root, count, stream=stream, flags=flags, with_rest=with_rest)
        self._clients = [CLIENTS, *clients]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="wires", daemon=True)
        self._raft: dict[tuple[str, str], Wire] = {}
        self._data: dict[tuple[str, str], Wire] = {}

    def __enter__(self) -> Self:
        self._thread.start()
        for dialled in self.names:
            for dialler in [*self.names, *self._clients]:
                ends = dialler, dialled
                if dialler != dialled:
                    self._data[ends] = self._wire(ends, self.data_ports[dialled])
                if dialler != dialled and dialler not in self._clients:
                    self._raft[ends] = self._wire(ends, self.raft_ports[dialled])
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for wire in self._all():
            self._run(wire.close())
        self._run(self._loop.shutdown_asyncgens())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def endpoints(self) -> list[str]:
        """The addresses at which publishers and subscribers reach the nodes through wires."""
        return [f"127.0.0.1:{self._data[CLIENTS, name].port}" for name in self.names]

    def endpoints_of(self, client: str, *names: str) -> list[str]:
        """Return the addresses at which a named client reaches these nodes."""
        return [f"127.0.0.1:{self._data[client, name].port}" for name in names]

    def wires_between(self, dialler: str, dialled: str) -> list[Wire]:
        """Return the wires by which one end connects to a node: for data, and between nodes also for Raft."""
        ends = dialler, dialled
        return [wires[ends] for wires in (self._raft, self._data) if ends in wires]

    def wires(self, end: str) -> list[Wire]:
        """All wires of one node, to and from it; or those of the `CLIENTS`."""
        return [wire for wires in (self._raft, self._data) for ends, wire in wires.items() if end in ends]

    def cut(self, end: str) -> None:
        """End all its connections, and refuse new ones until `heal`."""
        for wire in self.wires(end):
            wire.cut()

    def silence(self, end: str) -> None:
        """Block all data to it and from it until `heal`. The connections stay open."""
        for wire in self.wires(end):
            wire.hold()

    def delay(self, seconds: float) -> None:
        """Deliver all data between any two ends this much later, until `heal`."""
        for wire in self._all():
            wire.delay(seconds)

    def lose(self, share: float) -> None:
        """Lose this share of the data between any two ends, until `heal`. TCP sends it again."""
        for wire in self._all():
            wire.lose(share)

    def reset(self) -> None:
        """End all connections. New ones may be made at once."""
        for wire in self._all():
            wire.reset()

    def heal(self, end: str) -> None:
        """Let everything through again."""
        for wire in self.wires(end):
            wire.heal()

    def _seen_by(self, name: str) -> dict[str, tuple[str, str]]:
        direct = super()._seen_by(name)
        return {
            each: direct[each]
            if each == name
            else (f"127.0.0.1:{self._raft[name, each].port}", f"127.0.0.1:{self._data[name, each].port}")
            for each in self.names
        }

    def _all(self) -> Iterator[Wire]:
        yield from self._raft.values()
        yield from self._data.values()

    def _wire(self, ends: tuple[str, str], port: int) -> Wire:
        wire = Wire("-".join(ends), port, self._loop)
        self._run(wire.open())
        return wire

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
