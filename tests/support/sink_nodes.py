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

    def messages(self, name: str, least: int = 0) -> list[Message]:
        """All that is merged of what a writer wrote, by any executor, once there is so much of it.

        What is merged is committed: a node may be a moment behind in writing it.
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
        """Value, topic and nanoseconds of a partition's rows, in order, once the writer has so many."""
        return [
            (each.value, each.topic, each.timestamp_ns)
            for each in self.messages(name, least)
            if each.session.startswith(f"sink~{name}.{partition}.")
        ]


@contextlib.contextmanager
def running_sink() -> Iterator[Sink]:
    """For the tests of a module."""
    root = Path(tempfile.mkdtemp(prefix="rt", dir="/tmp"))  # Unix sockets want a short path.
    try:
        with LocalCluster(root) as nodes:
            nodes.start()
            nodes.wait_ready()
            yield Sink(nodes)
    finally:
        shutil.rmtree(root)
