"""A worker of a group: several of these programs share the messages of a stream. It needs a cluster.

    python examples/group_worker.py --endpoints node1:5002,… --ca ca.crt --cert workers.crt --key workers.key

The certificate: `rt certs issue pki --stream trades --role subscriber --name workers --lease workers`.
"""

import argparse
import os
import signal
from typing import Literal

import rt

parser = argparse.ArgumentParser(description="Share the messages of a stream with other workers.")
parser.add_argument(
    "--path", default="data", help="Where to copy the log. Workers of one machine may share it."
)
parser.add_argument("--stream", default="trades")
parser.add_argument("--group", default="workers")
parser.add_argument("--pattern", default="trades/*")
parser.add_argument("--out", default="handled.txt", help="A line for each handled message.")
parser.add_argument("--lease-seconds", type=float, default=10.0)
parser.add_argument("--endpoints", help="host:port of each node, separated by commas.")
parser.add_argument("--ca")
parser.add_argument("--cert")
parser.add_argument("--key")
options = parser.parse_args()

out = os.open(options.out, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)


def handle(message: rt.Message) -> None:
    """If it raises, it is called again with the same message. Another worker may have handled it before."""
    os.write(out, f"{os.getpid()} {message.topic} {message.position} {message.value.decode()}\n".encode())


def decide(failure: rt.HandlerFailure) -> Literal["retry", "stop"]:
    """Called when a message has failed for a minute. The message is skipped only if this says so."""
    return "stop" if isinstance(failure.error, OSError) else "retry"


client = rt.connect(
    endpoints=options.endpoints,
    stream=options.stream,
    path=options.path,
    ca=options.ca,
    cert=options.cert,
    key=options.key,
)
group = client.group(options.group, rt.GroupOptions(lease_s=options.lease_seconds, on_error=decide))
group.subscribe(options.pattern, handle)
signal.signal(signal.SIGTERM, lambda *_: group.stop())
group.run()
