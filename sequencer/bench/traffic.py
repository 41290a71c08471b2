"""The processes of publishers and of the subscriber of `rt bench transport`. They use the public API."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import rt
from sequencer.localcluster.clients import open_publisher, open_subscriber
from sequencer.localcluster.processes import Answer, serve

PERCENTS: Final = (50, 99)
"""Percentiles of latency."""
CALL_BYTES: Final = 256 * 1024
"""Size of the values that are published with one call."""
_AHEAD_PAUSE_S: Final = 0.05
"""Pause of a publisher that is far enough ahead: a small part of the time that its lead lasts."""
_PACED_PAUSE_S: Final = 0.01


def publish_random(publisher: rt.Publisher, size_bytes: int, value_bytes: int) -> None:
    """Publish at least `size_bytes` of random values. Returns when they are synced here."""
    values = [os.urandom(value_bytes) for _ in range(CALL_BYTES // value_bytes)]
    left = -(-size_bytes // value_bytes)
    while left > 0:
        left -= len(publisher.publish_many(values[:left]))
    publisher.flush()


class TrafficPublishers:
    """Publishers of one process. They flood in one thread, and drip in a thread each."""

    def __init__(self, publishers: list[rt.Publisher], value_bytes: int) -> None:
        self._publishers, self._value_bytes = publishers, value_bytes
        self._threads: list[threading.Thread] = []
        self._stopping = threading.Event()

    def answer(self, do: str, arguments: Answer) -> Answer:
        match do:
            case "flood":
                self._start(self._flood, float(arguments["lead_bytes"]), float(arguments.get("rate_mb", 0)))
            case "drip":
                for publisher in self._publishers:
                    self._start(self._drip, publisher, float(arguments["rate_hz"]))
            case "fill":
                self._fill(int(arguments["size_bytes"]))
            case "stop":
                self._stop()
                return self.answer("published", {})
            case "published":
                return {"counts": [publisher.next_number for publisher in self._publishers]}
            case "merged":
                return {"counts": [publisher.progress.merged for publisher in self._publishers]}
        return {}

    def _start(self, work: Any, *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _stop(self) -> None:
        """Returns when all threads have ended and everything is synced here."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self._stopping.clear()
        for publisher in self._publishers:
            publisher.flush()

    def _fill(self, size_bytes: int) -> None:
        for publisher in self._publishers:
            publish_random(publisher, size_bytes, self._value_bytes)

    def _flood(self, lead_bytes: float, rate_mb: float) -> None:
        # A shorter lead needs smaller calls.
        count = max(1, min(CALL_BYTES, int(lead_bytes) // 4) // self._value_bytes)
        values = [os.urandom(self._value_bytes) for _ in range(count)]
        lead = max(count, int(lead_bytes / self._value_bytes))
        begun, sent = time.monotonic(), [0] * len(self._publishers)
        while not self._stopping.is_set():
            is_idle = True
            for at, publisher in enumerate(self._publishers):
                is_ahead = publisher.next_number - publisher.progress.merged > lead
                if is_ahead or (rate_mb and sent[at] > rate_mb * 1e6 * (time.monotonic() - begun)):
                    continue
                is_idle = False
                publisher.publish_many(values)
                sent[at] += count * self._value_bytes
            if is_idle:
                time.sleep(_PACED_PAUSE_S if rate_mb else _AHEAD_PAUSE_S)

    def _drip(self, publisher: rt.Publisher, rate_hz: float) -> None:
        value = os.urandom(self._value_bytes)
        due_s = time.monotonic()
        while not self._stopping.is_set():
            due_s += 1 / rate_hz
            time.sleep(max(0.0, due_s - time.monotonic()))
            publisher.publish(value)


class TrafficSubscriber:
    """Reads in columns and notes when each message was published and received."""

    def __init__(self, subscriber: rt.Subscriber) -> None:
        self._subscriber = subscriber
        self._count = 0
        self._received: list[tuple[npt.NDArray[np.int64], int]] = []
        """For each batch: when its messages were published, and when the batch was received, in ns."""
        threading.Thread(target=self._read, daemon=True).start()

    def answer(self, do: str, _arguments: Answer) -> Answer:
        match do:
            case "received":
                return {"count": self._count}
            case "forget":
                self._received.clear()
            case "latencies":
                if not (received := list(self._received)):
                    return {"ns": []}
                latencies_ns = np.concatenate([now_ns - published_ns for published_ns, now_ns in received])
                return {"ns": np.percentile(latencies_ns, PERCENTS).tolist()}
            case "times":
                times = [
                    (ns, now_ns) for published_ns, now_ns in self._received for ns in published_ns.tolist()
                ]
                return {"published_ns": [ns for ns, _ in times], "received_ns": [ns for _, ns in times]}
        return {}

    def _read(self) -> None:
        for batch in self._subscriber.batches():
            self._received.append((batch.timestamps_ns, time.time_ns()))
            self._count += len(batch)


def main() -> None:
    """Publish or subscribe until the end of the standard input."""
    settings = json.loads(sys.argv[1])
    if "subscriber" in settings:
        serve(TrafficSubscriber(open_subscriber(settings["subscriber"])).answer)
    else:
        publishers = [open_publisher(each) for each in settings["publishers"]]
        serve(TrafficPublishers(publishers, settings["value_bytes"]).answer)


if __name__ == "__main__":
    main()
