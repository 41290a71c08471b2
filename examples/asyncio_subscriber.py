"""A subscriber in an event loop.

python examples/asyncio_subscriber.py --path data/trades/sessions/feed1 --count 2
"""

import argparse
import asyncio

import rt

parser = argparse.ArgumentParser(description="Print messages from an event loop.")
parser.add_argument(
    "--path", default="data/trades/sessions/feed1", help="A log; with --endpoints, where to copy it."
)
parser.add_argument("--stream", default="trades")
parser.add_argument("--count", type=int, help="Stop after this many messages.")
parser.add_argument("--endpoints", help="host:port of each node, separated by commas.")
parser.add_argument("--ca")
parser.add_argument("--cert")
parser.add_argument("--key")
options = parser.parse_args()

cluster = {}
if options.endpoints:
    tls = rt.TLS(ca=options.ca, cert=options.cert, key=options.key)
    cluster = {"endpoints": options.endpoints.split(","), "tls": tls}


async def main() -> None:
    """Other tasks of the loop run while this one waits for messages."""
    left = options.count
    async with rt.aio.Subscriber(options.path, options.stream, **cluster) as subscriber:
        while left is None or left > 0:
            for message in await subscriber.poll(max_messages=left or 1000, timeout=1.0):
                print(message.position, message.topic, message.value)
                left = None if left is None else left - 1


asyncio.run(main())
