"""Messages merged at a steady rate in a separate process, to measure a streaming query.

    python -m rt.bench.paced_publisher DIRECTORY MEGABYTES_PER_SECOND SECONDS

Some messages are published first. Then it prints a line on stdout, and a line on stdin starts the rest.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from typing import Final

from rt.bench.merged_logs import BATCH_BYTES, BLOCK_BYTES, TOPIC
from rt.client.publisher import Publisher
from rt.testing.merged import MergedLogBuilder

VALUE_BYTES: Final = 1024
_ROLL_BYTES: Final = 4 * 2**20
"""The segment size of the session. Each turn of the merger scans the segment where the last turn ended."""
_TURN_SECONDS: Final = 0.05
_DISTINCT: Final = 5000


def feed(root: str, bytes_per_second: float, seconds: float) -> None:
    """Publish and merge at this rate for `seconds`. The log is in `root`/merged."""
    values = itertools.cycle([os.urandom(VALUE_BYTES) for _ in range(_DISTINCT)])
    publisher = Publisher(
        root, "bench", publisher_id="one", batch_bytes=BATCH_BYTES, roll_bytes=_ROLL_BYTES, fsync="never"
    )
    merged = MergedLogBuilder(os.path.join(root, "merged"), cluster_id=os.urandom(16), stream="bench")
    with publisher, merged:
        _add(publisher, merged, list(itertools.islice(values, _DISTINCT)))
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.readline()
        begin, count = time.monotonic(), 0
        while (passed := time.monotonic() - begin) < seconds:
            due = int(bytes_per_second * passed / VALUE_BYTES) - count
            _add(publisher, merged, list(itertools.islice(values, due)))
            count += due
            time.sleep(_TURN_SECONDS)


def _add(publisher: Publisher, merged: MergedLogBuilder, values: list[bytes]) -> None:
    publisher.publish_many(values, topic=TOPIC)
    publisher.flush()
    merged.merge_all([publisher.directory], block_bytes=BLOCK_BYTES)


if __name__ == "__main__":
    feed(sys.argv[1], float(sys.argv[2]) * 1e6, float(sys.argv[3]))
