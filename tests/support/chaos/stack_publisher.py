"""The child process of a chaos run of the whole stack: a publisher that publishes all the time.

Start it with `python -m chaos.stack_publisher '<settings as JSON>'`. Each value contains its number, so that
the merged log can be checked without notes.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
from typing import Any, Final

import rt
from sequencer.localcluster.clients import open_publisher
from sequencer.localcluster.processes import Answer, serve

_TOGETHER_MAX: Final = 20
_FAILED: Final = 3


def value_of(number: int) -> bytes:
    """Return the value that is published as `number`."""
    return b"%d:" % number + bytes([number % 251]) * (number * 7919 % 600)


class StackPublisherProcess:
    """Publishes and flushes in a thread until it must finish."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._draw = random.Random(f"{settings['seed']} {settings['name']}")
        self._pause_s = float(settings["pause_s"])
        self._finishing = threading.Event()
        self._publisher = open_publisher(settings, roll_bytes=64 * 1024)
        self._flushed = self._publisher.next_number
        self._thread = threading.Thread(target=self._run, name="publishing", daemon=True)
        self._thread.start()

    def answer(self, do: str, _arguments: Answer) -> Answer:
        """Report the progress ("status"), finish publishing ("finish"), or close in good order."""
        match do:
            case "finish":
                self._finishing.set()
                self._thread.join()
            case "close":
                self._publisher.close(timeout=5)
                return {}
        flushed, progress = self._flushed, self._publisher.progress
        return {"flushed": flushed, "replicated": progress.replicated, "merged": progress.merged}

    def _run(self) -> None:
        try:
            while not self._finishing.wait(self._draw.uniform(0, 2 * self._pause_s)):
                self._publish()
        except rt.RtError as error:
            os.write(2, f"ended by {type(error).__name__}: {error}\n".encode())
            os._exit(_FAILED)

    def _publish(self) -> None:
        publisher = self._publisher
        for _ in range(self._draw.randint(1, _TOGETHER_MAX)):
            publisher.publish(value_of(publisher.next_number))
        publisher.flush()
        self._flushed = publisher.next_number


def main() -> None:
    """Publish until SIGTERM."""
    serve(StackPublisherProcess(json.loads(sys.argv[1])).answer)


if __name__ == "__main__":
    main()
