"""A query engine that moves between hosts, as a program: `moving_engine.py CONFIG`, until SIGTERM.

It adds up the numbers of the topic "in", and publishes each number with its sum in the topic "out".
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import rt
from rt.objects import PostgresStore
from rt.query import Factories, Observable, QueryEngine, Source
from rt.query import operators as ops
from rt.query.host import QueryHost
from rt.query.messages import MessageSink, MessageSource, OutgoingMessage, as_message
from rt.query.runner import EngineRunner
from rt.streams import ClusterLeases, LeaseTimes

factories = Factories()


@factories("sums")
def sums() -> Observable[Any]:
    return Source("in").pipe(
        ops.where(lambda message: message.topic == "in"),
        ops.scan(lambda last, message: [int(message.value), last[1] + int(message.value)], [0, 0]),
        ops.map(lambda pair: OutgoingMessage(b"%d %d" % tuple(pair), "out")),
    )


def main(config: dict[str, Any]) -> None:
    directory, stream, endpoints = config["directory"], config["stream"], config["endpoints"]
    reading, writing = (rt.TLS(*config[name]) for name in ("reading", "writing"))
    host = config["host"]

    def build(fence: int, stack: ExitStack) -> EngineRunner:
        limits = {"timeout_s": config["timeout_s"], "connect_timeout_s": config["timeout_s"]}
        store = PostgresStore(config["url"], schema=config["schema"], fence=fence, **limits)
        engine = QueryEngine(stack.enter_context(store), factories)
        stack.callback(engine.unload)
        source = MessageSource(
            directory, stream, endpoints=endpoints, tls=reading, name="queries", connect_timeout=None
        )
        engine.add_source("in", source)
        output = engine.add_sink("out", encode=as_message)
        engine.recover()
        if not engine.queries:
            engine.start("sums", "sums", sink="out")
        own = f"sums~{host}"
        sink = MessageSink(
            output, directory, stream, publisher_id=own, dedup_id="sums", endpoints=endpoints, tls=writing
        )
        return EngineRunner(engine, [source], [stack.enter_context(sink)], checkpoint_s=0.05)

    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    leases = ClusterLeases(endpoints, reading, "queries")
    QueryHost(leases, "sums", build, times=LeaseTimes(**config["times"])).run(stopped.is_set)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    main(json.loads(Path(sys.argv[1]).read_text()))
