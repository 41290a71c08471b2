"""A publisher of the demo, a process of its own: `python -m rt.demo.publish ROOT SESSION DATA INDEX COUNT`.

It goes on where its session's log ends, and says on stdout after each flush how many lines are safe.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from rt.demo.source import lines, share
from rt.publisher import Publisher

STREAM = "demo"
_FLUSH_LINES = 5000


def main(root: str, session: str, data: str, index: str, count: str) -> None:
    """Publish this publisher's share to its end."""
    with Publisher(root, STREAM, publisher_id=session) as publisher:
        rest = lines(Path(data), share(Path(data), int(index), int(count)), publisher.next_number)
        while block := list(itertools.islice(rest, _FLUSH_LINES)):
            for topic, group in itertools.groupby(block, key=lambda line: line.topic):
                publisher.publish_many([line.value for line in group], topic=topic)
            publisher.flush()
            print(publisher.next_number, flush=True)  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
