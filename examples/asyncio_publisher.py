"""A publisher in an event loop: several tasks publish, and each knows when its messages are merged.

python examples/asyncio_publisher.py --tasks 3
"""

import argparse
import asyncio

import rt

parser = argparse.ArgumentParser(description="Publish from the tasks of an event loop.")
parser.add_argument("--path", default="data", help="Directory of the logs.")
parser.add_argument("--stream", default="trades")
parser.add_argument(
    "--name", default="feed2", help="The session: unique in the stream, the certificate's name."
)
parser.add_argument("--tasks", type=int, default=3)
parser.add_argument("--endpoints", help="host:port of each node, separated by commas.")
parser.add_argument("--ca")
parser.add_argument("--cert")
parser.add_argument("--key")
options = parser.parse_args()

cluster = {}
if options.endpoints:
    tls = rt.TLS(ca=options.ca, cert=options.cert, key=options.key)
    cluster = {"endpoints": options.endpoints.split(","), "tls": tls}


async def work(publisher: rt.aio.Publisher, task: int) -> None:
    """Publish two messages, and wait for the nodes if there are any."""
    for step in ("began", "ended"):
        delivery = publisher.publish(f"task {task} {step}".encode(), topic=f"tasks/{task}")
        if cluster:
            await delivery  # until it is merged; meanwhile the other tasks run


async def main() -> None:
    """Close the publisher when all tasks have ended."""
    async with rt.aio.Publisher(
        options.path, options.stream, publisher_id=options.name, **cluster
    ) as publisher:
        await asyncio.gather(*(work(publisher, task) for task in range(options.tasks)))
        await publisher.flush()  # on the disk of this machine
        print(f"published {publisher.next_number} messages in {publisher.directory}")


asyncio.run(main())
