"""Nodes that serve one merged log from a thread. A test stops and starts them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from receiving_node import FakeNode, make_pki, tls_of

from replicator.pull.remote_log import RemoteLog
from sequencer.localcluster.loopback import free_port


class RangeNodes:
    """`count` nodes of stream s that serve the log in `root`/merged. At first, all of them run."""

    def __init__(self, root: Path, pki: Path, count: int, loop: asyncio.AbstractEventLoop) -> None:
        self._root = root
        self._pki = pki
        self._loop = loop
        self._ports = [free_port() for _ in range(count)]
        self._up: dict[int, contextlib.AsyncExitStack] = {}
        self.nodes: dict[int, FakeNode] = {}
        self.endpoints = [f"localhost:{port}" for port in self._ports]
        self.files = {name: str(pki / file) for name, file in _FILES.items()}
        """CA, certificate and key of a subscriber."""
        for index in range(count):
            self.start(index)

    def start(self, index: int) -> None:
        """Serve."""
        self._do(self._start(index))

    def stop(self, index: int) -> None:
        """Stop a node and all its streams."""
        self._do(self._stop(index))

    def asked(self, log: RemoteLog) -> int:
        """Return the index of the node that a reader asks now."""
        return self.endpoints.index(log._nodes.target)

    @contextlib.contextmanager
    def in_epochs(self, *epochs: int) -> Iterator[None]:
        """Put each node into one of these epochs inside the `with` block, from its next answer on."""
        before = [node.epoch for _, node in sorted(self.nodes.items())]
        self._enter(epochs)
        try:
            yield
        finally:
            self._enter(before)

    def _enter(self, epochs: Sequence[int]) -> None:
        for index, epoch in enumerate(epochs):
            self.nodes[index].epoch = epoch

    def close(self) -> None:
        """Stop all."""
        for index in list(self._up):
            self.stop(index)

    def _do(self, act: Any) -> None:
        asyncio.run_coroutine_threadsafe(act, self._loop).result(60)

    async def _start(self, index: int) -> None:
        node = self.nodes[index] = FakeNode(self._root)
        serving = self._up[index] = contextlib.AsyncExitStack()
        await serving.enter_async_context(node.serving(tls_of(self._pki, "n1"), self._ports[index]))

    async def _stop(self, index: int) -> None:
        await self._up.pop(index).aclose()


async def _calls_ended() -> None:
    """Wait until calls that the servers have cancelled end. gRPC crashes if the loop ends before."""
    if calls := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(calls, timeout=30)


_FILES = {"ca": "ca.crt", "cert": "sub.crt", "key": "sub.key"}


@contextlib.contextmanager
def range_nodes(root: Path, count: int = 2) -> Iterator[RangeNodes]:
    """Run nodes in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        nodes = RangeNodes(root, make_pki(root / "pki"), count, loop)
        try:
            yield nodes
        finally:
            nodes.close()
            asyncio.run_coroutine_threadsafe(_calls_ended(), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
