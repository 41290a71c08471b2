"""What commands print: results on stdout, messages, progress and readers' events on stderr."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import click

from rt.cli.formats.tables import escape
from rt.events import BadMessage, BadTail, CorruptPositions, Event, HoldRefused, Reset, SkipForward

if TYPE_CHECKING:
    from tqdm import tqdm

T = TypeVar("T")


def report(text: object) -> None:
    """Write one line to stderr."""
    click.echo(f"rt: {escape(str(text))}", err=True)


def show(
    found: T, *, as_json: bool, to_object: Callable[[T], object], to_lines: Callable[[T], Iterable[str]]
) -> None:
    """Write a result to stdout, as one JSON object or as lines."""
    click.echo(json.dumps(to_object(found)) if as_json else "\n".join(to_lines(found)))


class EventPrinter:
    """An event handler that prints. `has_lost` is set if messages in the log cannot be read."""

    def __init__(self) -> None:
        self.has_lost = False

    def __call__(self, event: Event) -> None:
        self.has_lost |= isinstance(event, BadMessage)
        report(_in_words(event))


def _in_words(event: Event) -> str:
    match event:
        case SkipForward(wanted, resumed, reason):
            return f"messages {wanted} to {resumed - 1} are missing ({reason}): continuing at {resumed}"
        case BadTail(path, offset, torn_bytes):
            return f"{path} ends with an incomplete batch: {torn_bytes} bytes at offset {offset} are skipped"
        case BadMessage(start, end, path, offset, reason):
            return f"messages {start} to {end - 1} ({path}, offset {offset}) cannot be read: {reason}"
        case CorruptPositions(start, end, reason):
            behind = "on" if end is None else f"to {end - 1}"
            return f"no node has good bytes of messages from {start} {behind}, which is waited for: {reason}"
        case Reset(position, merged_run):
            return f"the stream was reset: epoch {merged_run} starts at position {position}"
        case HoldRefused(name, why):
            return f"the nodes keep no messages for {name}: {why}"


class Bar:
    """The progress of a command. Its methods are cheap enough to be called for every read."""

    def __init__(self, shown: tqdm[Any] | None) -> None:
        self._shown = shown

    def add(self, count: int) -> None:
        if self._shown is not None:
            self._shown.update(count)

    def reach(self, done: int, total: int) -> None:
        if self._shown is not None:
            self._shown.total = total
            self._shown.update(done - self._shown.n)


@contextlib.contextmanager
def progress(
    label: str, *, total: int | None = None, unit: str = "B", is_quiet: bool = False
) -> Iterator[Bar]:
    """A bar for the `with` block; none with `is_quiet`, or if stderr is not a terminal."""
    if is_quiet or not sys.stderr.isatty():
        yield Bar(None)
        return
    from tqdm import tqdm

    with tqdm(
        desc=label,
        total=total,
        file=sys.stderr,
        leave=False,
        mininterval=0.2,
        unit=unit,
        unit_scale=True,
        dynamic_ncols=True,
    ) as shown:
        yield Bar(shown)
