r"""A publisher as a service: each line of stdin becomes a message.

Files only:      printf '12.50\n12.51\n' | python examples/publisher_service.py
With a cluster:  … --endpoints node1:5002,node2:5002,node3:5002 --ca ca.crt --cert feed1.crt --key feed1.key
"""

import argparse
import sys
import time

import rt

parser = argparse.ArgumentParser(description="Publish the lines of stdin.")
parser.add_argument("--path", default="data", help="Directory of the logs.")
parser.add_argument("--stream", default="trades")
parser.add_argument(
    "--name", default="feed1", help="The session: unique in the stream, the certificate's name."
)
parser.add_argument("--topic", default="")
parser.add_argument("--max-silence", type=float, help="Promise a line at least this often, in seconds.")
parser.add_argument("--endpoints", help="host:port of each node, separated by commas.")
parser.add_argument("--ca")
parser.add_argument("--cert")
parser.add_argument("--key")
options = parser.parse_args()

cluster = {}
if options.endpoints:
    tls = rt.TLS(ca=options.ca, cert=options.cert, key=options.key)
    cluster = {"endpoints": options.endpoints.split(","), "tls": tls}

with rt.Publisher(
    options.path, options.stream, publisher_id=options.name, max_silence=options.max_silence, **cluster
) as publisher:
    number = None
    for line in sys.stdin.buffer:
        while True:
            try:
                number = publisher.publish(line.rstrip(b"\n"), topic=options.topic)
                break
            except rt.DiskFull as error:  # nothing was taken: try again when there is space
                print(error, file=sys.stderr)
                time.sleep(1.0)
            except (rt.CertificateError, rt.ClusterMismatch) as error:  # once: messages wait on the disk
                print(error, file=sys.stderr)
    publisher.flush()  # on the disk of this machine
    if cluster and number is not None:
        publisher.wait(number, level="replicated", timeout=30)  # on the disks of a majority of the nodes
    print(f"published {publisher.next_number} messages in {publisher.directory}")
