"""The publishers and subscribers of a soak, as separate processes that use the public API and write notes.

The file of notes remains after the process has ended. `soak_notes` describes its content.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import threading
from collections.abc import Iterator
from typing import Any, Final

import rt
from chaos.soak_notes import tag_of, value_of
from rt.events import Event, SkipForward
from sequencer.localcluster.clients import open_publisher, open_subscriber
from sequencer.localcluster.processes import Answer, serve

_TOGETHER: Final = 20
_ACK_MESSAGES: Final = 500
_TAKE_MESSAGES: Final = 5000
_TAKE_S: Final = 0.5
_WAIT_S: Final = 0.05


class Notes:
    """A file of notes. Each line is written in one call."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, *lines: str) -> None:
        """Append these lines."""
        if lines:
            os.write(self._file, "".join(f"{line}\n" for line in lines).encode())


class Publishing:
    """Publishes at a steady rate in a thread, and notes what was acknowledged, until it is asked to
    finish.
    """

    def __init__(self, settings: dict[str, Any], notes: Notes) -> None:
        self._settings, self._notes = settings, notes
        self._tag, self._draw = int(settings["tag"]), random.Random(settings["tag"])
        self._finishing = threading.Event()
        self._publisher = open_publisher(
            settings,
            roll_bytes=256 * 1024,
            fsync=self._draw.choice(["batch", "interval", "never"]),
            compression=self._draw.choice([None, "zstd"]),
        )
        notes.write(f"first {self._publisher.next_number}")
        self._thread = threading.Thread(target=self._run, name="publishing", daemon=True)
        self._thread.start()

    def answer(self, do: str, arguments: Answer) -> Answer:
        """Finish publishing and sync all of it ("finish"), report whether all is merged ("merged"), or close
        ("close").
        """
        match do:
            case "finish":
                self._finishing.set()
                self._thread.join()
            case "merged":
                self._note_progress()
                return {"is_merged": self._publisher.progress.merged == self._publisher.next_number}
            case "close":
                self._publisher.close(timeout=float(arguments["linger_s"]))
        return {}

    def _run(self) -> None:
        try:
            self._publish()
            self._flush()
        except rt.RtError as error:
            self._notes.write(f"ended {type(error).__name__} {_one_line(error)}")

    def _publish(self) -> None:
        publisher, draw = self._publisher, self._draw
        pause_s = _TOGETHER / self._settings["rate_hz"]
        while not self._finishing.wait(pause_s):
            first = publisher.next_number
            if draw.random() < 0.5:
                values = [value_of(self._tag, number) for number in range(first, first + _TOGETHER)]
                publisher.publish_many(values)
            else:
                for number in range(first, first + _TOGETHER):
                    publisher.publish(value_of(self._tag, number), topic=f"t{number % 3}")
            if draw.random() < 0.1:
                self._flush()
                self._wait(draw.choice(["replicated", "merged"]))
            self._note_progress()

    def _flush(self) -> None:
        self._publisher.flush()
        self._notes.write(f"flushed {self._publisher.next_number}")

    def _wait(self, level: Any) -> None:
        """Wait for this level, as a program may do. Continue if the cluster takes longer."""
        end = self._publisher.next_number
        with contextlib.suppress(rt.Timeout):
            self._publisher.wait(end - 1, level, timeout=_WAIT_S)
            self._notes.write(f"{level} {end}")

    def _note_progress(self) -> None:
        progress = self._publisher.progress
        self._notes.write(f"replicated {progress.replicated}", f"merged {progress.merged}")


class Subscribing:
    """Reads in a thread, checks each value, and notes runs of messages, events and acknowledgements."""

    def __init__(self, settings: dict[str, Any], notes: Notes) -> None:
        self._notes = notes
        self._is_named = bool(settings["is_named"])
        self._unacknowledged = 0
        self._subscriber = open_subscriber(
            settings,
            position=settings["position"],
            on_event=self._note_event,
            retention=settings["retention"],
            name=settings["name"] if self._is_named else None,
        )
        self._is_finishing = False
        self._thread = threading.Thread(target=self._run, name="reading", daemon=True)
        self._thread.start()

    def answer(self, do: str, _arguments: Answer) -> Answer:
        """Report the next position, after a stop if asked to ("close")."""
        if do == "close":
            self._is_finishing = True
            self._subscriber.call_off()
            self._thread.join()
            self._subscriber.close()
        return {"position": self._subscriber.position}

    def _run(self) -> None:
        try:
            while not self._is_finishing:
                messages = self._subscriber.poll(_TAKE_MESSAGES, _TAKE_S)
                self._notes.write(*runs(messages))
                self._acknowledge(len(messages))
        except rt.RtError as error:
            self._notes.write(f"ended {type(error).__name__} {_one_line(error)}")

    def _acknowledge(self, count: int) -> None:
        """Acknowledge the noted messages, but only after many messages or when none arrive."""
        self._unacknowledged += count
        is_due = self._unacknowledged >= _ACK_MESSAGES or (self._unacknowledged and not count)
        if self._is_named and is_due:
            self._subscriber.ack(position := self._subscriber.position)
            self._notes.write(f"ack {position}")
            self._unacknowledged = 0

    def _note_event(self, event: Event) -> None:
        match event:
            case SkipForward(wanted, resumed, reason):
                self._notes.write(f"skip {wanted} {resumed} {reason}")
            case _:
                self._notes.write(f"event {_one_line(event)}")


def runs(messages: list[rt.Message]) -> Iterator[str]:
    """Yield lines for these messages, as few as possible."""
    open_run: list[Any] = []
    for message in messages:
        tag = tag_of(message.value, message.number)
        if tag is None:
            yield f"bad {message.position}: {message.session} {message.number} {message.value[:40]!r}"
            tag = -1
        head = (message.position, message.session, message.number, tag)
        if open_run:
            position, session, number, last_tag, count = open_run
            if head == (position + count, session, number + count, last_tag):
                open_run[4] += 1
                continue
            yield "run {} {} {} {} {}".format(*open_run)
        open_run = [*head, 1]
    if open_run:
        yield "run {} {} {} {} {}".format(*open_run)


def _one_line(what: object) -> str:
    return " ".join(str(what).split())


def main() -> None:
    """Run as the settings specify until SIGTERM or the end of the standard input."""
    settings = json.loads(sys.argv[1])
    notes = Notes(settings["notes"])
    kind = Publishing if settings["kind"] == "publisher" else Subscribing
    serve(kind(settings, notes).answer)


if __name__ == "__main__":
    main()
