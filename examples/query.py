r"""A standing query: an alert when a price rises above a limit. Its state survives a crash.

printf '99\n101\n102\n90\n103\n' | python examples/publisher_service.py --topic IBM
python examples/query.py --log data/trades/sessions/feed1 --above 100 --once
"""

import argparse
import os
import time

from rt.objects import SqliteStore
from rt.query import Factories, Observable, QueryEngine, Source, VirtualScheduler
from rt.query import operators as ops
from rt.query.messages import MessageSink, MessageSource, OutgoingMessage, as_message
from rt.query.runner import EngineRunner

parser = argparse.ArgumentParser(description="Publish an alert when a price rises above a limit.")
parser.add_argument(
    "--log", default="data/trades/sessions/feed1", help="Each message is a price, its topic a symbol."
)
parser.add_argument("--path", default="data", help="Where the state and the alerts are kept.")
parser.add_argument("--above", type=float, default=100.0)
parser.add_argument("--once", action="store_true", help="Stop after two seconds without a message.")
options = parser.parse_args()

factories = Factories()


@factories("alert")
def alert(above: float) -> Observable:
    """The first price above the limit, and again after it was below."""
    return Source("prices").pipe(
        ops.map(lambda message: [message.topic, float(message.value)]),
        ops.distinct_until_changed(lambda price: price[1] > above),
        ops.where(lambda price: price[1] > above),
        ops.map(lambda price: OutgoingMessage(f"{price[0]} {price[1]}".encode(), "alerts")),
    )


os.makedirs(options.path, exist_ok=True)
with SqliteStore(os.path.join(options.path, "query.db")) as store:
    engine = QueryEngine(store, factories, VirtualScheduler())
    source = MessageSource(options.log, "trades")
    engine.add_source("prices", source, time_of=lambda message: message.timestamp_ns)
    output = engine.add_sink("alerts", encode=as_message)
    engine.recover()  # also at the first start
    if not engine.queries:
        engine.start("alert", "alert", {"above": options.above}, sink="alerts")
    sink = MessageSink(output, options.path, "trades", publisher_id="alerts")

    seen, since = engine.watermarks, time.monotonic()

    def stopped() -> bool:
        """Whether `--once` was given and no message came for two seconds."""
        global seen, since
        if engine.watermarks != seen:
            seen, since = engine.watermarks, time.monotonic()
        return options.once and time.monotonic() - since > 2.0

    EngineRunner(engine, [source], [sink]).run(until=stopped)
    engine.unload()
    sink.close()
