"""Where the values of a query go: to its sink, or nowhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rt.query.checkpoint.edge import OutputEdge


class QueryOutput:
    """Receives what a query emits. `count`: how many values, in this run of the engine."""

    __slots__ = ("_on_end", "_sink", "count")

    def __init__(self, sink: OutputEdge | None, on_end: Callable[[Exception | None], object]) -> None:
        self._sink = sink
        self._on_end = on_end
        self.count = 0

    def on_next(self, value: Any, /) -> None:
        if self._sink is not None:
            self._sink.on_next(value)
        self.count += 1

    def on_error(self, error: Exception, /) -> None:
        self._on_end(error)

    def on_completed(self) -> None:
        self._on_end(None)
