r"""Totals of each user in every ten seconds of event time, published exactly once.

With files, from the log of a publisher:

    python examples/event_time.py --log data/dev/sessions/feed1 --once

With nodes it reads and publishes the stream: see docs/event-time.md for the two certificates that it needs.
"""

import argparse
import json
import os
import time

import rt
from rt.objects import SqliteStore
from rt.query import Factories, Observable, QueryEngine, Source, VirtualScheduler
from rt.query import operators as ops
from rt.query.messages import MessageSink, MessageSource, OutgoingMessage, as_message
from rt.query.runner import EngineRunner

parser = argparse.ArgumentParser(description="Publish totals of event time.")
parser.add_argument("--log", default="data/dev/sessions/feed1", help="What to read without nodes.")
parser.add_argument("--path", default="data", help="Where the state and the results are kept.")
parser.add_argument("--stream", default="dev")
parser.add_argument("--endpoints", help="host:port of each node, separated by commas.")
parser.add_argument("--tls-dir", help="Directory with the certificates `queries` and `totals`.")
parser.add_argument("--size", type=float, default=10.0, help="Length of a window. Seconds.")
parser.add_argument("--disorder", type=float, default=5.0, help="How late orders may be. Seconds.")
parser.add_argument("--once", action="store_true", help="Stop after some seconds without an order.")
options = parser.parse_args()

factories = Factories()


@factories("totals")
def totals(size_s: float) -> Observable:
    """The sum of the amounts of each user in every `size_s` seconds."""
    return Source("orders").pipe(
        ops.map(lambda message: json.loads(message.value)),
        ops.tumbling_window(
            size_s,
            ops.Fold.sum(lambda order: order["amount"]),
            key_mapper=lambda order: order["user"],
            late="results",
        ),
        ops.map(lambda window: OutgoingMessage(json.dumps(window).encode(), "totals", window["end_ns"])),
    )


def as_output(value) -> tuple[bytes, str, int | None]:
    """Encode a result, or a value that is late or too far ahead."""
    if not isinstance(value, dict):
        return as_message(value)
    late = value["value"]
    content = json.loads(late.value) if isinstance(late, rt.Message) else late
    return as_message(OutgoingMessage(json.dumps({**value, "value": content}).encode(), "late"))


read, write = {"path": options.log}, {"publisher_id": "totals"}
if options.endpoints:
    nodes = options.endpoints.split(",")
    read = {"path": os.path.join(options.path, "copy"), "name": "queries", "endpoints": nodes}
    read["tls"] = rt.TLS.from_directory(options.tls_dir, "queries")
    write |= {"dedup_id": "totals", "endpoints": nodes}
    write["tls"] = rt.TLS.from_directory(options.tls_dir, "totals")

os.makedirs(options.path, exist_ok=True)
with SqliteStore(os.path.join(options.path, "event-time.db")) as store:
    engine = QueryEngine(store, factories, VirtualScheduler())
    output = engine.add_sink("results", encode=as_output)
    source = MessageSource(stream=options.stream, topics=["orders"], on_event=print, **read)
    engine.add_source(
        "orders",
        source,
        time_of=lambda message: message.timestamp_ns,
        max_out_of_orderness_s=options.disorder,
        max_jump_s=86_400,
        late="results",
    )
    engine.recover()  # also at the first start
    if not engine.queries:
        engine.start("totals", "totals", {"size_s": options.size}, sink="results")
    sink = MessageSink(output, options.path, options.stream, **write)

    seen, since = engine.watermarks, time.monotonic()

    def stopped() -> bool:
        """Whether `--once` was given and no order came for some seconds."""
        global seen, since
        if engine.watermarks != seen:
            seen, since = engine.watermarks, time.monotonic()
        return options.once and time.monotonic() - since > (5.0 if seen["orders"] >= 0 else 30.0)

    EngineRunner(engine, [source], [sink]).run(until=stopped)
    print("late", engine.event_time.late_values, engine.event_time.sources)
    engine.unload()
    sink.close()
