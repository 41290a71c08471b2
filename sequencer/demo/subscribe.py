"""The process of the subscriber of the demo. It uses the public API.

It reads the stream in columns, keeps a tally of each session, and notes when each message arrived.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import asdict

import rt
from sequencer.demo.tally import SessionTally, by_session, find_fault
from sequencer.localcluster.clients import open_subscriber
from sequencer.localcluster.processes import Answer, serve


class DemoSubscriber:
    """Reads `subscriber` in a thread."""

    def __init__(self, subscriber: rt.Subscriber) -> None:
        self._subscriber = subscriber
        self._tallies: dict[str, SessionTally] = {}
        self._received = 0
        self._fault = ""
        self._stamps_ns: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)]
        self._arrived_ns: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)]
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="reading", daemon=True)
        self._thread.start()

    def answer(self, do: str, arguments: Answer) -> Answer:
        """Answer a request of the demo. Raises the error with which the thread failed."""
        if self._failure is not None:
            raise self._failure
        if do != "finish":
            return {"received": self._received}
        self._subscriber.close()
        self._thread.join()
        times = [np.concatenate(columns) for columns in (self._stamps_ns, self._arrived_ns)]
        np.save(arguments["times"], np.stack(times))
        totals = {session: asdict(tally.total()) for session, tally in self._tallies.items()}
        return {"received": self._received, "fault": self._fault, "totals": totals}

    def _run(self) -> None:
        try:
            for batch in self._subscriber.batches():
                self._take(batch, time.time_ns())
        except Exception as error:  # noqa: BLE001  # Raised by `answer`.
            self._failure = error

    def _take(self, batch: Any, now_ns: int) -> None:
        if not self._fault:
            self._fault = find_fault("position", batch.positions, self._received)
        self._stamps_ns.append(batch.timestamps_ns.copy())
        self._arrived_ns.append(np.full(len(batch), now_ns))
        for session, part in by_session(batch):
            self._tallies.setdefault(session, SessionTally()).add_batch(part)
        self._received += len(batch)


def main() -> None:
    """Subscribe from the first message on, until SIGTERM."""
    with open_subscriber(json.loads(sys.argv[1]), position="earliest") as subscriber:
        serve(DemoSubscriber(subscriber).answer)


if __name__ == "__main__":
    main()
