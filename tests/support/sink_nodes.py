"""Three real nodes that Spark writes to, and what is merged of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import rt
from rt.log.columns import Message
from rt.net.rest import ask, check
from sequencer.testing.nodes import Nodes


class Sink:
    """The nodes, a publisher's certificate with the dedup id "spark", and a ledger."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.tls = nodes.certificate("publisher", "sink", dedup_ids=["spark"])
        self.ledger = nodes.root / "ledger"

    def options(self, name: str, **more: str) -> dict[str, str]:
        """Of `format("rt")`."""
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
        """From where on the nodes hold what the subscriber `name` needs."""
        tls = self.nodes.certificate("subscriber", name)
        answer = check(asyncio.run(ask(self.nodes.endpoints, tls, "GET", "/holds")))
        found = {hold["name"]: hold["position"] for hold in json.loads(answer.body)}
        return found.get(name)

    def publisher(self, name: str) -> rt.Publisher:
        """One that is no writer of Spark's."""
        return rt.Publisher(
            self.nodes.root / "sources",
            self.nodes.stream,
            publisher_id=name,
            endpoints=self.nodes.endpoints,
            tls=self.nodes.certificate("publisher", name),
        )

    def messages(self, name: str) -> list[Message]:
        """All that is merged of what a writer wrote, by any executor."""
        with contextlib.suppress(rt.NotALog), rt.LogReader(self.nodes.merged_directory("n1")) as reader:
            return [each for each in reader if each.session.startswith(f"sink~{name}.")]
        return []

    def written(self, name: str, partition: int) -> list[tuple[bytes, str, int]]:
        """Value, topic and nanoseconds of a partition's rows, in order."""
        return [
            (each.value, each.topic, each.timestamp_ns)
            for each in self.messages(name)
            if each.session.startswith(f"sink~{name}.{partition}.")
        ]


@contextlib.contextmanager
def running_sink() -> Iterator[Sink]:
    """For the tests of a module."""
    root = Path(tempfile.mkdtemp(prefix="rt", dir="/tmp"))  # Unix sockets want a short path.
    try:
        with Nodes(root) as nodes:
            nodes.start()
            nodes.wait_ready()
            yield Sink(nodes)
    finally:
        shutil.rmtree(root)
