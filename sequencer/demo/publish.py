"""The process of a publisher of the demo. It uses the public API.

It publishes its share of the data repeatedly at a steady rate, then once at full speed, then waits until
everything is merged.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import threading
import time
from typing import Any, Final

from msgspec.structs import asdict

import rt
from sequencer.demo.source import DemoRecord, share
from sequencer.demo.tally import SessionTally
from sequencer.localcluster.clients import open_publisher
from sequencer.localcluster.processes import Answer, serve

_CHUNK: Final = 1000
_WAIT_S: Final = 0.1


class DemoPublisher:
    """Publishes `records` in a thread. `answer` starts the phases."""

    def __init__(self, publisher: rt.Publisher, records: list[DemoRecord]) -> None:
        self._publisher, self._records = publisher, records
        self._tally = SessionTally()
        self._failure: Exception | None = None
        self._burst_started = threading.Event()
        self._burst = {"count": 0, "value_bytes": 0, "start_ns": 0}
        """Counts and time at the start of the burst."""
        self._is_done = False
        self._thread = threading.Thread(target=self._run, name="publishing", daemon=True)
        self._rate_hz = 1.0

    def answer(self, do: str, arguments: Answer) -> Answer:
        """Answer a request of the demo. Raises the error with which the thread failed."""
        if self._failure is not None:
            raise self._failure
        match do:
            case "steady":
                self._rate_hz = float(arguments["rate_hz"])
                self._thread.start()
            case "burst":
                self._burst_started.set()
        return self._status()

    def _status(self) -> dict[str, Any]:
        status: dict[str, Any] = {
            "to_come": len(self._records),
            "published": self._tally.count,
            "merged": self._publisher.progress.merged,
            "is_done": self._is_done,
        }
        if status["is_done"]:
            status |= {"total": asdict(self._tally.total()), "burst": self._burst}
        return status

    def _run(self) -> None:
        try:
            self._publish_steadily()
            self._publish_all()
            self._wait_merged()
            self._is_done = True
        except Exception as error:  # noqa: BLE001  # Raised by `answer`.
            self._failure = error

    def _publish_steadily(self) -> None:
        due_s = time.monotonic()
        for record in itertools.cycle(self._records):
            if self._burst_started.wait(max(0.0, due_s - time.monotonic())):
                break
            self._publisher.publish(record.value, topic=record.topic)
            self._tally.add([record])
            due_s += 1 / self._rate_hz

    def _publish_all(self) -> None:
        tally = self._tally
        self._burst = {"count": tally.count, "value_bytes": tally.value_bytes, "start_ns": time.time_ns()}
        records = iter(self._records)
        while chunk := list(itertools.islice(records, _CHUNK)):
            for topic, group in itertools.groupby(chunk, key=lambda record: record.topic):
                self._publisher.publish_many([record.value for record in group], topic=topic)
            tally.add(chunk)
        self._publisher.flush()

    def _wait_merged(self) -> None:
        last = self._tally.count - 1
        while True:
            with contextlib.suppress(rt.Timeout):
                self._publisher.wait(last, level="merged", timeout=_WAIT_S)
                return


def main() -> None:
    """Load the share of the data, then publish until SIGTERM."""
    settings = json.loads(sys.argv[1])
    try:
        records = share(settings["data"], settings["index"], settings["count"])
    except rt.RtError as error:
        sys.exit(str(error))
    with open_publisher(settings) as publisher:
        serve(DemoPublisher(publisher, records).answer)


if __name__ == "__main__":
    main()
