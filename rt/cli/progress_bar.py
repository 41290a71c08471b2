"""A progress bar on stderr, if stderr is a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm


class Bar:
    """The progress of a command. Methods are cheap enough for every read."""

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
