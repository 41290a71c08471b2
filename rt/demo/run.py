"""Running the demo: start the publishers, kill one, wait for all, read everything back and compare."""

from __future__ import annotations

import contextlib
import itertools
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rt.demo.publish import STREAM
from rt.demo.source import Line, lines, share
from rt.errors import RtError
from rt.log.directory import session_directory
from rt.log.reader import LogReader
from rt.log.verify import verify


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run did, and what its checks found wrong (nothing, it is hoped)."""

    messages: int
    value_bytes: int
    seconds: float
    kills: int
    problems: tuple[str, ...]


class Demo:
    """`count` publishers of the files below `data`, into sessions below `root`."""

    def __init__(self, root: Path, data: Path, count: int) -> None:
        self._root = root
        self._data = data
        self._count = count
        self._sizes = [[len(line.value) for line in self._lines(index)] for index in range(count)]
        self._safe = [0] * count
        self._kills = 0

    @property
    def total(self) -> int:
        """Messages that will be published."""
        return sum(map(len, self._sizes))

    def run(self, on_progress: Callable[[int], object]) -> Outcome:
        """Publish everything, killing the first publisher once a third of its share is safe; then check."""
        start = time.perf_counter()
        victim_at = max(len(self._sizes[0]) // 3, 1)
        with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
            running = {
                index: stack.enter_context(self._start(index, selector)) for index in range(self._count)
            }
            while running:
                for key, _ in selector.select():
                    index = key.data
                    line = running[index].readline()
                    if not line:
                        selector.unregister(key.fileobj)
                        del running[index]
                        continue
                    on_progress(int(line) - self._safe[index])
                    self._safe[index] = int(line)
                    if index == 0 and not self._kills and int(line) >= victim_at:
                        self._kill(running.pop(0), selector)
                        running[0] = stack.enter_context(self._start(0, selector))
        taken = time.perf_counter() - start
        problems = [*self._problems()]
        return Outcome(self.total, sum(map(sum, self._sizes)), taken, self._kills, tuple(problems))

    def _session(self, index: int) -> str:
        return f"publisher-{index}"

    def _lines(self, index: int) -> Iterator[Line]:
        return lines(self._data, share(self._data, index, self._count))

    @contextlib.contextmanager
    def _start(self, index: int, selector: selectors.BaseSelector) -> Iterator[_Running]:
        arguments = [self._root, self._session(index), self._data, index, self._count]
        command = [sys.executable, "-m", "rt.demo.publish", *map(str, arguments)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            selector.register(process.stdout, selectors.EVENT_READ, index)
            try:
                yield _Running(process, process.stdout)
            finally:
                process.kill()

    def _kill(self, victim: _Running, selector: selectors.BaseSelector) -> None:
        selector.unregister(victim.stdout)
        victim.process.kill()
        victim.process.wait()
        self._kills += 1

    def _problems(self) -> Iterator[str]:
        if not self._kills:
            yield "no publisher was killed: too little data"
        for index in range(self._count):
            directory = session_directory(self._root, STREAM, self._session(index))
            try:
                yield from self._session_problems(index, directory)
            except RtError as error:
                yield str(error)

    def _session_problems(self, index: int, directory: str) -> Iterator[str]:
        yield from map(str, verify(directory).damage)
        with LogReader(directory) as reader:
            both = itertools.zip_longest(self._lines(index), reader)
            for number, (line, message) in enumerate(both):
                if line is None or message is None:
                    yield f"{directory} ends at {number}, its source does not, or the other way round"
                    return
                if (message.number, message.topic, message.value) != (number, *line):
                    yield f"{directory} differs from its source at message {number}"
                    return


@dataclass(frozen=True, slots=True)
class _Running:
    process: subprocess.Popen[bytes]
    stdout: IO[bytes]

    def readline(self) -> bytes:
        """A line that the process said; empty once it has ended well, `RtError` if it ended otherwise."""
        line = self.stdout.readline()
        if not line and (code := self.process.wait()) != 0:
            raise RtError(
                "a publisher ended by itself", got=f"exit status {code}", where=os.fspath(sys.executable)
            )
        return line
