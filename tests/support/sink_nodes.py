"""Three real nodes that Spark writes to, and access to their merged messages."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import rt
from rt.log.scan.message_batch import Message
from rt.net.rest_client import ask, check
from sequencer.localcluster.nodes import LocalCluster


class Sink:
    """The nodes, a publisher's certificate with the dedup id "spark", and a ledger."""

    def __init__(self, nodes: LocalCluster) -> None:
        self.nodes = nodes
        self.tls = nodes.certificate("publisher", "sink", dedup_ids=["spark"])
        self.ledger = nodes.root / "ledger"

    def options(self, name: str, **more: str) -> dict[str, str]:
        """Return options to write with `format("rt")`."""
        return {
            "endpoints": ",".join(self.nodes.endpoints),
            "stream": self.nodes.stream,
            "ca": str(self.tls.ca),
            "cert": str(self.tls.cert),
            "key": str(self.tls.key),
            "name": name,
            "ledger": str(self.ledger),
            "path": str(self.nodes.root / "executor"),
            **more,
        }

    def reading(self, name: str) -> dict[str, str]:
        """Options to read as the subscriber `name`."""
        tls = self.nodes.certificate("subscriber", name)
        return {
            "endpoints": ",".join(self.nodes.endpoints),
            "stream": self.nodes.stream,
            "ca": str(tls.ca),
            "cert": str(tls.cert),
            "key": str(tls.key),
        }

    def held(self, name: str) -> int | None:
        """Return the position from which the nodes keep messages for the subscriber `name`."""
        tls = self.nodes.certificate("subscriber", name)
        answer = check(asyncio.run(ask(self.nodes.endpoints, tls, "GET", "/holds")))
        found = {hold["name"]: hold["position"] for hold in json.loads(answer.body)}
        return found.get(name)

    def publisher(self, name: str) -> rt.Publisher:
        """Return a publisher that is independent of Spark."""
        return rt.Publisher(
            self.nodes.root / "sources",
            self.nodes.stream,
            publisher_id=name,
            endpoints=self.nodes.endpoints,
            tls=self.nodes.certificate("publisher", name),
        )

    def messages(self, name: str, least: int = 0) -> list[Message]:
        """Return all merged messages of a writer, from all its executors, after there are at least `least`.

        A merged message is committed, but a node may write it a moment later.
        """
        found: list[Message] = []

        def is_there() -> bool:
            found[:] = self._messages(f"sink~{name}.")
            return len(found) >= least

        self.nodes.wait(is_there, f"{least} messages of {name} to be written")
        return found

    def _messages(self, prefix: str) -> list[Message]:
        with contextlib.suppress(rt.LogNotFound), rt.LogReader(self.nodes.merged_directory("n1")) as reader:
            return [each for each in reader if each.session.startswith(prefix)]
        return []

    def written(self, name: str, partition: int, least: int) -> list[tuple[bytes, str, int]]:
        """Value, topic and nanoseconds of a partition's rows, in order, after the writer has at least `least`
        messages.
        """
        return [
            (each.value, each.topic, each.timestamp_ns)
            for each in self.messages(name, least)
            if each.session.startswith(f"sink~{name}.{partition}.")
        ]


@contextlib.contextmanager
def running_sink() -> Iterator[Sink]:
    """Run nodes for the tests of a module."""
    root = Path(tempfile.mkdtemp(prefix="rt", dir="/tmp"))  # The path of a Unix socket must be short.
    try:
        with LocalCluster(root) as nodes:
            nodes.start()
            nodes.wait_ready()
            yield Sink(nodes)
    finally:
        shutil.rmtree(root)
