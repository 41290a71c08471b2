"""The log library's speed: publishing, reading back and verifying on one core, with files only.

Messages are random bytes, 20,000 different ones in turn, so that the CPU cache and the allocator do not see
the same value each time. Each round writes a new log, measures, and deletes it.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Generator, Iterator

from msgspec import Struct

from rt.bench.measure import Figure, ratios, seconds
from rt.bench.processes import peak_memory_mb
from rt.client.publisher import Publisher
from rt.log.check.verify import verify
from rt.log.read.reader import LogReader

_DISTINCT = 20_000
_BATCH_BYTES = 256 * 1024


class LogBench(Struct, frozen=True):
    """Writes logs of `size_bytes` of values in the directory `root`."""

    root: str
    rounds: int
    size_bytes: int

    def figures(self) -> Generator[Figure, None, None]:
        yield from self._small()
        yield from self._large()

    def memory_figures(self, size_bytes: int) -> Generator[Figure, None, None]:
        """Write and read a log of `size_bytes`. The figure is how much the peak memory exceeds that of a
        small log.
        """
        values = _values(1024, size_bytes=16 * 2**20)
        self._write_and_read(values, 4)
        before = peak_memory_mb()
        self._write_and_read(values, size_bytes // (len(values) * 1024))
        yield Figure("memory: growth of the peak over the log", (peak_memory_mb() - before,), "MB")

    # 128-byte messages

    def _small(self) -> Iterator[Figure]:
        count = self.size_bytes // 128
        values = _values(128, size_bytes=self.size_bytes)
        one, many, columns, each, checked = [], [], [], [], []
        for _ in range(self.rounds):
            one.append(count / self._publish_each(values))
            many.append(count / self._publish_many(values))
            columns.append(count / seconds(self._read_columns))
            each.append(count / seconds(self._read_messages))
            checked.append(count / seconds(self._verify))
            self._clear()
        yield Figure("128 B: publish", tuple(one), "messages/s", 600_000)
        yield Figure("128 B: publish_many", tuple(many), "messages/s", 4_000_000)
        yield Figure("128 B: read as columns", _mb(columns, 128), "MB/s", 1_000)
        yield Figure("128 B: read message by message", tuple(each), "messages/s", 1_500_000)
        yield Figure("128 B: verify", _mb(checked, 128), "MB/s", 1_000)

    def _publish_each(self, values: list[bytes]) -> float:
        def work() -> None:
            publish = publisher.publish
            for value in values:
                publish(value, "trade")

        with self._publisher() as publisher:
            taken_s = seconds(work)
        self._clear()
        return taken_s

    def _publish_many(self, values: list[bytes], **options: object) -> float:
        with self._publisher(**options) as publisher:
            return seconds(lambda: publisher.publish_many(values, "trade"))

    def _read_columns(self) -> None:
        with LogReader(self._session) as reader:
            for _ in reader.batches():
                pass

    def _read_messages(self) -> None:
        with LogReader(self._session) as reader:
            for _ in reader:
                pass

    def _verify(self) -> None:
        assert not verify(self._session).damage

    # 1 KiB messages against plain writes of the same bytes

    def _large(self) -> Iterator[Figure]:
        values = _values(1024, size_bytes=self.size_bytes)
        ours, buffered, bulk = [], [], []
        for _ in range(self.rounds):
            ours.append(self._publish_many(values, fsync="never", roll_bytes=2**32))
            self._clear()
            buffered.append(self._plain(values, 1))
            bulk.append(self._plain(values, _BATCH_BYTES // 1024))
        size = len(values) * 1024 / 1e6
        yield Figure("1 KiB: publish_many", tuple(size / taken for taken in ours), "MB/s")
        yield Figure(
            "1 KiB: plain buffered write, a message a call", tuple(size / t for t in buffered), "MB/s"
        )
        yield Figure("1 KiB: plain write, 256 joined messages a call", tuple(size / t for t in bulk), "MB/s")
        yield Figure("1 KiB: ours over the plain buffered write", ratios(buffered, ours), "", 0.7)
        yield Figure("1 KiB: ours over the plain write of joined messages", ratios(bulk, ours), "")

    def _plain(self, values: list[bytes], together: int) -> float:
        """Write the same values without framing, with or without Python's file buffer."""
        path = os.path.join(self.root, "plain")
        chunks = values if together == 1 else [b"".join(c) for c in _chunks(values, together)]

        def work() -> None:
            with open(path, "wb", buffering=_BATCH_BYTES if together == 1 else 0) as file:
                write = file.write
                for chunk in chunks:
                    write(chunk)

        taken_s = seconds(work)
        os.unlink(path)
        return taken_s

    def _write_and_read(self, values: list[bytes], times: int) -> None:
        with self._publisher() as publisher:
            for _ in range(times):
                publisher.publish_many(values)
        self._read_columns()
        self._clear()

    def _publisher(self, **options: object) -> Publisher:
        return Publisher(self.root, "bench", publisher_id="bench", batch_bytes=_BATCH_BYTES, **options)  # type: ignore[arg-type]

    @property
    def _session(self) -> str:
        return os.path.join(self.root, "bench", "sessions", "bench")

    def _clear(self) -> None:
        shutil.rmtree(os.path.join(self.root, "bench"), ignore_errors=True)


def _values(size: int, *, size_bytes: int) -> list[bytes]:
    distinct = [os.urandom(size) for _ in range(min(_DISTINCT, size_bytes // size))]
    return list(itertools.islice(itertools.cycle(distinct), size_bytes // size))


def _chunks(values: list[bytes], count: int) -> Iterator[list[bytes]]:
    return (values[start : start + count] for start in range(0, len(values), count))


def _mb(rates: list[float], size: int) -> tuple[float, ...]:
    return tuple(rate * size / 1e6 for rate in rates)
