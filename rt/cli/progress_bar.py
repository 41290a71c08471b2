"""A progress bar on stderr, if stderr is a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, Protocol


class Bar(Protocol):
    """The progress of a command. Methods are cheap enough for every read."""

    def add(self, count: int) -> None:
        """Record that `count` more units are done."""

    def reach(self, done: int, total: int) -> None:
        """Record that `done` of `total` units are done."""


class _NoBar:
    def add(self, count: int) -> None:
        pass

    def reach(self, done: int, total: int) -> None:
        pass


class _Tqdm:
    def __init__(self, label: str, total: int | None, unit: str) -> None:
        from tqdm import tqdm

        self.bar: Any = tqdm(
            desc=label,
            total=total,
            file=sys.stderr,
            leave=False,
            mininterval=0.2,
            unit=unit,
            unit_scale=True,
            dynamic_ncols=True,
        )

    def add(self, count: int) -> None:
        self.bar.update(count)

    def reach(self, done: int, total: int) -> None:
        self.bar.total = total
        self.bar.update(done - self.bar.n)


@contextlib.contextmanager
def progress(
    label: str, *, total: int | None = None, unit: str = "B", is_quiet: bool = False
) -> Iterator[Bar]:
    """A bar for the `with` block; none with `is_quiet`, or if stderr is not a terminal."""
    if is_quiet or not sys.stderr.isatty():
        yield _NoBar()
        return
    shown = _Tqdm(label, total, unit)
    try:
        yield shown
    finally:
        shown.bar.close()
