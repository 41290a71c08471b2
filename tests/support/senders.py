"""Publisher processes that record what they sent and what was acknowledged.

A `Sender` is a session directory and the publisher processes (`Life`) started on it. The notes of a process
remain after its end, however it ends, so that a verdict can check later which messages had to survive. A
value names its process and its number, so a number given twice or a duplicate message is detected.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import rt

STREAM = "s"
_tags = itertools.count(1)
_PAUSE_S = 0.1
"""The pause between two bursts of messages of a sender."""


def value_of(tag: int, number: int) -> bytes:
    """Return the value that run `tag` publishes as `number`."""
    return b"%d:%d:" % (tag, number) + bytes([number % 251]) * (number * 7919 % 600)


def read_value(value: bytes) -> tuple[int, int]:
    """Return the run and the number of a value. Raise `AssertionError` if that run did not send it."""
    tag, number = map(int, value.split(b":", 2)[:2])
    assert value == value_of(tag, number), value[:40]
    return tag, number


@dataclass(frozen=True, slots=True)
class Notes:
    """The notes of one run: its first number, and one past the last flushed, replicated and merged number."""

    first: int
    flushed: int
    replicated: int
    merged: int
    ended_by: str
    """The class of the error that ended it. Empty if it was killed, was closed properly, or still runs."""


class Life:
    """One run of a publisher, as a process."""

    def __init__(
        self, root: Path, session: str, endpoints: Sequence[str], tls: rt.TLS, incarnation: int
    ) -> None:
        self.tag, self.incarnation = next(_tags), incarnation
        self.notes_file = root / f"notes.{self.tag}"
        settings = {
            "root": str(root),
            "session": session,
            "endpoints": list(endpoints),
            "tls": [os.path.abspath(path) for path in (tls.ca, tls.cert, tls.key)],
            "tag": self.tag,
        }
        with self.notes_file.open("wb") as notes, (root / "stderr").open("ab") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, __file__, json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=notes,
                stderr=stderr,
            )

    @property
    def notes(self) -> Notes:
        """Its notes so far, without an incomplete last line."""
        reached = {"first": 0, "flushed": 0, "replicated": 0, "merged": 0}
        ended_by = ""
        said = self.notes_file.read_text()
        for line in said[: said.rfind("\n") + 1].splitlines():
            word, what = line.split()
            if word == "ended":
                ended_by = what
            else:
                reached[word] = int(what)
        return Notes(**reached, ended_by=ended_by)

    def end(self, number: signal.Signals | None) -> int:
        """Kill it with a signal, or let it close properly (None). Return its exit status."""
        if number is not None:
            self.process.send_signal(number)
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(60)


class Sender:
    """A publisher's session on its own disk below `root`. Its processes end with the `with` block."""

    def __init__(self, root: Path, session: str, endpoints: Sequence[str], tls: rt.TLS) -> None:
        self.root, self.session = root, session
        self._endpoints, self._tls = endpoints, tls
        self._incarnation = 0
        self.lives: list[Life] = []
        root.mkdir(parents=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        self._kill_push_clients()

    @property
    def directory(self) -> Path:
        """The session directory."""
        return self.root / STREAM / "sessions" / self.session

    @property
    def notes(self) -> Notes:
        """The notes of the last run."""
        return self.lives[-1].notes

    def start(self) -> None:
        """Start another run."""
        self.lives.append(Life(self.root, self.session, self._endpoints, self._tls, self._incarnation))

    def kill(self) -> None:
        """Kill -9 the publisher. Its push client continues."""
        self.lives[-1].end(signal.SIGKILL)

    def close(self) -> None:
        """Let the publisher close properly, and leave the rest to its push client."""
        status = self.lives[-1].end(None)
        assert status == 0, (self.session, status, self.notes.ended_by, self.last_words())

    def lose(self) -> None:
        """Kill all processes and delete the directory. The next start is another incarnation."""
        self.lives[-1].end(signal.SIGKILL)
        self._kill_push_clients()
        shutil.rmtree(self.directory)
        self._incarnation += 1

    def last_words(self) -> str:
        """Return the end of the output of the publishers and the push clients."""
        said = [self.root / "stderr", self.directory / "push.log"]
        return "\n".join(path.read_text(errors="replace")[-1500:] for path in said if path.exists())

    def _kill_push_clients(self) -> None:
        for pid in self._push_clients():
            with contextlib.suppress(ProcessLookupError):
                fd = os.pidfd_open(pid)
                try:
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
                    select.select([fd], [], [])
                finally:
                    os.close(fd)

    def _push_clients(self) -> Iterator[int]:
        """Yield the push clients that have files of this directory open."""
        for entry in filter(str.isdigit, os.listdir("/proc")):
            process = Path("/proc", entry)
            with contextlib.suppress(OSError):
                is_push = b"push" in (process / "cmdline").read_bytes().replace(b"\0", b" ").split()
                if is_push and any(self.directory in file.resolve().parents for file in process.glob("fd/*")):
                    yield int(entry)


# The process


def main() -> None:
    """Publish, flush and note until stdin ends; then close."""
    settings = json.loads(sys.argv[1])
    draw, tag = random.Random(settings["tag"]), settings["tag"]
    publisher = rt.Publisher(
        settings["root"],
        STREAM,
        publisher_id=settings["session"],
        endpoints=settings["endpoints"],
        tls=rt.TLS(*settings["tls"]),
        roll_bytes=64 * 1024,
        fsync=draw.choice(["batch", "interval", "never"]),
        compression=draw.choice([None, "zstd"]),
    )
    _note("first", publisher.next_number)
    try:
        _publish(publisher, draw, tag)
    except rt.RtError as error:
        _note("ended", type(error).__name__)
        sys.exit(3)


def _publish(publisher: rt.Publisher, draw: random.Random, tag: int) -> None:
    while not select.select([0], [], [], _PAUSE_S)[0]:
        first = publisher.next_number
        for number in range(first, first + draw.randrange(1, 4)):
            publisher.publish(value_of(tag, number), topic=f"t{number % 3}")
        first = publisher.next_number
        publisher.publish_many([value_of(tag, number) for number in range(first, first + draw.randrange(20))])
        if draw.random() < 0.3:
            publisher.flush()
            _note("flushed", publisher.next_number)
        _note_progress(publisher)
    publisher.close()
    _note("flushed", publisher.next_number)
    _note_progress(publisher)


def _note_progress(publisher: rt.Publisher) -> None:
    progress = publisher.progress
    if progress.replicated:
        _note("replicated", progress.replicated)
        _note("merged", progress.merged)
    if publisher.next_number:
        with contextlib.suppress(rt.Timeout, rt.Closed):
            # Raises the error if the message can never be merged.
            publisher.wait(publisher.next_number - 1, "merged", timeout=0)


def _note(word: str, what: object) -> None:
    os.write(1, f"{word} {what}\n".encode())


if __name__ == "__main__":
    main()
