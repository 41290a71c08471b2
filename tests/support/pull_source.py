"""A node that serves a merged log from a thread, for subscribers and the processes that they start."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from receiving_node import CLUSTER, FakeNode, tls_of

import rt
from rt.log.format.segment import SegmentId
from rt.net.tls import TLS
from rt.testing.merged import MergedLogBuilder
from sequencer.localcluster.loopback import free_port


class PullSource:
    """A publisher to files, a merged log of it, and a node that serves this log from `start` to `stop`."""

    def __init__(self, root: Path, tls: TLS, loop: asyncio.AbstractEventLoop) -> None:
        self._root = root
        self._tls = tls
        self._loop = loop
        self._port = free_port()
        self._serving: contextlib.AsyncExitStack | None = None
        self.refuses_holds = ""
        """The reason for which it refuses holds, from the next start on."""
        self.acknowledged: list[tuple[str, int]] = []
        """The acknowledgements of subscribers, oldest first."""
        self.endpoint = f"localhost:{self._port}"
        self.merged = str(root / "merged")
        self._log = MergedLogBuilder(self.merged, cluster_id=CLUSTER, stream="s")
        self._publisher = rt.Publisher(root, "s", publisher_id="feed", linger_ms=0)

    def publish(self, *values: bytes, topic: str = "", timestamps_ns: Sequence[int] | None = None) -> None:
        """Publish the values in one batch, and merge them."""
        self._publisher.publish_many(list(values), topic=topic, timestamps_ns=timestamps_ns)
        self._publisher.flush()
        self._log.merge_all([self._publisher.directory])
        self._log.sync()

    def roll(self, run: int | None = None) -> None:
        """End the merged segment. With `run`, also end the epoch."""
        self._log.roll(run)

    def trim(self, before: SegmentId) -> None:
        """Trim the segments before `before`."""
        self._log.trim(before)

    def start(self) -> None:
        """Serve."""
        self._do(self._start())

    def stop(self) -> None:
        """Stop serving. The log stays."""
        self._do(self._stop())

    def close(self) -> None:
        self.stop()
        self._publisher.close()
        self._log.close()

    def _do(self, act: Any) -> None:
        asyncio.run_coroutine_threadsafe(act, self._loop).result(60)

    async def _start(self) -> None:
        assert self._serving is None
        self._serving = contextlib.AsyncExitStack()
        node = self.node = FakeNode(self._root)
        node.acknowledged, node.refuses_holds = self.acknowledged, self.refuses_holds
        await self._serving.enter_async_context(node.serving(self._tls, self._port))

    async def _stop(self) -> None:
        serving, self._serving = self._serving, None
        if serving is not None:
            await serving.aclose()


@contextlib.contextmanager
def pull_source(root: Path, pki: Path) -> Iterator[PullSource]:
    """Run one started source in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        source = PullSource(root, tls_of(pki, "n1"), loop)
        source.start()
        try:
            yield source
        finally:
            source.close()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
