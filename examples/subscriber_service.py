"""A subscriber as a service: handles each message, and continues after a restart where it acknowledged.

Files only:      python examples/subscriber_service.py --path data/trades/sessions/feed1 --once
With a cluster:  … --path copy --endpoints node1:5002,… --ca ca.crt --cert reader1.crt --key reader1.key
"""

import argparse
import signal
import sys

import rt

parser = argparse.ArgumentParser(description="Print messages, each at least once.")
parser.add_argument(
    "--path", default="data/trades/sessions/feed1", help="A log; with --endpoints, where to copy it."
)
parser.add_argument("--stream", default="trades")
parser.add_argument("--name", default="reader1", help="With --endpoints: the certificate's name.")
parser.add_argument("--once", action="store_true", help="Stop after a second without messages.")
parser.add_argument("--endpoints", help="host:port of each node, separated by commas.")
parser.add_argument("--ca")
parser.add_argument("--cert")
parser.add_argument("--key")
options = parser.parse_args()


def on_event(event: object) -> None:
    """Report what is missing or was reset; without a handler it would be raised as `rt.Gap`."""
    print(event, file=sys.stderr)


cluster = {}
if options.endpoints:
    tls = rt.TLS(ca=options.ca, cert=options.cert, key=options.key)
    cluster = {"endpoints": options.endpoints.split(","), "tls": tls}

with rt.Subscriber(
    options.path, options.stream, name=options.name, on_event=on_event, **cluster
) as subscriber:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while True:
        messages = subscriber.poll(max_messages=1000, timeout=1.0)
        for message in messages:
            print(message.position, message.session, message.number, message.topic, message.value)
        if messages:
            subscriber.ack(subscriber.position)  # after the work: a crash before it repeats these messages
        elif options.once:
            break
