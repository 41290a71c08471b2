"""A publisher or a subscriber that works until it is stopped, with the rt version on its path.

`python upgrade_client.py publisher|subscriber SETTINGS`. It uses the public API only, so it also runs with an
earlier rt. It keeps the file `progress` in the directory `state` of the settings, and stops when `stop`
appears there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import rt
from rt.child_process import die_with_stdin

WAIT_S = 300.0
PAUSE_S = 0.1
BATCH = 50


def note(state: Path, progress: dict[str, int]) -> None:
    new = state / "progress.new"
    new.write_text(json.dumps({**progress, "version": rt.__version__}))
    os.replace(new, state / "progress")


def publish(settings: dict[str, Any], state: Path, **common: Any) -> None:
    """Publish 0, 1, 2, ... Each batch waits until the previous one is merged, and a little longer to limit
    the load: nodes start on the same machine.
    """
    count, name = 0, settings["name"]
    with rt.Publisher(settings["root"], settings["stream"], publisher_id=name, **common) as publisher:
        while not (state / "stop").exists():
            numbers = publisher.publish_many([b"%d" % (count + one) for one in range(BATCH)])
            publisher.wait(numbers[-1], "merged", timeout=WAIT_S)
            count += BATCH
            note(state, {name: count})
            time.sleep(PAUSE_S)


def subscribe(settings: dict[str, Any], state: Path, **common: Any) -> None:
    """Read everything. Check that positions have no gap, and that each session has 0, 1, 2, ..."""
    position, counts = 0, dict[str, int]()
    with rt.Subscriber(
        settings["root"], settings["stream"], connect_timeout=None, position="earliest", **common
    ) as subscriber:
        while not (state / "stop").exists():
            for message in subscriber.poll(max_messages=1000, timeout=0.5):
                expected = counts.get(message.session, 0)
                found = message.position, int(message.value)
                assert found == (position, expected), (message.session, found, position, expected)
                position, counts[message.session] = position + 1, expected + 1
            note(state, counts)


def main() -> None:
    die_with_stdin()
    role, settings = sys.argv[1], json.loads(sys.argv[2])
    run = publish if role == "publisher" else subscribe
    run(
        settings,
        Path(settings["state"]),
        endpoints=settings["endpoints"],
        tls=rt.TLS(*settings["tls"]),
    )


if __name__ == "__main__":
    main()
