"""The participants of a run: clusters of real nodes, hosts of streams, publishers at a steady rate."""

from __future__ import annotations

import contextlib
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import pytest
from preloaded import CLOCK, built, set_clock

import rt
from chaos.streams.notes import Note, decode_notes
from sequencer.localcluster.nodes import LocalCluster
from sequencer.localcluster.processes import Process, ProcessEnded

CLUSTERS: Final = ("east", "west", "north", "south")
KEYS: Final = ("a", "b", "c", "d", "e")
FLAGS: Final = ("--retention-disk-percent", "0")
_TICK_S: Final = 0.05
_END_S: Final = 240.0
"""A host drains within seconds, but a busy machine may be slow."""


def streams_of(cluster: str) -> list[str]:
    return [f"load/{cluster}-{key}" for key in KEYS]


class Host:
    """A host and its successive processes, with a directory of its own. With the library `clock`, its clocks
    can be set.
    """

    def __init__(
        self, root: Path, name: str, settings: Mapping[str, object], clock: Path | None = None
    ) -> None:
        self.name, self._root, self._clock = name, root, clock
        self._asleep_s = 0
        self._settings = {**settings, "host": name, "directory": str(root / name)}
        self._lives = 0
        self._read: dict[Path, int] = {}
        self._process: Process | None = None

    @property
    def life(self) -> str:
        return f"{self.name}.{self._lives}"

    @property
    def is_running(self) -> bool:
        return self._process is not None

    @property
    def process(self) -> Process:
        assert self._process is not None, self.name
        return self._process

    def start(self) -> None:
        self._lives += 1
        notes = self._root / f"{self.life}.notes"
        self._read[notes] = 0
        settings = {**self._settings, "notes": str(notes)}
        with pytest.MonkeyPatch.context() as patch:
            if self._clock is not None:
                self.set_clock(0)
                patch.setenv("LD_PRELOAD", str(self._clock))
                patch.setenv("CLOCK_OFFSET_FILE", str(self._clock_file))
            self._process = Process("chaos.streams.host", settings, self._root / f"{self.name}.log")

    def kill(self, *, is_disk_lost: bool = False) -> None:
        """Kill the host with SIGKILL. If `is_disk_lost`, delete its disk."""
        self.process.kill()
        self._process = None
        if is_disk_lost:
            shutil.rmtree(self._root / self.name, ignore_errors=True)

    def set_clock(self, seconds: int) -> None:
        """Set its wall clock off by this many seconds."""
        set_clock(self._clock_file, seconds, asleep_s=self._asleep_s)

    def sleep(self, seconds: int) -> None:
        """Let its clock of leases jump, and all its timers with it, as if the machine had slept."""
        self._asleep_s += seconds
        self.set_clock(0)

    @property
    def _clock_file(self) -> Path:
        return self._root / f"clock.{self.name}"

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        process = self.process
        process.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            process.signal(signal.SIGCONT)

    def drain(self) -> int:
        """End the host with SIGTERM. Return its exit status."""
        status: int = self.process.terminate(_END_S)
        self._process = None
        return status

    def notes(self) -> list[tuple[str, list[Note]]]:
        """Return what its processes have noted since the last call."""
        found = []
        for path, start in self._read.items():
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                file.seek(start)
                data = file.read()
                end = data.rfind(b"\n") + 1
                self._read[path] = start + end
                if end:
                    found.append((path.stem, list(decode_notes(data[:end]))))
        return found

    def check_alive(self) -> None:
        if self._process is not None and self._process.status is not None:
            raise ProcessEnded("a host ended by itself", where=self.name, got=self._process.last_words(1000))


class Feed:
    """A publisher of one cluster, in a thread."""

    def __init__(self, root: Path, nodes: LocalCluster) -> None:
        self._root, self._nodes = root, nodes
        self._tls = nodes.certificate("publisher", "feed")
        self._finishing = threading.Event()
        self._thread: threading.Thread | None = None
        self.error: Exception | None = None

    def start(self, rate_hz: float, published: Mapping[str, list[float]]) -> None:
        """Start to publish. The time of each event is added to the list of its stream in `published`."""
        self._thread = threading.Thread(target=self._run, args=(rate_hz, published), daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Stop publishing. When this returns, all events are on this machine's disk, and are sent to the
        nodes from there.
        """
        self._finishing.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, rate_hz: float, published: Mapping[str, list[float]]) -> None:
        try:
            with rt.Publisher(
                self._root / "feeds",
                self._nodes.stream,
                publisher_id="feed",
                endpoints=self._nodes.endpoints,
                tls=self._tls,
            ) as publisher:
                self._publish(publisher, rate_hz, published)
        except Exception as error:  # noqa: BLE001 - the run reports it
            self.error = error

    def _publish(self, publisher: rt.Publisher, rate_hz: float, published: Mapping[str, list[float]]) -> None:
        topics, count, begun_s = streams_of(self._nodes.stream), 0, time.monotonic()
        while not self._finishing.wait(_TICK_S):
            while count < (time.monotonic() - begun_s) * rate_hz:
                topic = topics[count % len(topics)]
                times = published[topic]
                times.append(time.monotonic())
                publisher.publish(f"{topic}.{len(times) - 1}".encode(), topic=topic)
                count += 1


class Cast:
    """All participants. They start and end with the `with` block."""

    def __init__(
        self, root: Path, *, clusters: int, nodes: int, hosts: int, lease_s: float, has_clocks: bool
    ) -> None:
        """If `has_clocks`, the clocks of hosts can be set. This needs a C compiler."""
        self.root = root
        clock = built(root, "clock", CLOCK) if has_clocks else None
        self.clusters = {
            name: LocalCluster(root / name[0], nodes, stream=name, flags=FLAGS)
            for name in CLUSTERS[:clusters]
        }
        self.results = root / "results"
        self.results.mkdir()
        tls = {
            name: one.certificate("subscriber", "hosts", lease_groups=["streams"])
            for name, one in self.clusters.items()
        }
        settings = {
            "results": str(self.results),
            "lease_s": lease_s,
            "streams": [stream for name in self.clusters for stream in streams_of(name)],
            "clusters": {
                name: {
                    "endpoints": one.endpoints,
                    "tls": [str(tls[name].ca), str(tls[name].cert), str(tls[name].key)],
                }
                for name, one in self.clusters.items()
            },
        }
        self.hosts = {
            name: Host(root, name, settings, clock)
            for name in (f"h{number}" for number in range(1, hosts + 1))
        }
        self.feeds = [Feed(root, one) for one in self.clusters.values()]
        self._opened = contextlib.ExitStack()

    def __enter__(self) -> Cast:
        for nodes in self.clusters.values():
            self._opened.enter_context(nodes)
            nodes.start()
        for nodes in self.clusters.values():
            nodes.wait_ready()
        return self

    def __exit__(self, *error: object) -> None:
        for feed in self.feeds:
            feed.finish()
        for host in self.running:
            host.kill()
        self._opened.close()

    @property
    def running(self) -> Sequence[Host]:
        return [host for host in self.hosts.values() if host.is_running]

    def check(self) -> None:
        """Raise if something ended without a fault."""
        for host in self.running:
            host.check_alive()
        for nodes in self.clusters.values():
            nodes.check_alive()
        for feed in self.feeds:
            if feed.error is not None:
                raise feed.error
