"""The publisher and the consumer of a comparison: a child process each, of the same shape for each system.

`python -m sequencer.bench.compare.traffic '<settings as JSON>'`. The value of a message is

    number (8 bytes) + time at which it was due, ns (8 bytes), little-endian, + random bytes
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
import sys
import threading
import time
import traceback
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt
import uvloop

from sequencer.bench.compare.system import BatchConsumer, PipelinedPublisher, system
from sequencer.bench.traffic import PERCENTS
from sequencer.localcluster.processes import Answer, serve

CALL_BYTES: Final = 256 * 1024
"""Size of the values that are published with one call, at full speed."""
_STOP_S: Final = 300.0
_FILLERS: Final = 64

HEAD_BYTES: Final = 16
_HEAD: Final = struct.Struct("<qq")
_COLUMNS: Final = np.dtype("<i8")


def make_values(first: int, due_ns: Sequence[int], filler: bytes) -> list[bytes]:
    """Values with these times, numbered from `first`, each with `filler` at its end."""
    return [_HEAD.pack(first + at, due) + filler for at, due in enumerate(due_ns)]


def read_heads(values: Sequence[bytes]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The numbers and times of values."""
    heads = np.frombuffer(b"".join([value[:HEAD_BYTES] for value in values]), _COLUMNS).reshape(-1, 2)
    return heads[:, 0], heads[:, 1]


class SequenceCheck:
    """Counts messages that are missing, repeated or out of order. Numbers start at 0."""

    def __init__(self) -> None:
        self.received = 0
        self.lost = 0
        """Numbers that were skipped."""
        self.wrong = 0
        """Numbers that came again, or after a higher one."""
        self._highest = -1

    def add(self, numbers: npt.NDArray[np.int64]) -> None:
        highest = np.maximum.accumulate(np.append(self._highest, numbers))
        steps = numbers - highest[:-1]
        self.received += len(numbers)
        self.lost += int((steps[steps > 1] - 1).sum())
        self.wrong += int((steps < 1).sum())
        self._highest = int(highest[-1])


class Loop:
    """An event loop in a thread. If its work or a library raises an error, the process ends with the
    traceback.
    """

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._loop.set_exception_handler(_end)
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Wait for the result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_STOP_S)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).add_done_callback(_end_if_failed)


def _end(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    sys.stderr.write(f"{context['message']}\n")
    if (error := context.get("exception")) is not None:
        traceback.print_exception(error)
    os._exit(1)


def _end_if_failed(work: Future[None]) -> None:
    if (error := work.exception()) is not None:
        traceback.print_exception(error)
        os._exit(1)


class Publishing:
    """Publishes at full speed or at a rate, until it is stopped."""

    def __init__(self, loop: Loop, publisher: PipelinedPublisher, value_bytes: int) -> None:
        self._loop, self._publisher, self._value_bytes = loop, publisher, value_bytes
        self._fillers = [os.urandom(value_bytes - HEAD_BYTES) for _ in range(_FILLERS)]
        self._published = 0
        self._is_stopping = False
        self._stopped = asyncio.Event()

    def answer(self, do: str, arguments: Answer) -> Answer:
        match do:
            case "flood":
                self._loop.start(self._run(self._flood()))
            case "drip":
                self._loop.start(self._run(self._drip(float(arguments["rate_hz"]))))
            case "stop":
                self._loop.run(self._stop())
        return {"published": self._published, "acknowledged": self._publisher.acknowledged}

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        self._is_stopping = False
        self._stopped.clear()
        await work
        self._stopped.set()

    async def _stop(self) -> None:
        self._is_stopping = True
        await self._stopped.wait()
        await self._publisher.flush()

    async def _publish(self, due_ns: list[int]) -> None:
        filler = self._fillers[self._published % _FILLERS]
        values = make_values(self._published, due_ns, filler)
        self._published += len(values)
        await self._publisher.publish(values)

    async def _flood(self) -> None:
        # With one message, the Redis publisher does not wait for a replica.
        count = max(2, CALL_BYTES // self._value_bytes)
        while not self._is_stopping:
            await self._publish([time.time_ns()] * count)
            await asyncio.sleep(0)

    async def _drip(self, rate_hz: float) -> None:
        """Each message carries the time at which it was due, so a late publisher is part of the latency."""
        interval_ns = 1e9 / rate_hz
        begun_ns, sent = time.time_ns(), 0
        while not self._is_stopping:
            due = int((time.time_ns() - begun_ns) / interval_ns) - sent
            if due > 0:
                await self._publish([begun_ns + int((sent + at + 1) * interval_ns) for at in range(due)])
                sent += due
            next_ns = begun_ns + int((sent + 1) * interval_ns)
            await asyncio.sleep(max(0.0, (next_ns - time.time_ns()) / 1e9))


class Consuming:
    """Receives everything, checks its order and notes the latency of each message."""

    def __init__(self, loop: Loop, consumer: BatchConsumer) -> None:
        self._consumer, self._check = consumer, SequenceCheck()
        self._latencies_ns: list[npt.NDArray[np.int64]] = []
        loop.start(self._receive())

    def answer(self, do: str, _arguments: Answer) -> Answer:
        match do:
            case "forget":
                self._latencies_ns.clear()
            case "latencies":
                if not (latencies_ns := list(self._latencies_ns)):
                    return {"ns": []}
                return {"ns": np.percentile(np.concatenate(latencies_ns), PERCENTS).tolist()}
        return {"received": self._check.received, "lost": self._check.lost, "wrong": self._check.wrong}

    async def _receive(self) -> NoReturn:
        while True:
            values = await self._consumer.receive()
            now_ns = time.time_ns()
            numbers, due_ns = read_heads(values)
            self._latencies_ns.append(now_ns - due_ns)
            self._check.add(numbers)


def main() -> None:
    """Publish or consume until the end of the standard input."""
    settings = json.loads(sys.argv[1])
    chosen, loop = system(settings["system"]), Loop()
    if settings["role"] == "publisher":
        publisher = loop.run(chosen.open_publisher(settings["client"]))
        serve(Publishing(loop, publisher, settings["value_bytes"]).answer)
    else:
        serve(Consuming(loop, loop.run(chosen.open_consumer(settings["client"]))).answer)


if __name__ == "__main__":
    main()
